"""The backward pass with recomputation, in both loop orders and as two kernels without shared results.

From Q, K and the saved ``L = m + log l`` every tile of P is had again in one exponential; with ``D = rowsum(dO O)``,
computed once beforehand,

    P = exp(S - L)    dV = P^T dO    dP = dO V^T    dS = P (dP - D)    dQ = scale dS K    dK = scale dS^T Q

A tile of dS feeds rows of dQ and of dK. Whichever is outermost stays on chip; the other is read, added to and written
back for every tile. N = N_q = N_k, T_r = ceil(N/B_r), T_c = ceil(N/B_c), all tiles visible:

============ ==================================== ================= =====================================
             traffic                              products          results shared by tasks
============ ==================================== ================= =====================================
outer_keys   7 Nd + N + T_c (4 Nd + 2N)           10 N^2 d          dQ: atomic additions, in any order
outer_rows   7 Nd + 3N + 6 Nd T_r                 10 N^2 d          dK and dV: likewise
separate     9 Nd + 3N + T_c (2Nd + 2N) + 2 Nd T_r   14 N^2 d       none: bitwise repeatable
============ ==================================== ================= =====================================

In each: D costs ``2 Nd + N``. Of a part of the tiles, each visited one costs ``4 B_r d + 2 B_r`` (outer_keys),
``6 B_c d`` (outer_rows), ``2 B_r d + 2 B_r + 2 B_c d`` (separate); causal with B = B_r = B_c dividing N: (T+1)/2 takes
the place of T. Exponentials: N^2, and 2 N^2 in `separate`.

Source: FlashAttention-2 (Dao, 2023), section 3.1.2, Algorithm 2 (outer_keys); section 3.2 (atomic additions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import errors
from ..softmax import finite_max
from .dropout import Dropout
from .flash_v2 import Output
from .memory import Chip, Hbm, Machine
from .standard import Gradients
from .tiling import Blocks, Grid, check, scale_of


class Operands(NamedTuple):
    """The tensors in HBM: inputs and results of one backward pass, with what does not change over it."""

    q: Hbm
    k: Hbm
    v: Hbm
    do: Hbm
    lse: Hbm
    delta: Hbm
    dq: Hbm
    dk: Hbm
    dv: Hbm
    grid: Grid
    scale: float
    dropout: Dropout | None


class RowTile(NamedTuple):
    """What a row tile brings: q, do [B_r, d], lse and delta [B_r]."""

    q: torch.Tensor
    do: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def read_rows(chip: Chip, hbm: Operands, rows: slice) -> RowTile:
    """A row tile, from HBM: 2 B_r d + 2 B_r elements."""
    return RowTile(*(chip.read(x, rows) for x in (hbm.q, hbm.do, hbm.lse, hbm.delta)))


def recompute(
    chip: Chip, hbm: Operands, i: int, j: int, row: RowTile, k_j: torch.Tensor, v_j: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """P after dropout and dS of one tile, both [B_r, B_c]."""
    s = hbm.grid.mask(hbm.scale * (row.q @ k_j.T), i, j)
    p = chip.keep(torch.exp(s - finite_max(row.lse)[:, None]))
    dp, kept = row.do @ v_j.T, p
    if hbm.dropout is not None:
        z = hbm.dropout.factors(chip, hbm.grid.rows[i], hbm.grid.columns[j])
        kept, dp = p * z, dp * z
    return kept, chip.keep(p * (dp - row.delta[:, None]))


def _outer_keys(machine: Machine, hbm: Operands, *, with_dq: bool) -> None:
    """One task for each key tile: dK_j and dV_j on chip; with `with_dq` it also adds to every dQ_i."""
    for j, columns in enumerate(hbm.grid.columns):
        with machine.on_chip() as outer:
            k_j, v_j = outer.read(hbm.k, columns), outer.read(hbm.v, columns)  # [B_c, d], [B_c, d_v]
            dk_j, dv_j = outer.new(*k_j.shape), outer.new(*v_j.shape)
            for i in hbm.grid.rows_seeing(j):
                rows = hbm.grid.rows[i]
                with machine.on_chip() as chip:
                    row = read_rows(chip, hbm, rows)
                    p, ds = recompute(chip, hbm, i, j, row, k_j, v_j)
                    dv_j = dv_j + p.T @ row.do
                    dk_j = dk_j + hbm.scale * (ds.T @ row.q)
                    if with_dq:
                        chip.write(hbm.dq, chip.read(hbm.dq, rows) + hbm.scale * (ds @ k_j), rows)
            outer.write(hbm.dk, dk_j, columns)
            outer.write(hbm.dv, dv_j, columns)


def _outer_rows(machine: Machine, hbm: Operands, *, with_dkv: bool) -> None:
    """One task for each row tile: dQ_i on chip; with `with_dkv` it also adds to every dK_j and dV_j."""
    for i, rows in enumerate(hbm.grid.rows):
        with machine.on_chip() as outer:
            row = read_rows(outer, hbm, rows)
            dq_i = outer.new(*row.q.shape)  # [B_r, d]
            for j in hbm.grid.keys_seen(i):
                columns = hbm.grid.columns[j]
                with machine.on_chip() as chip:
                    k_j, v_j = chip.read(hbm.k, columns), chip.read(hbm.v, columns)  # [B_c, d], [B_c, d_v]
                    p, ds = recompute(chip, hbm, i, j, row, k_j, v_j)
                    dq_i = dq_i + hbm.scale * (ds @ k_j)
                    if with_dkv:
                        dk_j, dv_j = chip.read(hbm.dk, columns), chip.read(hbm.dv, columns)
                        chip.write(hbm.dk, dk_j + hbm.scale * (ds.T @ row.q), columns)
                        chip.write(hbm.dv, dv_j + p.T @ row.do, columns)
            outer.write(hbm.dq, dq_i, rows)


def _zero(machine: Machine, x: Hbm, tiles: list[slice]) -> None:
    for rows in tiles:
        with machine.on_chip() as chip:
            chip.write(x, chip.new(rows.stop - rows.start, x.shape[1]), rows)


def _loop_keys(machine: Machine, hbm: Operands) -> None:
    _zero(machine, hbm.dq, hbm.grid.rows)
    _outer_keys(machine, hbm, with_dq=True)


def _loop_rows(machine: Machine, hbm: Operands) -> None:
    for x in (hbm.dk, hbm.dv):
        _zero(machine, x, hbm.grid.columns)
    _outer_rows(machine, hbm, with_dkv=True)


def _loop_both(machine: Machine, hbm: Operands) -> None:
    _outer_keys(machine, hbm, with_dq=False)
    _outer_rows(machine, hbm, with_dkv=False)


LOOPS: dict[str, Callable[[Machine, Operands], None]] = {
    "outer_keys": _loop_keys,
    "outer_rows": _loop_rows,
    "separate": _loop_both,
}


def backward(
    machine: Machine,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: Output,
    do: torch.Tensor,
    blocks: Blocks,
    *,
    loop: str = "outer_keys",
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
) -> Gradients:
    """Gradients of version 2, with S and P computed again tile by tile.

    On chip, of SRAM: outer_keys ``d (4 B_c + 3 B_r)``, outer_rows ``d (3 B_r + 4 B_c)``, separate ``d max(4 B_c +
    2 B_r, 3 B_r + 2 B_c)``; ``2 B_r B_c + 2 B_r`` of registers (P, dS, L_i, D_i). HBM in use: ``8 Nd + 2N``. The
    traffic: see the table above.

    Args:
        machine, blocks, softmax_scale, dropout: as in `flash_v2.forward`.
        qkv: q, k, v as in `flash_v2.forward`.
        out: what it returned.
        do: fp64 [N_q, d_v], gradient of the output.
        loop: "outer_keys" (the paper's), "outer_rows" or "separate".

    Raises:
        tilewise.errors.ArgumentError: another `loop`.
        tilewise.textbook.memory.SramError: the tiles do not fit.

    Source:
        FlashAttention-2 (Dao, 2023), Algorithm 2. Its listing loads O_i in the inner loop too (Nd T_c), which no line
        uses once D is known.

    Example:
        >>> from tilewise.textbook import flash_v2
        >>> q, k, v, do = torch.randn(4, 16, 4, dtype=torch.float64)
        >>> out = flash_v2.forward(Machine(), q, k, v, Blocks(8, 8))
        >>> machine = Machine()
        >>> dq, dk, dv = backward(machine, (q, k, v), out, do, Blocks(8, 8))
        >>> machine.counts.traffic == 7 * 16 * 4 + 16 + 2 * (4 * 16 * 4 + 2 * 16)
        True
    """
    if loop not in LOOPS:
        errors.fail(errors.ArgumentError, "loop", repr(loop), ", ".join(LOOPS), "name one of these")
    q, k, v = qkv
    check(q, k, v)
    hbm = Operands(
        q=machine.put("q", q),
        k=machine.put("k", k),
        v=machine.put("v", v),
        do=machine.put("do", do),
        lse=machine.put("lse", out.lse),
        delta=machine.new("delta", q.shape[0]),
        dq=machine.new("dq", *q.shape),
        dk=machine.new("dk", *k.shape),
        dv=machine.new("dv", *v.shape),
        grid=blocks.grid(q.shape[0], k.shape[0]),
        scale=scale_of(q, softmax_scale),
        dropout=dropout,
    )
    o = machine.put("o", out.o)
    for rows in hbm.grid.rows:
        with machine.on_chip() as chip:
            chip.write(hbm.delta, (chip.read(hbm.do, rows) * chip.read(o, rows)).sum(dim=1), rows)
    LOOPS[loop](machine, hbm)
    return Gradients(hbm.dq.result(), hbm.dk.result(), hbm.dv.result())
