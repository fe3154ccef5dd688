"""Checks of a call's tensors, one function per argument. All run before any work; none of them launches a kernel,
except `metadata` where values must be read."""

from __future__ import annotations

import torch

from .block_masks import BlockMask
from .errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError, fail
from .mask_algebra import Mask
from .masks import Dense, Document, PrefixLM, parts
from .problem import Inputs, Problem

MAX_HEAD_DIM = 512
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def tensors(inputs: Inputs) -> None:
    """q, k, v: rank, dtype, device, strides, sizes that go together."""
    packed = inputs.cu_seqlens_q is not None
    layout = "[total, heads, head_dim]" if packed else "[batch, seqlen, heads, head_dim]"
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        if not isinstance(x, torch.Tensor):
            fail(DtypeError, name, type(x).__name__, f"a tensor {layout}", "pass torch tensors")
        if x.ndim != (3 if packed else 4):
            fix = "unsqueeze or reshape it; BHSD tensors need .transpose(1, 2)"
            fail(ShapeError, name, f"rank {x.ndim}, shape {list(x.shape)}", f"rank {3 if packed else 4}, {layout}", fix)
        if x.dtype not in DTYPES:
            fix = "cast it; fp8 has its own entry, attention_fp8"
            fail(DtypeError, name, x.dtype, "float16, bfloat16, float32, and float64 on the CPU", fix)
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            fix = "call .contiguous(); only the last dimension must be dense, other strides are free"
            fail(ShapeError, name, f"last-dimension stride {x.stride(-1)}", "stride 1 in the last dimension", fix)
    _together(inputs)
    _sizes(inputs)


def _together(inputs: Inputs) -> None:
    q, k, v = inputs[:3]
    if not q.dtype == k.dtype == v.dtype:
        got = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        fail(DtypeError, "q, k, v", got, "one dtype for all three", "cast them to one dtype, e.g. k.to(q.dtype)")
    for name, x in zip(inputs._fields, inputs, strict=True):
        # Lengths may live anywhere: they are moved where they are needed.
        elsewhere = name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k") or (name == "dropout_seed" and x is not None)
        if x is not None and not elsewhere and x.device != q.device:
            fail(DeviceError, name, f"{x.device}, q on {q.device}", "all tensors on q's device", f"{name}.to(q.device)")


def _sizes(inputs: Inputs) -> None:
    q, k, v = inputs[:3]
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            fail(ShapeError, name, f"head dim {x.shape[-1]}", f"1 to {MAX_HEAD_DIM}", "split the heads")
    if q.shape[-1] != k.shape[-1]:
        got = f"head dim {k.shape[-1]}, q's is {q.shape[-1]}"
        fail(ShapeError, "k", got, "the same head dim for q and k (v's may differ)", "project both to one size")
    if q.shape[-2] < 1 or k.shape[-2] < 1 or q.shape[-2] % k.shape[-2]:
        got = f"{q.shape[-2]} query heads with {k.shape[-2]} key/value heads"
        fail(ShapeError, "heads", got, "heads_q a positive multiple of heads_kv", "pass k, v with a divisor of heads_q")
    if k.shape[:-1] != v.shape[:-1]:
        got = f"shape {list(v.shape)} beside k {list(k.shape)}"
        fail(ShapeError, "v", got, "k's shape in all but the last dimension", "give k and v the same keys and heads")
    if inputs.cu_seqlens_q is None and q.shape[0] != k.shape[0]:
        fail(ShapeError, "k", f"batch {k.shape[0]}, q's is {q.shape[0]}", "one batch size", "expand k and v")


def modifiers(problem: Problem, inputs: Inputs) -> None:
    """bias, alibi_slopes, sinks, the mask's tensors: dtype, device and shape."""
    _bias(problem, inputs.bias)
    per_head = (problem.heads_q,)
    for name, x, shapes in (
        ("alibi_slopes", inputs.alibi_slopes, (per_head, (problem.batch, problem.heads_q))),
        ("sinks", inputs.sinks, (per_head,)),
    ):
        if x is None:
            continue
        if x.dtype not in (torch.float32, problem.dtype):
            fail(DtypeError, name, x.dtype, f"float32 or q's dtype {problem.dtype}", f"{name}.float()")
        if tuple(x.shape) not in shapes:
            want = " or ".join(str(list(shape)) for shape in shapes)
            fail(ShapeError, name, f"shape {list(x.shape)}", f"{want} (one value per query head)", "reshape it")
    for mask in parts(problem.options.mask):
        _mask(problem, mask)


def _bias(problem: Problem, bias: torch.Tensor | None) -> None:
    if bias is None:
        return
    if problem.packed:
        fail(UnsupportedError, "bias", "a tensor with packed sequences", "dense calls", "pad, or use score_mod=")
    if not bias.dtype.is_floating_point:
        fail(DtypeError, "bias", bias.dtype, "a floating dtype; it is added to the scores", "boolean masks go to mask=")
    grid = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    if not _broadcasts(tuple(bias.shape), grid):
        want = f"a shape that broadcasts to [B, Hq, Sq, Sk] = {list(grid)}"
        fail(ShapeError, "bias", f"shape {list(bias.shape)}", want, "add dimensions of size 1")


