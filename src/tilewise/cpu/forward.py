"""FlashAttention-2 forward (Dao, 2023, Algorithm 1): rows outside, keys inside, one division at the end.

Handles every feature of the contract. Not here: fp8, KV caches.
"""

from __future__ import annotations

import torch

from .. import dropout, softmax
from ..problem import Inputs, Problem
from .groups import Group, Span, groups, rows_view
from .scores import dropped, scores


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [.., Sq, Hq, Dv] in `problem.out_dtype` and LSE in the compute dtype."""
    out = torch.zeros(problem.out_shape(inputs.q), dtype=problem.out_dtype)
    lse = torch.full(problem.lse_shape(inputs.q), softmax.EMPTY, dtype=problem.compute_dtype)
    seed = int(inputs.dropout_seed) if inputs.dropout_seed is not None else 0
    for group in groups(problem, inputs):
        target, stats = rows_view(out, problem, group.where), group.row_stats(lse)
        for m0, m1, spans in group.spans():
            o, row_lse = _attend_rows(group, m0, m1, spans, seed)
            target[:, :, m0:m1] = o
            stats[:, :, m0:m1] = row_lse
    return out, lse


def _attend_rows(group: Group, m0: int, m1: int, spans: list[Span], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [b, heads, M, Dv] and LSE [b, heads, M] of one row tile."""
    q = group.q[:, :, :, m0:m1].flatten(2, 3)  # [b, h_kv, group * M, D]
    state = softmax.init(tuple(q.shape[:3]), group.v.shape[-1], q, sink_rows(group, m1 - m0))
    for span in spans:
        visible = group.visible(span)
        if visible is not None and not bool(visible.any()):
            continue
        s, _ = scores(group, span, q)  # [b, heads, M, N]
        if visible is not None:
            visible = visible.expand(s.shape)
            s.masked_fill_(~visible, softmax.EMPTY)
        lost = dropped(group, span, seed)
        seen, lost = (None if x is None else group.by_kv_head(x) for x in (visible, lost))
        state = softmax.update(state, group.by_kv_head(s), group.v[:, :, span.n0 : span.n1], seen, lost)
    o, lse = softmax.finalize(state)
    if group.problem.has_dropout:
        o.mul_(dropout.scale(group.problem.options.dropout_keep))
    return group.by_q_head(o), group.by_q_head(lse)


def sink_rows(group: Group, rows: int) -> torch.Tensor | None:
    """Sink logits as [h_kv, group * M], or None."""
    if group.inputs.sinks is None:
        return None
    sinks = group.inputs.sinks[group.heads].to(group.problem.compute_dtype)
    return sinks.unflatten(0, (-1, group.problem.group_size))[..., None].expand(-1, -1, rows).flatten(1, 2)
