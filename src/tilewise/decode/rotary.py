"""Rotary position embedding in plain operators (`tilewise.Rotary` says what it is)."""

from __future__ import annotations

import torch


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """`x` rotated, computed in fp32 (fp64 for fp64) and rounded to x's dtype once.

    Args:
        x: [..., S, H, D].
        cos, sin: [L, R/2] with R <= D.
        positions: int64 [..., S]: the row of the tables for each token; clamped to them.
        interleaved: pairs are dims (2r, 2r + 1), not (r, r + R/2).
    """
    half = cos.shape[1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    at = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table.to(compute)[at][..., None, :] for table in (cos, sin))  # [..., S, 1, R/2]
    head = x[..., : 2 * half].to(compute)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    pair = (a * c - b * s, b * c + a * s)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
