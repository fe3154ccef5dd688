"""flash-attn's rotary layer: functions with gradients, and `RotaryEmbedding` with its tables.

Functions whose names end in an underscore, and ``inplace=True``, overwrite their argument without telling autograd that
they did, as flash-attn's do: what came before must not need the old values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import checks
from ..errors import ArgumentError, ShapeError, fail
from . import conventions
from .flash_attn_rotary_kernel import apply_rotary, positions, turn

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


class _Turned(torch.autograd.Function):
    """Parts of a tensor rotated, each by its own tables; the gradient is rotated back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, at: torch.Tensor, parts: Sequence[Any], how: tuple[bool, bool], *tables: torch.Tensor
    ) -> torch.Tensor:
        interleaved, inplace = how
        ctx.parts, ctx.interleaved = parts, interleaved
        ctx.save_for_backward(at, *tables)
        return _turn_parts(x if inplace else x.clone(), at, parts, interleaved, tables)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        at, *tables = ctx.saved_tensors
        back = [table if i % 2 == 0 else -table for i, table in enumerate(tables)]
        dx = _turn_parts(grads[0].clone(), at, ctx.parts, ctx.interleaved, back)
        return (dx, None, None, None, *[None for _ in tables])


def _turn_parts(
    x: torch.Tensor, at: torch.Tensor, parts: Sequence[Any], interleaved: bool, tables: Sequence[torch.Tensor]
) -> torch.Tensor:
    for part, cos, sin in zip(parts, tables[0::2], tables[1::2], strict=True):
        turn(x[part], (cos, sin), at, interleaved, inplace=True)
    return x


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """The first ``2 · cos.shape[1]`` dims of each head, rotated by the angles of the token's position.

    Args:
        x: [batch, seqlen, heads, head_dim]; with `cu_seqlens` [total, heads, head_dim].
        cos, sin: [positions, rotary_dim / 2]; they get no gradient.
        interleaved: pairs are dims (2r, 2r + 1) (GPT-J), not (r, r + rotary_dim / 2) (GPT-NeoX).
        inplace: write into x.
        seqlen_offsets: the position of each sequence's first token, an int or integers [batch].
        cu_seqlens: [batch + 1], for packed sequences; needs `max_seqlen`, the longest one's length.
        max_seqlen: see there.

    Returns:
        x, or a tensor like it.

    Raises:
        tilewise.errors.ArgumentError: shapes that do not go together, or positions past the tables.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn_rotary import apply_rotary_emb
        >>> angle = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> x = torch.randn(1, 6, 2, 8)
        >>> y = apply_rotary_emb(x, angle.cos(), angle.sin())
        >>> torch.allclose(y.norm(dim=-1), x.norm(dim=-1)), torch.equal(y[..., 4:], x[..., 4:])
        (True, True)
    """
    checks.flags(interleaved=interleaved, inplace=inplace)
    at = positions(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return _Turned.apply(x, at, (...,), (interleaved, inplace), cos, sin)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Queries and keys of a packed tensor rotated in place; values are left alone.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], or [batch, seqlen, heads_q + 2 · heads_k, head_dim] with
            `num_heads_q`.
        cos, sin: [positions, rotary_dim / 2].
        cos_k, sin_k: other tables for keys, both or neither.
        interleaved, seqlen_offsets: as `apply_rotary_emb`.
        num_heads_q: query heads of a four-dimensional qkv.

    Returns:
        qkv.

    Raises:
        tilewise.errors.ArgumentError: shapes that do not go together, or positions past the tables.
    """
    checks.flags(interleaved=interleaved)
    if (cos_k is None) != (sin_k is None):
        fail(ArgumentError, "cos_k, sin_k", "one of the two", "both, or neither", "pass both")
    parts = conventions.packed_parts("qkv", qkv, num_heads_q)[:2]
    cos_k, sin_k = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
    at = positions(qkv[parts[0]], cos, sin, seqlen_offsets)
    positions(qkv[parts[1]], cos_k, sin_k, seqlen_offsets)
    return _Turned.apply(qkv, at, parts, (interleaved, True), cos, sin, cos_k, sin_k)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Keys of ``kv [batch, seqlen, 2, heads, head_dim]`` rotated in place; the rest as `apply_rotary_emb_qkv_`."""
    checks.flags(interleaved=interleaved)
    if kv.ndim != 5 or kv.shape[2] != 2:
        want = "[batch, seqlen, 2, heads, head_dim]"
        fail(ShapeError, "kv", f"shape {list(kv.shape)}", want, "torch.stack((k, v), dim=2)")
    at = positions(kv[:, :, 0], cos, sin, seqlen_offsets)
    return _Turned.apply(kv, at, ((..., 0, slice(None), slice(None)),), (interleaved, True), cos, sin)


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Every pair ``(a, b)`` as ``(-b, a)``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """`apply_rotary_emb` in the tensors' own dtype; tables [seqlen, R/2] or [batch, seqlen, R/2]."""
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        got = f"a rotary dim of {rotary_dim}, head dim {x.shape[-1]}"
        fail(ShapeError, "cos, sin", got, "rotary_dim <= head dim", "cut the tables")
    c, s = (
        (table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)).unsqueeze(-2)
        for table in (cos, sin)
    )
    head = x[..., :rotary_dim]
    return torch.cat((head * c + rotate_half(head, interleaved) * s, x[..., rotary_dim:]), dim=-1)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables that grow with the sequences; XPos with `scale_base`.

    The angle of pair r at position p is ``p · base^(-2r / dim)``. With `scale_base`, queries are multiplied, and keys
    divided, by ``((2r + 0.4 dim) / 1.4 dim) ^ ((p - L // 2) / scale_base)``, L being the length of the tables.

    Args:
        dim: dims of a head that are rotated.
        base: see the equation.
        interleaved: as `apply_rotary_emb`.
        scale_base: XPos' base, 512 as a rule; None: plain rotary embedding.
        device: of the tables until they are used.

    Source:
        Su et al., "RoFormer" (2021); Sun et al., "A Length-Extrapolatable Transformer" (2022) for XPos.
    """

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._inv_freq(device), persistent=False)
        pairs = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (pairs + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        # Of queries, and of keys where they differ.
        self._tables: tuple[torch.Tensor, ...] = ()

    def _inv_freq(self, device: Any) -> torch.Tensor:
        pairs = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-pairs / self.dim)

    def _grow(self, seqlen: int, like: torch.Tensor) -> None:
        """Build the tables anew if they are too short, or not in the dtype and on the device of `like`."""
        if self._tables:
            cos = self._tables[0]
            fits = seqlen <= cos.shape[0] and cos.dtype == like.dtype and cos.device == like.device
            # Tables of inference mode cannot be saved for a backward pass.
            if fits and not (self.training and cos.is_inference()):
                return
        # In fp32 whatever the module was cast to: positions are large, and angles matter modulo a turn.
        frequencies = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._inv_freq(like.device)
        position = torch.arange(seqlen, device=like.device, dtype=torch.float32)
        angle = torch.outer(position, frequencies.to(like.device))
        tables: tuple[torch.Tensor, ...] = (angle.cos(), angle.sin())
        if self.scale is not None and self.scale_base is not None:
            power = (position - seqlen // 2) / self.scale_base
            factor = self.scale.to(like.device, torch.float32) ** power[:, None]
            tables = (*(table * factor for table in tables), *(table / factor for table in tables))
        self._tables = tuple(table.to(like.dtype) for table in tables)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Queries and keys rotated in place.

        Args:
            qkv: as `apply_rotary_emb_qkv_`; with `kv` the queries alone, [batch, seqlen, heads, head_dim].
            kv: [batch, seqlen, 2, heads, head_dim], or None.
            seqlen_offset: the position of the first token, an int or integers [batch].
            max_seqlen: how far the tables must reach; needed once where the offsets are a tensor.
            num_heads_q: query heads of a four-dimensional qkv without `kv`.

        Returns:
            qkv, or with `kv` both.

        Raises:
            tilewise.errors.ArgumentError: offsets in a tensor, and no tables yet for them; or as
                `apply_rotary_emb_qkv_`.
        """
        if max_seqlen is not None or not isinstance(seqlen_offset, torch.Tensor):
            self._grow(max_seqlen if max_seqlen is not None else qkv.shape[1] + int(seqlen_offset), qkv)
        elif not self._tables:
            fix = "pass the longest length that is to come"
            fail(ArgumentError, "max_seqlen", None, "an int, where seqlen_offset is a tensor", fix)
        cos, sin, *other = self._tables
        cos_k, sin_k = other or (cos, sin)
        if kv is None:
            tables = (cos, sin, cos_k, sin_k)
            return apply_rotary_emb_qkv_(qkv, *tables, self.interleaved, seqlen_offset, num_heads_q)
        if num_heads_q is not None:
            fail(ArgumentError, "num_heads_q", num_heads_q, "None beside kv", "leave it out: qkv is the queries")
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
