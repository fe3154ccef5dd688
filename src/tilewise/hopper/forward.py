"""Forward on Hopper: ``o = softmax(s) v`` and ``lse = log sum exp s``, FlashAttention-3's pipeline in Gluon.

One warp loads (TMA), two or three warpgroups compute, each 64 rows of the tile. Within a warpgroup the product
``S_j = Q K_jᵀ`` runs beside the softmax of S_{j-1} and ``O += P_{j-1} V_{j-1}`` (FlashAttention-3, Shah et al., 2024,
Algorithms 1 and 2). The grid is persistent: `schedule` deals the tiles to programs, the longest first, and Q of a
program's next tile is loaded while it still computes the last.

HBM: reads q once and k, v once per tile of rows (mostly from L2), writes o and lse.

*Handles* bf16 and fp16, head dims up to 256, GQA, causal and windows of both alignments. *Not here*: whatever changes a
score (softcap, bias, ...), other masks, packed sequences, dropout, sinks.
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

from .pipeline import Ring, arrived, cta_barrier, make_ring, produce, release, tma_load, tma_store

LN2 = gl.constexpr(0.6931471805599453)


class Band(NamedTuple):
    """Visible keys of row i: ``i + off - left .. i + off + right``, within ``0 .. len_k``; a side may be None."""

    off: Any
    left: Any
    right: Any
    len_q: Any
    len_k: Any


class Work(NamedTuple):
    """Tiles dealt to programs: int32 [rounds, programs], -1 for none; and what a tile's number means."""

    table: Any
    rounds: Any
    tiles_m: Any
    heads: Any
    group: Any


class Tile(NamedTuple):
    """Rows from m0 of one head, and its key tiles ``lo .. hi``, of which ``full_lo .. full_hi`` are whole."""

    m0: Any
    b: Any
    h: Any
    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


class Io(NamedTuple):
    """Descriptors of the tensors, the LSE [B, Hq, Sq], the scale of raw scores in base 2, and the staging of O."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    o_desc: Any
    lse: Any
    qk_scale: Any
    o_smem: Any


class Shape(NamedTuple):
    """Compile-time sizes. SHARED_O: O leaves through the buffer of Q, for want of shared memory."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    CONSUMERS: Any
    SHARED_O: Any