def _broadcasts(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    tail = grid[len(grid) - len(shape) :]
    return len(shape) <= len(grid) and all(n in (1, full) for n, full in zip(shape, tail, strict=True))


def _mask(problem: Problem, mask: Mask) -> None:
    grid = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    if problem.packed and isinstance(mask, (Dense, BlockMask)):
        got = f"a {'boolean tensor' if isinstance(mask, Dense) else 'BlockMask'} with packed sequences"
        why = "causal, window, Document, PrefixLM and predicates there, by position inside the member"
        fail(UnsupportedError, "mask", got, why, "pad to a dense call, or express it as a predicate")
    if isinstance(mask, Dense):
        _same_device(problem, "mask", mask.tensor)
        if not _broadcasts(tuple(mask.tensor.shape), grid):
            want = f"a shape that broadcasts to [B, Hq, Sq, Sk] = {list(grid)}"
            fail(ShapeError, "mask", f"shape {list(mask.tensor.shape)}", want, "add dimensions of size 1")
    elif isinstance(mask, BlockMask):
        _same_device(problem, "BlockMask.tiles", mask.tiles)
        full = (problem.batch, problem.heads_q, -(-problem.seqlen_q // mask.block_q), -(-problem.seqlen_k // mask.block_k))
        if not _broadcasts(tuple(mask.tiles.shape), full) or tuple(mask.tiles.shape[2:]) != full[2:]:
            want = f"[B|1, Hq|1, ceil(Sq/block_q), ceil(Sk/block_k)] = {list(full)}"
            fail(ShapeError, "BlockMask.tiles", f"shape {list(mask.tiles.shape)}", want, "rebuild it for these lengths")
    elif isinstance(mask, Document):
        _ids(problem, "Document.q_ids", mask.q_ids, problem.seqlen_q)
        _ids(problem, "Document.k_ids", mask.keys, problem.seqlen_k)
    elif isinstance(mask, PrefixLM) and isinstance(mask.prefix, torch.Tensor):
        _same_device(problem, "PrefixLM.prefix", mask.prefix)
        if mask.prefix.shape != (problem.batch,):
            fail(ShapeError, "PrefixLM.prefix", f"shape {list(mask.prefix.shape)}", f"[{problem.batch}]", "one per batch")


def _ids(problem: Problem, name: str, ids: torch.Tensor, length: int) -> None:
    _same_device(problem, name, ids)
    enough = ids.shape[-1] >= length if problem.packed else ids.shape[-1] == length
    if not enough or (ids.ndim == 2 and ids.shape[0] not in (1, problem.batch)):
        want = f"[{length}] or [{problem.batch}, {length}], one id per position"
        fail(ShapeError, name, f"shape {list(ids.shape)}", want, "pass q_ids and k_ids where the lengths differ")


def _same_device(problem: Problem, name: str, x: torch.Tensor) -> None:
    if x.device != problem.device:
        fail(DeviceError, name, f"{x.device}, q on {problem.device}", "q's device", "move it with .to(q.device)")


def offsets(inputs: Inputs, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """cu_seqlens_*, seqused_k, max_seqlen_*: dtypes and shapes (values: `metadata`)."""
    cu_q, cu_k, used = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("seqused_k", used)):
        if x is None and name == "seqused_k":
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in _INTEGERS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            fail(DtypeError, name, got, "an int32 or int64 tensor", f"{name}.int()")
        if x.ndim != 1 or (name != "seqused_k" and x.shape[0] < 1):
            want = "[batch + 1], starting at 0" if name != "seqused_k" else "[batch]"
            fail(ShapeError, name, f"shape {list(x.shape)}", want, "pass one offset more than members")
    assert cu_q is not None and cu_k is not None
    if cu_q.shape != cu_k.shape or (used is not None and used.shape[0] != cu_q.shape[0] - 1):
        got = f"cu_seqlens_q {list(cu_q.shape)}, cu_seqlens_k {list(cu_k.shape)}"
        got += "" if used is None else f", seqused_k {list(used.shape)}"
        fail(ShapeError, "cu_seqlens", got, "[batch + 1] twice, seqused_k [batch]", "describe the same members in all")
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(n, (bool, torch.Tensor)) or n < 0:
            got = "a tensor" if isinstance(n, torch.Tensor) else repr(n)
            fail(ArgumentError, name, got, "a Python int >= 0", "pass int(lengths.max()), computed once per batch")


def metadata(problem: Problem, inputs: Inputs) -> None:
    """The values of lengths and offsets, where reading them costs nothing (CPU tensors) or was asked for."""
    if not problem.packed:
        return
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    for name, cu, rows, longest in (
        ("q", inputs.cu_seqlens_q, inputs.q.shape[0], problem.seqlen_q),
        ("k", inputs.cu_seqlens_k, inputs.k.shape[0], problem.seqlen_k),
    ):
        if cu.device.type == "cpu" or problem.options.validate:
            _offsets_of(name, cu.tolist(), rows, longest)
    used = inputs.seqused_k
    if used is not None and (used.device.type == "cpu" or problem.options.validate):
        ends = inputs.cu_seqlens_k.tolist()
        for b, n in enumerate(used.tolist()):
            if not 0 <= n <= ends[b + 1] - ends[b]:
                want = f"0 to the member's length {ends[b + 1] - ends[b]}"
                fail(ArgumentError, f"seqused_k[{b}]", n, want, "count only keys that the member has")


def _offsets_of(name: str, cu: list[int], rows: int, longest: int) -> None:
    argument = f"cu_seqlens_{name}"
    if cu[0] != 0:
        fail(ArgumentError, argument, f"a first offset of {cu[0]}", "offsets that start at 0", "prepend 0")
    for b, (start, stop) in enumerate(zip(cu, cu[1:], strict=False)):
        if stop < start:
            fail(ArgumentError, argument, f"{start} then {stop} at member {b}", "non-decreasing offsets", "cumsum lengths")
        if stop - start > longest:
            got = f"{longest}, but member {b} has {stop - start} rows"
            fail(ArgumentError, f"max_seqlen_{name}", got, "at least the longest member", "pass the true maximum")
    if cu[-1] > rows:
        fail(ArgumentError, argument, f"an end of {cu[-1]}", f"at most the {rows} rows of {name}", "check the lengths")
