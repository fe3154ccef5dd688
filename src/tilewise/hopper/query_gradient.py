"""dq of the backward pass on its way to memory, half a tile at a time: through shared memory, added up by a warp.

HBM: adds to the fp32 sum of dq once per tile of keys (in L2, if what is worked on at once fits).
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .key_tiles import before, keys_of, row_tile, span_of
from .pipeline import arrived, reinterpret, release, tma_add, tma_store
from .recompute import tile_layout
from .turns import await_turn, pass_on, turn_of, wave_of
from .work import dealt, rounds_of

# Warps of a warpgroup, its keys, and the rows and columns of its half of a tile of dq.
WARPS = gl.constexpr(4)
HALF = gl.constexpr(64)


@gluon.constexpr_function
def dq_stages(rows, dropout):
    """Halves of dq on their way to memory: as many as there is room for."""
    return 3 if rows == HALF.value and not dropout else 2


@gluon.jit
def add_dq(io, smem, band, work, variant, shape):
    """The warp that adds dq to memory, the second warpgroup's half of a tile first."""
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
                    add_one(io, smem, [b, h, row, 0], i, shape, 1)
                    add_one(io, smem, [b, h, row, 0], i, shape, 0)
                else:
                    turn = turn_of(m, n0 // shape.BLOCK_N, first, end, seq, band, shape)
                    line = (b * work.heads * work.group + h) * gl.cdiv(seq.len_q, shape.BLOCK_M)
                    counter = io.turns.added + line + m
                    add_in_turn(io, smem, [b, h, row, 0], i, counter, turn, shape, 1)
                    add_in_turn(io, smem, [b, h, row, 0], i, counter, turn, shape, 0)
                i += 1
        t = upcoming
    tma.store_wait(0)


@gluon.jit
def add_one(io, smem, coord, i, shape, W: gl.constexpr):
    """Add a half of dq of use i to memory, whoever else does."""
    use = use_of(i, W)
    arrived(smem.dq, use, HALF, HALF)
    tma_add(io.dq_desc, part_of(coord, W, shape), smem.dq.tiles.index(use % smem.dq.STAGES))
    tma.store_wait(0)
    release(smem.dq, use)


@gluon.jit
def add_in_turn(io, smem, coord, i, counter, turn, shape, W: gl.constexpr):
    """Add a half of dq of use i to memory once `turn` others have; the first overwrites what is there."""
    use = use_of(i, W)
    arrived(smem.dq, use, HALF, HALF)
    if W == 1:
        await_turn(counter, turn)
    tile = smem.dq.tiles.index(use % smem.dq.STAGES)
    if turn == 0:
        tma_store(io.dq_desc, part_of(coord, W, shape), tile)
    else:
        tma_add(io.dq_desc, part_of(coord, W, shape), tile)
    if W == 1:
        tma.store_wait(0)
    else:
        pass_on(counter)
    release(smem.dq, use)


@gluon.jit
def use_of(i, W: gl.constexpr):
    """The use of dq's ring for the half of tile i that warpgroup W computes: the second one's is there first."""
    return 2 * i + 1 - W


@gluon.jit
def part_of(coord, W: gl.constexpr, shape):
    """Where the half of warpgroup W begins: of the rows, or of the columns where there are 64 rows alone."""
    row, column = coord[2], coord[3]
    if shape.BLOCK_M == 2 * HALF:
        row += HALF * W
    else:
        column += HALF * W
    return [coord[0], coord[1], row, column]


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
    both = gl.join((words & 0xFFFF).to(gl.int16), (words >> 16).to(gl.int16)).reshape([HALF, 2 * HALF])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    words_smem = reinterpret(smem.dq.tiles.index(slot), gl.int16, [HALF, 2 * HALF], SWIZZLED)
    words_smem.store(gl.convert_layout(both, tile_layout(WARPS, 2 * HALF), assert_trivial=True))


@gluon.jit
def announce(smem, i, W: gl.constexpr):
    """Tell the warp that adds it of a half of dq."""
    fence_async_shared()
    mbarrier.arrive(smem.dq.full.index(use_of(i, W) % smem.dq.STAGES), count=1)
