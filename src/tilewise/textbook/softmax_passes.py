"""Softmax of rows that do not fit on chip: in three passes over HBM, in two, and, fused with what follows, in one.

For scores X [R, N], read from HBM in blocks of B columns:

=========== ================================== ========== =======
            passes                             reads      writes
=========== ================================== ========== =======
three_pass  max; sum; normalise                3 R N      R N
two_pass    max and sum together; normalise    2 R N      R N
one_pass    softmax(X) V without softmax(X)    R N + N d  R d
=========== ================================== ========== =======

The exponentials: 2 R N in three passes; 2 R N + R N/B in two (each block rescales the sum, one factor for each row);
R N + R N/B in one. The softmax itself cannot be had in one pass, since its first element depends on the last score; a
product with it can.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithms 2 and 3; FlashAttention
(Dao et al., 2022), section 3.1.
"""

from __future__ import annotations

import torch

from ..softmax import EMPTY, finite_max
from .memory import Hbm, Machine
from .tiling import cut


def three_pass(machine: Machine, x: torch.Tensor, *, block: int) -> torch.Tensor:
    """Safe softmax of the rows: ``exp(x - max x) / sum exp(x - max x)``, each step a pass.

    Reads 3 R N, writes R N elements; 2 R N exponentials; B + 2 elements on chip for each row.

    Args:
        machine: counts; its SRAM must hold R blocks of `block` columns.
        x: fp64 [R, N] scores, each row with a finite one.
        block: B, columns of a tile.

    Returns:
        fp64 [R, N]; every row sums to 1.

    Raises:
        tilewise.textbook.memory.SramError: a tile does not fit.

    Source:
        Milakov and Gimelshein (2018), Algorithm 2.

    Example:
        >>> machine = Machine()
        >>> x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
        >>> bool(torch.allclose(three_pass(machine, x, block=2), x.softmax(dim=1))), machine.counts.reads["x"]
        (True, 9)
    """
    rows, length = x.shape
    x_hbm, y_hbm = machine.put("x", x), machine.new("y", rows, length)
    with machine.on_chip() as chip:
        m_i, l_i = chip.new(rows, fill=EMPTY), chip.new(rows)
        for columns in cut(length, block):
            with machine.on_chip() as tile:
                m_i = torch.maximum(m_i, tile.read(x_hbm, slice(None), columns).amax(dim=1))
        for columns in cut(length, block):
            with machine.on_chip() as tile:
                p = torch.exp(tile.read(x_hbm, slice(None), columns) - m_i[:, None])
                l_i = l_i + p.sum(dim=1)
        _normalise(machine, x_hbm, y_hbm, m_i, l_i, block)
    return y_hbm.result()


def two_pass(machine: Machine, x: torch.Tensor, *, block: int) -> torch.Tensor:
    """Online softmax of the rows: maximum and sum in one pass, the sum rescaled whenever the maximum grows.

    Reads 2 R N, writes R N elements; 2 R N + R ceil(N/B) exponentials.

    Args and errors as `three_pass`.

    Source:
        Milakov and Gimelshein (2018), Algorithm 3.

    Example:
        >>> machine = Machine()
        >>> x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
        >>> bool(torch.allclose(two_pass(machine, x, block=2), x.softmax(dim=1))), machine.counts.reads["x"]
        (True, 6)
    """
    rows, length = x.shape
    x_hbm, y_hbm = machine.put("x", x), machine.new("y", rows, length)
    with machine.on_chip() as chip:
        m_i, l_i = chip.new(rows, fill=EMPTY), chip.new(rows)
        for columns in cut(length, block):
            with machine.on_chip() as tile:
                x_j = tile.read(x_hbm, slice(None), columns)  # [R, B]
                m_new = torch.maximum(m_i, x_j.amax(dim=1))
                shift = finite_max(m_new)
                l_i = torch.exp(m_i - shift) * l_i + torch.exp(x_j - shift[:, None]).sum(dim=1)
                m_i = m_new
        _normalise(machine, x_hbm, y_hbm, m_i, l_i, block)
    return y_hbm.result()


def _normalise(machine: Machine, x: Hbm, y: Hbm, m_i: torch.Tensor, l_i: torch.Tensor, block: int) -> None:
    """The last pass: ``y = exp(x - m_i) / l_i``."""
    for columns in cut(x.shape[1], block):
        with machine.on_chip() as tile:
            y_j = torch.exp(tile.read(x, slice(None), columns) - m_i[:, None]) / l_i[:, None]
            tile.write(y, y_j, slice(None), columns)


def one_pass(machine: Machine, x: torch.Tensor, v: torch.Tensor, *, block: int) -> torch.Tensor:
    """``softmax(x) @ v`` in one pass: what the softmax is for is accumulated and rescaled like its sum.

    Reads R N + N d, writes R d elements; R N + R ceil(N/B) exponentials; R (2 + d) + B (R + d) elements on chip.

    Args:
        machine, x, block: as `three_pass`.
        v: fp64 [N, d] values.

    Returns:
        fp64 [R, d].

    Raises:
        tilewise.textbook.memory.SramError: a tile does not fit.

    Source:
        FlashAttention (Dao et al., 2022), section 3.1, after Milakov and Gimelshein's Algorithm 3.

    Example:
        >>> machine = Machine()
        >>> x, v = torch.zeros(1, 4, dtype=torch.float64), torch.arange(4, dtype=torch.float64)[:, None]
        >>> one_pass(machine, x, v, block=2), machine.counts.reads["x"]
        (tensor([[1.5000]], dtype=torch.float64), 4)
    """
    rows, length = x.shape
    x_hbm, v_hbm, o_hbm = machine.put("x", x), machine.put("v", v), machine.new("o", rows, v.shape[1])
    with machine.on_chip() as chip:
        m_i, l_i = chip.new(rows, fill=EMPTY), chip.new(rows)
        acc = chip.new(rows, v.shape[1])
        for columns in cut(length, block):
            with machine.on_chip() as tile:
                x_j, v_j = tile.read(x_hbm, slice(None), columns), tile.read(v_hbm, columns)
                m_new = torch.maximum(m_i, x_j.amax(dim=1))
                shift = finite_max(m_new)
                alpha, p = torch.exp(m_i - shift), torch.exp(x_j - shift[:, None])
                l_i = alpha * l_i + p.sum(dim=1)
                acc = alpha[:, None] * acc + p @ v_j
                m_i = m_new
        chip.write(o_hbm, acc / l_i[:, None])
    return o_hbm.result()
