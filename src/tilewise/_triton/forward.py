"""Forward: ``o = softmax(s) v`` and ``lse = log sum exp s``, one program per tile of rows, keys streamed past it.

Algorithm 1 of FlashAttention-2 (Dao, 2023). HBM: reads q once and k, v once per tile of rows, writes o and lse.

*Handles* every option of `Problem`. *Not here*: split keys (decode), fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import score
from ..kernels.call import prepare
from ..kernels.placement import on
from ..kernels.replay import Tape
from ..kernels.rows import rows_of
from ..kernels.score import LN2, LOG2E
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import device, launch


@triton.jit
def sums_of_rows(p, variant, shape):
    """Sums of weights, [M]; where there are registers [M, 8], of every eighth column, which are one thread's."""
    FEW: tl.constexpr = variant.fold or (variant.line and variant.cap is None)
    if FEW and variant.seed is None and shape.BLOCK_DV <= 128:
        sums = tl.sum(p.reshape(shape.BLOCK_M, shape.BLOCK_N // 8, 8), 1)
    else:
        sums = tl.sum(p, 1)
    return sums


@triton.jit
def beside_sums(row, sums):
    """A number for each row, to be combined with `sums_of_rows`."""
    if len(sums.shape) == 2:
        row = row[:, None]
    return row


@triton.jit
def weights(s, m_i, fallen, variant, MASKED: tl.constexpr):
    """Weights relative to each row's maximum so far, the factor on what earlier maxima gave, and the new maxima.

    Maxima are those of scores in base 2, or of what makes scores by `score.last_factor`. If `fallen` [M] is not None,
    it is still to be subtracted from the scores `s` of a row: instead, it is added to the maximum.
    """
    m_tile = tl.max(s, 1)  # [M]
    if fallen is None:
        m_before = m_i
    else:
        m_before = m_i + fallen
    m_new = tl.maximum(m_before, m_tile)
    m_safe = m_new
    if MASKED or not variant.scaled:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    if variant.scaled:
        # Scaling and subtracting the maximum are one instruction.
        factor = score.last_factor(variant) * LOG2E
        scale = score.exact_scale(m_safe, factor)
        p = tl.exp2(s * scale[:, None] - (m_safe * scale)[:, None])  # [M, N]
        alpha = tl.exp2((m_before - m_safe) * factor)
    else:
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m_before - m_safe)
    if fallen is None:
        m_i = m_new
    else:
        # Of `m_new`, earlier maxima would be rounded once more with each tile.
        m_i = tl.maximum(m_i, m_tile - fallen)
    return p, alpha, m_i


@triton.jit
def _attend(
    state, tiles, a, b, seq, span, variant, extra, shape, left, right, listed, lo, hi, MASKED: tl.constexpr
):  # fmt: skip
    """The loop body (see `device.walk`) on k and v: `tiles` are that of q, its first row, and pointers to k, v."""
    acc, l_i, m_i = state
    q_tile, m0, k_base, v_base = tiles
    rows = (m0 + tl.arange(0, shape.BLOCK_M))[:, None]
    offs_n = tl.arange(0, shape.BLOCK_N)
    LINE: tl.constexpr = variant.line and not MASKED
    if LINE:
        risen = score.risen(variant, seq, offs_n)
    for i in tl.range(lo, hi):
        n0 = device.key_tile(i, listed, span, left, variant, shape, MASKED) * shape.BLOCK_N
        keys = (n0 + offs_n)[None, :]
        first, last = span.first - n0, span.last - n0
        k_ptr = k_base + n0.to(tl.int64) * a.seq
        k_tile = device.load_rows(k_ptr, a.seq, offs_n, first, last, shape.HEAD_DIM, shape.BLOCK_D, MASKED)
        s = device.dot(q_tile, tl.trans(k_tile))  # [M, N]
        if LINE:
            s = score.uncapped(s, variant) + risen[None, :]
        elif variant.scaled:
            s = score.before_factor(s, variant, seq, rows, n0, offs_n[None, :])
        else:
            s = score.scores(s, variant, extra, seq, rows, keys).s
        if MASKED:
            seen = score.visible(variant, extra, seq, rows, keys, left, right)
            s = tl.where(seen, s, float("-inf"))
        if variant.bounded:
            p = score.bounded_weights(s * (variant.cap * LOG2E) - score.BOUNDED, variant, MASKED)  # [M, N]
        else:
            fallen = score.fallen(variant, seq, m0 + tl.arange(0, shape.BLOCK_M), n0) if LINE else None
            p, alpha, m_i = weights(s, m_i, fallen, variant, MASKED)
            l_i *= beside_sums(alpha, l_i)
            acc *= alpha[:, None]
        l_i += sums_of_rows(p, variant, shape)
        v_ptr = v_base + n0.to(tl.int64) * b.seq
        v_tile = device.load_rows(v_ptr, b.seq, offs_n, first, last, shape.HEAD_DIM_V, shape.BLOCK_DV, MASKED)
        # Many registers that are one thing or another make LLVM take a second more, and weights are fewer than `acc`.
        BY_WEIGHTS: tl.constexpr = shape.BLOCK_DV > 128
        if BY_WEIGHTS:
            p = device.without_dropped(p, variant, seq, m0, n0, v_tile.dtype, shape)
        if MASKED:
            # What is not finite in v reaches the rows that see it, and no others.
            strange_tile = device.any_strange(v_tile)
            if strange_tile:
                v_tile, strange = device.finite(v_tile)
                seen = score.visible(variant, extra, seq, rows, keys, left, right)
                poisoned = tl.max((seen & strange[None, :]).to(tl.int32), 1)
                if BY_WEIGHTS:
                    p = tl.where(poisoned[:, None] > 0, tl.full((1, 1), float("nan"), tl.float32).to(p.dtype), p)
                else:
                    acc = tl.where(poisoned[:, None] > 0, float("nan"), acc)
        if not BY_WEIGHTS:
            p = device.without_dropped(p, variant, seq, m0, n0, v_tile.dtype, shape)
        acc = device.dot_add(p, v_tile, acc)  # [M, Dv]
    return acc, l_i, m_i


@triton.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "stat_rows", "left", "right"], do_not_specialize_on_alignment=["sinks"]
)
def forward_kernel(q, k, v, out, lse, sinks, variant, extra, shape, seqlen_q, seqlen_k, stat_rows, left, right):
    """Programs: (batch, head, tile of rows), the longest rows of a causal mask first."""
    tiles_m = tl.cdiv(seqlen_q, shape.BLOCK_M)
    pid = tl.program_id(0)
    tile_m = tiles_m - 1 - pid % tiles_m
    h = (pid // tiles_m) % shape.HEADS
    b = pid // tiles_m // shape.HEADS
    seq = device.locate(variant, b, h, seqlen_q, seqlen_k, shape)
    m0 = tile_m * shape.BLOCK_M
    if m0 >= seq.len_q:
        return
    offs_m = tl.arange(0, shape.BLOCK_M)
    rows_left = seq.len_q - m0
    q_ptr = device.row_ptr(q, b, seq.q_start + m0, h)
    q_tile = device.load_rows(q_ptr, q.seq, offs_m, 0, rows_left, shape.HEAD_DIM, shape.BLOCK_D, True)
    k_ptr = device.row_ptr(k, b, seq.k_start, h // shape.GROUP)
    v_ptr = device.row_ptr(v, b, seq.k_start, h // shape.GROUP)
    m_i = tl.full([shape.BLOCK_M], float("-inf"), tl.float32)
    l_i = sums_of_rows(tl.zeros([shape.BLOCK_M, shape.BLOCK_N], tl.float32), variant, shape)
    if sinks is not None and not variant.bounded:
        # A sink is a key with value 0 that every row has already seen.
        sink = tl.load(sinks + h).to(tl.float32)
        m_i = tl.zeros_like(m_i) + (sink / score.last_factor(variant) if variant.scaled else sink * LOG2E)
        l_i += 0.125 if len(l_i.shape) == 2 else 1.0
    tiles = q_tile, m0, k_ptr, v_ptr
    state = tl.zeros([shape.BLOCK_M, shape.BLOCK_DV], tl.float32), l_i, m_i
    span = device.keys_of(seq, m0, left, right, shape)
    acc, l_i, m_i = device.walk(
        _attend, state, tiles, k, v, seq, span, variant, extra, shape, left, right, h, tile_m, left
    )  # fmt: skip
    if len(l_i.shape) == 2:
        l_i = tl.sum(l_i, 1)
    if variant.bounded:
        m_i = tl.where(l_i == 0.0, float("-inf"), score.BOUNDED)
        if sinks is not None:
            m_i, l_i, rest = score.joined(m_i, l_i, tl.load(sinks + h).to(tl.float32) * LOG2E)
            acc *= rest[:, None]
        m_i *= LN2
    else:
        m_i = m_i * (score.last_factor(variant) if variant.scaled else LN2)
    # Only a row that sees nothing has a sum of 0; comparing for equality lets a NaN through.
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    lse_tile = tl.where(empty, float("-inf"), m_i + tl.log(l_i))
    stat = device.stat_offset(seq, stat_rows, variant, shape) + m0
    tl.store(lse + stat + offs_m, lse_tile, mask=offs_m < rows_left)
    acc = acc / l_i[:, None]
    if variant.seed is not None:
        acc = acc * (65536.0 / variant.keep)
    out_ptr = device.row_ptr(out, b, seq.q_start + m0, h)
    device.store_rows(out_ptr, out.seq, offs_m, rows_left, acc, shape.HEAD_DIM_V, shape.BLOCK_DV)


def forward(
    problem: Problem, inputs: Inputs, tile: TileConfig, tape: Tape | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch: ``out`` in `problem.out_dtype` and ``lse`` fp32."""
    q, tape = inputs.q, tape or Tape()
    # Rows of packed tensors that belong to no member are written by nobody else.
    zero, nothing = (0.0, float("-inf")) if problem.packed else (None, None)
    out = tape.empty(problem.out_shape(q), problem.out_dtype, q.device, zero)
    lse = tape.empty(problem.lse_shape(q), torch.float32, q.device, nothing)
    sinks = None if inputs.sinks is None else inputs.sinks.contiguous()
    call = prepare(problem, inputs)
    programs = triton.cdiv(problem.seqlen_q, tile.block_m) * problem.heads_q * problem.batch
    if programs:
        arguments = (
            *(rows_of(x, problem.packed) for x in (q, inputs.k, inputs.v, out)), lse, sinks,
            *call.variant(tile), launch.shape(problem, tile), *call.sizes,
        )  # fmt: skip
        with on(q.device):
            tape.launch(forward_kernel, programs, arguments, **tile.launch_options)
    return out, lse
