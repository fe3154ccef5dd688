"""One tile of scores, shared by forward and backward, and the way back through it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import dropout
from .groups import Group, Span


class Saved(NamedTuple):
    """What the derivative needs of a tile: tanh of the capped score, and the score before the user's modification."""

    tanh: torch.Tensor | None
    modded: torch.Tensor | None


def scores(group: Group, span: Span, q: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Scores [b, heads, M, N] before the mask: scaled product, softcap, score mod, ALiBi, bias.

    Args:
        group: the group that the tile belongs to.
        span: the tile.
        q: its rows [b, h_kv, group * M, D], scaled.
    """
    options, inputs = group.problem.options, group.inputs
    s = group.by_q_head(q @ group.k[:, :, span.n0 : span.n1].transpose(-1, -2))
    tanh = modded = None
    if options.softcap is not None:
        tanh = s.div_(options.softcap).tanh_()
        s = tanh * options.softcap
    if options.score_mod is not None:
        modded = s
        s = options.score_mod.forward(s, group.positions(span))
        s = s.clone() if s is modded or not s.is_contiguous() else s
    if inputs.alibi_slopes is not None:
        slopes = alibi_slopes(group, inputs.alibi_slopes).to(s.dtype)
        s = s.addcmul_(slopes, distance(group, span), value=-1.0)
    if inputs.bias is not None:
        s = s.add_(bias_tile(group, inputs.bias, span))
    return s, Saved(tanh, modded)


def scores_backward(group: Group, span: Span, ds: torch.Tensor, saved: Saved) -> torch.Tensor:
    """The gradient of the scaled product, given `ds` of the scores; overwrites `ds`."""
    options = group.problem.options
    if options.score_mod is not None:
        assert saved.modded is not None
        ds = options.score_mod.backward(ds, saved.modded, group.positions(span))
    if saved.tanh is not None:
        ds = ds * (1.0 - saved.tanh.square())
    return ds


def alibi_slopes(group: Group, slopes: torch.Tensor) -> torch.Tensor:
    """The group's part of a slopes-shaped tensor as a view [b|1, heads, 1, 1]."""
    table = slopes[None] if slopes.ndim == 1 else slopes[group.where.b0 : group.where.b1]
    return table[:, group.heads, None, None]


def distance(group: Group, span: Span) -> torch.Tensor:
    """``|i + off - j|`` as [M, N] in the compute dtype."""
    rows = torch.arange(span.m0, span.m1)[:, None] + group.off
    return (rows - torch.arange(span.n0, span.n1)).abs().to(group.problem.compute_dtype)


def bias_tile(group: Group, bias: torch.Tensor, span: Span) -> torch.Tensor:
    """The part of a bias-shaped tensor under a tile, a view [b|1, heads|1, M|1, N|1]."""
    grid = bias[(None,) * (4 - bias.ndim)]
    box = (slice(group.where.b0, group.where.b1), group.heads, slice(span.m0, span.m1), slice(span.n0, span.n1))
    return grid[tuple(part if n > 1 else slice(None) for part, n in zip(box, grid.shape, strict=True))]


def dropped(group: Group, span: Span, seed: int) -> torch.Tensor | None:
    """Which weights of a tile dropout leaves out, bool [b, heads, M, N], or None where the call has no dropout."""
    if not group.problem.has_dropout:
        return None
    at = group.positions(span)
    head = at.b * group.problem.heads_q + at.h
    keep = group.problem.options.dropout_keep
    return ~dropout.keep_mask(seed, head, at.q.flatten(), (span.n0, span.n1), keep)
