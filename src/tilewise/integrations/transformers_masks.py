"""Masks of transformers as masks of tilewise: bands and intervals of keys in place of tensors [B, 1, Sq, Sk].

transformers asks for a mask once per forward pass and kind of layer. It says what it wants as a function of positions,
beside a mask of padding. Functions that it builds itself are read for what they say; of others a tensor is made.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from .. import masks
from ..errors import UnsupportedError, fail
from ..mask_algebra import TOP_LEFT, Mask
from ..masks import Causal, Dense, Full, Interval, Window

# transformers' functions are closures made anew in each call; their code is what stays the same.
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SLIDING_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__


class TransformersMask(FlexBlockMask):
    """A mask on its way through a model. Of all objects but tensors, this kind alone is one that models hand on.

    Args:
        mask: all that is visible.
        band: causal and window alone, where `mask` holds nothing else but documents; else None.
        settled: whether documents that share a row are kept apart already, or cannot be there.
        grid: (batch, 1, seqlen_q, seqlen_k), from which transformers sees that the mask is ready.
    """

    def __init__(self, mask: Mask, band: Mask | None, settled: bool, grid: tuple[int, int, int, int]) -> None:
        self.mask, self.band, self.settled, self.grid = mask, band, settled, grid

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.grid

    @property
    def ndim(self) -> int:
        return len(self.grid)

    def to(self, device: Any) -> TransformersMask:
        """This mask on another device, for models that are spread over several."""
        tensors: list[torch.Tensor] = []
        spec = self.mask.encode(tensors)
        moved = masks.decode(ast.literal_eval(spec), tuple(x.to(device) for x in tensors))
        return TransformersMask(moved, self.band, self.settled, self.grid)

    def __repr__(self) -> str:
        return f"TransformersMask({self.mask}, shape={self.grid})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse_tensor_work("an index")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse_tensor_work(getattr(func, "__name__", repr(func)))


def _refuse_tensor_work(what: str) -> NoReturn:
    got = f"a model that computes with its mask itself ({what})"
    want = "models whose layers call transformers' attention interface"
    fail(UnsupportedError, "attention_mask", got, want, "use attn_implementation='eager' for this model")


@dataclass(frozen=True)
class _Grid:
    """The positions that a mask covers; with a static cache `q_offset` is a tensor."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    q_offset: int | torch.Tensor
    kv_offset: int
    device: torch.device | str

    @property
    def aligned(self) -> bool:
        """Whether the last query stands at the last key."""
        return self._standing(self.seqlen_k - self.seqlen_q)

    @property
    def at_start(self) -> bool:
        """Whether the first query stands at the first key."""
        return self._standing(0)

    def _standing(self, ahead: int) -> bool:
        return not isinstance(self.q_offset, torch.Tensor) and self.q_offset - self.kv_offset == ahead

    def rows(self) -> torch.Tensor:
        """The queries' positions, counted from the first key: int64 [Sq]."""
        return torch.arange(self.seqlen_q, device=self.device) + (self.q_offset - self.kv_offset)


@dataclass(frozen=True)
class _Rule:
    """What a mask function says: key k is visible to q iff ``q - left <= k <= q + right`` and all of `others` hold.

    Each of `others` shows every query one run of keys around itself. `packed`: documents are among them; `read`: the
    function could be taken apart, so that this is all it says.
    """

    left: int | None = None
    right: int | None = None
    others: tuple[Callable[..., Any], ...] = ()
    packed: bool = False
    read: bool = True

    def band(self, grid: _Grid) -> Mask | None:
        """`left` and `right` as a mask, or None where neither of our diagonals is theirs, or a window has no key."""
        if self.left is not None and self.left < 0:
            return None
        bounds = Full() if self.left is None and not self.right else Window(self.left, self.right or None)
        if self.right == 0 and (grid.aligned or grid.at_start):
            return conjunction(Causal() if grid.aligned else Causal(TOP_LEFT), bounds)
        return bounds if grid.aligned or (self.left is None and self.right is None) else None

    def interval(self, grid: _Grid) -> Mask:
        """`left` and `right` as bounds of each row."""
        rows = grid.rows()
        lo = None if self.left is None else (rows - self.left).int()
        return Interval(lo, None if self.right is None else (rows + self.right + 1).int())


