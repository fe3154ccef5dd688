"""flash-attn's `apply_rotary`: rotary embedding as a function without gradients, which its layers are made of."""

from __future__ import annotations

import torch

from .. import checks
from ..decode.rotary import rotate
from ..errors import ArgumentError, DtypeError, ShapeError, fail
from . import conventions

__all__ = ["apply_rotary"]


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """The first ``R = 2 · cos.shape[1]`` dims of each head, rotated in pairs; computed in fp32, rounded once.

    Args:
        x: [batch, seqlen, heads, head_dim]; with `cu_seqlens` [total, heads, head_dim].
        cos: [L, R/2]: row p holds the angles of position p.
        sin: likewise.
        seqlen_offsets: the position of each sequence's first token: an int, or integers [batch]. Positions past the
            tables are left as they are; an int is checked.
        cu_seqlens: [batch + 1], for packed sequences.
        max_seqlen: the longest of them; needed with `cu_seqlens`.
        interleaved: pairs are dims (2r, 2r + 1), not (r, r + R/2).
        inplace: write into x.
        conjugate: rotate backwards.

    Returns:
        x, or a tensor like it.

    Raises:
        tilewise.errors.ArgumentError: shapes that do not go together, or an int that leads past the tables.
    """
    checks.flags(interleaved=interleaved, inplace=inplace, conjugate=conjugate)
    at = positions(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return turn(x, (cos, -sin if conjugate else sin), at, interleaved, inplace)


def turn(
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    at: torch.Tensor,
    interleaved: bool,
    inplace: bool,
) -> torch.Tensor:
    """`x` with the token at ``x[..., s, :, :]`` rotated to position ``at[..., s]``."""
    turned = rotate(x, *tables, at, interleaved)
    turned = torch.where((at < tables[0].shape[0])[..., None, None], turned, x)
    return x.copy_(turned) if inplace else turned


def positions(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """The position of each token, [seqlen], [batch, seqlen] or [total]; raises for what `apply_rotary` says."""
    packed = cu_seqlens is not None
    if x.ndim != (3 if packed else 4):
        want = "[total, heads, head_dim] with cu_seqlens, [batch, seqlen, heads, head_dim] without"
        fail(ShapeError, "x", f"shape {list(x.shape)}", want, "reshape it")
    if cos.shape != sin.shape or cos.ndim != 2 or 2 * cos.shape[1] > x.shape[-1]:
        got = f"cos {list(cos.shape)}, sin {list(sin.shape)}, head dim {x.shape[-1]}"
        fail(ShapeError, "cos, sin", got, "[positions, rotary_dim / 2] twice, rotary_dim <= head dim", "cut them")
    if cu_seqlens is None and max_seqlen is not None:
        fix = "leave it out: the length of a dense x is in its shape"
        fail(ArgumentError, "max_seqlen", max_seqlen, "None without cu_seqlens", fix)
    if packed and max_seqlen is None:
        fail(ArgumentError, "max_seqlen", None, "an int beside cu_seqlens", "pass the longest sequence's length")
    longest = x.shape[1] if max_seqlen is None else conventions.integer("max_seqlen", max_seqlen)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    first = _offsets(seqlen_offsets, batch, longest, cos.shape[0])
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device)
        return row + (first.to(x.device)[:, None] if isinstance(first, torch.Tensor) else first)
    member, inside = conventions.places(cu_seqlens.to(x.device), x.shape[0])
    return inside + (first.to(x.device)[member] if isinstance(first, torch.Tensor) else first)


def _offsets(seqlen_offsets: int | torch.Tensor, batch: int, longest: int, rows: int) -> int | torch.Tensor:
    if isinstance(seqlen_offsets, torch.Tensor):
        if seqlen_offsets.dtype not in (torch.int32, torch.int64):
            fix = "seqlen_offsets.int()"
            fail(DtypeError, "seqlen_offsets", seqlen_offsets.dtype, "int32 or int64, or a Python int", fix)
        if seqlen_offsets.shape != (batch,):
            got = f"shape {list(seqlen_offsets.shape)}"
            fail(ShapeError, "seqlen_offsets", got, f"[batch] = [{batch}]", "pass one per sequence, or an int")
        return seqlen_offsets.to(torch.int64)
    first = conventions.integer("seqlen_offsets", seqlen_offsets)
    if not 0 <= first <= rows - longest:
        got = f"{first}, with sequences of {longest} and tables of {rows} positions"
        fail(ArgumentError, "seqlen_offsets", got, "positions inside the tables", "build longer tables")
    return first
