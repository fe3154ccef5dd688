"""Backward on Hopper: dk, dv and dq in one pass over the score tiles, recomputed from q, k and lse.

Algorithm 2 of FlashAttention-2 (Dao, 2023) on FlashAttention-3's terms (Shah et al., 2024, Section 3.1): one warp loads
(TMA), two warpgroups compute, each 64 keys of the tile, one warp adds dq to memory; where some row does not see some
key, two more look through what is loaded (`arrivals`). Scores are transposed, so that Pᵀ and dSᵀ are operands from
registers in the products for dv and dk; the one for dq takes dSᵀ from shared memory.

    Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dSᵀ = Pᵀ (dPᵀ - delta)    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

The warpgroups alternate: one computes dSᵀ while the other multiplies, which holds its warps up where operands are in
registers. Each has five products a tile in one go: dV and dK of the tile whose dSᵀ it has just made, its half of dQ,
and Sᵀ and dPᵀ of the next. dQ takes dSᵀ of both: the second one's half is of the same tile, the first one's of the tile
before. Whose turn it is says all that they must know of each other (`gather`).

One tile of keys passes into the next: K is there ahead, V comes while the last rows are at work, and what follows their
products are those of the next tile's first rows.

dq is added up in fp32 by TMA, half a tile at a time; programs that share rows begin at different ones. Their order is
not fixed unless there are `turns`. dk and dv leave by TMA, through the memory of K and dSᵀ.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.score import Sequence
from . import scores
from .arrivals import load, tidy
from .epilogue import halves
from .key_tiles import before, is_masked, keys_of, met, row_tile
from .pipeline import (
    arrived,
    cta_barrier,
    make_ring,
    make_turns,
    my_turn,
    next_turn,
    once_ready,
    release,
    specialize,
    tma_store,
)
from .products import as_operand, numbers_of, packed
from .query_gradient import HALF, STAGES, WARPS, add_dq, announce, put
from .recompute import (
    capped,
    draw,
    exponents,
    make_bits,
    of_weights,
    product_gradient,
    score_gradient,
    tile_layout,
    unpacked,
    weights,
    weights_and_rest,
    without_dropped,
)
from .unread import LOOKERS
from .work import Band, Work, dealt, key_of, line_of, rounds_of

# Warpgroups that compute.
CONSUMERS = gl.constexpr(2)


class Io(NamedTuple):
    """What is read and written beside the variant's tensors.

    Descriptors of q, k, v, do, of dq's fp32 sum, and of lse2 and delta as one line each; dk and dv, contiguous
    [B, Sk, Hkv, D], and their descriptors, None where they are not needed; how many rows a head has in a statistic; the
    scale of raw scores in base 2 and in dk; None, or the order in which dq is added up (`turns.Turns`).
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
    dk_desc: Any
    dv_desc: Any
    stat_rows: Any
    qk_scale: Any
    softmax_scale: Any
    turns: Any


class Buffers(NamedTuple):
    """Shared memory: rings of q, of do and both statistics, of k, v, and of halves of dq on their way to memory; dSᵀ
    of two tiles; the barriers by which warpgroups alternate; with dropout, its bits for each warpgroup.
    """

    q: Any
    do: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    alternation: Any
    bits: Any


@gluon.jit
def ds_of(ds, i, shape):
    """dSᵀ of tile i."""
    return ds.index(i & 1).reshape([shape.BLOCK_N, shape.BLOCK_M])


@gluon.jit
def own_ds(ds, i, shape, W: gl.constexpr):
    """dSᵀ of tile i and the keys of warpgroup W."""
    return ds_of(ds, i, shape).slice(HALF * W, HALF, dim=0)


@gluon.jit
def query_gradient(smem, i, k_smem, no_dq, shape, W: gl.constexpr):
    """A half of ``dQ = dS K`` of tile i, asynchronously."""
    ds_smem = ds_of(smem.ds, i, shape)
    if shape.BLOCK_M == 2 * HALF:
        ds_smem = ds_smem.slice(HALF * W, HALF, dim=1)
    else:
        k_smem = k_smem.slice(HALF * W, HALF, dim=1)
    return warpgroup_mma(ds_smem.permute((1, 0)), k_smem, no_dq, use_acc=False, is_async=True)


