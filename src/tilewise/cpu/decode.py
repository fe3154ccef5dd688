"""Attention with a key/value cache: append, then each sequence alone, over the keys gathered from its slots.

Handles all of `kvcache.CacheProblem`. One sequence at a time, so no row's bits depend on another sequence.

Source: Flash-Decoding (Dao et al., 2023) for parts that are merged; Flash-Decoding++ (Hong et al., 2023), section 3,
for the unified maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from .. import softmax
from ..decode.append import append, places, rows_of, scale_at, stretch
from ..decode.plan import parts
from ..decode.rotary import rotate
from ..kvcache import CacheInputs, CacheProblem, Lengths, Tree, band, key_range, lengths
from ..problem import Inputs
from .forward import sink_rows
from .groups import Group, Span, rows_view, sequences_of
from .scores import scores

# exp of the distance between the assumed maximum and the true one stays a normal number of fp32, and so do sums of
# 2**40 of them.
REACH = 60.0


def attend_cache(problem: CacheProblem, inputs: CacheInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in `out_dtype` and LSE of the call, after its new keys are in the cache."""
    call = problem.attention
    at = lengths(problem, inputs)
    append(problem, inputs, at)
    out = torch.zeros(call.out_shape(inputs.q), dtype=call.out_dtype)
    lse = torch.full(call.lse_shape(inputs.q), softmax.EMPTY, dtype=call.compute_dtype)
    for b, n in enumerate(at.q.tolist()):
        stats = lse[b] if inputs.cu_seqlens_q is None else lse[:, int(inputs.cu_seqlens_q[b]) :]
        for group in _groups(problem, inputs, at, b):
            _attend(problem, group, rows_of(out, inputs, b, n), stats[:, :n])
    return out, lse


def _groups(problem: CacheProblem, inputs: CacheInputs, at: Lengths, b: int) -> Iterator[Group]:
    """The work of one sequence, as of a packed problem whose rows and keys are its own."""
    call, (n_q, n_k, pad) = problem.attention, (int(x[b]) for x in (at.q, at.k, at.pad))
    one = Lengths(*(x[b : b + 1] for x in at))
    lo, hi = (int(x) for x in key_range(one, *band(problem), torch.zeros_like(one.q), one.q))
    static = problem.static
    k = _keys(problem, inputs, b, (inputs.k_cache, inputs.k_scale, static.k_scale), (pad, lo, hi, n_k))
    v = _keys(problem, inputs, b, (inputs.v_cache, inputs.v_scale, static.v_scale), (pad, lo, hi, n_k))
    mask = call.options.mask
    if inputs.tree is not None:
        mask = mask & Tree(inputs.tree, n_k - n_q)
    alone = Inputs(_rows(problem, inputs, at, b), k, v, alibi_slopes=inputs.alibi_slopes, sinks=inputs.sinks)
    sequence = replace(call, packed=True, options=replace(call.options, mask=mask))
    return sequences_of(sequence, alone, b, b + 1, slice(0, n_q), slice(0, n_k))


def _keys(
    problem: CacheProblem,
    inputs: CacheInputs,
    b: int,
    cache: tuple[torch.Tensor, torch.Tensor | None, str | None],
    where: tuple[int, int, int, int],
) -> torch.Tensor:
    """Keys (or values) of one sequence, dequantised: [n_k, Hkv, D] in the compute dtype, stored by head.

    Args:
        problem, inputs, b: the sequence.
        cache: keys or values, their scale, and how it is indexed.
        where: slots before the first key; the keys that any row sees, lo .. hi; how many keys there are. Of the others
            not even the pages' ids may be looked at, and nobody reads what is in their place.
    """
    (tensor, scale, kind), (pad, lo, hi, n_k) = cache, where
    x = torch.empty((tensor.shape[2], n_k, tensor.shape[3]), dtype=problem.attention.compute_dtype)
    if lo < hi:
        x[:, lo:hi] = stretch(tensor, inputs, b, pad + lo, pad + hi).transpose(0, 1)
        if scale is not None:
            rows = places(inputs, b, pad + torch.arange(lo, hi)).rows
            x[:, lo:hi] *= scale_at(scale, kind, b, rows).transpose(0, 1)
    return x.transpose(0, 1)


