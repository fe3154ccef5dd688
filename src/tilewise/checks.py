"""Checks of a call's tensors, one function per argument. All run before any work; none of them launches a kernel,
except `metadata` where values must be read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from .block_masks import BlockMask
from .errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError, fail
from .mask_algebra import Mask, fits
from .masks import Dense, Document, Interval, Predicate, PrefixLM, parts
from .problem import LENGTHS, Inputs, Problem

MAX_HEAD_DIM = 512
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
# What may lie on any device: it is moved to where it is needed.
_MOVABLE = ("dropout_seed", *LENGTHS)


def tensors(inputs: Inputs, packed: bool) -> None:
    """q, k, v: rank, dtype, strides, sizes that go together; of all inputs: that they are tensors, and where."""
    layout = "[total, heads, head_dim]" if packed else "[batch, seqlen, heads, head_dim]"
    for name, x in zip(inputs._fields, inputs, strict=True):
        required = name in ("q", "k", "v") or (packed and name in ("cu_seqlens_q", "cu_seqlens_k"))
        if x is not None or required:
            plain(name, x)
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
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
    _sizes(inputs, packed)


def plain(name: str, x: Any) -> None:
    """Raise unless `x` is a tensor with strides."""
    if not isinstance(x, torch.Tensor):
        fail(DtypeError, name, type(x).__name__, "a torch tensor", "convert it with torch.as_tensor(...)")
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        fix = "call .to_dense(); sequences of different lengths go to attention_varlen, packed"
        fail(ShapeError, name, got, "dense tensors with strides", fix)


def _together(inputs: Inputs) -> None:
    q, k, v = inputs[:3]
    if not q.dtype == k.dtype == v.dtype:
        got = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        fail(DtypeError, "q, k, v", got, "one dtype for all three", "cast them to one dtype, e.g. k.to(q.dtype)")
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None:
            placed(name, x, q.device, movable=name in _MOVABLE)


def placed(name: str, x: torch.Tensor, device: torch.device, movable: bool = False) -> None:
    """Raise unless `x` is on q's device, or can be moved there."""
    if x.device != device and not (movable and "meta" not in (x.device.type, device.type)):
        fail(DeviceError, name, f"{x.device}, q on {device}", "all tensors on q's device", "move it: .to(q.device)")


def flags(**values: Any) -> None:
    """Raise unless all are True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            fail(ArgumentError, name, repr(value)[:60], "True or False", "pass a Python bool")


def seed(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The dropout seed as a scalar tensor."""
    plain("dropout_seed", x)
    placed("dropout_seed", x, device, movable=True)
    if x.numel() != 1 or x.dtype != torch.int64:
        got = f"{x.dtype} {list(x.shape)}"
        fail(ArgumentError, "dropout_seed", got, "an int or a scalar int64 tensor", "torch.tensor(seed)")
    return x.reshape(())


def _sizes(inputs: Inputs, packed: bool) -> None:
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
    if not packed and q.shape[0] != k.shape[0]:
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
    if problem.options.score_mod is not None:
        _aux(problem, "ScoreMod.aux", problem.options.score_mod.aux)


def _bias(problem: Problem, bias: torch.Tensor | None) -> None:
    if bias is None:
        return
    if problem.packed:
        fail(UnsupportedError, "bias", "a tensor with packed sequences", "dense calls", "pad, or use score_mod=")
    if bias.dtype not in DTYPES:
        want = "float16, bfloat16, float32 or float64; it is added to the scores"
        fail(DtypeError, "bias", bias.dtype, want, "cast it; boolean masks go to mask=")
    grid = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    if not fits(tuple(bias.shape), grid):
        want = f"a shape that broadcasts to [B, Hq, Sq, Sk] = {list(grid)}"
        fail(ShapeError, "bias", f"shape {list(bias.shape)}", want, "add dimensions of size 1")


