"""FlashAttention, version 2: the outer loop over queries, one division at the end, one statistic kept.

What changes against `flash_v1`: a row tile stays on chip until it is finished, so O, m and l never travel; the output
is normalised once instead of in every step; the backward needs ``L = m + log l`` alone; and row tiles do not depend on
each other, so that they run on as many processors as there are, in any order (sequence parallelism).

Source: FlashAttention-2 (Dao, 2023), section 3.1, Algorithm 1, and section 3.2 (parallelism). The backward: `backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..softmax import EMPTY, finite_max
from .dropout import Dropout
from .memory import Hbm, Machine
from .tiling import Blocks, Grid, check, scale_of


class Output(NamedTuple):
    """Output `o` [N_q, d_v] and natural-log `lse` [N_q] of the scores; both fp64."""

    o: torch.Tensor
    lse: torch.Tensor


class Operands(NamedTuple):
    """The tensors in HBM: inputs q, k, v, results o, lse."""

    q: Hbm
    k: Hbm
    v: Hbm
    o: Hbm
    lse: Hbm


def forward(
    machine: Machine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks,
    *,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    order: Sequence[int] | None = None,
) -> Output:
    """``softmax(scale q k^T) v`` with Q tiles in the outer loop.

    Traffic in elements, N = N_q = N_k, T_r = ceil(N/B_r), all tiles visible:

        outer      reads Q_i, writes O_i, L_i     2 Nd + N
        inner      reads K_j, V_j                 T_r 2 Nd
        total      2 Nd + N + 2 Nd T_r

    and of a part of the tiles: ``2 Nd + N`` plus ``2 B_c d`` for each visited tile. Causal with B = B_r = B_c dividing
    N: T (T+1)/2 of the T^2 tiles, in all ``2 Nd + N + (T+1) Nd``. Against version 1 the inner loop moves two matrices
    and not three, and no statistics. With B_r = M/4d: 8 N^2 d^2 / M + 2 Nd + N.

    On chip: ``2d (B_r + B_c)`` of SRAM (Q_i, O_i, K_j, V_j), ``B_r B_c + 2 B_r`` of registers (S, m_i, l_i).
    HBM in use: ``4 Nd + N``. FLOPs, all tiles visible: ``4 N^2 d`` in products; ``N^2 + N T_c + N`` exponentials and
    logarithms; ``4 N^2 + 2 Nd T_c + 4 N T_c + Nd + N`` others.

    Args:
        machine: counts.
        q, k, v: fp64 [N_q, d], [N_k, d], [N_k, d_v], one head. (The formulas have d_v = d.)
        blocks: tile sizes and which tiles are visible (causal, block-sparse).
        softmax_scale: default 1/sqrt(d).
        dropout: from `textbook.dropout`; None for none.
        order: a permutation of the row tiles, the order in which these independent tasks run; None for 0, 1, ...

    Returns:
        `Output`, bit for bit the same in every order. A row that sees no key has o = 0 and lse = -inf.

    Raises:
        tilewise.textbook.memory.SramError: the tiles do not fit.
        tilewise.errors.ShapeError, DtypeError: inputs that do not go together.

    Source:
        FlashAttention-2 (Dao, 2023), Algorithm 1.

    Example:
        >>> q, k, v = torch.randn(3, 16, 4, dtype=torch.float64)
        >>> machine = Machine(sram=4 * 8 * 4)
        >>> o, lse = forward(machine, q, k, v, Blocks(8, 8), order=[1, 0])
        >>> machine.counts.traffic == 2 * 16 * 4 + 16 + 2 * 16 * 4 * 2
        True
    """
    check(q, k, v)
    grid, scale = blocks.grid(q.shape[0], k.shape[0]), scale_of(q, softmax_scale)
    hbm = Operands(
        machine.put("q", q),
        machine.put("k", k),
        machine.put("v", v),
        machine.new("o", q.shape[0], v.shape[1]),
        machine.new("lse", q.shape[0]),
    )
    for i in range(len(grid.rows)) if order is None else order:
        row_tile(machine, hbm, grid, i, scale, dropout)
    return Output(hbm.o.result(), hbm.lse.result())


def row_tile(machine: Machine, hbm: Operands, grid: Grid, i: int, scale: float, dropout: Dropout | None) -> None:
    """One task, what one thread block does: O_i and L_i, from Q_i and the key tiles that it sees."""
    rows = grid.rows[i]
    with machine.on_chip() as chip:
        q_i = chip.read(hbm.q, rows)  # [B_r, d]
        acc = chip.new(q_i.shape[0], hbm.v.shape[1])  # [B_r, d_v]
        m_i, l_i = chip.new(q_i.shape[0], fill=EMPTY), chip.new(q_i.shape[0])  # [B_r]
        for j in grid.keys_seen(i):
            columns = grid.columns[j]
            with machine.on_chip() as tile:
                k_j, v_j = tile.read(hbm.k, columns), tile.read(hbm.v, columns)  # [B_c, d], [B_c, d_v]
                s = tile.keep(grid.mask(scale * (q_i @ k_j.T), i, j))  # [B_r, B_c]
                m_new = torch.maximum(m_i, s.amax(dim=1))
                shift = finite_max(m_new)
                p = torch.exp(s - shift[:, None])
                alpha = torch.exp(m_i - shift)
                l_i = alpha * l_i + p.sum(dim=1)
                if dropout is not None:
                    p = p * dropout.factors(tile, rows, columns)
                acc = alpha[:, None] * acc + p @ v_j
                m_i = m_new
        inverse = l_i.masked_fill(l_i == 0, 1.0).reciprocal()
        chip.write(hbm.o, inverse[:, None] * acc, rows)
        chip.write(hbm.lse, m_i + torch.log(l_i), rows)