def _rows(problem: CacheProblem, inputs: CacheInputs, at: Lengths, b: int) -> torch.Tensor:
    """The sequence's rows of q, [Sq, Hq, D], rotated."""
    n = int(at.q[b])
    q = rows_of(inputs.q, inputs, b, n)
    if inputs.rotary_cos is None or inputs.rotary_sin is None:
        return q
    first = int(at.used[b] if inputs.rotary_positions is None else inputs.rotary_positions[b]) + int(at.new[b]) - n
    return rotate(q, inputs.rotary_cos, inputs.rotary_sin, first + torch.arange(n), problem.static.rotary_interleaved)


def _attend(problem: CacheProblem, group: Group, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill a group's rows of one sequence's output [Sq, Hq, Dv] and LSE [Hq, Sq]."""
    target, stats = rows_view(out, group.problem, group.where), group.row_stats(lse)
    for m0, m1, spans in group.spans():
        total: tuple[torch.Tensor, torch.Tensor] | None = None
        for i, part in enumerate(_parts(problem, group, m0, m1, spans)):
            found = _attend_part(problem, group, (m0, m1), part, sinks=i == 0)
            total = found if total is None else softmax.merge(*total, *found)
        assert total is not None
        target[:, :, m0:m1], stats[:, :, m0:m1] = (group.by_q_head(x) for x in total)


def _parts(problem: CacheProblem, group: Group, m0: int, m1: int, spans: list[Span]) -> Iterator[list[Span]]:
    """A row tile's key tiles, part by part as the call asks for it; at least one part, which may be empty."""
    lo, hi = (spans[0].n0, spans[-1].n1) if spans else (0, 0)
    # Few rows take as many keys more in one step: each is read once, whatever the steps.
    step = group.config.block_n * max(1, group.config.block_m // ((m1 - m0) * problem.attention.group_size))
    for start, stop in parts(problem.static, lo, hi):
        yield [Span(m0, m1, n0, min(n0 + step, stop)) for n0 in range(start, stop, step)]


def _attend_part(
    problem: CacheProblem, group: Group, rows: tuple[int, int], spans: list[Span], sinks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, h_kv, group * M, Dv] and LSE of a row tile over some of its keys."""
    q = group.q[:, :, :, rows[0] : rows[1]].flatten(2, 3)  # [1, h_kv, group * M, D]
    sink = sink_rows(group, rows[1] - rows[0]) if sinks else None
    phi = problem.static.softmax_max
    if phi is None:
        return _true(group, q, spans, sink)
    o, lse, strayed = _assumed(group, q, spans, sink, phi)
    if bool(strayed.any()):
        # Exactly the rows that strayed are computed again: the others keep their bits.
        exact, exact_lse = _true(group, q, spans, sink)
        o = torch.where(strayed[..., None], exact, o)
        lse = torch.where(strayed, exact_lse, lse)
    return o, lse


def _true(
    group: Group, q: torch.Tensor, spans: list[Span], sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """With the running maximum (FlashAttention-2, Algorithm 1)."""
    state = softmax.init(tuple(q.shape[:3]), group.v.shape[-1], q, sink)
    for span in spans:
        s, visible = _tile(group, span, q)
        state = softmax.update(state, s, group.v[:, :, span.n0 : span.n1], visible)
    return softmax.finalize(state)


def _assumed(
    group: Group, q: torch.Tensor, spans: list[Span], sink: torch.Tensor | None, phi: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With the maximum φ, and which rows it does not hold for: their largest score is too far from it."""
    empty = softmax.init(tuple(q.shape[:3]), group.v.shape[-1], q, sink)
    peak = empty.m
    state = softmax.State(torch.full_like(peak, phi), (empty.m - phi).exp(), empty.acc)
    for span in spans:
        s, visible = _tile(group, span, q)
        peak = torch.maximum(peak, s.amax(dim=-1))
        state = softmax.accumulate(state, s, group.v[:, :, span.n0 : span.n1], visible)
    strayed = ((peak - phi).abs() > REACH) & (peak > softmax.EMPTY)
    # Values may be so large that their weighted sum overflows where their mean does not.
    strayed |= ~torch.isfinite(state.acc).all(dim=-1)
    return *softmax.finalize(state), strayed


def _tile(group: Group, span: Span, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [1, h_kv, group * M, N], -inf where invisible, and what is visible."""
    s, _ = scores(group, span, q)
    visible = group.visible(span)
    if visible is None:
        return group.by_kv_head(s), None
    visible = visible.expand(s.shape)
    s.masked_fill_(~visible, softmax.EMPTY)
    return group.by_kv_head(s), group.by_kv_head(visible)