@gluon.jit
def keys_half(ring, n, W: gl.constexpr):
    """The keys, or values, of warpgroup W in use n of their ring."""
    COLUMNS: gl.constexpr = ring.tiles.shape[4]
    tile_smem = ring.tiles.index(n % ring.STAGES).reshape([CONSUMERS * HALF, COLUMNS])
    return tile_smem.slice(HALF * W, HALF, dim=0)


@gluon.jit
def times_rows(keys, n, rows, i, zero, shape, W: gl.constexpr):
    """``Sᵀ = K Qᵀ``, or ``dPᵀ = V dOᵀ``, of uses n and i of their rings, asynchronously."""
    rows_smem = arrived(rows, i, shape.BLOCK_M, rows.tiles.shape[4])
    return warpgroup_mma(keys_half(keys, n, W), rows_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def seen_by_rows(t, band, work, variant, shape, turns):
    """Whether there is a tile of keys number t, and any rows see it: 1 or 0."""
    _, _, span = met(gl.maximum(t, 0), band, work, variant, shape, turns)
    return ((t >= 0) & (span.count > 0)).to(gl.int32)


@gluon.jit
def kept(p32, variant, key, own, m0, n0, heads, smem, shape, W: gl.constexpr):
    """What dropout leaves of packed weights [N, M / 2] of 64 keys."""
    draw(variant, key, own.b, own.h, m0, n0, heads, smem.bits.index(W), shape)
    return without_dropped(p32, smem.bits.index(W), shape)


@gluon.jit
def gather(
    i, n, phase, follows, state, seq, n0, span, io, smem, band, work, variant, extra, shape, W: gl.constexpr
):  # fmt: skip
    """dk and dv of the 64 keys from n0, and a half of all that the tile adds to dq, handed over row tile by row tile;
    and the next use, phase, and `state`: products of the first rows, and whether they are there.

    Warpgroups take a turn in every phase: one for products of the first rows, if nobody has seen to them, one for each
    tile of rows, one after the last. Who passes it on has stored dSᵀ of its keys, and has read what it needs of the
    other's before: of tile i - 1, and the second one, W 1, of tile i too. That is why dSᵀ of two tiles is kept, and
    nothing else is waited for.

    Whether another tile of keys `follows` whose first rows' products are this one's last turn too.
    """
    SCORES: gl.constexpr = tile_layout(WARPS, shape.BLOCK_M)
    KEYS: gl.constexpr = tile_layout(WARPS, shape.BLOCK_D)
    VALUES: gl.constexpr = tile_layout(WARPS, shape.BLOCK_DV)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    TO_DK: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KEYS, k_width=2)
    dtype: gl.constexpr = io.q_desc.dtype
    # The lse is asked for before its products are there, where there are registers for it (docs/tuning.md).
    EARLY: gl.constexpr = shape.BLOCK_D > HALF
    no_scores = gl.zeros([HALF, shape.BLOCK_M], gl.float32, SCORES)
    no_dq = gl.zeros([HALF, HALF], gl.float32, tile_layout(WARPS, HALF))
    dk = gl.zeros([HALF, shape.BLOCK_D], gl.float32, KEYS)
    dv = gl.zeros([HALF, shape.BLOCK_DV], gl.float32, VALUES)
    k_smem = smem.k.tiles.index(n % smem.k.STAGES).reshape([shape.BLOCK_N, shape.BLOCK_D])
    keys = (n0 + gl.arange(0, HALF, gl.SliceLayout(1, SCORES)))[:, None]
    s, dp, ready = state
    key, heads = key_of(variant), work.heads * work.group
    head, m = before(span)
    if span.count > 0:
        head, m = row_tile(0, head, m, span, variant)
        if ready == 0:
            my_turn(smem.alternation, phase, W)
            # ptxas takes parts of K's descriptors from here for dQ too, past a branch that may not have been taken.
            here = scores.opaque(n)
            s = times_rows(smem.k, here, smem.q, i, no_scores, shape, W)
            dp = times_rows(smem.v, here, smem.do, i, no_scores, shape, W)
            next_turn(smem.alternation, W, CONSUMERS)
            s, dp = warpgroup_mma_wait(0, deps=(s, dp))
            phase += 1
    lse = smem.lse.index(i % smem.do.STAGES).load(ROW)
    for j in range(span.count):
        last = j + 1 == span.count
        # What is read no more makes room for what comes next. If nothing does, it is multiplied once more, for nobody.
        more = 1
        if last:
            more = follows
            if follows != 0:
                release(smem.v, n)
                arrived(smem.k, n + 1, shape.BLOCK_N, shape.BLOCK_D)
        own = Sequence(seq.b, seq.h * work.group + head, seq.q_start, seq.k_start, seq.len_q, seq.len_k, seq.off)
        masked = is_masked(j, m, span, variant)
        m0 = m * shape.BLOCK_M
        stage, do_stage = i % smem.q.STAGES, i % smem.do.STAGES
        q_smem = smem.q.tiles.index(stage).reshape([shape.BLOCK_M, shape.BLOCK_D])
        do_smem = smem.do.tiles.index(do_stage).reshape([shape.BLOCK_M, shape.BLOCK_DV])
        rows = (m0 + gl.arange(0, shape.BLOCK_M, ROW))[None, :]
        if not EARLY:
            lse = smem.lse.index(do_stage).load(ROW)
        if variant.capped:
            delta = smem.delta.index(do_stage).load(ROW)[None, :]
            p, ds = capped(s, dp, lse[None, :], delta, own, rows, keys, m0, masked, band, variant, extra, shape)
            p32 = packed(p, dtype)
        else:
            s, chain = exponents(s, lse[None, :], own, rows, keys, m0, io, variant, extra, shape, False)
            # Only now, for want of registers.
            delta = smem.delta.index(do_stage).load(ROW)[None, :]
            if variant.seed is None:
                p, dp = weights_and_rest(s, dp - delta, own, rows, keys, m0, masked, band, variant, extra, shape)
                p32 = packed(p, dtype)
                ds = score_gradient(p, p, dp, delta, variant)
            else:
                p32 = packed(weights(s, own, rows, keys, m0, masked, band, variant, extra, shape, False), dtype)
                left32 = kept(p32, variant, key, own, m0, n0, heads, smem, shape, W)
                p, left = unpacked(p32, SCORES, dtype), unpacked(left32, SCORES, dtype)
                p32 = left32
                ds = score_gradient(p, left, dp, delta, variant)
                if shape.CLEAN:
                    if masked:
                        ds = of_weights(ds, p)
            ds = product_gradient(ds, chain, own, rows, keys, masked, variant, extra, shape)
        ds16 = ds.to(dtype)
        own_ds(smem.ds, i, shape, W).store(ds16)
        my_turn(smem.alternation, phase, W)
        # Operands in registers are waited for behind the next product: so few are kept that all fit.
        p16 = as_operand(p32, dtype, VALUES)
        dv = warpgroup_mma(p16, do_smem, dv, is_async=True)
        # What takes as long as that product.
        fence_async_shared()
        if W == 1:
            # Its own half is read at once; the first one's has lain there for a turn.
            cta_barrier()
        ds_operand = gl.convert_layout(ds16, TO_DK, assert_trivial=True)
        dk = warpgroup_mma(ds_operand, q_smem, dk, is_async=True)
        dv, p16 = warpgroup_mma_wait(1, deps=(dv, p16))
        # (Of the first one there is no tile before the first: what it multiplies then is handed to nobody.)
        use = i - (1 - W)
        dq = query_gradient(smem, use, k_smem, no_dq, shape, W)
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk, ds_operand))
        if more != 0:
            release(smem.q, i)
        next_n = n
        if last:
            next_n += follows
        else:
            head, m = row_tile(j + 1, head, m, span, variant)
        s = times_rows(smem.k, next_n, smem.q, i + more, no_scores, shape, W)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        next_turn(smem.alternation, W, CONSUMERS)
        if more != 0:
            release(smem.do, i)
        if j >= 1 - W:
            put(dq, smem, use, W)
        if last & (follows != 0):
            arrived(smem.v, next_n, shape.BLOCK_N, shape.BLOCK_DV)
        dp = times_rows(smem.v, next_n, smem.do, i + more, no_scores, shape, W)
        if j >= 1 - W:
            announce(smem, use, W)
        if EARLY:
            lse = smem.lse.index((i + more) % smem.do.STAGES).load(ROW)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        i += 1
        phase += 1
    if (span.count == 0) | (follows == 0):
        release(smem.v, n)
    if (span.count > 0) & (follows == 0):
        release(smem.q, i - 1)
        release(smem.do, i - 1)
    return dk, dv, i, phase, (s, dp, gl.where(span.count > 0, follows, 0))


