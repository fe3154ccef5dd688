"""The oracle: attention as the contract defines it, in fp64, with every score in memory, differentiable by autograd.

Tests, documentation and benchmarks compare against this file and nothing else. It shares definitions with the rest of
the package (what a mask shows, which elements dropout keeps) but no algorithm.

With ``dtype=`` it is the yardstick of tolerances instead: the same computation with the roundings of plain PyTorch code
whose tensors (scores, probabilities, output, and their gradients) have that dtype, each computed in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import dropout
from .arguments import prepare
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