def attention_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    **unknown: Any,
) -> TransformersMask | torch.Tensor:
    """The mask of one kind of layer, as transformers' `AttentionMaskInterface` asks for it.

    Args:
        batch_size, q_length, kv_length: of the layers' tensors.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: ``(b, h, q, k) -> bool``, of positions.
        attention_mask: bool [batch, positions seen], False for padding, or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: without either, the model wants a tensor to work on, or
            transformers has packed documents or a cache of fixed size to say in `mask_function`.
        use_vmap: whether part of the function is a user's.
        device: of the layers' tensors.
        local_size, dtype, config: what `mask_function` says already, or what a boolean mask does not depend on.

    Returns:
        A `TransformersMask`, or a bool tensor [batch, 1, q_length, kv_length], True for visible.

    Raises:
        tilewise.errors.UnsupportedError: transformers passes something that is not known here.
    """
    if unknown:
        fix = "use the release of transformers that tilewise's extra hf names"
        fail(UnsupportedError, min(unknown), "a value", "what transformers 5.17 passes to mask functions", fix)
    grid = _Grid(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    rule = None if use_vmap else _rule(mask_function, attention_mask is None, allow_is_bidirectional_skip, grid)
    to_work_on = not (allow_is_causal_skip or allow_is_bidirectional_skip or (rule is not None and rule.packed))
    if rule is None or (to_work_on and (q_length > 1 or grid.aligned)):
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
    band, padding = rule.band(grid), _padding(attention_mask, grid, causal=rule.right == 0)
    mask = conjunction(rule.interval(grid) if band is None else band, _runs(rule, grid), padding)
    documents = rule.packed and rule.read
    beside = len(rule.others) - int(documents)
    alone = band if padding is None and grid.aligned and not beside else None
    settled = documents or padding is not None or allow_is_bidirectional_skip
    return TransformersMask(mask, alone, settled, (batch_size, 1, q_length, kv_length))


def conjunction(*parts: Mask | None) -> Mask:
    """What is visible in all parts; None and `Full` hide nothing."""
    total: Mask = Full()
    for part in parts:
        if part is not None and not isinstance(part, Full):
            total = part if isinstance(total, Full) else total & part
    return total


def _rule(function: Callable[..., Any], unpadded: bool, both_ways: bool, grid: _Grid) -> _Rule | None:
    """What the function says, or None if it is not known to show each query one run of keys around itself."""
    if function is masking_utils.causal_mask_function:
        return _Rule(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return _Rule()
    if torch.compiler.is_compiling():
        # The compiler does not show what a closure holds. transformers joins by "and" only what shows runs, packs only
        # what has no padding, and what does not look both ways is causal.
        runs = function.__code__ is _AND and (grid.aligned or not both_ways)
        return _Rule(None, None if both_ways else 0, (function,), packed=unpadded, read=False) if runs else None
    rule = _Rule()
    for part in _parts(function):
        code, (held, *_) = part.__code__, (*_held(part), None)
        if part is masking_utils.causal_mask_function:
            rule = replace(rule, right=0)
        elif code is _SLIDING:
            rule = replace(rule, left=held - 1)
        elif code is _SLIDING_BOTH_WAYS:
            rule = replace(rule, left=held, right=held)
        elif code in (_CHUNKED, _PACKED):
            rule = replace(rule, others=(*rule.others, part), packed=rule.packed or code is _PACKED)
        elif part is not masking_utils.bidirectional_mask_function:
            return None
    return rule


def _held(function: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The functions that are joined by "and"."""
    if function.__code__ is _AND:
        for part in _held(function)[0]:
            yield from _parts(part)
    else:
        yield function


def _runs(rule: _Rule, grid: _Grid) -> Mask | None:
    """What `rule.others` show, found by bisection from each query's own key outwards."""
    if not rule.others:
        return None
    rows = grid.rows()[None]
    batch, head = torch.arange(grid.batch, device=grid.device)[:, None], torch.zeros_like(rows[:, :1])

    def shown(keys: torch.Tensor) -> torch.Tensor:
        at = (batch, head, rows + grid.kv_offset, keys + grid.kv_offset)
        return torch.stack([function(*at).expand(keys.shape) for function in rule.others]).all(0)

    own = rows.expand(grid.batch, -1)
    lo = _first(shown, torch.zeros_like(own), own, grid)
    if rule.right == 0:
        return Interval(lo.int())
    # Backwards from the last key, so that one search serves both sides.
    last = grid.seqlen_k - 1
    hi = last - _first(lambda keys: shown(last - keys), torch.zeros_like(own), last - own, grid)
    return Interval(lo.int(), hi.int() + 1)


def _first(shown: Callable[[torch.Tensor], torch.Tensor], low: Any, high: Any, grid: _Grid) -> torch.Tensor:
    """The first key in ``low .. high`` from which on all are shown; that `high` is, is known."""
    count = 1
    # Counted so, a compiled graph serves all lengths up to a power of two.
    while count <= grid.seqlen_k:
        count *= 2
        middle = (low + high) // 2
        seen = shown(middle)
        low, high = torch.where(seen, low, torch.minimum(middle + 1, high)), torch.where(seen, middle, high)
    return high


def _padding(attention_mask: torch.Tensor | None, grid: _Grid, causal: bool) -> Mask | None:
    """The keys that are no padding: bounds where they are one run, as on one side or both, and else key by key."""
    if attention_mask is None:
        return None
    keys = attention_mask[:, grid.kv_offset : grid.kv_offset + grid.seqlen_k]
    width, known = keys.shape[1], readable(keys)
    # Keys past the padding mask are a cache's slots without a token: hidden, as from causal queries they are anyway.
    whole = width == grid.seqlen_k
    if known and (whole or causal) and bool(keys.all()) and (whole or bool((grid.rows()[-1:] < width).all())):
        return None
    positions = torch.arange(width, device=keys.device)
    first = torch.where(keys, positions, width).amin(1, keepdim=True)
    last = torch.where(keys, positions, -1).amax(1, keepdim=True)
    rows = (keys.shape[0], grid.seqlen_q)
    bounds = Interval(*(x.int().expand(rows).contiguous() for x in (first, last + 1)))
    if known and bool((keys.sum(1, keepdim=True) == (last - first + 1).clamp(min=0)).all()):
        return bounds
    each = torch.nn.functional.pad(keys, (0, grid.seqlen_k - width))
    return bounds & Dense(each[:, None, None])


def readable(x: torch.Tensor) -> bool:
    """Whether what is done may depend on the values of `x`."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (is_tracing(x) or x.is_meta or capturing)
