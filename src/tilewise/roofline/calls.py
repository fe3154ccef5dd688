"""What one call must cost at least: floating-point operations, HBM bytes, and the time that a device needs for them.

Counts are of the algorithm, not of a kernel: each visible (row, key) pair once, each tensor over HBM once. Beside them
stands standard attention, which writes its scores S and probabilities P to HBM and reads them back.

Source: FlashAttention (Dao et al., 2022), section 3 and Theorem 2; FlashAttention-2 (Dao, 2023), section 4.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import sequences
from ..mask_algebra import Frame, interval
from ..problem import DIFFERENTIABLE, Inputs, Problem
from .devices import Device

FORWARD, BACKWARD = "forward", "backward"


class Pairs(NamedTuple):
    """How many (query row, key) pairs of all heads are visible; an upper bound where a predicate was not run."""

    number: int
    exact: bool


def visible_pairs(problem: Problem, inputs: Inputs) -> Pairs:
    """Pairs that the mask leaves, over all batch entries and query heads."""
    total, exact = 0, True
    for first, last, seqlen_q, seqlen_k in _lengths(problem, inputs):
        # Shapes alone decide where the tensors are only described.
        where = torch.device("cpu") if problem.device.type == "meta" else problem.device
        off = int(problem.offset(seqlen_q, seqlen_k))
        frame = Frame(first, last, seqlen_q, seqlen_k, off, where)
        lowered = problem.options.mask.lower(frame)
        lo, hi = interval(lowered, frame)
        seen = (hi - lo).clamp(min=0).sum(dim=1).expand(last - first).sum()
        share = 1.0 if lowered.blocks is None else lowered.blocks.density
        total += round(int(seen) * share) * problem.heads_q
        exact = exact and lowered.residual is None and lowered.blocks is None
    return Pairs(total, exact)


def _lengths(problem: Problem, inputs: Inputs) -> list[tuple[int, int, int, int]]:
    """Ranges of batch entries with their lengths: (first, last, seqlen_q, seqlen_k)."""
    if not problem.packed:
        return [(0, problem.batch, problem.seqlen_q, problem.seqlen_k)]
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    found = sequences.members(inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k)
    return [(m.b, m.b + 1, m.q1 - m.q0, m.k1 - m.k0) for m in found]


def products(problem: Problem, pairs: int, pass_: str = FORWARD) -> dict[str, int]:
    """Floating-point operations of each matrix product, 2 per multiply-add.

    Forward: ``S = QKᵀ`` and ``O = PV``. Backward: S again, ``dP = dO Vᵀ``, ``dV = Pᵀ dO``, ``dQ = dS K``,
    ``dK = dSᵀ Q`` (2.5 times the forward where both head dims agree).
    """
    scores, values = 2 * pairs * problem.head_dim, 2 * pairs * problem.head_dim_v
    if pass_ == FORWARD:
        return {"S = QKᵀ": scores, "O = PV": values}
    return {"S = QKᵀ": scores, "dP = dO Vᵀ": values, "dV = Pᵀ dO": values, "dQ = dS K": scores, "dK = dSᵀ Q": scores}


def flops(problem: Problem, pairs: int, pass_: str = FORWARD) -> int:
    """Floating-point operations of all products."""
    return sum(products(problem, pairs, pass_).values())


def tensor_bytes(problem: Problem, inputs: Inputs, pass_: str = FORWARD) -> dict[str, int]:
    """Bytes of each tensor that a pass reads or writes: inputs and results, and in the backward their gradients."""
    moved = {name: _bytes(x) for name, x in zip(inputs._fields, inputs, strict=True) if x is not None}
    rows = inputs.q.shape.numel() // problem.head_dim
    moved["o"] = rows * problem.head_dim_v * problem.out_dtype.itemsize
    moved["lse"] = rows * problem.compute_dtype.itemsize
    if pass_ == BACKWARD:
        moved["do"] = moved["o"]
        moved |= {f"d{name}": moved[name] for name in DIFFERENTIABLE if name in moved}
    return moved


def hbm_bytes(problem: Problem, inputs: Inputs, pass_: str = FORWARD) -> int:
    """Bytes over HBM if each of a pass's tensors crosses once."""
    return sum(tensor_bytes(problem, inputs, pass_).values())


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def standard_hbm_bytes(problem: Problem, inputs: Inputs, pass_: str = FORWARD) -> int:
    """Bytes of standard attention: the same tensors, and S and P (in q's dtype) written and read back.

    Forward (FlashAttention, Algorithm 0): S written and read, P written and read. Backward: P read for dV and for dS,
    dP written and read, dS written and read twice.
    """
    scores = score_matrix_bytes(problem, inputs)
    return hbm_bytes(problem, inputs, pass_) + (4 if pass_ == FORWARD else 7) * scores


def score_matrix_bytes(problem: Problem, inputs: Inputs) -> int:
    """Bytes of one full matrix of scores over all batch entries and heads, in q's dtype."""
    cells = sum((last - first) * m * n for first, last, m, n in _lengths(problem, inputs))
    return cells * problem.heads_q * problem.dtype.itemsize


def floor_ms(problem: Problem, pairs: int, moved: int, on: Device, pass_: str = FORWARD) -> float:
    """Milliseconds below which no implementation gets on this device: the longer of arithmetic and memory."""
    arithmetic = flops(problem, pairs, pass_) / (on.tflops(problem.dtype) * 1e12)
    memory = moved / (on.hbm_tb_s * 1e12)
    return 1e3 * max(arithmetic, memory)
