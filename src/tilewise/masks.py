"""Masks as values: which keys a query may see. They combine with ``&`` and ``|`` (see `tilewise.mask_algebra`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import errors
from .block_masks import BlockMask
from .interning import check_aux, check_function, constant, decode_aux, encode_aux, intern, lookup
from .mask_algebra import BOTTOM_RIGHT, TOP_LEFT, And, Frame, Lowered, Mask, Or, Positions, fits, pick


@dataclass(frozen=True)
class Full(Mask):
    """Every key is visible."""

    def visible(self, at: Positions) -> torch.Tensor:
        return torch.ones((), dtype=torch.bool, device=at.k.device)

    def lower(self, frame: Frame) -> Lowered:
        return Lowered()

    def encode(self, tensors: list[torch.Tensor]) -> str:
        return "('full',)"


@dataclass(frozen=True)
class Causal(Mask):
    """Row i sees key j iff ``j <= i + off``.

    Args:
        align: "bottom_right" (``off = seqlen_k - seqlen_q``), "top_left" (``off = 0``), or None: as the rest of the
            call says, which is bottom-right unless it says otherwise.
    """

    align: str | None = None

    def __post_init__(self) -> None:
        if self.align not in (None, BOTTOM_RIGHT, TOP_LEFT):
            errors.fail(
                errors.ArgumentError,
                "Causal.align",
                repr(self.align),
                "'bottom_right', 'top_left' or None",
                "name one of them",
            )

    def visible(self, at: Positions) -> torch.Tensor:
        return at.k <= at.q + at.off

    def lower(self, frame: Frame) -> Lowered:
        return Lowered(right=0)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        return f"('causal',{self.align!r})"

    def alignment(self) -> str | None:
        return self.align


def _check_bound(name: str, bound: Any) -> None:
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
        errors.fail(
            errors.ArgumentError,
            f"window {name} bound",
            repr(bound),
            "a Python int >= 0, or None for unbounded",
            "a model's window of W tokens including itself is (W - 1, 0); other libraries' -1 is None here",
        )


@dataclass(frozen=True)
class Window(Mask):
    """Row i sees key j iff ``i + off - left <= j <= i + off + right``; both bounds are inclusive, None is unbounded."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        _check_bound("left", self.left)
        _check_bound("right", self.right)

    def visible(self, at: Positions) -> torch.Tensor:
        center = at.q + at.off
        # Distances, not shifted positions: a bound may be any Python integer, also beyond int64.
        seen = torch.ones((), dtype=torch.bool, device=at.k.device)
        if self.left is not None:
            seen = seen & (center - at.k <= min(self.left, 2**62))
        if self.right is not None:
            seen = seen & (at.k - center <= min(self.right, 2**62))
        return seen

    def lower(self, frame: Frame) -> Lowered:
        return Lowered(left=self.left, right=self.right)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        return f"('window',{constant(self.left)!r},{constant(self.right)!r})"


def _check_ids(name: str, ids: Any) -> None:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim not in (1, 2):
        shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        errors.fail(
            errors.ShapeError,
            name,
            shown,
            "an int32 or int64 tensor [S] or [B, S]",
            "pass one integer per position",
        )


def _rows(ids: torch.Tensor, b0: int, b1: int, length: int) -> torch.Tensor:
    """Ids as [B|1, length], for batch entries b0 .. b1."""
    table = ids if ids.ndim == 2 else ids[None]
    return (table if table.shape[0] == 1 else table[b0:b1])[:, :length].contiguous()


