"""dq of the backward pass on its way to memory, half a tile at a time: through shared memory, added up by a warp.

HBM: adds to the fp32 sum of dq once per tile of keys (in L2, if what is worked on at once fits).
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .key_tiles import before, met, place_of, row_tile
from .pipeline import arrived, reinterpret, release, tma_add, tma_store
from .products import halves_of
from .recompute import tile_layout
from .turns import await_turn, pass_on, turn_of, wave_of
from .work import dealt, rounds_of

# Warps of a warpgroup, its keys, and the rows and columns of its half of a tile of dq.
WARPS = gl.constexpr(4)
HALF = gl.constexpr(64)
# Halves of dq on their way to memory.
STAGES = gl.constexpr(2)


@gluon.jit
def add_dq(io, smem, band, work, variant, shape):
    """The warp that adds dq to memory, the second warpgroup's half of a tile first."""
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, n0, span = met(t, band, work, variant, shape, io.turns)
            first, end = 0, 0
            if io.turns is not None:
                first, end = wave_of(t, io.turns)
            head, m = before(span)
            for j in range(span.count):
                head, m = row_tile(j, head, m, span, variant)
                b, h, row = place_of(seq, head, m, work, shape)
                turn = 0
                if io.turns is not None:
                    turn = turn_of(m, n0 // shape.BLOCK_N, first, end, seq, band, shape)
                    line = (b * work.heads * work.group + h) * gl.cdiv(seq.len_q, shape.BLOCK_M)
                    await_turn(io.turns.added + line + m, turn)
                add_half(io, smem, b, h, row, i, turn, shape, 1)
                add_half(io, smem, b, h, row, i, turn, shape, 0)
                if io.turns is not None:
                    pass_on(io.turns.added + line + m)
                i += 1
        t = upcoming
    tma.store_wait(0)


@gluon.jit
def add_half(io, smem, b, h, row, i, turn, shape, W: gl.constexpr):
    """Add a half of dq of use i to memory; whose turn is first overwrites what is there.

    It is one of the rows, or of the columns where there are 64 rows alone.
    """
    use = use_of(i, W)
    column = 0
    if shape.BLOCK_M == 2 * HALF:
        row += HALF * W
    else:
        column = HALF * W
    arrived(smem.dq, use, HALF, HALF)
    tile = smem.dq.tiles.index(use % smem.dq.STAGES)
    if io.turns is None:
        tma_add(io.dq_desc, [b, h, row, column], tile)
    elif turn == 0:
        tma_store(io.dq_desc, [b, h, row, column], tile)
    else:
        tma_add(io.dq_desc, [b, h, row, column], tile)
    tma.store_wait(0)
    release(smem.dq, use)


@gluon.jit
def use_of(i, W: gl.constexpr):
    """The use of dq's ring for the half of tile i that warpgroup W computes: the second one's is there first."""
    return 2 * i + 1 - W


@gluon.jit
def put(dq, smem, i, W: gl.constexpr):
    """Put a half of dq of tile i where TMA finds it, of every eight columns the even ones first.

    So four words that follow each other are one from each of four threads, as in a matrix of 16-bit numbers, and are
    stored as such: its rows lie in different banks, which those of fp32 numbers do not. `round_kernel` knows of it.
    """
    use = use_of(i, W)
    slot = use % smem.dq.STAGES
    mbarrier.wait(smem.dq.empty.index(slot), ((use // smem.dq.STAGES) & 1) ^ 1)
    words = dq.to(gl.int32, bitcast=True).reshape([HALF, HALF // 8, 4, 2]).permute([0, 1, 3, 2]).reshape([HALF, HALF])
    both = halves_of(words, gl.int16)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    words_smem = reinterpret(smem.dq.tiles.index(slot), gl.int16, [HALF, 2 * HALF], SWIZZLED)
    words_smem.store(gl.convert_layout(both, tile_layout(WARPS, 2 * HALF), assert_trivial=True))


@gluon.jit
def announce(smem, i, W: gl.constexpr):
    """Tell the warp that adds it of a half of dq."""
    fence_async_shared()
    mbarrier.arrive(smem.dq.full.index(use_of(i, W) % smem.dq.STAGES), count=1)
