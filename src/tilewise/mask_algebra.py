"""Masks as values: which keys a query may see. They combine with ``&`` and ``|``.

Every mask has two faces. `Mask.visible` says for any set of positions what is visible: the definition, used by the
oracle. `Mask.lower` turns the mask into what kernels use to skip work: a per-row key interval, a tile map and a
residual predicate (design: intervals compose by max and min, so no combination of masks needs code of its own).

Positions are those inside one sequence: row ``i`` in ``[0, seqlen_q)``, key ``j`` in ``[0, seqlen_k)``. The diagonal
is at ``j = i + off`` with ``off = seqlen_k - seqlen_q`` (bottom-right, the default) or 0 (top-left).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import errors

if TYPE_CHECKING:
    from .block_masks import BlockMask

BOTTOM_RIGHT = "bottom_right"
TOP_LEFT = "top_left"


class Positions(NamedTuple):
    """Batch index, query head, row, key (integer tensors that broadcast together) and the diagonal's offset."""

    b: torch.Tensor
    h: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    off: torch.Tensor | int


class Frame(NamedTuple):
    """The sequences that a mask is lowered for: batch entries ``b0 .. b1`` of these lengths.

    `off` is an int where all sequences share it, else an int tensor [b1 - b0].
    """

    b0: int
    b1: int
    seqlen_q: int
    seqlen_k: int
    off: torch.Tensor | int
    device: torch.device


@dataclass(frozen=True, eq=False)
class Lowered:
    """A mask as kernels use it: key j is visible to row i of a sequence iff all of these hold.

    - ``i + off - left <= j <= i + off + right`` (None: unbounded)
    - ``row_lo[b, i] <= j < row_hi[b, i]`` (int32 [B|1, seqlen_q], or None)
    - ``blocks.tiles[b, h, i // block_q, j // block_k]`` (or None)
    - ``residual.visible(...)`` (or None)
    """

    left: int | None = None
    right: int | None = None
    row_lo: torch.Tensor | None = None
    row_hi: torch.Tensor | None = None
    blocks: BlockMask | None = None
    residual: Mask | None = None

    def __and__(self, other: Lowered) -> Lowered:
        blocks, extra = _and_blocks(self.blocks, other.blocks)
        residual = [m for m in (self.residual, other.residual, extra) if m is not None]
        return Lowered(
            _merge(min, self.left, other.left),
            _merge(min, self.right, other.right),
            _merge(torch.maximum, self.row_lo, other.row_lo),
            _merge(torch.minimum, self.row_hi, other.row_hi),
            blocks,
            _conjunction(residual),
        )


