"""Matrix products in which an invisible entry contributes exactly nothing."""

from __future__ import annotations

import math

import torch


def masked_product(p: torch.Tensor, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """``p @ x``, where entries of p that are not visible are 0 and stay 0 beside NaN and infinity in x.

    Args:
        p: [..., M, N], exactly 0 where not visible.
        x: [..., N, D].
        visible: bool that broadcasts to p's shape; None: all visible.
    """
    # A finite sum proves that all are finite; an overflowing one only costs the slower, equally exact way.
    if visible is None or math.isfinite(x.sum().item()):
        return p @ x
    finite = torch.isfinite(x)
    out = p @ x.masked_fill(~finite, 0.0)
    rows = (~finite).any(dim=-1).flatten(0, -2).any(dim=0).nonzero()[:, 0]
    seen = visible.expand(p.shape)[..., rows]
    if not bool(seen.any()):
        return out
    strange = x[..., None, rows, :].masked_fill(finite[..., None, rows, :], 0.0)
    terms = p[..., rows, None] * strange
    return out + terms.masked_fill(~seen[..., None], 0.0).sum(dim=-2)
