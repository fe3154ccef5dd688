"""FlexAttention's call, `torch.nn.attention.flex_attention.flex_attention`, over this package's masks and kernels.

Its functions are recorded and written anew as a `ScoreMod` and a `Predicate` (`flex_functions`), with derivatives; its
BlockMask becomes a map of tiles. What a mask function says that is causal or a window is taken as such.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from ..api import attention
from ..block_masks import BlockMask
from ..errors import ArgumentError, ShapeError, UnsupportedError, fail
from ..interning import outside_compilation
from ..mask_algebra import TOP_LEFT, Mask
from ..masks import Causal, Predicate, Window
from ..score_mods import ScoreMod
from .flex_functions import lower, record

# Functions that vary without end must not fill memory.
_MOST = 256


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, tile by tile and without having to be compiled.

    ``softmax(mask(score_mod(scale · query keyᵀ))) value``, forward and backward, on the CPU and on GPUs.

    Args:
        query: [batch, heads_q, seqlen_q, head_dim] fp16, bf16, fp32 (fp64 on the CPU).
        key: [batch, heads_kv, seqlen_k, head_dim], query's dtype; batch may be 1, which broadcasts.
        value: [batch, heads_kv, seqlen_k, head_dim_v], query's dtype.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` on scalars, or None. It may capture numbers, tensors that
            need no gradient, and functions; no branches on values. See docs/score_mods.md for the operations.
        block_mask: PyTorch's BlockMask (`create_block_mask`), or None. Its lists say which tiles are visible, its
            `mask_mod` what of them.
        scale: default ``1 / sqrt(head_dim)``; > 0.
        enable_gqa: query head h reads key/value head ``h // (heads_q // heads_kv)``; without it heads are as many.
        return_lse: also return the LSE.
        kernel_options: None; tiles are chosen from a table.
        return_aux: PyTorch's AuxRequest; its `lse` alone.

    Returns:
        out [batch, heads_q, seqlen_q, head_dim_v]; with `return_lse` also lse fp32 [batch, heads_q, seqlen_q], natural
        log; with `return_aux` also PyTorch's AuxOutput. All are differentiable.

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention`; and for functions that cannot be lowered, kernel
            options and maximum scores.

    Numerics:
        As `tilewise.attention`; `score_mod` is applied in fp32.

    Source:
        FlexAttention (Dong et al., 2024), arXiv 2412.05496; PyTorch's documentation of flex_attention.

    Example:
        >>> import torch, tilewise
        >>> q = torch.randn(1, 8, 128, 64)
        >>> k, v = torch.randn(2, 1, 2, 128, 64)
        >>> slopes = 2.0 ** -torch.arange(1, 9)
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score - slopes[h] * (q_idx - kv_idx)
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        >>> tilewise.flex(q, k, v, alibi, causal, enable_gqa=True).shape
        torch.Size([1, 8, 128, 64])
    """
    _check(query, key, value, enable_gqa, kernel_options)
    wants_lse = _wants_lse(return_lse, return_aux)
    k, v = key, value
    if key.shape[0] == 1 != query.shape[0]:
        k, v = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, k, v))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    result = attention(
        q, k, v,
        mask=None if block_mask is None else as_mask(block_mask, query.shape[2], key.shape[2], query.device),
        score_mod=None if score_mod is None else as_score_mod(score_mod, query.device, dtype),
        softmax_scale=scale, return_lse=wants_lse,
    )  # fmt: skip
    if not wants_lse:
        return result.transpose(1, 2) if return_aux is None else (result.transpose(1, 2), _aux(return_aux, None))
    out, lse = result
    return out.transpose(1, 2), lse if return_aux is None else _aux(return_aux, lse)


# The compiler leaves calls alone: functions are recorded here, and the kernels are fused without it.
outside_compilation(
    flex, "tilewise.flex runs as it is; with fullgraph=True call tilewise.attention(score_mod=ScoreMod(...))"
)