def _merge(pick: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return pick(a, b)


def _conjunction(masks: list[Mask]) -> Mask | None:
    total: Mask | None = None
    for mask in masks:
        total = mask if total is None else total & mask
    return total


def _and_blocks(a: BlockMask | None, b: BlockMask | None) -> tuple[BlockMask | None, Mask | None]:
    """One tile map for both, or (where block sizes differ) the first map and the second as a predicate."""
    if a is None or b is None:
        return (b if a is None else a), None
    both = a.intersection(b)
    return (a, b) if both is None else (both, None)


def fits(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape broadcasts to `grid`, without making it larger."""
    tail = grid[len(grid) - len(shape) :]
    return len(shape) <= len(grid) and all(n in (1, full) for n, full in zip(shape, tail, strict=True))


def pick(grid: torch.Tensor, at: Positions) -> torch.Tensor:
    """``grid[b, h, q, k]`` for a grid [B|1, H|1, Q|1, K|1] that broadcasts."""
    index = [x if n > 1 else torch.zeros_like(x) for x, n in zip(at[:4], grid.shape, strict=True)]
    return grid[tuple(index)]


class Mask:
    """Base of all masks. True means visible.

    Masks of numbers alone are values: equal ones compare equal, so what is planned for a problem can be kept. Masks
    that hold tensors or functions are equal to themselves only.
    """

    def visible(self, at: Positions) -> torch.Tensor:
        """Boolean tensor that broadcasts against the positions: which of them are visible."""
        raise NotImplementedError

    def lower(self, frame: Frame) -> Lowered:
        """This mask for kernels; by default nothing but the predicate itself."""
        return Lowered(residual=self)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        """This mask as a Python literal; its tensors are appended to `tensors` and named by position."""
        raise NotImplementedError

    def alignment(self) -> str | None:
        """The alignment that this mask asks for ("bottom_right", "top_left"), or None."""
        return None

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        errors.fail(
            errors.ArgumentError, "mask", "a mask used as a truth value", "& and |", "write a & b, not 'a and b'"
        )


@dataclass(frozen=True)
class And(Mask):
    """Visible iff visible in both."""

    a: Mask
    b: Mask

    def __post_init__(self) -> None:
        _check_operands("&", self.a, self.b)

    def visible(self, at: Positions) -> torch.Tensor:
        return self.a.visible(at) & self.b.visible(at)

    def lower(self, frame: Frame) -> Lowered:
        return self.a.lower(frame) & self.b.lower(frame)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        return f"('and',{self.a.encode(tensors)},{self.b.encode(tensors)})"

    def alignment(self) -> str | None:
        return _common_alignment(self.a, self.b)


@dataclass(frozen=True)
class Or(Mask):
    """Visible iff visible in at least one."""

    a: Mask
    b: Mask

    def __post_init__(self) -> None:
        _check_operands("|", self.a, self.b)

    def visible(self, at: Positions) -> torch.Tensor:
        return self.a.visible(at) | self.b.visible(at)

    def lower(self, frame: Frame) -> Lowered:
        """The hull of both intervals prunes; what lies between them is left to the predicate."""
        a, b = interval(self.a.lower(frame), frame), interval(self.b.lower(frame), frame)
        lo, hi = torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])
        return Lowered(row_lo=lo.int().contiguous(), row_hi=hi.int().contiguous(), residual=self)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        return f"('or',{self.a.encode(tensors)},{self.b.encode(tensors)})"

    def alignment(self) -> str | None:
        return _common_alignment(self.a, self.b)


def _check_operands(operator: str, *operands: Any) -> None:
    for mask in operands:
        if not isinstance(mask, Mask):
            errors.fail(
                errors.ArgumentError,
                f"operand of {operator}",
                type(mask).__name__,
                "masks",
                "wrap a function in Predicate(...) and a boolean tensor in Dense(...)",
            )


def _common_alignment(*masks: Mask) -> str | None:
    found = {mask.alignment() for mask in masks} - {None}
    if len(found) > 1:
        errors.fail(
            errors.ArgumentError,
            "mask",
            "Causal masks of both alignments",
            "one alignment per call",
            "use the same align= everywhere",
        )
    return found.pop() if found else None


def interval(lowered: Lowered, frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    """The per-row key interval ``[lo, hi)`` of a lowered mask as int64 [B|1, seqlen_q], within ``[0, seqlen_k]``.

    A row with an empty interval has ``lo >= hi``.
    """
    rows = torch.arange(frame.seqlen_q, device=frame.device)[None]
    center = rows + (frame.off[:, None] if isinstance(frame.off, torch.Tensor) else frame.off)
    lo, hi = torch.zeros_like(center), torch.full_like(center, frame.seqlen_k)
    # A bound beyond every distance that can occur is as good as none, and keeps the sums inside int64.
    reach = 2**40
    if lowered.left is not None and lowered.left < reach:
        lo = torch.maximum(lo, center - lowered.left)
    if lowered.right is not None and lowered.right < reach:
        hi = torch.minimum(hi, center + lowered.right + 1)
    if lowered.row_lo is not None:
        lo = torch.maximum(lo, lowered.row_lo.long())
    if lowered.row_hi is not None:
        hi = torch.minimum(hi, lowered.row_hi.long())
    return lo, hi.clamp(min=0)
