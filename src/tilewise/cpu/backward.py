"""FlashAttention-2 backward (Dao, 2023, Algorithm 2): scores are recomputed tile by tile from q, k and the LSE.

Per tile: ``P = exp(S - lse)``, ``dV += (P Z)ᵀ dO``, ``dP = (dO Vᵀ) Z``, ``dS = P (dP - delta)`` with ``delta =
rowsum(dO O) - dlse``, then back through the score functions to ``dQ = scale dS K`` and ``dK = scale dSᵀ Q``. One fixed
order of tiles, so gradients are bitwise repeatable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import dropout, softmax
from ..problem import DIFFERENTIABLE, Inputs, Problem
from ..products import masked_product
from .groups import Group, Span, groups, keys_view, rows_of, rows_view
from .scores import alibi_slopes, bias_tile, distance, dropped, scores, scores_backward


class Rows(NamedTuple):
    """One row tile: q and do, scaled, [b, h_kv, group * M, D], lse (0 where empty) and delta [b, heads, M].

    q carries softmax_scale and do the inverse keep probability, since they enter only products that have them.
    """

    q: torch.Tensor
    do: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    needs: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Gradients of the inputs named in `needs`, each in its input's dtype and shape."""
    # Sums over tiles run in the compute dtype, whatever the input's.
    grads = {
        name: torch.zeros(x.shape, dtype=problem.compute_dtype)
        for name, x in zip(DIFFERENTIABLE, inputs[:6], strict=True)
        if name in needs and x is not None
    }
    seed = int(inputs.dropout_seed) if inputs.dropout_seed is not None else 0
    # In one layout, whatever autograd sends: products of other strides round differently.
    do = torch.zeros_like(out) if do is None else do.contiguous()
    for group in groups(problem, inputs):
        all_do, all_out = (rows_of(x, problem, group.where) for x in (do, out))
        delta = group.by_q_head((all_do * all_out).sum(-1).flatten(2, 3))
        if dlse is not None:
            delta = delta - group.row_stats(dlse)
        all_do = all_do * dropout.scale(problem.options.dropout_keep) if problem.has_dropout else all_do
        row_lse = group.row_stats(lse)
        if "sinks" in grads:
            _sinks_backward(group, grads["sinks"], row_lse, delta)
        for m0, m1, spans in group.spans():
            rows = Rows(
                group.q[:, :, :, m0:m1].flatten(2, 3),
                all_do[:, :, :, m0:m1].flatten(2, 3),
                softmax.finite_max(row_lse[:, :, m0:m1]),
                delta[:, :, m0:m1],
            )
            for span in spans:
                _tile_backward(group, span, rows, grads, seed)
    return {name: grad.to(getattr(inputs, name).dtype) for name, grad in grads.items()}


def _tile_backward(group: Group, span: Span, rows: Rows, grads: dict[str, torch.Tensor], seed: int) -> None:
    """Add one tile's share to all gradients."""
    visible = group.visible(span)
    if visible is not None and not bool(visible.any()):
        return
    s, saved = scores(group, span, rows.q)  # [b, heads, M, N]
    hidden = None
    if visible is not None:
        visible = visible.expand(s.shape)
        hidden = ~visible
        s.masked_fill_(hidden, softmax.EMPTY)
    p = s.sub_(rows.lse[..., None]).exp_()
    dp = group.by_q_head(rows.do @ group.v[:, :, span.n0 : span.n1].transpose(-1, -2))
    lost = dropped(group, span, seed)
    if lost is not None:
        dp.masked_fill_(lost, 0.0)
    if "v" in grads:
        _add_keys(group, span, grads["v"], p if lost is None else p.masked_fill(lost, 0.0), rows.do, visible)
    ds = dp.sub_(rows.delta[..., None]).mul_(p)
    if hidden is not None:
        ds.masked_fill_(hidden, 0.0)
    _modifiers_backward(group, span, ds, grads)
    ds = scores_backward(group, span, ds, saved)
    if hidden is not None:
        ds = ds.masked_fill(hidden, 0.0)
    if "k" in grads:
        _add_keys(group, span, grads["k"], ds, rows.q, visible)
    if "q" in grads:
        seen = None if visible is None else group.by_kv_head(visible)
        dq = masked_product(group.by_kv_head(ds), group.k[:, :, span.n0 : span.n1], seen)
        target = rows_view(grads["q"], group.problem, group.where)[:, :, span.m0 : span.m1]
        target.add_(group.by_q_head(dq), alpha=group.problem.softmax_scale)


def _add_keys(
    group: Group, span: Span, grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, visible: torch.Tensor | None
) -> None:
    """``grad[keys] += xᵀ y`` for x [b, heads, M, N] and y [b, h_kv, group * M, D]: sums over the group too."""
    seen = None if visible is None else group.by_kv_head(visible).transpose(-1, -2)
    share = masked_product(group.by_kv_head(x).transpose(-1, -2), y, seen)
    keys_view(grad, group.problem, group.where)[:, :, span.n0 : span.n1].add_(share)


def _modifiers_backward(group: Group, span: Span, ds: torch.Tensor, grads: dict[str, torch.Tensor]) -> None:
    """Gradients of what was added to the scores: bias and ALiBi slopes."""
    if "bias" in grads:
        target = bias_tile(group, grads["bias"], span)
        target.add_(ds.sum_to_size(target.shape))
    if "alibi_slopes" in grads:
        target = alibi_slopes(group, grads["alibi_slopes"])
        target.sub_((ds * distance(group, span)).sum_to_size(target.shape))


def _sinks_backward(group: Group, grad: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> None:
    """``dsink = -sum exp(sink - lse) delta``: the sink is a key whose value, hence dP, is 0."""
    assert group.inputs.sinks is not None
    sinks = group.inputs.sinks[group.heads].to(lse.dtype)
    p = torch.exp(sinks[:, None] - softmax.finite_max(lse))
    grad[group.heads].sub_((p * delta).sum(dim=(0, 2)))