@gluon.jit
def dealt(work, n):
    """The n-th tile number of this program, or -1."""
    return gl.load(work.table + n * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def tile_of(t, band, work, shape):
    """What the tile number t stands for. There is always a key tile: a row that sees nothing is masked, not skipped."""
    m0 = (t % work.tiles_m) * shape.BLOCK_M
    b, h = t // work.tiles_m // work.heads, (t // work.tiles_m) % work.heads
    last_row = gl.minimum(m0 + shape.BLOCK_M, band.len_q) - 1
    first, full_first, last, full_last = 0 * m0, 0 * m0, band.len_k, band.len_k
    if band.left is not None:
        first = gl.maximum(first, m0 + band.off - band.left)
        full_first = gl.maximum(first, last_row + band.off - band.left)
    if band.right is not None:
        last = gl.minimum(last, last_row + band.off + band.right + 1)
        full_last = gl.minimum(last, m0 + band.off + band.right + 1)
    lo = gl.minimum(first, band.len_k - 1) // shape.BLOCK_N
    hi = gl.maximum(gl.cdiv(gl.maximum(last, 0), shape.BLOCK_N), lo + 1)
    full_lo = gl.minimum(gl.cdiv(full_first, shape.BLOCK_N), hi)
    full_hi = gl.minimum(gl.maximum(gl.maximum(full_last, 0) // shape.BLOCK_N, full_lo), hi)
    return Tile(m0, b, h, lo, full_lo, full_hi, hi)


@gluon.jit
def load(io, q, k, v, band, work, shape):
    """The producer: Q of each tile, then its K and V tiles from the last to the first."""
    i = 0
    for n in range(work.rounds):
        t = dealt(work, n)
        if t >= 0:
            tile = tile_of(t, band, work, shape)
            mbarrier.wait(q.empty.index(0), (n & 1) ^ 1)
            mbarrier.expect(q.full.index(0), shape.CONSUMERS * io.q_desc.block_type.nbytes)
            for w in gl.static_range(shape.CONSUMERS):
                tma_load(io.q_desc, [tile.b, tile.m0 + w * 64, tile.h, 0], q.full.index(0), q.tiles.index(w))
            head = tile.h // work.group
            for j in range(tile.hi - tile.lo):
                n0 = (tile.hi - 1 - j) * shape.BLOCK_N
                produce(k, io.k_desc, [tile.b, n0, head, 0], i)
                produce(v, io.v_desc, [tile.b, n0, head, 0], i)
                i += 1


@gluon.constexpr_function
def score_layout(n):
    """Registers of a [64, n] accumulator of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.jit
def as_operand(p, dtype: gl.constexpr, VALUES: gl.constexpr):
    """Probabilities as the left operand of the product that accumulates in layout VALUES: the same registers."""
    return gl.convert_layout(
        p.to(dtype), gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2), assert_trivial=True
    )


@gluon.jit
def scaled(acc, factor):
    """Rows of `acc` times `factor`, which has the rows' layout of the scores: the same threads."""
    VALUES: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUES), assert_trivial=True)[:, None]


@gluon.jit
def masked(s, rows, n0, band, shape):
    """Scores of keys that a row does not see become -inf."""
    # A value that the compiler cannot foresee keeps this a branch: it would rather compute and select in every tile.
    n0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n0], dtype=gl.int32, is_pure=False, pack=1)
    keys = n0 + gl.arange(0, shape.BLOCK_N, gl.SliceLayout(0, score_layout(shape.BLOCK_N)))
    seen = (keys < band.len_k)[None, :] & (rows >= 0)[:, None]  # [M, N]
    if band.left is not None:
        seen = seen & (keys[None, :] >= (rows + (band.off - band.left))[:, None])
    if band.right is not None:
        seen = seen & (keys[None, :] <= (rows + (band.off + band.right))[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def probabilities(s, m_i, qk_scale):
    """``exp2(qk_scale * (s - m))`` with the new maximum m of raw scores, and m with 0 for -inf.

    Scaling and subtracting are one instruction, whose product is not rounded while that of m is: the difference grows
    with the score and passes what exp2 can hold. From 1e8 on a score is known to 8 at best, so a power of two within a
    factor of two serves as scale as well, and it multiplies exactly. Every step between maximum and exponentials is
    waited for, so both products are at hand before it is known which is wanted.
    """
    m_new = gl.maximum(m_i, gl.max(s, 1))  # [M]
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    whole = (qk_scale.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    huge = gl.abs(m_safe) > 1e8 / qk_scale
    scale = gl.where(huge, whole, qk_scale)
    shift = gl.where(huge, m_safe * whole, m_safe * qk_scale)
    return gl.exp2(s * scale[:, None] - shift[:, None]), m_new, m_safe


@gluon.jit
def step(state, q_smem, zero, k, v, rows, tile, j, i, qk_scale, band, shape):
    """Scores of key tile j (use i of the rings) while the values of the tile before it are added."""
    acc, p16, m_i, l_i = state
    k_smem = arrived(k, i, shape.BLOCK_N, shape.BLOCK_D)
    s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
    v_smem = arrived(v, i - 1, shape.BLOCK_N, shape.BLOCK_DV)
    acc = warpgroup_mma(p16, v_smem, acc, is_async=True)  # [M, Dv]
    s, acc, p16 = warpgroup_mma_wait(1, deps=(s, acc, p16))
    release(k, i)
    # One loop with a branch: of two loops, the second would unpack the 16-bit operand that it takes over.
    if band.left is not None or band.right is not None:
        if (j >= tile.full_hi) | (j < tile.full_lo):
            s = masked(s, rows, j * shape.BLOCK_N, band, shape)
    p, m_new, m_safe = probabilities(s, m_i, qk_scale)
    alpha = gl.exp2((m_i - m_safe) * qk_scale)
    l_i = l_i * alpha + gl.sum(p, 1)
    acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
    release(v, i - 1)
    VALUES: gl.constexpr = score_layout(shape.BLOCK_DV)
    return scaled(acc, alpha), as_operand(p, p16.dtype, VALUES), m_new, l_i


@gluon.jit
def attend(q_smem, k, v, rows, tile, i, io, band, shape):
    """All key tiles of a row tile, the last first; the values of the first are left to the caller."""
    SCORES: gl.constexpr = score_layout(shape.BLOCK_N)
    VALUES: gl.constexpr = score_layout(shape.BLOCK_DV)
    zero = gl.zeros([64, shape.BLOCK_N], gl.float32, SCORES)
    k_smem = arrived(k, i, shape.BLOCK_N, shape.BLOCK_D)
    s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k, i)
    top = tile.hi - 1
    if (top >= tile.full_hi) | (top < tile.full_lo):
        s = masked(s, rows, top * shape.BLOCK_N, band, shape)
    m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    p, m_i, _ = probabilities(s, m_i, io.qk_scale)
    acc = gl.zeros([64, shape.BLOCK_DV], gl.float32, VALUES)
    state = acc, as_operand(p, io.q_desc.dtype, VALUES), m_i, gl.sum(p, 1)
    last = tile.hi - tile.lo
    for d in range(1, last):
        state = step(state, q_smem, zero, k, v, rows, tile, top - d, i + d, io.qk_scale, band, shape)
    return state, i + last


@gluon.jit
def store(acc, m_i, l_i, tile, rows, o_smem, io, band, work, shape, W: gl.constexpr):
    """Normalise and write 64 rows of O (TMA drops those past the end) and their LSE."""
    # Only a row that sees nothing has a sum of 0; comparing for equality lets a NaN through.
    empty = l_i == 0.0
    l_safe = gl.where(empty, 1.0, l_i)
    lse = gl.where(empty, float("-inf"), m_i * (io.qk_scale * LN2) + gl.log(l_safe))
    stat = (tile.b * work.heads + tile.h).to(gl.int64) * band.len_q
    gl.store(io.lse + stat + rows, lse, mask=rows < band.len_q)
    acc = scaled(acc, 1.0 / l_safe)
    if not shape.SHARED_O:
        # The tile before may still be leaving.
        tma.store_wait(0)
        cta_barrier()
    o_smem.reshape([64, shape.BLOCK_DV]).store(acc.to(io.o_desc.dtype))
    fence_async_shared()
    cta_barrier()
    tma_store(io.o_desc, [tile.b, tile.m0 + W * 64, tile.h, 0], o_smem)


@gluon.jit
def compute(io, q, k, v, band, work, shape, W: gl.constexpr):
    """Consumer W: 64 rows of every tile."""
    q_smem = q.tiles.index(W).reshape([64, shape.BLOCK_D])
    i = 0
    for n in range(work.rounds):
        t = dealt(work, n)
        if t >= 0:
            tile = tile_of(t, band, work, shape)
            rows = tile.m0 + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout(shape.BLOCK_N)))
            mbarrier.wait(q.full.index(0), n & 1)
            state, i = attend(q_smem, k, v, rows, tile, i, io, band, shape)
            acc, p16, m_i, l_i = state
            if not shape.SHARED_O:
                mbarrier.arrive(q.empty.index(0), count=1)
            v_smem = arrived(v, i - 1, shape.BLOCK_N, shape.BLOCK_DV)
            acc = warpgroup_mma(p16, v_smem, acc, is_async=True)  # [M, Dv]
            acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
            release(v, i - 1)
            store(acc, m_i, l_i, tile, rows, io.o_smem.index(W), io, band, work, shape, W)
            if shape.SHARED_O:
                tma.store_wait(0)
                mbarrier.arrive(q.empty.index(0), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rounds", "tiles_m", "heads", "group", "off", "left", "right", "len_q", "len_k"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, qk_scale, rounds, tiles_m, heads, group, off, left, right, len_q, len_k,
    shape, STAGES: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """Programs: as many as run at once; `table` deals the tiles (see `Work`, `Band`)."""
    band = Band(off, left, right, len_q, len_k)
    work = Work(table, rounds, tiles_m, heads, group)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [shape.CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=shape.CONSUMERS)
    k = make_ring(k_desc, STAGES, shape.CONSUMERS)
    v = make_ring(v_desc, STAGES, shape.CONSUMERS)
    o_smem = q_tiles
    if not shape.SHARED_O:
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [shape.CONSUMERS] + o_desc.block_type.shape, o_desc.layout)
    fence_async_shared()
    q = Ring(q_tiles, q_full, q_empty, gl.constexpr(1))
    io = Io(q_desc, k_desc, v_desc, o_desc, lse, qk_scale, o_smem)
    if shape.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (compute, (io, q, k, v, band, work, shape, 0)),
                (compute, (io, q, k, v, band, work, shape, 1)),
                (load, (io, q, k, v, band, work, shape)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (io, q, k, v, band, work, shape, 0)),
                (compute, (io, q, k, v, band, work, shape, 1)),
                (compute, (io, q, k, v, band, work, shape, 2)),
                (load, (io, q, k, v, band, work, shape)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
