"""Backward on Hopper: dk, dv and dq in one pass over the score tiles, recomputed from q, k and lse.

Algorithm 2 of FlashAttention-2 (Dao, 2023) on FlashAttention-3's terms (Shah et al., 2024, Section 3.1): one warp loads
(TMA), two warpgroups compute, each 64 keys of the tile, one warp adds dq to memory. Scores are transposed, so that
Pᵀ and dSᵀ are operands from registers in the products for dv and dk; the one for dq takes dSᵀ from shared memory.

    Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dSᵀ = Pᵀ (dPᵀ - delta)    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

The exponentials run beside dPᵀ, and so does handing over dQ of the tile before; dSᵀ is made beside dV, and sent to
shared memory beside the next tile's Sᵀ and dK. dPᵀ starts from -delta. dq is added up in fp32 by TMA, tile by tile;
programs that share rows begin at different ones. Their order is not fixed unless there are `turns`.

HBM: reads k, v once and q, do, lse, delta once per tile of keys (mostly from L2); writes dk, dv; adds to dq once per
tile of keys.

*Handles* bf16 and fp16, head dims up to 128, every mask, packed sequences, softcap, score modifications, bias, ALiBi,
dropout. *Not here*: wider heads, a repeatable dq of packed sequences and of masks that are no band (`backward_apart`),
the gradients of bias and ALiBi slopes (`_triton.backward`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.score import Sequence
from . import unread
from .key_tiles import before, is_masked, keys_of, row_tile, span_of
from .pipeline import arrived, cta_barrier, make_ring, produce, release, tma_add, tma_load, tma_store
from .products import as_operand, packed
from .recompute import (
    draw,
    exponents,
    make_bits,
    product_gradient,
    score_gradient,
    tile_layout,
    unpacked,
    weights,
    without_dropped,
)
from .statistics import first_stat
from .turns import await_turn, pass_on, turn_of, wave_of
from .work import Band, Work, dealt, key_of, rounds_of

# Tiles of dq on their way to memory.
DQ_STAGES = gl.constexpr(2)


class Io(NamedTuple):
    """What is read and written beside the variant's tensors.

    Descriptors of q, k, v, do, of dq's fp32 sum, and of lse2 and delta as one line each; dk and dv, contiguous
    [B, Sk, Hkv, D]; how many rows a head has in a statistic; the scale of raw scores in base 2 and in dk; None, or the
    order in which dq is added up (`turns.Turns`).
    """

    q_desc: Any
    k_desc: Any
    v_desc: Any
    do_desc: Any
    dq_desc: Any
    lse_desc: Any
    delta_desc: Any
    dk: Any
    dv: Any
    stat_rows: Any
    qk_scale: Any
    softmax_scale: Any
    turns: Any


class Buffers(NamedTuple):
    """Shared memory: rings of q and do with their statistics, of k, v, and of dq on its way to memory; dSᵀ; with
    dropout, its bits.
    """

    q: Any
    do: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    bits: Any


@gluon.constexpr_function
def dq_layout(warps, m, n):
    """Registers of dq [m, n]: its rows are divided among warpgroups, or its columns if rows are too few."""
    if m >= 16 * warps:
        return tile_layout(warps, n)
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, n * 4 // warps, 16]
    )


@gluon.jit
def load(io, smem, band, work, variant, shape):
    """The producer: K and V of each tile, then the rows that see it, with their statistics."""
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, n0 = keys_of(t, band, work, shape)
            span = span_of(seq, n0, band, work, variant, shape, t, io.turns)
            b, pairs = seq.b, seq.b * (work.heads * work.group)
            if shape.PACKED:
                b, pairs = 0, 0
            produce(smem.k, io.k_desc, [b, seq.k_start + n0, seq.h, 0], n)
            produce(smem.v, io.v_desc, [b, seq.k_start + n0, seq.h, 0], n)
            head, m = before(span)
            for j in range(span.count):
                head, m = row_tile(j, head, m, span, variant)
                h, row = seq.h * work.group + head, seq.q_start + m * shape.BLOCK_M
                stat = stat_of(seq, (pairs + h) * io.stat_rows, m, shape)
                load_rows(io.q_desc, io.lse_desc, smem.q, smem.lse, [b, row, h, 0], stat, i)
                load_rows(io.do_desc, io.delta_desc, smem.do, smem.delta, [b, row, h, 0], stat, i)
                i += 1
        t = upcoming


@gluon.jit
def stat_of(seq, line, m, shape):
    """Where the statistics of the m-th tile of rows are in memory; `line` is where its head's begin."""
    first = line + m * shape.BLOCK_M
    if shape.PACKED:
        first += first_stat(seq.q_start, seq.b)
    return first