@gluon.jit
def finish(i, n, phase, smem, shape, W: gl.constexpr):
    """The first warpgroup's half of dq of the last tile of rows, i - 1, in a turn after all others; the next phase."""
    # As in `gather`: nothing of these descriptors is to come from a loop that may not have run.
    here = scores.opaque(n)
    k_smem = smem.k.tiles.index(here % smem.k.STAGES).reshape([shape.BLOCK_N, shape.BLOCK_D])
    no_dq = gl.zeros([HALF, HALF], gl.float32, tile_layout(WARPS, HALF))
    my_turn(smem.alternation, phase, W)
    if W == 0:
        dq = query_gradient(smem, scores.opaque(i - 1), k_smem, no_dq, shape, W)
        dq = warpgroup_mma_wait(0, deps=(dq,))
    next_turn(smem.alternation, W, CONSUMERS)
    if W == 0:
        put(dq, smem, i - 1, W)
        announce(smem, i - 1, W)
    return phase + 1


@gluon.jit
def compute(io, smem, band, work, variant, extra, shape, W: gl.constexpr):
    """Warpgroup W: 64 keys of every tile."""
    dtype: gl.constexpr = io.k_desc.dtype
    KEYS: gl.constexpr = tile_layout(WARPS, shape.BLOCK_D)
    VALUES: gl.constexpr = tile_layout(WARPS, shape.BLOCK_DV)
    i = 0
    phase = 0
    no_scores = gl.zeros([HALF, shape.BLOCK_M], gl.float32, tile_layout(WARPS, shape.BLOCK_M))
    state = (no_scores, no_scores, 0)
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, n0, span = met(t, band, work, variant, shape, io.turns)
            follows = seen_by_rows(upcoming, band, work, variant, shape, io.turns)
            arrived(smem.k, n, shape.BLOCK_N, shape.BLOCK_D)
            arrived(smem.v, n, shape.BLOCK_N, shape.BLOCK_DV)
            dk, dv, i, phase, state = gather(
                i, n, phase, follows, state, seq, n0 + HALF * W, span, io, smem, band, work, variant, extra, shape, W
            )  # fmt: skip
            if variant.seed is not None:
                dv *= 65536.0 / variant.keep
            # So half of their registers are free for the last dq.
            dk32, dv32 = packed(dk * io.softmax_scale, dtype), packed(dv, dtype)
            if span.count > 0:
                phase = finish(i, n, phase, smem, shape, W)
            # Asked again: kept until here, the answers would cost registers in every tile.
            seq, n0 = keys_of(scores.opaque(t), band, work, shape)
            dk, dv = numbers_of(dk32, dtype, KEYS), numbers_of(dv32, dtype, VALUES)
            leave(dk, dv, seq, n0 + HALF * W, n, i, io, smem, work, shape, W)
            release(smem.k, n)
        t = upcoming


