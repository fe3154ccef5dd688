"""Backward: dq, dk, dv (and the gradients of slopes, sinks and bias) with recomputation of the scores.

Algorithm 2 of FlashAttention-2 (Dao, 2023), its one loop split in two so that no gradient needs atomics and every
result is repeatable bit for bit: `dq_kernel` streams keys past a tile of rows, `dkv_kernel` rows of all query heads of
a group past a tile of keys. ``delta = rowsum(do o) - dlse`` carries the gradient of the log-sum-exp with it.

    p = exp(s - lse)    ds = p (do v^T - delta)    dq = scale ds k    dk = scale ds^T q    dv = p^T do

HBM: reads q, do once and k, v once per tile of rows; then k, v once and q, do once per tile of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import score
from ..kernels.score import LOG2E
from . import device


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "stat_rows"], do_not_specialize_on_alignment=["dlse"])
def delta_kernel(out, do, lse, dlse, lse2, delta, variant, shape, seqlen_q, seqlen_k, stat_rows):
    """``delta``, and the lse in base 2, +inf for rows that see nothing: their probabilities become 0 without a test."""
    tiles_m = tl.cdiv(seqlen_q, shape.BLOCK_M)
    pid = tl.program_id(0)
    b = pid // tiles_m // shape.HEADS
    h = (pid // tiles_m) % shape.HEADS
    seq = device.locate(variant, b, h, seqlen_q, seqlen_k, shape)
    m0 = (pid % tiles_m) * shape.BLOCK_M
    offs_m = tl.arange(0, shape.BLOCK_M)
    rows_left = seq.len_q - m0
    stat = device.stat_offset(seq, stat_rows, variant, shape) + m0 + offs_m
    inside = offs_m < rows_left
    delta_tile = tl.zeros([shape.BLOCK_M], tl.float32)
    if do is not None:
        o_ptr = device.row_ptr(out, b, seq.q_start + m0, h)
        do_ptr = device.row_ptr(do, b, seq.q_start + m0, h)
        o_tile = device.load_rows(o_ptr, out.seq, offs_m, 0, rows_left, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
        do_tile = device.load_rows(do_ptr, do.seq, offs_m, 0, rows_left, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
        delta_tile += tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        delta_tile -= tl.load(dlse + stat, mask=inside, other=0.0)
    lse_tile = tl.load(lse + stat, mask=inside, other=0.0) * LOG2E
    tl.store(lse2 + stat, tl.where(lse_tile == float("-inf"), float("inf"), lse_tile), mask=inside)
    tl.store(delta + stat, delta_tile, mask=inside)


@triton.jit
def rescaled(lse2, delta, variant):
    """Statistics with which weights come out as dropout leaves those that it keeps, and ``p delta`` as it was."""
    if variant.seed is not None:
        share = tl.zeros((), tl.float32) + variant.keep / 65536.0
        lse2 += tl.log2(share)
        delta *= share
    return lse2, delta


@triton.jit
def score_tile_gradient(
    qk, dp, lse2, delta, rows, keys, m0, n0, seq, variant, extra, shape, left, right, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """From the products q·k and do·v: probabilities, the same after dropout, ``ds`` of the whole score, its chain.

    `rows`, `lse2`, `delta` are [M, 1] and `keys` [1, N], or [1, M] and [N, 1] when TRANSPOSED, where delta is
    subtracted from `dp` already unless there is dropout. With it, probabilities are multiplied by the factor on what is
    kept (see `rescaled`).
    """
    chain = score.scores(qk, variant, extra, seq, rows, keys, lse2)
    s = chain.s
    if MASKED:
        seen = score.visible(variant, extra, seq, rows, keys, left, right)
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s)
    dropped = p
    if variant.seed is not None:
        keep = device.keep_tile(variant, seq, m0, n0, shape)
        if TRANSPOSED:
            keep = tl.trans(keep)
        dropped = tl.where(keep, p, 0.0)
        ds = dropped * dp - p * delta
    else:
        if not TRANSPOSED:
            dp = dp - delta
        ds = p * dp
    if MASKED:
        # What is invisible may be NaN, and 0 · NaN is NaN.
        ds = tl.where(p == 0.0, 0.0, ds)
    return p, dropped, ds, chain


@triton.jit
def product_gradient(ds, chain, variant, extra, seq, rows, keys, MASKED: tl.constexpr):
    """The gradient of ``scale q·k`` from that of the score, in which it is linear."""
    if not variant.fold:
        gradient = score.scores_gradient(ds, chain, variant, extra, seq, rows, keys)
        if MASKED:
            gradient = tl.where(ds == 0.0, 0.0, gradient)
        ds = gradient
    return ds


@triton.jit
def _gather_dq(
    state, tiles, a, b, seq, span, variant, extra, shape, left, right, listed, lo, hi, MASKED: tl.constexpr
):  # fmt: skip
    """The loop body of dq (see `device.walk`); `state` is dq and sums per row for the gradient of the slope."""
    dq, ds_far, far, ds_sum, p_sum = state
    q_tile, do_tile, lse2, delta, m0, k_base, v_base = tiles
    rows = (m0 + tl.arange(0, shape.BLOCK_M))[:, None]
    offs_n = tl.arange(0, shape.BLOCK_N)
    for i in tl.range(lo, hi):
        n0 = device.key_tile(i, listed, span, left, variant, shape, MASKED) * shape.BLOCK_N
        keys = (n0 + offs_n)[None, :]
        first, last = span.first - n0, span.last - n0
        k_ptr = k_base + n0.to(tl.int64) * a.seq
        v_ptr = v_base + n0.to(tl.int64) * b.seq
        k_tile = device.load_rows(k_ptr, a.seq, offs_n, first, last, shape.HEAD_DIM, shape.BLOCK_D, MASKED)
        v_tile = device.load_rows(v_ptr, b.seq, offs_n, first, last, shape.HEAD_DIM_V, shape.BLOCK_DV, MASKED)
        qk = device.dot(q_tile, tl.trans(k_tile))  # [M, N]
        dp = device.dot(do_tile, tl.trans(v_tile))  # [M, N]
        p, _, ds, chain = score_tile_gradient(
            qk, dp, lse2[:, None], delta[:, None], rows, keys, m0, n0, seq, variant, extra, shape, left, right,
            MASKED, False,
        )  # fmt: skip
        if shape.WANT_SLOPES:
            away = score.distance(seq, rows, keys)
            ds_far += tl.sum(ds * away, 1)
            far += tl.sum(p * away, 1)
            ds_sum += tl.sum(ds, 1)
            p_sum += tl.sum(p, 1)
        ds = product_gradient(ds, chain, variant, extra, seq, rows, keys, MASKED)
        if MASKED:
            # A key that is not finite has already made ds NaN for the rows that see it.
            k_tile, _ = device.finite(k_tile)
        dq = device.dot_add(ds.to(k_tile.dtype), k_tile, dq)  # [M, D]
    return dq, ds_far, far, ds_sum, p_sum


@triton.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "stat_rows", "left", "right"], do_not_specialize_on_alignment=["dlse"]
)
def dq_kernel(
    q, k, v, do, dq, dslopes, dlse, lse2, delta, variant, extra, shape, seqlen_q, seqlen_k, stat_rows, left, right
):  # fmt: skip
    """Programs: (batch, head, tile of rows), as in the forward pass; `dslopes` is fp32 [B, Hq, tiles of rows]."""
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
    do_ptr = device.row_ptr(do, b, seq.q_start + m0, h)
    q_tile = device.load_rows(q_ptr, q.seq, offs_m, 0, rows_left, shape.HEAD_DIM, shape.BLOCK_D, True)
    do_tile = device.load_rows(do_ptr, do.seq, offs_m, 0, rows_left, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
    stat = device.stat_offset(seq, stat_rows, variant, shape) + m0 + offs_m
    lse2_rows = tl.load(lse2 + stat, mask=offs_m < rows_left, other=float("inf"))
    delta_rows = tl.load(delta + stat, mask=offs_m < rows_left, other=0.0)
    k_ptr = device.row_ptr(k, b, seq.k_start, h // shape.GROUP)
    v_ptr = device.row_ptr(v, b, seq.k_start, h // shape.GROUP)
    lse2_rows, delta_weighed = rescaled(lse2_rows, delta_rows, variant)
    tiles = q_tile, do_tile, lse2_rows, delta_weighed, m0, k_ptr, v_ptr
    none = tl.zeros([shape.BLOCK_M], tl.float32)
    state = tl.zeros([shape.BLOCK_M, shape.BLOCK_D], tl.float32), none, none, none, none
    span = device.keys_of(seq, m0, left, right, shape)
    dq_tile, ds_far, far, ds_sum, p_sum = device.walk(
        _gather_dq, state, tiles, k, v, seq, span, variant, extra, shape, left, right, h, tile_m, left
    )  # fmt: skip
    dq_ptr = device.row_ptr(dq, b, seq.q_start + m0, h)
    device.store_rows(dq_ptr, dq.seq, offs_m, rows_left, dq_tile * variant.scale, shape.HEAD_DIM, shape.BLOCK_D)
    if dslopes is not None:
        if variant.seed is not None:
            p_sum *= variant.keep / 65536.0
            far *= variant.keep / 65536.0
        # delta holds the rounding of o, and distances are large: here the sum over p·dp, which is not rounded, serves.
        excess = delta_rows * (1.0 - p_sum) - ds_sum
        if dlse is not None:
            excess += tl.load(dlse + stat, mask=offs_m < rows_left, other=0.0)
        dslope = tl.where(offs_m < rows_left, -(ds_far + excess * far), 0.0)
        tl.store(dslopes + (b.to(tl.int64) * shape.HEADS + h) * tiles_m + tile_m, tl.sum(dslope, 0))


@triton.jit
def load_statistics(lse2_ptr, delta_ptr, inside, MASKED: tl.constexpr):
    """Both statistics of rows in one load, each twice.

    Loads of fewer elements than threads Triton repeats in every thread for all the rows that it needs: 32 copies to
    shared memory a thread and tile instead of one.
    """
    ptrs = tl.where(tl.arange(0, 4)[None, :] % 2 == 0, lse2_ptr[:, None], delta_ptr[:, None])
    if MASKED:
        both = tl.load(ptrs, mask=inside[:, None], other=float("inf"))
    else:
        both = tl.load(ptrs)
    lse2, delta = tl.split(both.reshape(both.shape[0], 2, 2))
    lse2, _ = tl.split(lse2)
    delta, _ = tl.split(delta)
    if MASKED:
        delta = tl.where(inside, delta, 0.0)
    return lse2, delta


@triton.jit
def by_keys(tile, TRANSPOSED: tl.constexpr):
    """A score tile as [N, M]."""
    if not TRANSPOSED:
        tile = tl.trans(tile)
    return tile


@triton.jit
def _gather_dkv(
    state, tiles, a, b, seq, span, variant, extra, shape, left, right, listed, lo, hi, MASKED: tl.constexpr
):  # fmt: skip
    """The loop body of dk and dv over the rows of all heads (see `device.walk`).

    Score tiles are [N, M], so that they are operands where they lie. With dropout those of dk and dv are [M, N] if
    there are rows for all warps: they go through shared memory instead of the numbers, which are drawn where a row is.
    """
    TRANSPOSED: tl.constexpr = variant.seed is None or shape.BLOCK_M < 64 or not (shape.WANT_K and shape.WANT_V)
    dk, dv = state
    k_tile, v_tile, lse2, delta, n0, stat_rows, q_base, do_base = tiles
    offs_m = tl.arange(0, shape.BLOCK_M)
    offs_n = tl.arange(0, shape.BLOCK_N)
    end = hi
    if variant.plan is None:
        end = lo + (hi - lo) * shape.GROUP
    # One before the first tile of the first head.
    head, tile = n0 * 0 - 1, hi + n0 * 0
    if shape.GROUP == 1:
        head = n0 * 0
    for i in tl.range(lo, end, disable_licm=True):
        head, tile = device.row_tile(i, head, tile, lo, hi, listed, variant, shape)
        m0 = device.of_edges(tile, span, right, variant, shape, MASKED) * shape.BLOCK_M
        own = score.Sequence(seq.b, seq.h + head, seq.q_start, seq.k_start, seq.len_q, seq.len_k, seq.off)
        first, last = span.first - m0, span.last - m0
        q_ptr = q_base + m0.to(tl.int64) * a.seq + head.to(tl.int64) * a.head
        do_ptr = do_base + m0.to(tl.int64) * b.seq + head.to(tl.int64) * b.head
        q_tile = device.load_rows(
            q_ptr, a.seq, offs_m, first, last, shape.HEAD_DIM, shape.BLOCK_D, MASKED
        )  # fmt: skip
        do_tile = device.load_rows(
            do_ptr, b.seq, offs_m, first, last, shape.HEAD_DIM_V, shape.BLOCK_DV, MASKED
        )  # fmt: skip
        stat = head.to(tl.int64) * stat_rows + m0 + offs_m
        lse2_rows, delta_rows = load_statistics(lse2 + stat, delta + stat, m0 + offs_m < seq.len_q, MASKED)
        lse2_rows, delta_rows = rescaled(lse2_rows, delta_rows, variant)
        if TRANSPOSED:
            rows, keys = (m0 + offs_m)[None, :], (n0 + offs_n)[:, None]
            lse2_rows, delta_rows = lse2_rows[None, :], delta_rows[None, :]
            qk = device.dot(k_tile, tl.trans(q_tile))  # [N, M]
        else:
            rows, keys = (m0 + offs_m)[:, None], (n0 + offs_n)[None, :]
            lse2_rows, delta_rows = lse2_rows[:, None], delta_rows[:, None]
            qk = device.dot(q_tile, tl.trans(k_tile))  # [M, N]
        dp = qk
        if shape.WANT_K and variant.seed is None:
            # Starting from -delta frees its registers before the probabilities need some.
            dp = device.dot_add(v_tile, tl.trans(do_tile), tl.zeros_like(qk) - delta_rows)  # [N, M]
        elif shape.WANT_K and TRANSPOSED:
            dp = device.dot(v_tile, tl.trans(do_tile))  # [N, M]
        elif shape.WANT_K:
            dp = device.dot(do_tile, tl.trans(v_tile))  # [M, N]
        _, p, ds, chain = score_tile_gradient(
            qk, dp, lse2_rows, delta_rows, rows, keys, m0, n0, own, variant, extra, shape, left, right, MASKED,
            TRANSPOSED,
        )  # fmt: skip
        if shape.WANT_V:
            dv = device.dot_add(by_keys(p.to(do_tile.dtype), TRANSPOSED), do_tile, dv)  # [N, Dv]
        if shape.WANT_K:
            ds = product_gradient(ds, chain, variant, extra, own, rows, keys, MASKED)
            dk = device.dot_add(by_keys(ds.to(q_tile.dtype), TRANSPOSED), q_tile, dk)  # [N, D]
    return dk, dv


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "stat_rows", "left", "right"])
def dkv_kernel(q, k, v, do, dk, dv, lse2, delta, variant, extra, shape, seqlen_q, seqlen_k, stat_rows, left, right):
    """Programs: (batch, key/value head, tile of keys), which sum over the query heads of their group."""
    tiles_n = tl.cdiv(seqlen_k, shape.BLOCK_N)
    pid = tl.program_id(0)
    tile_n = pid % tiles_n
    head_kv = (pid // tiles_n) % (shape.HEADS // shape.GROUP)
    b = pid // tiles_n // (shape.HEADS // shape.GROUP)
    h = head_kv * shape.GROUP
    seq = device.locate(variant, b, h, seqlen_q, seqlen_k, shape)
    n0 = tile_n * shape.BLOCK_N
    if n0 >= seq.len_k:
        return
    offs_n = tl.arange(0, shape.BLOCK_N)
    keys_left = seq.len_k - n0
    k_ptr = device.row_ptr(k, b, seq.k_start + n0, head_kv)
    v_ptr = device.row_ptr(v, b, seq.k_start + n0, head_kv)
    k_tile = device.load_rows(k_ptr, k.seq, offs_n, 0, keys_left, shape.HEAD_DIM, shape.BLOCK_D, True)
    v_tile = device.load_rows(v_ptr, v.seq, offs_n, 0, keys_left, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
    q_ptr, do_ptr = device.row_ptr(q, b, seq.q_start, h), device.row_ptr(do, b, seq.q_start, h)
    stat = device.stat_offset(seq, stat_rows, variant, shape)
    tiles = k_tile, v_tile, lse2 + stat, delta + stat, n0, stat_rows, q_ptr, do_ptr
    dk_tile = tl.zeros([shape.BLOCK_N, shape.BLOCK_D], tl.float32)
    dv_tile = tl.zeros([shape.BLOCK_N, shape.BLOCK_DV], tl.float32)
    span = device.rows_of(seq, n0, left, right, shape)
    dk_tile, dv_tile = device.walk(
        _gather_dkv, (dk_tile, dv_tile), tiles, q, do, seq, span, variant, extra, shape, left, right, head_kv, tile_n,
        right,
    )  # fmt: skip
    if shape.WANT_K:
        dk_ptr = device.row_ptr(dk, b, seq.k_start + n0, head_kv)
        dk_tile *= variant.scale
        device.store_rows(dk_ptr, dk.seq, offs_n, keys_left, dk_tile, shape.HEAD_DIM, shape.BLOCK_D)
    if shape.WANT_V:
        dv_ptr = device.row_ptr(dv, b, seq.k_start + n0, head_kv)
        device.store_rows(dv_ptr, dv.seq, offs_n, keys_left, dv_tile, shape.HEAD_DIM_V, shape.BLOCK_DV)
