"""The oracle: attention as the contract defines it, in fp64, with every score in memory, differentiable by autograd.

Tests, documentation and benchmarks compare against this file and nothing else. It shares definitions with the rest of
the package (what a mask shows, which elements dropout keeps) but no algorithm.

With ``dtype=`` it is the yardstick of tolerances instead: the same computation with the roundings of plain PyTorch code
whose tensors (scores, probabilities, output, and their gradients) have that dtype, each computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import dropout
from .arguments import prepare
from .cache_arguments import prepare as prepare_cache
from .kvcache import FP8, PER_HEAD, PER_PAGE, CacheInputs, CacheProblem, Tree
from .mask_algebra import Positions
from .problem import Inputs, Problem
from .sequences import members


class Numerics(NamedTuple):
    """What intermediate tensors are kept in. fp64 rounds nowhere else."""

    dtype: torch.dtype

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in the dtype that products and functions are computed in."""
        return x.to(self.compute)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as it comes back from memory; its gradient is rounded likewise."""
        return x.to(self.dtype).to(self.compute)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dtype: torch.dtype = torch.float64, **arguments: Any
) -> Any:
    """`tilewise.attention`, with the same arguments, in fp64 (or with the roundings of `dtype`): out or (out, lse)."""
    problem, inputs, return_lse = prepare(q, k, v, **arguments)
    out, lse = _dense(problem, inputs, Numerics(dtype))
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> Any:
    """`tilewise.attention_varlen` in fp64, by decomposition into one dense problem per member."""
    problem, inputs, return_lse = prepare(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **arguments)
    outs, lses, numerics = [], [], Numerics(dtype)
    for member in members(cu_seqlens_q, cu_seqlens_k, inputs.seqused_k):
        b, rows, keys = member.b, slice(member.q0, member.q1), slice(member.k0, member.k1)
        slopes = inputs.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b : b + 1]
        alone = inputs._replace(q=q[None, rows], k=k[None, keys], v=v[None, keys], alibi_slopes=slopes)
        out, lse = _dense(problem, alone, numerics, first=b)
        outs.append(out[0])
        lses.append(lse[0])
    slack = q.shape[0] - int(cu_seqlens_q[-1])
    outs.append(q.new_zeros((slack, problem.heads_q, problem.head_dim_v), dtype=numerics.compute))
    lses.append(q.new_full((problem.heads_q, slack), float("-inf"), dtype=numerics.compute))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> Any:
    """`tilewise.attention_with_kvcache` in fp64, one dense problem per sequence; the caches stay as they are.

    Keys and values are what `appended` says that the cache holds after the call: in its dtype, whatever `dtype` is.
    """
    problem, inputs = prepare_cache(q, k_cache, v_cache, cache_seqlens, **arguments)
    call, numerics = problem.attention, Numerics(dtype)
    caches = _appended(problem, inputs)
    out = q.new_zeros(call.out_shape(q), dtype=numerics.compute)
    lse = q.new_full(call.lse_shape(q), float("-inf"), dtype=numerics.compute)
    for b, sequence in enumerate(_cached(problem, inputs)):
        keys = sequence.slots[sequence.first_key :]
        scales = ((inputs.k_scale, problem.static.k_scale), (inputs.v_scale, problem.static.v_scale))
        k, v = (_dequantized(x, *scale, b, keys) for x, scale in zip(caches, scales, strict=True))
        rows = numerics.load(sequence.rows(q, b))
        if inputs.rotary_cos is not None:
            rows = numerics.store(_rotated(problem, inputs, rows, sequence.position))
        slopes = inputs.alibi_slopes
        slopes = slopes[b : b + 1] if slopes is not None and slopes.ndim == 2 else slopes
        alone = Inputs(rows[None], k[None], v[None], alibi_slopes=slopes, sinks=inputs.sinks)
        mask = call.options.mask
        if inputs.tree is not None:
            mask = mask & Tree(inputs.tree, len(keys) - rows.shape[0])
        here = replace(call, options=replace(call.options, mask=mask))
        o, stats = _dense(here, alone, numerics, first=b)
        sequence.rows(out, b)[:] = o[0]
        sequence.stats(lse, b)[:] = stats[0]
    return (out, lse) if arguments.get("return_lse") else out


def appended(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of both caches as `tilewise.attention_with_kvcache` leaves them; rotation and scaling in fp64."""
    return _appended(*prepare_cache(q, k_cache, v_cache, cache_seqlens, **arguments))