def _check(query: Any, key: Any, value: Any, enable_gqa: Any, kernel_options: Any) -> None:
    """Raise for what is FlexAttention's own: its layout, its say over heads, options of its kernels."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            got = f"shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            fail(ShapeError, name, got, "a tensor [batch, heads, seqlen, head_dim]", "add dimensions of size 1")
    if not isinstance(enable_gqa, bool):
        fail(ArgumentError, "enable_gqa", repr(enable_gqa)[:60], "True or False", "pass a Python bool")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        got = f"False with {query.shape[1]} query and {key.shape[1]} key/value heads"
        fail(ArgumentError, "enable_gqa", got, "as many heads, or enable_gqa=True", "pass enable_gqa=True")
    if kernel_options:
        fix = "leave it out; see docs/tuning.md for how tiles are chosen, and backend= of tilewise.attention"
        fail(UnsupportedError, "kernel_options", sorted(kernel_options), "None: tiles come from a table", fix)


def _wants_lse(return_lse: Any, return_aux: Any) -> bool:
    if not isinstance(return_lse, bool):
        fail(ArgumentError, "return_lse", repr(return_lse)[:60], "True or False", "pass a Python bool")
    if return_aux is None:
        return return_lse
    if return_lse:
        fix = "pass return_aux=AuxRequest(lse=True) alone"
        fail(ArgumentError, "return_lse", "True together with return_aux", "one of the two", fix)
    if return_aux.max_scores:
        fix = "ask for the LSE; the largest score is not kept, for a kernel's running maximum may lag behind it"
        fail(UnsupportedError, "return_aux", "max_scores=True", "AuxRequest(lse=True)", fix)
    return bool(return_aux.lse)


def _aux(request: Any, lse: torch.Tensor | None) -> Any:
    """PyTorch's AuxOutput, which lives where its AuxRequest does."""
    from torch.nn.attention.flex_attention import AuxOutput

    return AuxOutput(lse=lse, max_scores=None)


class _Recorded(NamedTuple):
    """What a function was lowered to, and all that it captured then."""

    captured: tuple[Any, ...]
    value: Any


_recorded: dict[tuple[Any, ...], _Recorded] = {}


def _remembered(function: Callable[..., Any], how: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """``make()``, once for each function whose code and captured values are the same."""
    captured: list[Any] = []
    if not _capture(function, captured):
        return make()
    key = (*how, *(x if isinstance(x, (int, float, str, bool, type(None))) else id(x) for x in captured))
    # Types too, for 1 == 1.0 == True.
    key = (*key, *map(type, captured))
    found = _recorded.get(key)
    if found is None:
        if len(_recorded) >= _MOST:
            _recorded.clear()
        # What was captured is kept, so that nothing else can get its address.
        found = _recorded[key] = _Recorded(tuple(captured), make())
    return found.value


def _capture(value: Any, captured: list[Any]) -> bool:
    """Append all that a function depends on; False if some of it may change without being seen."""
    if isinstance(value, FunctionType):
        # Of globals the values of now count: functions, numbers and tensors that the code names.
        named = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *named]
        captured.append(value.__code__)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return all(_capture(part, captured) for part in (*parts, *cells) if part is not value)
    if isinstance(value, tuple):
        captured.append(len(value))
        return all(_capture(part, captured) for part in value)
    captured.append(value)
    plain = isinstance(value, (int, float, str, bool, type(None), torch.Tensor, torch.dtype, torch.device))
    return plain or type(value).__name__ in ("module", "builtin_function_or_method", "type", "_VariableFunctionsClass")


def _names(code: CodeType) -> list[str]:
    """Names that a function's code uses, functions inside it included."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def as_score_mod(function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> ScoreMod:
    """FlexAttention's score_mod as ours, for scores of this dtype and positions on this device."""
    if not callable(function):
        got = type(function).__name__
        fail(ArgumentError, "score_mod", got, "a function (score, b, h, q_idx, kv_idx)", "pass one, or None")

    def make() -> ScoreMod:
        found = lower(function, record(function, True, device, dtype), True)
        return ScoreMod(found.fn, found.dfn, found.tensors)

    made: ScoreMod = _remembered(function, ("score", device, dtype), make)
    return made


# Masks made of a BlockMask, with the versions of its lists: whoever changes them in place gets another.
_masks: weakref.WeakKeyDictionary[Any, tuple[Any, Mask | None]] = weakref.WeakKeyDictionary()


