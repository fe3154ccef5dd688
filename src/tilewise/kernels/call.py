"""From a problem to the records that kernels of both dialects take. Nothing here launches or chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from .. import dropout
from ..mask_algebra import Frame, Lowered
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import compiled, plans
from .score import BOUNDED_CAP, Grid, Variant


def grid(x: torch.Tensor) -> Grid:
    """A tensor that broadcasts to [B, Hq, Sq, Sk]."""
    x = x[(None,) * (4 - x.ndim)]
    return Grid(x, *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))


# Up to this softcap an error of 3e-7 of it is small beside the rounding of 16-bit probabilities.
_COARSE_CAP = 256.0


@dataclass(frozen=True)
class Call:
    """One call's records.

    `base` is the variant without what depends on a tile, `extra` what its score modification reads. `in_use` are the
    lengths of the sequences, ints or tensors [B]; `sizes` are seqlen_q, seqlen_k, the rows of a statistic, and the left
    and right bound of the band.
    """

    problem: Problem
    frame: Frame
    in_use: tuple[Any, Any]
    lowered: Lowered
    base: Variant
    extra: tuple[Any, ...]
    sizes: tuple[int | None, ...]

    def variant(
        self, tile: TileConfig, *, transposed: bool = False, planned: bool = True
    ) -> tuple[Variant, tuple[Any, ...]]:
        """The variant for kernels with this tile, and what its compiled functions read.

        Args:
            tile: its rows and keys.
            transposed: for a kernel that walks rows for a tile of keys.
            planned: False for a kernel that tests every element, and so needs the whole mask as a test.
        """
        lowered, extra = self.lowered, self.extra
        residual, blocks = lowered.residual, lowered.blocks
        whole = blocks is not None and blocks.block_q % tile.block_m == 0 and blocks.block_k % tile.block_n == 0
        if blocks is not None and not (planned and whole):
            residual = blocks if residual is None else residual & blocks
        fields = plans.bounds(lowered, self.frame)
        if residual is not None:
            fields["predicate"], data = compiled.predicate(residual, self.problem.device, len(extra))
            extra = (*extra, *data)
        if planned and (blocks is not None or "bounds" in fields):
            group = self.problem.group_size if transposed else 0
            fields |= plans.plan(lowered, self.frame, self.in_use, tile, group)
        return self.base._replace(**fields), extra


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """The records of a call, the same for each of its kernels."""
    in_use = _lengths_in_use(problem, inputs)
    frame = Frame(0, problem.batch, problem.seqlen_q, problem.seqlen_k, problem.offset(*in_use), problem.device)
    lowered = problem.options.mask.lower(frame)
    stat_rows = inputs.q.shape[0] if problem.packed else problem.seqlen_q
    base, extra = _base(problem, inputs)
    if inputs.alibi_slopes is not None:
        base = base._replace(line=tl.constexpr(base.scaled.value and lowered.right is not None and lowered.right <= 0))
    sizes = (problem.seqlen_q, problem.seqlen_k, stat_rows, _bound(lowered.left), _bound(lowered.right))
    return Call(problem, frame, in_use, lowered, base, extra, sizes)


def _bound(side: int | None) -> int | None:
    return None if side is None or side >= compiled.UNBOUNDED else side


def _lengths_in_use(problem: Problem, inputs: Inputs) -> tuple[Any, Any]:
    len_q: Any = problem.seqlen_q
    len_k: Any = problem.seqlen_k
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        len_q, len_k = inputs.cu_seqlens_q.diff(), inputs.cu_seqlens_k.diff()
    return len_q, len_k if inputs.seqused_k is None else inputs.seqused_k


def _near(problem: Problem, cap: float) -> bool:
    """Whether `score.near_factor` can serve: its coefficients must be far from the ends of fp32."""
    alone = problem.options.score_mod is None and not problem.has_bias
    return alone and cap >= 1e-4 and 1e-4 <= problem.softmax_scale / cap <= 1e4


def _base(problem: Problem, inputs: Inputs) -> tuple[Variant, tuple[Any, ...]]:
    """The variant without tests and plan, and what the score modification reads."""
    options, extra = problem.options, ()
    fields: dict[str, Any] = {
        "cu_q": inputs.cu_seqlens_q,
        "cu_k": inputs.cu_seqlens_k,
        "used_k": inputs.seqused_k,
        "scale": problem.softmax_scale,
        "cap": options.softcap,
    }
    rough = problem.dtype == torch.bfloat16
    fine = problem.dtype.itemsize > 2 or (options.softcap or 0.0) > _COARSE_CAP
    if options.softcap is not None:
        fields["fine"] = tl.constexpr(fine)
        fields["rough"] = tl.constexpr(rough)
        fields["near"] = tl.constexpr(not (fine or rough) and _near(problem, options.softcap))
    if options.score_mod is not None:
        fields["mod"], fields["dmod"], extra = compiled.score_functions(options.score_mod, problem.device)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes
        batch = 0 if slopes.ndim == 1 or slopes.shape[0] == 1 else slopes.stride(0)
        fields |= {"slopes": slopes, "slopes_batch": batch, "slopes_head": slopes.stride(-1)}
    if inputs.bias is not None:
        fields |= zip(("bias", "bias_batch", "bias_head", "bias_q", "bias_k"), grid(inputs.bias), strict=True)
    if inputs.dropout_seed is not None and problem.has_dropout:
        cut = dropout.cut(options.dropout_keep)
        # Floats, for of integers Triton compiles 1 and multiples of 16 apart.
        fields |= {"seed": inputs.dropout_seed.to(problem.device), "keep": float(options.dropout_keep)}
        fields |= {"cut": float(cut.number), "drops": tl.constexpr(cut.drops)}
    scaled = fields.keys().isdisjoint(("mod", "bias"))
    alone = scaled and "slopes" not in fields
    fold = alone and options.softcap is None
    capped = alone and not fold and "seed" not in fields and (rough or not fine)
    bounded = alone and 0.0 < (options.softcap or 0.0) <= BOUNDED_CAP and problem.dtype != torch.float16
    kinds = {"fold": fold, "capped": capped, "scaled": scaled, "bounded": bounded}
    return Variant(**fields, **{name: tl.constexpr(kind) for name, kind in kinds.items()}), extra