def _mask(problem: Problem, mask: Mask) -> None:
    grid = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    if problem.packed and isinstance(mask, (Dense, BlockMask)):
        got = f"a {'boolean tensor' if isinstance(mask, Dense) else 'BlockMask'} with packed sequences"
        why = "causal, window, Document, Interval, PrefixLM and predicates there, by position inside the member"
        fail(UnsupportedError, "mask", got, why, "pad to a dense call, or express it as a predicate")
    if isinstance(mask, Dense):
        _on_device(problem, "mask", mask.tensor)
        if not fits(tuple(mask.tensor.shape), grid):
            want = f"a shape that broadcasts to [B, Hq, Sq, Sk] = {list(grid)}"
            fail(ShapeError, "mask", f"shape {list(mask.tensor.shape)}", want, "add dimensions of size 1")
    elif isinstance(mask, BlockMask):
        _on_device(problem, "BlockMask.tiles", mask.tiles)
        full = (
            problem.batch,
            problem.heads_q,
            -(-problem.seqlen_q // mask.block_q),
            -(-problem.seqlen_k // mask.block_k),
        )
        if not fits(tuple(mask.tiles.shape), full) or tuple(mask.tiles.shape[2:]) != full[2:]:
            want = f"[B|1, Hq|1, ceil(Sq/block_q), ceil(Sk/block_k)] = {list(full)}"
            fail(ShapeError, "BlockMask.tiles", f"shape {list(mask.tiles.shape)}", want, "rebuild it for these lengths")
    elif isinstance(mask, Document):
        _ids(problem, "Document.q_ids", mask.q_ids, problem.seqlen_q)
        _ids(problem, "Document.k_ids", mask.keys, problem.seqlen_k)
    elif isinstance(mask, Interval):
        for name, bound in (("Interval.lo", mask.lo), ("Interval.hi", mask.hi)):
            if bound is not None:
                _ids(problem, name, bound, problem.seqlen_q)
    elif isinstance(mask, PrefixLM) and isinstance(mask.prefix, torch.Tensor):
        _on_device(problem, "PrefixLM.prefix", mask.prefix)
        if mask.prefix.shape != (problem.batch,):
            got, want = f"shape {list(mask.prefix.shape)}", f"[{problem.batch}]"
            fail(ShapeError, "PrefixLM.prefix", got, want, "pass one length per batch entry")
    elif isinstance(mask, Predicate):
        _aux(problem, "Predicate.aux", mask.aux)


def _ids(problem: Problem, name: str, ids: torch.Tensor, length: int) -> None:
    _on_device(problem, name, ids)
    enough = ids.shape[-1] >= length if problem.packed else ids.shape[-1] == length
    if not enough or (ids.ndim == 2 and ids.shape[0] not in (1, problem.batch)):
        want = f"[{length}] or [{problem.batch}, {length}], one value per position"
        fix = "pass q_ids and k_ids where the lengths differ" if "ids" in name else "pass one bound per row"
        fail(ShapeError, name, f"shape {list(ids.shape)}", want, fix)


def _on_device(problem: Problem, name: str, x: torch.Tensor) -> None:
    plain(name, x)
    placed(name, x, problem.device)


def _aux(problem: Problem, name: str, aux: tuple[Any, ...]) -> None:
    for i, x in enumerate(aux):
        if not isinstance(x, torch.Tensor):
            continue
        _on_device(problem, f"{name}[{i}]", x)
        if x.requires_grad and torch.is_grad_enabled():
            want = "tensors that need no gradient, for they would get none"
            fix = "pass its .detach(); what is learned and added to the scores goes to bias= or alibi_slopes="
            fail(UnsupportedError, f"{name}[{i}]", "a tensor that requires a gradient", want, fix)


def offsets(inputs: Inputs, max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """cu_seqlens_*, seqused_k, max_seqlen_*: dtypes and shapes (values: `metadata`)."""
    cu_q, cu_k, used = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("seqused_k", used)):
        if x is None:
            continue
        if x.dtype not in INTEGERS:
            fail(DtypeError, name, x.dtype, "an int32 or int64 tensor", f"{name}.int()")
        if x.ndim != 1 or (name != "seqused_k" and x.shape[0] < 1):
            want = "[batch + 1], starting at 0" if name != "seqused_k" else "[batch]"
            fail(ShapeError, name, f"shape {list(x.shape)}", want, "pass one offset more than members")
    assert cu_q is not None and cu_k is not None
    if cu_q.shape != cu_k.shape or (used is not None and used.shape[0] != cu_q.shape[0] - 1):
        got = f"cu_seqlens_q {list(cu_q.shape)}, cu_seqlens_k {list(cu_k.shape)}"
        got += "" if used is None else f", seqused_k {list(used.shape)}"
        fail(ShapeError, "cu_seqlens", got, "[batch + 1] twice, seqused_k [batch]", "describe the same members in all")
    length("max_seqlen_q", max_seqlen_q)
    length("max_seqlen_k", max_seqlen_k)


def length(name: str, n: Any) -> None:
    """Raise unless `n` is a length as an int."""
    whole = isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool)
    if not whole or not 0 <= n < 2**63:
        got = type(n).__name__ if isinstance(n, torch.Tensor) else repr(n)
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
            offsets_of(name, cu.tolist(), rows, longest)
    used = inputs.seqused_k
    if used is not None and (used.device.type == "cpu" or problem.options.validate):
        ends = inputs.cu_seqlens_k.tolist()
        for b, n in enumerate(used.tolist()):
            if not 0 <= n <= ends[b + 1] - ends[b]:
                want = f"0 to the member's length {ends[b + 1] - ends[b]}"
                fail(ArgumentError, f"seqused_k[{b}]", n, want, "count only keys that the member has")


def offsets_of(name: str, cu: list[int], rows: int, longest: int) -> None:
    argument = f"cu_seqlens_{name}"
    if cu[0] != 0:
        fail(ArgumentError, argument, f"a first offset of {cu[0]}", "offsets that start at 0", "prepend 0")
    lengths = [stop - start for start, stop in pairwise(cu)]
    for b, n in enumerate(lengths):
        if n < 0:
            got = f"{cu[b]} then {cu[b + 1]} at member {b}"
            fail(ArgumentError, argument, got, "non-decreasing offsets", "pass the cumulative sum of the lengths")
    if cu[-1] > rows:
        fail(ArgumentError, argument, f"an end of {cu[-1]}", f"at most the {rows} rows of {name}", "check the lengths")
    for b, n in enumerate(lengths):
        if n > longest:
            got = f"{longest}, but member {b} has {n} rows"
            fail(ArgumentError, f"max_seqlen_{name}", got, "at least the longest member", "pass the true maximum")