def as_mask(block_mask: Any, seqlen_q: int, seqlen_k: int, device: torch.device) -> Mask | None:
    """PyTorch's BlockMask as ours, for these lengths; None: all is visible."""
    lists = [getattr(block_mask, name, None) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks")]
    if not isinstance(lists[0], torch.Tensor):
        fix = "create_block_mask(mask_mod, ...); tilewise's own masks go to tilewise.attention(mask=)"
        fail(ArgumentError, "block_mask", type(block_mask).__name__, "PyTorch's BlockMask, or None", fix)
    versions = (seqlen_q, seqlen_k, block_mask.mask_mod, *(x._version for x in lists if x is not None))
    known = _masks.get(block_mask)
    if known is None or known[0] != versions:
        # It is kept, and may be wanted for a gradient later.
        with torch.inference_mode(False):
            known = _masks[block_mask] = (versions, _lowered_mask(block_mask, seqlen_q, seqlen_k, device))
    return known[1]


def _lowered_mask(block_mask: Any, seqlen_q: int, seqlen_k: int, device: torch.device) -> Mask | None:
    block_q, block_k = block_mask.BLOCK_SIZE
    tiles = block_mask.to_dense().bool()
    # One tile of everything is what PyTorch puts in place of no mask, of whatever lengths.
    trivial = tiles.shape[2:] == (1, 1) and min(block_q, block_k) >= max(seqlen_q, seqlen_k)
    if not trivial and tuple(block_mask.shape[-2:]) != (seqlen_q, seqlen_k):
        got = f"one for lengths {tuple(block_mask.shape[-2:])}"
        fix = "create one for these lengths, or crop it with block_mask._adjust(q_len, kv_len)"
        fail(ShapeError, "block_mask", got, f"a mask for query and key lengths ({seqlen_q}, {seqlen_k})", fix)
    total: Mask | None = BlockMask(tiles.to(device), block_q, block_k)
    if trivial and bool(tiles.all()):
        total = None
    for part in _parts(block_mask.mask_mod, seqlen_q == seqlen_k, device):
        total = part if total is None else total & part
    return total


def _parts(function: Callable[..., Any], square: bool, device: torch.device) -> list[Mask]:
    """A mask function as masks that together are it: causal and windows as such, the rest as a predicate."""
    graph = record(function, False, device, torch.float32)
    (result,) = graph.graph.output_node().args
    conjuncts = list(_conjuncts(result))
    causal = any(_bound(node) == ("right", 0) for node in conjuncts)
    found: list[Mask] = [Causal(TOP_LEFT)] if causal else []
    rest = []
    for node in conjuncts:
        side, distance = _bound(node) or (None, -1)
        # A window counts from the diagonal of the call, which is the top-left one if causal says so, or if all are one.
        if side is not None and (causal or square) and distance >= 0:
            found += [] if (side, distance) == ("right", 0) and causal else [Window(**{side: distance})]
        elif node is not True:
            rest.append(node)
    if rest:
        lowered = lower(function, _only(graph, rest), False)
        found.append(Predicate(lowered.fn, lowered.tensors))
    return found


def _conjuncts(node: Any) -> list[Any]:
    """What has to hold for `node` to hold, each on its own."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return [node]
    if node.target in (torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.logical_and.default):
        return [part for side in node.args for part in _conjuncts(side)]
    name = _name(node)
    return [True] if name in ("new_ones", "ones") and node.meta["val"].dtype == torch.bool else [node]


def _name(node: Any) -> str:
    """The operation of a node that calls one."""
    name: str = node.target._schema.name.partition("::")[2]
    return name


# ``row - key`` compared with a number: which side of a window it bounds, and what to add to the number.
_SIDES = {"le": ("left", 0), "lt": ("left", -1), "ge": ("right", 0), "gt": ("right", -1)}
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}


def _bound(node: Any) -> tuple[str, int] | None:
    """The side and the distance of a window, if a condition is one: ``q >= k``, ``q - k < 5`` and the like."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    name = _name(node)
    if name not in _SIDES:
        return None
    a, b = node.args
    difference: str | None = f"{_position(a)}{_position(b)}"
    number: Any = 0
    if difference not in ("qk", "kq"):
        difference, number = _difference(a), b
    if difference is None or type(number) is not int:
        return None
    if difference == "kq":
        name, number = _MIRRORED[name], -number
    side, more = _SIDES[name]
    # ``row - key >= n`` bounds the right side at -n.
    return side, (number if side == "left" else -number) + more


def _position(node: Any) -> str | None:
    """Which of the four positions a node is."""
    if not isinstance(node, torch.fx.Node) or node.op != "placeholder":
        return None
    placeholders = [other for other in node.graph.nodes if other.op == "placeholder"]
    return "bhqk"[placeholders.index(node)]


def _difference(node: Any) -> str | None:
    """ "qk" for row - key, "kq" for key - row."""
    if not isinstance(node, torch.fx.Node) or node.target is not torch.ops.aten.sub.Tensor or node.kwargs:
        return None
    pair = "".join(_position(x) or "?" for x in node.args)
    return pair if pair in ("qk", "kq") else None


def _only(graph: Any, conjuncts: list[Any]) -> Any:
    """The graph, with these conditions alone for its result."""
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        total = conjuncts[0]
        for node in conjuncts[1:]:
            total = graph.graph.call_function(torch.ops.aten.bitwise_and.Tensor, (total, node))
            total.meta["val"] = conjuncts[0].meta["val"]
    output.args = (total,)
    return graph