@gluon.jit
def load_rows(desc, line_desc, ring, lines, coord, stat, i):
    """Rows of q or do, and the statistic that goes with them, as use i of the ring."""
    stage = i % ring.STAGES
    mbarrier.wait(ring.empty.index(stage), ((i // ring.STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes + line_desc.block_type.nbytes)
    tma_load(line_desc, [stat], ring.full.index(stage), lines.index(stage))
    tma_load(desc, coord, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def add_dq(io, smem, band, work, variant, shape):
    """The warp that adds dq to memory; when it is told of a tile, the rows that the tile came from are free."""
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, n0 = keys_of(t, band, work, shape)
            span = span_of(seq, n0, band, work, variant, shape, t, io.turns)
            b = seq.b
            if shape.PACKED:
                b = 0
            first, end = 0, 0
            if io.turns is not None:
                first, end = wave_of(t, io.turns)
            head, m = before(span)
            for j in range(span.count):
                head, m = row_tile(j, head, m, span, variant)
                h, row = seq.h * work.group + head, seq.q_start + m * shape.BLOCK_M
                if io.turns is None:
                    add_one(io, smem, [b, h, row, 0], i, shape)
                else:
                    turn = turn_of(m, n0 // shape.BLOCK_N, first, end, seq, band, shape)
                    line = (b * work.heads * work.group + h) * gl.cdiv(seq.len_q, shape.BLOCK_M)
                    add_in_turn(io, smem, [b, h, row, 0], i, io.turns.added + line + m, turn, shape)
                i += 1
        t = upcoming
    tma.store_wait(0)


@gluon.jit
def add_one(io, smem, coord, i, shape):
    """Add dq of use i to memory, whoever else does."""
    arrived(smem.dq, i, shape.BLOCK_M, shape.BLOCK_D)
    tma_add(io.dq_desc, coord, smem.dq.tiles.index(i % smem.dq.STAGES))
    release(smem.q, i)
    release(smem.do, i)
    tma.store_wait(1)
    if i > 0:
        release(smem.dq, i - 1)


@gluon.jit
def add_in_turn(io, smem, coord, i, counter, turn, shape):
    """Add dq of use i to memory once `turn` others have; the first overwrites what is there."""
    arrived(smem.dq, i, shape.BLOCK_M, shape.BLOCK_D)
    # Neither loads nor, while there is room, products wait for others.
    release(smem.q, i)
    release(smem.do, i)
    await_turn(counter, turn)
    tile = smem.dq.tiles.index(i % smem.dq.STAGES)
    if turn == 0:
        tma_store(io.dq_desc, coord, tile)
    else:
        tma_add(io.dq_desc, coord, tile)
    pass_on(counter)
    release(smem.dq, i)


@gluon.jit
def hand_over(dq, smem, i, shape):
    """Put dq of tile i where TMA finds it."""
    slot = i % smem.dq.STAGES
    mbarrier.wait(smem.dq.empty.index(slot), ((i // smem.dq.STAGES) & 1) ^ 1)
    smem.dq.tiles.index(slot).reshape([shape.BLOCK_M, shape.BLOCK_D]).store(dq)


@gluon.jit
def announce(smem, i):
    """Tell the warp that adds it of dq of tile i."""
    fence_async_shared()
    mbarrier.arrive(smem.dq.full.index(i % smem.dq.STAGES), count=1)


@gluon.jit
def scores_of(smem, i, m, own, zero, shape):
    """``Sᵀ = K Qᵀ`` of the rows that are use i, asynchronously."""
    q_smem = arrived(smem.q, i, shape.BLOCK_M, shape.BLOCK_D)
    if shape.PACKED:
        unread.cut(q_smem, own.len_q - m * shape.BLOCK_M, shape.WARPS)
    k_smem = smem.k.tiles.index(0).reshape([shape.BLOCK_N, shape.BLOCK_D])
    return warpgroup_mma(k_smem, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def gather(i, seq, n0, span, io, smem, band, work, variant, extra, shape):
    """dk and dv of a tile of keys, and what it adds to dq, handed over row tile by row tile; and the next use."""
    SCORES: gl.constexpr = tile_layout(shape.WARPS, shape.BLOCK_M)
    KEYS: gl.constexpr = tile_layout(shape.WARPS, shape.BLOCK_D)
    VALUES: gl.constexpr = tile_layout(shape.WARPS, shape.BLOCK_DV)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    TO_DK: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KEYS, k_width=2)
    dtype: gl.constexpr = io.q_desc.dtype
    no_scores = gl.zeros([shape.BLOCK_N, shape.BLOCK_M], gl.float32, SCORES)
    no_dq = gl.zeros([shape.BLOCK_M, shape.BLOCK_D], gl.float32, dq_layout(shape.WARPS, shape.BLOCK_M, shape.BLOCK_D))
    dk = gl.zeros([shape.BLOCK_N, shape.BLOCK_D], gl.float32, KEYS)
    dv = gl.zeros([shape.BLOCK_N, shape.BLOCK_DV], gl.float32, VALUES)
    k_smem = smem.k.tiles.index(0).reshape([shape.BLOCK_N, shape.BLOCK_D])
    v_smem = smem.v.tiles.index(0).reshape([shape.BLOCK_N, shape.BLOCK_DV])
    keys = (n0 + gl.arange(0, shape.BLOCK_N, gl.SliceLayout(1, SCORES)))[:, None]
    s = no_scores
    heads, key = work.heads * work.group, key_of(variant)
    head, m = before(span)
    if span.count > 0:
        head, m = row_tile(0, head, m, span, variant)
        s = scores_of(smem, i, m, seq, no_scores, shape)
        if variant.seed is not None:
            draw(variant, key, seq.b, seq.h * work.group + head, m * shape.BLOCK_M, n0, heads, smem.bits, shape)
        s = warpgroup_mma_wait(0, deps=(s,))
    for j in range(span.count):
        own = Sequence(seq.b, seq.h * work.group + head, seq.q_start, seq.k_start, seq.len_q, seq.len_k, seq.off)
        masked = is_masked(j, m, span, variant)
        m0 = m * shape.BLOCK_M
        stage = i % smem.q.STAGES
        q_smem = smem.q.tiles.index(stage).reshape([shape.BLOCK_M, shape.BLOCK_D])
        do_smem = arrived(smem.do, i, shape.BLOCK_M, shape.BLOCK_DV)
        if shape.PACKED:
            unread.cut(do_smem, seq.len_q - m0, shape.WARPS)
        delta_smem = smem.delta.index(i % smem.do.STAGES)
        if variant.seed is None:
            begin = no_scores - delta_smem.load(ROW)[None, :]
            dp = warpgroup_mma(v_smem, do_smem.permute((1, 0)), begin, is_async=True)
        else:
            dp = warpgroup_mma(v_smem, do_smem.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if j > 0:
            announce(smem, i - 1)
        rows = (m0 + gl.arange(0, shape.BLOCK_M, ROW))[None, :]
        lse2 = smem.lse.index(stage).load(ROW)[None, :]
        s, chain = exponents(s, lse2, own, rows, keys, m0, io, variant, extra, shape, False)
        p = weights(s, own, rows, keys, masked, band, variant, extra)
        p32 = packed(p, dtype)
        left = p32
        if variant.seed is not None:
            left = without_dropped(p32, smem.bits, shape)
        operand = as_operand(left, dtype, VALUES)
        dv = warpgroup_mma(operand, do_smem, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        delta = no_scores
        if variant.seed is not None:
            delta = delta_smem.load(ROW)[None, :]
        p, left = unpacked(p32, SCORES, dtype), unpacked(left, SCORES, dtype)
        ds = score_gradient(p, left, dp, delta, masked, variant, shape)
        ds = product_gradient(ds, chain, own, rows, keys, masked, variant, extra, shape)
        ds16 = ds.to(dtype)
        smem.ds.store(ds16)
        dv, operand = warpgroup_mma_wait(0, deps=(dv, operand))
        # After the last tile these are scores for nobody, of the same rows once more.
        more = gl.minimum(j + 1, span.count - 1)
        if j + 1 < span.count:
            head, m = row_tile(more, head, m, span, variant)
        s = scores_of(smem, i + more - j, m, seq, no_scores, shape)
        operand = gl.convert_layout(ds16, TO_DK, assert_trivial=True)
        dk = warpgroup_mma(operand, q_smem, dk, is_async=True)
        fence_async_shared()
        cta_barrier()
        dq = warpgroup_mma(smem.ds.permute((1, 0)), k_smem, no_dq, use_acc=False, is_async=True)
        if variant.seed is not None:
            # While three products are under way, and few registers hold anything: the compiler moves nothing before a
            # wait, so this waits for rows that are there.
            arrived(smem.q, i + more - j, shape.BLOCK_M, shape.BLOCK_D)
            draw(variant, key, seq.b, seq.h * work.group + head, m * shape.BLOCK_M, n0, heads, smem.bits, shape)
        s, dk, dq, operand = warpgroup_mma_wait(0, deps=(s, dk, dq, operand))
        hand_over(dq, smem, i, shape)
        i += 1
    if span.count > 0:
        announce(smem, i - 1)
    return dk, dv, i


@gluon.jit
def compute(io, smem, band, work, variant, extra, shape):
    """The consumers, together."""
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, n0 = keys_of(t, band, work, shape)
            span = span_of(seq, n0, band, work, variant, shape, t, io.turns)
            k_smem = arrived(smem.k, n, shape.BLOCK_N, shape.BLOCK_D)
            arrived(smem.v, n, shape.BLOCK_N, shape.BLOCK_DV)
            if shape.CLEAN:
                unread.clean(k_smem, shape.WARPS)
            dk, dv, i = gather(i, seq, n0, span, io, smem, band, work, variant, extra, shape)
            release(smem.k, n)
            release(smem.v, n)
            if variant.seed is not None:
                dv *= 65536.0 / variant.keep
            store(dk * io.softmax_scale, io.dk, shape.HEAD_DIM, seq, n0, work, shape)
            store(dv, io.dv, shape.HEAD_DIM_V, seq, n0, work, shape)
        t = upcoming


@gluon.jit
def store(grad, ptr, HEAD_DIM: gl.constexpr, seq, n0, work, shape):
    """Write the keys that belong to the sequence, straight from registers."""
    LAYOUT: gl.constexpr = grad.type.layout
    keys = n0 + gl.arange(0, grad.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, grad.shape[1], gl.SliceLayout(0, LAYOUT))
    start = seq.k_start
    if not shape.PACKED:
        start = seq.b.to(gl.int64) * seq.len_k
    first = ((start + keys).to(gl.int64) * work.heads + seq.h) * HEAD_DIM
    inside = (keys < seq.len_k)[:, None] & (columns < HEAD_DIM)[None, :]
    gl.store(ptr + first[:, None] + columns[None, :], grad.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def roles(io, band, work, variant, extra, shape, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr):
    """Buffers and barriers, and who does what with them."""
    dtype: gl.constexpr = io.q_desc.dtype
    LINE: gl.constexpr = io.lse_desc.layout
    k, v = make_ring(io.k_desc, 1, 1), make_ring(io.v_desc, 1, 1)
    # Rows leave the ring of q a tile late, when dq of theirs is told of, so it needs one stage more than two.
    q, do = make_ring(io.q_desc, Q_STAGES, 1), make_ring(io.do_desc, DO_STAGES, 1)
    lse = gl.allocate_shared_memory(gl.float32, [Q_STAGES, shape.BLOCK_M], LINE)
    delta = gl.allocate_shared_memory(gl.float32, [DO_STAGES, shape.BLOCK_M], LINE)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([shape.BLOCK_N, shape.BLOCK_M], dtype)
    ds = gl.allocate_shared_memory(dtype, [shape.BLOCK_N, shape.BLOCK_M], DS)
    dq = make_ring(io.dq_desc, DQ_STAGES, 1)
    bits = q.full
    if variant.seed is not None:
        bits = make_bits(shape)
    fence_async_shared()
    smem = Buffers(q, do, lse, delta, k, v, ds, dq, bits)
    gl.warp_specialize(
        [
            (compute, (io, smem, band, work, variant, extra, shape)),
            (load, (io, smem, band, work, variant, shape)),
            (add_dq, (io, smem, band, work, variant, shape)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit(
    do_not_specialize=["rounds", "stat_rows", "tiles_n", "heads", "group", "off", "left", "right", "len_q", "len_k"]
)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, dk, dv, table, turns, qk_scale, softmax_scale,
    rounds, stat_rows, tiles_n, heads, group, off, left, right, len_q, len_k, variant, extra, shape,
    Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
):  # fmt: skip
    """Programs: as many as run at once; `table` deals the tiles of keys."""
    band = Band(off, left, right, len_q, len_k)
    work = Work(table, rounds, tiles_n, heads, group)
    io = Io(
        q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, dk, dv, stat_rows, qk_scale, softmax_scale,
        turns,
    )  # fmt: skip
    roles(io, band, work, variant, extra, shape, Q_STAGES, DO_STAGES)