class _Cached(NamedTuple):
    """One sequence of a call with a cache."""

    start: int | None  # its first row in a ragged call
    n: int  # rows
    slots: list[tuple[int, int]]  # where in the cache its slots lie, after the append
    first_key: int  # the first slot in use
    new: int  # slots that are appended, the last ones
    position: int  # of its first row, for rotation

    def rows(self, x: torch.Tensor, b: int) -> torch.Tensor:
        return x[b] if self.start is None else x[self.start : self.start + self.n]

    def stats(self, x: torch.Tensor, b: int) -> torch.Tensor:
        return x[b] if self.start is None else x[:, self.start : self.start + self.n]


def _cached(problem: CacheProblem, inputs: CacheInputs) -> Iterator[_Cached]:
    """The sequences of a call, read from its lengths and tables."""
    cu, table, size = inputs.cu_seqlens_q, inputs.page_table, inputs.k_cache.shape[1]
    for b, used in enumerate(inputs.cache_seqlens.tolist()):
        start, n = None, problem.attention.seqlen_q
        if cu is not None:
            start, n = int(cu[b]), int(cu[b + 1] - cu[b])
        new = 0 if not problem.appends else n if cu is not None else int(problem.seqlen_new or 0)
        if table is not None:
            slots = [(int(table[b, s // size]), s % size) for s in range(used + new)]
        else:
            row = b if inputs.cache_batch_idx is None else int(inputs.cache_batch_idx[b])
            slots = [(row, s) for s in range(used + new)]
        pad = 0 if inputs.cache_leftpad is None else int(inputs.cache_leftpad[b])
        position = used if inputs.rotary_positions is None else int(inputs.rotary_positions[b])
        yield _Cached(start, n, slots, pad, new, position + new - n)


def _appended(problem: CacheProblem, inputs: CacheInputs) -> tuple[torch.Tensor, torch.Tensor]:
    k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
    if inputs.k_new is None or inputs.v_new is None:
        return k_cache, v_cache
    static = problem.static
    for b, sequence in enumerate(_cached(problem, inputs)):
        slots = sequence.slots[len(sequence.slots) - sequence.new :]
        k, v = (sequence.rows(x, b).double() for x in (inputs.k_new, inputs.v_new))
        if inputs.rotary_cos is not None:
            first = sequence.position + sequence.n - sequence.new
            k = _rotated(problem, inputs, k, first).to(inputs.k_new.dtype).double()
        for cache, x, scale, kind in (
            (k_cache, k, inputs.k_scale, static.k_scale),
            (v_cache, v, inputs.v_scale, static.v_scale),
        ):
            most = torch.finfo(cache.dtype).max
            for t, (row, slot) in enumerate(slots):
                value = x[t] if scale is None else x[t] / _scale_of(scale, kind, b, row)
                cache[row, slot] = (value.clamp(-most, most) if problem.quantized else value).to(cache.dtype)
    return k_cache, v_cache


def _scale_of(scale: torch.Tensor, kind: str | None, b: int, row: int) -> torch.Tensor:
    """The scale of a slot in this row (page) of the cache for sequence b, fp64 [Hkv, 1]."""
    found = scale if kind == PER_HEAD else scale[row if kind == PER_PAGE else b]
    return found.double()[:, None]


def _dequantized(
    cache: torch.Tensor, scale: torch.Tensor | None, kind: str | None, b: int, slots: list[tuple[int, int]]
) -> torch.Tensor:
    """The values of sequence b that lie in these slots, fp64 [n, Hkv, D]."""
    rows, columns = torch.tensor(slots, dtype=torch.int64).view(-1, 2).to(cache.device).unbind(1)
    # PyTorch indexes no fp8.
    raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    x = raw[rows, columns].view(cache.dtype).double()
    if scale is None:
        return x
    found = scale if kind == PER_HEAD else scale[rows if kind == PER_PAGE else b]
    return x * found.double()[..., None]


def _rotated(problem: CacheProblem, inputs: CacheInputs, x: torch.Tensor, first: int) -> torch.Tensor:
    """Rows [n, H, D] of positions first, first + 1, ...: pairs of dims as complex numbers, times the angles' own."""
    assert inputs.rotary_cos is not None and inputs.rotary_sin is not None
    at = (first + torch.arange(x.shape[0], device=x.device)).clamp(0, inputs.rotary_cos.shape[0] - 1)
    angles = torch.complex(inputs.rotary_cos.to(x.dtype)[at], inputs.rotary_sin.to(x.dtype)[at])[:, None]
    head, rest = x[..., : problem.rotary_dim], x[..., problem.rotary_dim :]
    neighbours = problem.static.rotary_interleaved
    pairs = head.unflatten(-1, (-1, 2)) if neighbours else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.complex(pairs[..., 0].contiguous(), pairs[..., 1].contiguous()) * angles)
    turned = turned if neighbours else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), rest], dim=-1)