def _lookup_rows(ids: torch.Tensor, b: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    table = ids if ids.ndim == 2 else ids[None]
    return table[b if table.shape[0] > 1 else torch.zeros_like(b), position]


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Row i sees key j iff both belong to the same document.

    Args:
        q_ids: int32/int64 [seqlen_q] or [B, seqlen_q]: the document of each query.
        k_ids: the same for keys; None: `q_ids`.
        contiguous: True promises that each document is one run of keys, which saves the element test. Documents
            built by `from_lengths` are. None: read off CPU tensors, assumed False for others.
    """

    q_ids: torch.Tensor
    k_ids: torch.Tensor | None = None
    contiguous: bool | None = None

    def __post_init__(self) -> None:
        _check_ids("Document.q_ids", self.q_ids)
        if self.k_ids is not None:
            _check_ids("Document.k_ids", self.k_ids)
        if self.contiguous not in (None, True, False):
            got = repr(self.contiguous)[:60]
            errors.fail(errors.ArgumentError, "Document.contiguous", got, "True, False or None", "leave it out")

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device | str | None = None) -> Document:
        """Documents of these lengths, one after the other.

        >>> Document.from_lengths([2, 3]).q_ids.tolist()
        [0, 0, 1, 1, 1]
        """
        if not all(type(n) is int and n >= 0 for n in lengths):
            errors.fail(
                errors.ArgumentError,
                "Document.from_lengths",
                repr(lengths)[:60],
                "a list of ints >= 0",
                "tensor.tolist()",
            )
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        return cls(ids.to(device) if device is not None else ids, contiguous=True)

    @property
    def keys(self) -> torch.Tensor:
        return self.q_ids if self.k_ids is None else self.k_ids

    def visible(self, at: Positions) -> torch.Tensor:
        return _lookup_rows(self.q_ids, at.b, at.q) == _lookup_rows(self.keys, at.b, at.k)

    def lower(self, frame: Frame) -> Lowered:
        rows = _rows(self.q_ids, frame.b0, frame.b1, frame.seqlen_q)
        keys = _rows(self.keys, frame.b0, frame.b1, frame.seqlen_k)
        batch = max(rows.shape[0], keys.shape[0])
        rows, keys = rows.expand(batch, -1).contiguous(), keys.expand(batch, -1).contiguous()
        if keys.shape[1] == 0:
            empty = torch.zeros(batch, rows.shape[1], dtype=torch.int32, device=rows.device)
            return Lowered(row_lo=empty, row_hi=empty)
        # Stable sort: within one document the positions stay in order, so its first and last are the hull.
        ordered, position = keys.sort(dim=1, stable=True)
        first = torch.searchsorted(ordered, rows)
        last = torch.searchsorted(ordered, rows, right=True)
        seen = last > first
        lo = torch.where(seen, position.gather(1, first.clamp(max=keys.shape[1] - 1)), 0)
        hi = torch.where(seen, position.gather(1, (last - 1).clamp(min=0)) + 1, 0)
        contiguous = self.contiguous
        if rows.device.type == "cpu" and contiguous is not False:
            contiguous = bool(((hi - lo) == (last - first)).all())
            if self.contiguous and not contiguous:
                got = "True for documents that are not one run of keys each"
                errors.fail(errors.ArgumentError, "Document.contiguous", got, "a promise that holds", "leave it out")
        return Lowered(row_lo=lo.int(), row_hi=hi.int(), residual=None if contiguous else self)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        tensors.append(self.q_ids)
        if self.k_ids is None:
            return f"('document',{len(tensors) - 1},None,{self.contiguous!r})"
        tensors.append(self.k_ids)
        return f"('document',{len(tensors) - 2},{len(tensors) - 1},{self.contiguous!r})"


@dataclass(frozen=True, eq=False)
class Interval(Mask):
    """Row i sees key j iff ``lo[i] <= j < hi[i]``: padding on either side, chunks, a cache that is part full.

    Args:
        lo: int32/int64 [seqlen_q] or [B, seqlen_q]: the first key that each row sees; None: 0.
        hi: the same for the key after the last one; None: seqlen_k. Both may lie outside the keys, and a row with
            ``hi <= lo`` sees nothing.

    Example:
        >>> import torch, tilewise
        >>> x = torch.randn(2, 5, 1, 8)
        >>> pads = torch.tensor([[2], [0]]).expand(2, 5)      # the first member has two keys of padding on its left
        >>> out = tilewise.attention(x, x, x, causal=True, mask=tilewise.Interval(lo=pads))
        >>> torch.allclose(out[:1, 2:], tilewise.attention(x[:1, 2:], x[:1, 2:], x[:1, 2:], causal=True), atol=1e-6)
        True
    """

    lo: torch.Tensor | None = None
    hi: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, bound in (("Interval.lo", self.lo), ("Interval.hi", self.hi)):
            if bound is not None:
                _check_ids(name, bound)

    def visible(self, at: Positions) -> torch.Tensor:
        seen = torch.ones((), dtype=torch.bool, device=at.k.device)
        if self.lo is not None:
            seen = seen & (at.k >= _lookup_rows(self.lo, at.b, at.q))
        if self.hi is not None:
            seen = seen & (at.k < _lookup_rows(self.hi, at.b, at.q))
        return seen

    def lower(self, frame: Frame) -> Lowered:
        row_lo, row_hi = (
            None if side is None else _rows(side, frame.b0, frame.b1, frame.seqlen_q).clamp(0, frame.seqlen_k).int()
            for side in (self.lo, self.hi)
        )
        return Lowered(row_lo=row_lo, row_hi=row_hi)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        places = []
        for side in (self.lo, self.hi):
            places.append(None if side is None else len(tensors))
            if side is not None:
                tensors.append(side)
        return f"('interval',{places[0]!r},{places[1]!r})"


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """Causal, but the first ``prefix`` keys are visible to every row.

    Args:
        prefix: an int, or int32/int64 tensor [B].
    """

    prefix: int | torch.Tensor

    def __post_init__(self) -> None:
        p = self.prefix
        if isinstance(p, torch.Tensor):
            good = p.ndim == 1 and p.dtype in (torch.int32, torch.int64)
        else:
            good = isinstance(p, int) and not isinstance(p, bool) and p >= 0
        if not good:
            shown = f"{p.dtype} {list(p.shape)}" if isinstance(p, torch.Tensor) else repr(p)
            errors.fail(
                errors.ArgumentError,
                "PrefixLM.prefix",
                shown,
                "an int >= 0, or an int32/int64 tensor [B]",
                "pass the number of prefix keys",
            )

    def visible(self, at: Positions) -> torch.Tensor:
        prefix = self.prefix[at.b] if isinstance(self.prefix, torch.Tensor) else min(self.prefix, 2**62)
        return (at.k < prefix) | (at.k <= at.q + at.off)

    def lower(self, frame: Frame) -> Lowered:
        if isinstance(self.prefix, torch.Tensor):
            prefix = self.prefix[frame.b0 : frame.b1, None]
        else:
            prefix = torch.full((1, 1), min(self.prefix, frame.seqlen_k), device=frame.device)
        off = frame.off[:, None] if isinstance(frame.off, torch.Tensor) else frame.off
        rows = torch.arange(frame.seqlen_q, device=frame.device)[None]
        hi = torch.maximum(prefix.clamp(max=frame.seqlen_k), (rows + off + 1).clamp(max=frame.seqlen_k))
        return Lowered(row_hi=hi.int().contiguous())

    def encode(self, tensors: list[torch.Tensor]) -> str:
        if isinstance(self.prefix, torch.Tensor):
            tensors.append(self.prefix)
            return f"('prefix_tensor',{len(tensors) - 1})"
        return f"('prefix',{constant(self.prefix)!r})"


@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    """Visible iff ``fn(b, h, q, k, *aux)``: batch index, query head, row and key. Operators only.

    Example:
        >>> import torch, tilewise
        >>> strided = tilewise.Predicate(lambda b, h, q, k: (q - k) % 2 == 0) & tilewise.Causal()
        >>> x = torch.randn(1, 5, 1, 8)
        >>> tilewise.attention(x, x, x, mask=strided).shape
        torch.Size([1, 5, 1, 8])
    """

    fn: Callable[..., Any]
    aux: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_aux("Predicate.aux", self.aux)
        check_function("Predicate.fn", self.fn, 4 + len(self.aux))

    def visible(self, at: Positions) -> torch.Tensor:
        seen = self.fn(at.b, at.h, at.q, at.k, *self.aux)
        if isinstance(seen, bool):
            return torch.full((), seen, device=at.k.device)
        grid = torch.broadcast_shapes(*(x.shape for x in at[:4]))
        if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool or not fits(seen.shape, grid):
            got = f"{seen.dtype} {list(seen.shape)}" if isinstance(seen, torch.Tensor) else repr(seen)[:60]
            want = f"a boolean result, of a shape that broadcasts to the positions', here {list(grid)}"
            errors.fail(errors.DtypeError, "Predicate.fn", f"a result of {got}", want, "compare elementwise in fn")
        return seen

    def encode(self, tensors: list[torch.Tensor]) -> str:
        return f"('predicate',{intern(self.fn)},{encode_aux(self.aux, tensors)})"


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """An explicit boolean tensor that broadcasts to [B, Hq, seqlen_q, seqlen_k]; True is visible."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor) or self.tensor.dtype != torch.bool or self.tensor.ndim > 4:
            shown = (
                f"{self.tensor.dtype} {list(self.tensor.shape)}"
                if isinstance(self.tensor, torch.Tensor)
                else type(self.tensor).__name__
            )
            errors.fail(
                errors.DtypeError,
                "mask",
                shown,
                "a mask, a predicate, or a torch.bool tensor of rank <= 4 that broadcasts to [B, Hq, Sq, Sk]",
                "use .bool() with True for visible; additive masks go to bias=",
            )

    def grid(self) -> torch.Tensor:
        """The tensor with rank 4."""
        return self.tensor[(None,) * (4 - self.tensor.ndim)]

    def visible(self, at: Positions) -> torch.Tensor:
        return pick(self.grid(), at)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        tensors.append(self.tensor)
        return f"('dense',{len(tensors) - 1})"


def as_mask(value: Any) -> Mask:
    """A mask from what ``mask=`` takes: a mask, a predicate function, or a boolean tensor."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, torch.Tensor):
        return Dense(value)
    if callable(value):
        return Predicate(value)
    errors.fail(
        errors.ArgumentError,
        "mask",
        type(value).__name__,
        "a tilewise mask, a predicate (b, h, q, k) -> bool, or a torch.bool tensor",
        "pass one of them",
    )


def decode(node: Any, tensors: tuple[torch.Tensor, ...]) -> Mask:
    """The inverse of `Mask.encode`, on its evaluated literal."""
    tag, *args = node
    if tag in ("and", "or"):
        a, b = (decode(child, tensors) for child in args)
        return And(a, b) if tag == "and" else Or(a, b)
    if tag == "document":
        q_ids, k_ids, contiguous = args
        return Document(tensors[q_ids], None if k_ids is None else tensors[k_ids], contiguous)
    if tag == "interval":
        return Interval(*(None if side is None else tensors[side] for side in args))
    if tag == "predicate":
        return Predicate(lookup(args[0]), decode_aux(args[1], tensors))
    if tag == "blocks":
        return BlockMask(tensors[args[0]], args[1], args[2])
    if tag in ("dense", "prefix_tensor"):
        return {"dense": Dense, "prefix_tensor": PrefixLM}[tag](tensors[args[0]])
    return {"full": Full, "causal": Causal, "window": Window, "prefix": PrefixLM}[tag](*args)


def parts(mask: Mask) -> list[Mask]:
    """The leaves of a mask expression, left to right."""
    if isinstance(mask, (And, Or)):
        return parts(mask.a) + parts(mask.b)
    return [mask]
