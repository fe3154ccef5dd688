"""The gradient of a bias tensor: ``dbias = sum of ds`` over every dimension in which the bias broadcasts.

One program owns one tile of the bias and visits all score tiles that map to it, in a fixed order: repeatable bit for
bit, and nothing of size Sq × Sk is stored that the bias itself does not have.

HBM: reads q, k, v, do once per score tile. *Not here*: packed sequences, whose members have no common bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels.call import Call, grid
from ..kernels.replay import Tape
from ..kernels.rows import Rows
from ..tiles import TileConfig
from . import device, launch
from .backward import rescaled, score_tile_gradient


@triton.jit
def _score_tile(acc, operands, stats, m0, n0, b, h, variant, extra, shape, sizes, left, right):
    """Add ``ds`` of one score tile, if the band shows any of it."""
    q, k, v, do = operands
    lse2, delta = stats
    seqlen_q, seqlen_k, stat_rows = sizes
    seq = device.locate(variant, b, h, seqlen_q, seqlen_k, shape)
    span = device.keys_of(seq, m0, left, right, shape)
    offs_m = tl.arange(0, shape.BLOCK_M)
    offs_n = tl.arange(0, shape.BLOCK_N)
    if (n0 + shape.BLOCK_N > span.first) & (n0 < span.last):
        rows_left, first, last = seq.len_q - m0, span.first - n0, span.last - n0
        start_q, start_k = seq.q_start + m0, seq.k_start + n0
        q_ptr, do_ptr = device.row_ptr(q, b, start_q, h), device.row_ptr(do, b, start_q, h)
        k_ptr = device.row_ptr(k, b, start_k, h // shape.GROUP)
        v_ptr = device.row_ptr(v, b, start_k, h // shape.GROUP)
        q_tile = device.load_rows(q_ptr, q.seq, offs_m, 0, rows_left, shape.HEAD_DIM, shape.BLOCK_D, True)
        do_tile = device.load_rows(do_ptr, do.seq, offs_m, 0, rows_left, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
        k_tile = device.load_rows(k_ptr, k.seq, offs_n, first, last, shape.HEAD_DIM, shape.BLOCK_D, True)
        v_tile = device.load_rows(v_ptr, v.seq, offs_n, first, last, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
        stat = device.stat_offset(seq, stat_rows, variant, shape) + m0 + offs_m
        lse2_rows = tl.load(lse2 + stat, mask=offs_m < rows_left, other=float("inf"))
        delta_rows = tl.load(delta + stat, mask=offs_m < rows_left, other=0.0)
        lse2_rows, delta_rows = rescaled(lse2_rows, delta_rows, variant)
        qk = device.dot(q_tile, tl.trans(k_tile))  # [M, N]
        dp = device.dot(do_tile, tl.trans(v_tile))  # [M, N]
        rows, keys = (m0 + offs_m)[:, None], (n0 + offs_n)[None, :]
        _, _, ds, _ = score_tile_gradient(
            qk, dp, lse2_rows[:, None], delta_rows[:, None], rows, keys, m0, n0,
            seq, variant, extra, shape, left, right, True, False
        )  # fmt: skip
        acc += ds
    return acc


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "stat_rows", "left", "right"])
def dbias_kernel(
    q, k, v, do, dbias, lse2, delta, variant, extra, shape, batch, seqlen_q, seqlen_k, stat_rows, left, right,
    OWN_B: tl.constexpr, OWN_H: tl.constexpr, OWN_Q: tl.constexpr, OWN_K: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of the bias; OWN_*: the bias has this dimension, so a program owns its part and sums nothing."""
    tiles_m = tl.cdiv(seqlen_q, shape.BLOCK_M)
    tiles_n = tl.cdiv(seqlen_k, shape.BLOCK_N)
    pid = tl.program_id(0)
    b_lo, h_lo, m_lo, n_lo = 0, 0, 0, 0
    b_hi, h_hi, m_hi, n_hi = batch, shape.HEADS, tiles_m, tiles_n
    if OWN_K:
        n_lo = pid % tiles_n
        n_hi = n_lo + 1
        pid = pid // tiles_n
    if OWN_Q:
        m_lo = pid % tiles_m
        m_hi = m_lo + 1
        pid = pid // tiles_m
    if OWN_H:
        h_lo = pid % shape.HEADS
        h_hi = h_lo + 1
        pid = pid // shape.HEADS
    if OWN_B:
        b_lo = pid
        b_hi = b_lo + 1
    acc = tl.zeros([shape.BLOCK_M, shape.BLOCK_N], tl.float32)
    # Adding a tensor makes tensors of loop indices, which may be constants.
    zero = tl.zeros((), tl.int32)
    operands, stats, sizes = (q, k, v, do), (lse2, delta), (seqlen_q, seqlen_k, stat_rows)
    for b in tl.range(b_lo, b_hi):
        for h in tl.range(h_lo, h_hi):
            for m in tl.range(m_lo, m_hi):
                for n in tl.range(n_lo, n_hi):
                    m0 = zero + m * shape.BLOCK_M
                    n0 = zero + n * shape.BLOCK_N
                    acc = _score_tile(
                        acc, operands, stats, m0, n0, zero + b, zero + h, variant, extra, shape, sizes, left, right
                    )  # fmt: skip
    rows = m_lo * shape.BLOCK_M + tl.arange(0, shape.BLOCK_M)[:, None]
    keys = n_lo * shape.BLOCK_N + tl.arange(0, shape.BLOCK_N)[None, :]
    inside_q, inside_k = rows < seqlen_q, keys < seqlen_k
    if not OWN_Q:
        acc = tl.sum(acc, 0)[None, :]
        rows = tl.zeros((1, 1), tl.int32)
        inside_q = rows == 0
    if not OWN_K:
        acc = tl.sum(acc, 1)[:, None]
        keys = tl.zeros((1, 1), tl.int32)
        inside_k = keys == 0
    base = dbias.ptr + (zero + b_lo).to(tl.int64) * dbias.batch + (zero + h_lo).to(tl.int64) * dbias.head
    ptrs = base + rows.to(tl.int64) * dbias.q + keys.to(tl.int64) * dbias.k
    tl.store(ptrs, acc.to(dbias.ptr.dtype.element_ty), mask=inside_q & inside_k)


def dbias(
    bias: torch.Tensor, call: Call, operands: tuple[Rows, ...], stats: tuple[torch.Tensor, ...],
    tile: TileConfig,
) -> torch.Tensor:  # fmt: skip
    """The gradient of `bias`, in its shape and dtype.

    Args:
        bias: of the call.
        call: its records.
        operands: q, k, v, do.
        stats: the lse in base 2 and delta.
        tile: of the score tiles.
    """
    problem = call.problem
    grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    own = [size > 1 for size in bias[(None,) * (4 - bias.ndim)].shape]
    counts = (full[0], full[1], triton.cdiv(full[2], tile.block_m), triton.cdiv(full[3], tile.block_n))
    programs = 1
    for mine, count in zip(own, counts, strict=True):
        programs *= count if mine else 1
    if programs and grad.numel():
        shape = launch.shape(call.problem, tile)
        variant = call.variant(tile, planned=False)
        arguments = (*operands, grid(grad), *stats, *variant, shape, problem.batch, *call.sizes, *own)
        Tape().launch(dbias_kernel, programs, arguments, **tile.launch_options)
    return grad
