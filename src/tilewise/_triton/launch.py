"""From a problem to the records that kernels take. Nothing here launches or chooses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..mask_algebra import TOP_LEFT, Frame, Lowered
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import compiled, plans
from .device import Dropout, Grid, Lengths, Rows, Scoring, Shape, Variant, Visibility


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels run on the tensors' device, whichever is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def rows(x: torch.Tensor, problem: Problem) -> Rows:
    """q, k, v or a tensor like them."""
    return Rows(x, 0, x.stride(0), x.stride(1)) if problem.packed else Rows(x, *x.stride()[:3])


def grid(x: torch.Tensor) -> Grid:
    """A tensor that broadcasts to [B, Hq, Sq, Sk]."""
    x = x[(None,) * (4 - x.ndim)]
    return Grid(x, *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))


def block(head_dim: int) -> int:
    """The power of two that holds a head dimension; tensor cores want 16."""
    return max(16, triton.next_power_of_2(head_dim))


@dataclass(frozen=True)
class Call:
    """One call's records.

    `in_use` are the lengths of the sequences, ints or tensors [B]; `sizes` are seqlen_q, seqlen_k, the rows of a
    statistic, and the left and right bound of the band.
    """

    problem: Problem
    frame: Frame
    in_use: tuple[Any, Any]
    lowered: Lowered
    lengths: Lengths
    scoring: Scoring
    dropout: Dropout | None
    bias: torch.Tensor | None
    sizes: tuple[int | None, ...]

    def variant(self, tile: TileConfig, *, transposed: bool = False, planned: bool = True) -> Variant:
        """The variant for kernels with this tile.

        Args:
            tile: its rows and keys.
            transposed: for a kernel that walks rows for a tile of keys.
            planned: False for a kernel that tests every element, and so needs the whole mask as a test.
        """
        visibility, plan = self._visibility(tile, planned), None
        if not planned:
            return Variant(self.lengths, self.scoring, visibility, None, self.dropout)
        if self.lowered.blocks is not None or visibility.bounds is not None:
            plan = plans.plan(self.lowered, self.frame, self.in_use, tile, transposed)
        return Variant(self.lengths, self.scoring, visibility, plan, self.dropout)

    def _visibility(self, tile: TileConfig, planned: bool) -> Visibility:
        lowered, predicate, data = self.lowered, None, ()
        residual = lowered.residual
        blocks = lowered.blocks
        whole = blocks is not None and blocks.block_q % tile.block_m == 0 and blocks.block_k % tile.block_n == 0
        if blocks is not None and not (planned and whole):
            residual = blocks if residual is None else residual & blocks
        if residual is not None:
            predicate, data = compiled.predicate(residual, self.problem.device)
        bounds = plans.bounds(lowered, self.frame)
        irregular = predicate is not None or bounds is not None
        return Visibility(bounds, predicate, data, tl.constexpr(irregular), tl.constexpr(predicate is not None))

    def shape(self, tile: TileConfig) -> Shape:
        """Compile-time sizes."""
        p = self.problem
        sizes = (p.heads_q, p.group_size, p.options.align == TOP_LEFT, p.head_dim, p.head_dim_v)
        blocks = (block(p.head_dim), block(p.head_dim_v), tile.block_m, tile.block_n)
        return Shape(*(tl.constexpr(size) for size in (*sizes, *blocks)))


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """The records of a call, the same for each of its kernels."""
    in_use = _lengths_in_use(problem, inputs)
    frame = Frame(0, problem.batch, problem.seqlen_q, problem.seqlen_k, problem.offset(*in_use), problem.device)
    lowered = problem.options.mask.lower(frame)
    stat_rows = inputs.q.shape[0] if problem.packed else problem.seqlen_q
    return Call(
        problem,
        frame,
        in_use,
        lowered,
        Lengths(inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k),
        _scoring(problem, inputs),
        _dropout(problem, inputs),
        inputs.bias,
        (problem.seqlen_q, problem.seqlen_k, stat_rows, _bound(lowered.left), _bound(lowered.right)),
    )


def _bound(side: int | None) -> int | None:
    return None if side is None or side >= compiled.UNBOUNDED else side


def _lengths_in_use(problem: Problem, inputs: Inputs) -> tuple[Any, Any]:
    len_q: Any = problem.seqlen_q
    len_k: Any = problem.seqlen_k
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        len_q, len_k = inputs.cu_seqlens_q.diff(), inputs.cu_seqlens_k.diff()
    return len_q, len_k if inputs.seqused_k is None else inputs.seqused_k


def _scoring(problem: Problem, inputs: Inputs) -> Scoring:
    options, scale = problem.options, problem.softmax_scale
    mod, dmod, aux = None, None, ()
    if options.score_mod is not None:
        mod, dmod, aux = compiled.score_functions(options.score_mod, problem.device)
    slopes = None
    if inputs.alibi_slopes is not None:
        by_head = inputs.alibi_slopes if inputs.alibi_slopes.ndim == 2 else inputs.alibi_slopes[None]
        slopes = grid(by_head[:, :, None, None])
    bias = None if inputs.bias is None else grid(inputs.bias)
    plain = options.softcap is None and mod is None and slopes is None and bias is None
    return Scoring(scale, tl.constexpr(plain), options.softcap, mod, dmod, aux, slopes, bias)


def _dropout(problem: Problem, inputs: Inputs) -> Dropout | None:
    if inputs.dropout_seed is None or not problem.has_dropout:
        return None
    return Dropout(inputs.dropout_seed.to(problem.device), problem.options.dropout_keep)