def _scores(problem: Problem, inputs: Inputs, at: Positions, numerics: Numerics) -> torch.Tensor:
    """Scores [B, Hq, Sq, Sk] after softcap, score mod, ALiBi and bias, in this order."""
    options, load = problem.options, numerics.load
    k = load(inputs.k).repeat_interleave(problem.group_size, dim=2)
    s = numerics.store(torch.einsum("bqhd,bkhd->bhqk", load(inputs.q), k) * problem.softmax_scale)
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.score_mod is not None:
        s = options.score_mod.fn(s, at.b, at.h, at.q, at.k, *options.score_mod.aux)
    if inputs.alibi_slopes is not None:
        slopes = load(inputs.alibi_slopes).reshape(-1, problem.heads_q, 1, 1)
        s = s - slopes * (at.q + at.off - at.k).abs()
    if inputs.bias is not None:
        s = s + load(inputs.bias)
    return numerics.store(s)


def _dense(problem: Problem, inputs: Inputs, numerics: Numerics, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Sq, Hq, Dv] and LSE [B, Hq, Sq] of a dense problem whose batch entries are first, first + 1, ..."""
    batch, seqlen_q, heads = inputs.q.shape[:3]
    seqlen_k = inputs.k.shape[1]
    b = torch.arange(first, first + batch).view(-1, 1, 1, 1)
    h = torch.arange(heads).view(1, -1, 1, 1)
    i, j = torch.arange(seqlen_q).view(1, 1, -1, 1), torch.arange(seqlen_k).view(1, 1, 1, -1)
    b, h, i, j = (x.to(inputs.q.device) for x in (b, h, i, j))
    at = Positions(b, h, i, j, problem.offset(seqlen_q, seqlen_k))

    grid = (batch, heads, seqlen_q, seqlen_k)
    visible = problem.options.mask.visible(at).expand(grid)
    s = _scores(problem, inputs, at, numerics).expand(grid).masked_fill(~visible, float("-inf"))
    if inputs.sinks is not None:
        sink = numerics.load(inputs.sinks).view(1, -1, 1, 1).expand(batch, heads, seqlen_q, 1)
        s = torch.cat([s, sink], dim=-1)
    empty = (s == float("-inf")).all(dim=-1, keepdim=True)
    lse = s.masked_fill(empty, 0.0).logsumexp(dim=-1, keepdim=True)
    p = torch.exp(s - lse).masked_fill(empty, 0.0)[..., :seqlen_k]
    if problem.has_dropout:
        p = p * numerics.load(_dropout_weights(problem, inputs, at))
    v = numerics.load(inputs.v).repeat_interleave(problem.group_size, dim=2)
    out = numerics.store(torch.einsum("bhqk,bkhd->bqhd", numerics.store(p), v))
    return out, lse.masked_fill(empty, float("-inf"))[..., 0]


def _dropout_weights(problem: Problem, inputs: Inputs, at: Positions) -> torch.Tensor:
    assert inputs.dropout_seed is not None
    keep = problem.options.dropout_keep
    kept = dropout.keep_mask(
        int(inputs.dropout_seed), at.b * problem.heads_q + at.h, at.q.flatten(), (0, at.k.shape[-1]), keep
    )
    return kept.double() * dropout.scale(keep)