@gluon.jit
def leave(dk, dv, seq, n0, n, i, io, smem, work, shape, W: gl.constexpr):
    """Write dk and dv of 64 keys; nobody reads use n of K any more, nor any dSᵀ before that of tile i."""
    if shape.DIRECT:
        store_both(dk, dv, seq, n0, io, work, shape)
    elif shape.PACKED:
        # What follows a member's last key is the next one's.
        if n0 + HALF <= seq.len_k:
            send(dk, dv, seq, n0, n, i, io, smem, shape, W)
        else:
            store_both(dk, dv, seq, n0, io, work, shape)
    else:
        send(dk, dv, seq, n0, n, i, io, smem, shape, W)


@gluon.jit
def send(dk, dv, seq, n0, n, i, io, smem, shape, W: gl.constexpr):
    """Write dk and dv of 64 keys by TMA, which drops those past the end of the tensor.

    They leave through memory that this warpgroup is the next to write to, or TMA: its keys of K, and its dSᵀ.
    """
    PARTS: gl.constexpr = shape.BLOCK_DV // HALF
    line, key = line_of(seq, shape), seq.k_start + n0
    keys_half(smem.k, n, W).store(dk)
    parts = (dv,)
    if PARTS == 2:
        parts = halves(dv)
    for part in gl.static_range(PARTS):
        own_ds(smem.ds, i + part, shape, W).slice(0, HALF, dim=1).store(parts[part])
    fence_async_shared()
    cta_barrier()
    k_smem = smem.k.tiles.index(n % smem.k.STAGES)
    tma_store(io.dk_desc, [line, key, seq.h, 0], k_smem.slice(HALF * W, HALF, dim=1))
    for part in gl.static_range(PARTS):
        ds_smem = smem.ds.index((i + part) & 1).slice(HALF * W, HALF, dim=1)
        tma_store(io.dv_desc, [line, key, seq.h, HALF * part], ds_smem.slice(0, HALF, dim=3))
    tma.store_wait(0)


