"""FlashAttention, version 1: the outer loop over keys and values, the output kept normalised in HBM.

Key tile by key tile, every row tile is read, updated and written back with its statistics: the output O_i so far, its
row maxima m_i and row sums l_i. What version 2 changes: see `flash_v2`.

Source: FlashAttention (Dao et al., 2022), Algorithm 1 (forward), Algorithm 4 (backward), Algorithm 5 (block-sparse).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..softmax import EMPTY, finite_max
from .dropout import Dropout
from .memory import Machine
from .standard import Gradients
from .tiling import Blocks, check, scale_of


class Output(NamedTuple):
    """Output `o` [N_q, d_v], row maxima `m` [N_q] (natural-log units) and row sums `l` [N_q]; all fp64."""

    o: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 - the papers' name


def forward(
    machine: Machine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks,
    *,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
) -> Output:
    """``softmax(scale q k^T) v`` with K and V tiles in the outer loop.

    Traffic in elements, N = N_q = N_k, T_c = ceil(N/B_c), all tiles visible:

        start      writes O = 0, m = -inf, l = 0                     Nd + 2N
        outer      reads K_j, V_j, each once                         2 Nd
        inner      reads Q_i, O_i, m_i, l_i; writes O_i, m_i, l_i    T_c (3 Nd + 4N)
        total      3 Nd + 2N + T_c (3 Nd + 4N)

    and of a part of the tiles: ``Nd + 2N``, plus ``2 B_c d`` for each key tile that any row tile visits, plus
    ``3 B_r d + 4 B_r`` for each visited tile. Causal with B = B_r = B_c dividing N: T (T+1)/2 of the T^2 tiles, in all
    ``3 Nd + 2N + (T+1)/2 (3 Nd + 4N)``. With B_c = M/4d: T_c = 4Nd/M, so Theta(N^2 d^2 / M).

    On chip: ``2d (B_r + B_c)`` of SRAM (Q_i, O_i, K_j, V_j), ``B_r B_c + 2 B_r`` of registers (S, m_i, l_i).
    HBM in use: ``4 Nd + 2N``. FLOPs, all tiles visible: ``4 N^2 d`` in products; ``N^2 + 2 N T_c`` exponentials;
    ``4 N^2 + 4 Nd T_c + 7 N T_c`` others (scale, row maxima, subtract, row sums; for each inner step the output's two
    factors, their sum and the normalisation; the statistics).

    Args:
        machine: counts; ``4 B d <= M`` with B_r = B_c = B = floor(M/4d) is the paper's choice.
        q, k, v: fp64 [N_q, d], [N_k, d], [N_k, d_v], one head. (The formulas have d_v = d.)
        blocks: tile sizes and which tiles are visible (causal, block-sparse).
        softmax_scale: default 1/sqrt(d).
        dropout: from `textbook.dropout`; None for none.

    Returns:
        `Output`. A row that sees no key has o = 0, m = -inf, l = 0.

    Raises:
        tilewise.textbook.memory.SramError: the tiles do not fit.
        tilewise.errors.ShapeError, DtypeError: inputs that do not go together.

    Source:
        FlashAttention (Dao et al., 2022), Algorithm 1; with `dropout`, Algorithm 2; with `Blocks.tiles`, Algorithm 5.

    Example:
        >>> q, k, v = torch.randn(3, 16, 4, dtype=torch.float64)
        >>> machine = Machine(sram=4 * 8 * 4)
        >>> out = forward(machine, q, k, v, Blocks(8, 8))
        >>> machine.counts.traffic == 3 * 16 * 4 + 2 * 16 + 2 * (3 * 16 * 4 + 4 * 16)
        True
    """
    check(q, k, v)
    grid, scale = blocks.grid(q.shape[0], k.shape[0]), scale_of(q, softmax_scale)
    q_hbm, k_hbm, v_hbm = machine.put("q", q), machine.put("k", k), machine.put("v", v)
    o, m = machine.new("o", q.shape[0], v.shape[1]), machine.new("m", q.shape[0])
    l = machine.new("l", q.shape[0])  # noqa: E741 - the papers' name
    for rows in grid.rows:
        with machine.on_chip() as chip:
            length = rows.stop - rows.start
            chip.write(o, chip.new(length, v.shape[1]), rows)
            chip.write(m, chip.new(length, fill=EMPTY), rows)
            chip.write(l, chip.new(length), rows)
    for j, columns in enumerate(grid.columns):
        if not grid.rows_seeing(j):
            continue
        with machine.on_chip() as outer:
            k_j, v_j = outer.read(k_hbm, columns), outer.read(v_hbm, columns)  # [B_c, d], [B_c, d_v]
            for i in grid.rows_seeing(j):
                rows = grid.rows[i]
                with machine.on_chip() as chip:
                    q_i, o_i = chip.read(q_hbm, rows), chip.read(o, rows)  # [B_r, d], [B_r, d_v]
                    m_i, l_i = chip.read(m, rows), chip.read(l, rows)  # [B_r]
                    s = chip.keep(grid.mask(scale * (q_i @ k_j.T), i, j))  # [B_r, B_c]
                    m_ij = s.amax(dim=1)
                    p = torch.exp(s - finite_max(m_ij)[:, None])
                    l_ij = p.sum(dim=1)
                    if dropout is not None:
                        p = p * dropout.factors(chip, rows, columns)
                    m_new = torch.maximum(m_i, m_ij)
                    shift = finite_max(m_new)
                    old, new = torch.exp(m_i - shift) * l_i, torch.exp(m_ij - shift)
                    l_new = old + new * l_ij
                    inverse = l_new.masked_fill(l_new == 0, 1.0).reciprocal()
                    chip.write(o, inverse[:, None] * (old[:, None] * o_i + new[:, None] * (p @ v_j)), rows)
                    chip.write(m, m_new, rows)
                    chip.write(l, l_new, rows)
    return Output(o.result(), m.result(), l.result())


def backward(
    machine: Machine,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: Output,
    do: torch.Tensor,
    blocks: Blocks,
    *,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
) -> Gradients:
    """Gradients with S and P computed again, tile by tile, from Q, K and the row statistics.

        P = exp(S - m) / l    dV += P^T dO    dP = dO V^T    D = rowsum(dO O)    dS = P (dP - D)
        dQ += scale dS K      dK += scale dS^T Q

    Traffic in elements, N = N_q = N_k, all tiles visible:

        start      writes dQ = 0                                             Nd
        outer      reads K_j, V_j, writes dK_j, dV_j                         4 Nd
        inner      reads Q_i, O_i, dO_i, dQ_i, m_i, l_i; writes dQ_i         T_c (5 Nd + 2N)
        total      5 Nd + T_c (5 Nd + 2N)

    The paper's listing also sets dK and dV to 0 in HBM (2 Nd), where the end of the outer loop overwrites them. FLOPs:
    ``10 N^2 d`` in products, ``N^2`` exponentials, ``5 N^2 + 4 Nd T_c + 3 Nd T_r + N T_c`` others. On chip:
    ``4d (B_r + B_c)`` of SRAM, ``2 B_r B_c + 2 B_r`` of registers (P, dS, m_i, l_i). HBM in use: ``8 Nd + 2N``.

    Args:
        machine, blocks, softmax_scale, dropout: as in `forward`.
        qkv: q, k, v as in `forward`.
        out: what `forward` returned.
        do: fp64 [N_q, d_v], gradient of the output.

    Raises:
        tilewise.textbook.memory.SramError: the tiles do not fit.

    Source:
        FlashAttention (Dao et al., 2022), Algorithm 4 (appendix B); Theorem 5 gives Theta(N^2 d^2 / M).

    Example:
        >>> q, k, v, do = torch.randn(4, 16, 4, dtype=torch.float64)
        >>> out = forward(Machine(), q, k, v, Blocks(8, 8))
        >>> machine = Machine()
        >>> dq, dk, dv = backward(machine, (q, k, v), out, do, Blocks(8, 8))
        >>> machine.counts.traffic == 5 * 16 * 4 + 2 * (5 * 16 * 4 + 2 * 16)
        True
    """
    q, k, v = qkv
    check(q, k, v)
    grid, scale = blocks.grid(q.shape[0], k.shape[0]), scale_of(q, softmax_scale)
    names = {"q": q, "k": k, "v": v, "o": out.o, "do": do, "m": out.m, "l": out.l}
    hbm = {name: machine.put(name, x) for name, x in names.items()}
    dq, dk, dv = machine.new("dq", *q.shape), machine.new("dk", *k.shape), machine.new("dv", *v.shape)
    for rows in grid.rows:
        with machine.on_chip() as chip:
            chip.write(dq, chip.new(rows.stop - rows.start, q.shape[1]), rows)
    for j, columns in enumerate(grid.columns):
        with machine.on_chip() as outer:
            k_j, v_j = outer.read(hbm["k"], columns), outer.read(hbm["v"], columns)
            dk_j, dv_j = outer.new(*k_j.shape), outer.new(*v_j.shape)
            for i in grid.rows_seeing(j):
                rows = grid.rows[i]
                with machine.on_chip() as chip:
                    q_i, o_i, do_i, dq_i = (chip.read(x, rows) for x in (hbm["q"], hbm["o"], hbm["do"], dq))
                    m_i, l_i = chip.read(hbm["m"], rows), chip.read(hbm["l"], rows)
                    s = grid.mask(scale * (q_i @ k_j.T), i, j)
                    inverse = l_i.masked_fill(l_i == 0, 1.0).reciprocal()
                    p = chip.keep(inverse[:, None] * torch.exp(s - finite_max(m_i)[:, None]))  # [B_r, B_c]
                    dp = do_i @ v_j.T
                    kept = p
                    if dropout is not None:
                        z = dropout.factors(chip, rows, columns)
                        kept, dp = p * z, dp * z
                    dv_j = dv_j + kept.T @ do_i
                    delta_i = (do_i * o_i).sum(dim=1)
                    ds = chip.keep(p * (dp - delta_i[:, None]))  # [B_r, B_c]
                    chip.write(dq, dq_i + scale * (ds @ k_j), rows)
                    dk_j = dk_j + scale * (ds.T @ q_i)
            outer.write(dk, dk_j, columns)
            outer.write(dv, dv_j, columns)
    return Gradients(dq.result(), dk.result(), dv.result())