@gluon.jit
def store_both(dk, dv, seq, n0, io, work, shape):
    """Write dk and dv of the keys that belong to the sequence, straight from registers."""
    store(dk, io.dk, shape.HEAD_DIM, seq, n0, work, shape)
    store(dv, io.dv, shape.HEAD_DIM_V, seq, n0, work, shape)


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
    k, v = make_ring(io.k_desc, 2, CONSUMERS), make_ring(io.v_desc, 1, CONSUMERS)
    q, do = make_ring(io.q_desc, Q_STAGES, CONSUMERS), make_ring(io.do_desc, DO_STAGES, CONSUMERS)
    lse = gl.allocate_shared_memory(gl.float32, [DO_STAGES, shape.BLOCK_M], LINE)
    delta = gl.allocate_shared_memory(gl.float32, [DO_STAGES, shape.BLOCK_M], LINE)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, shape.BLOCK_N, 1, shape.BLOCK_M], dtype)
    ds = gl.allocate_shared_memory(dtype, [2, 1, shape.BLOCK_N, 1, shape.BLOCK_M], DS)
    dq = make_ring(io.dq_desc, STAGES, 1)
    alternation = make_turns(CONSUMERS)
    bits = q.full
    if variant.seed is not None:
        bits = make_bits(shape, CONSUMERS)
    marks = bits
    # As tiles land, and as consumers get them.
    landed = Buffers(q, do, lse, delta, k, v, ds, dq, alternation, bits)
    if shape.CLEAN:
        marks = gl.allocate_shared_memory(gl.int32, [LOOKERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        k = once_ready(k)
    if shape.PACKED:
        q, do = once_ready(q), once_ready(do)
    smem = Buffers(q, do, lse, delta, k, v, ds, dq, alternation, bits)
    fence_async_shared()
    specialize(
        [
            (compute, (io, smem, band, work, variant, extra, shape, 0)),
            (compute, (io, smem, band, work, variant, extra, shape, 1)),
            (load, (io, landed, band, work, variant, shape)),
            (add_dq, (io, smem, band, work, variant, shape)),
            (tidy, (landed, smem, marks, io.turns, band, work, variant, shape)),
        ],
        [4, 1, 1, LOOKERS * shape.CLEAN],
        [240, 24, 24, 24],
    )


@gluon.jit(
    do_not_specialize=["rounds", "stat_rows", "tiles_n", "heads", "group", "off", "left", "right", "len_q", "len_k"]
)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, dk, dv, dk_desc, dv_desc, table, turns, qk_scale,
    softmax_scale, rounds, stat_rows, tiles_n, heads, group, off, left, right, len_q, len_k, variant, extra, shape,
    Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
):  # fmt: skip
    """Programs: as many as run at once; `table` deals the tiles of keys."""
    band = Band(off, left, right, len_q, len_k)
    work = Work(table, rounds, tiles_n, heads, group)
    io = Io(
        q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, dk, dv, dk_desc, dv_desc, stat_rows, qk_scale,
        softmax_scale, turns,
    )  # fmt: skip
    roles(io, band, work, variant, extra, shape, Q_STAGES, DO_STAGES)
