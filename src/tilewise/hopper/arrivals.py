"""Tiles of the backward pass on their way to the products: one warp loads them, two look through those that may hold
what nobody may multiply.

A key that some row does not see may be NaN, and so may be what lies behind a member's last row in packed calls.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import unread
from .key_tiles import before, met, place_of, row_tile
from .pipeline import arrived, produce, ready, tma_load
from .statistics import first_stat
from .unread import LOOKERS
from .work import dealt, line_of, rounds_of


@gluon.jit
def load(io, smem, band, work, variant, shape):
    """The producer: K and V of each tile, and the rows that see it, with their statistics.

    The first rows are asked for before K and V, whose memory is free later.
    """
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, n0, span = met(t, band, work, variant, shape, io.turns)
            head, m = before(span)
            for j in range(gl.maximum(span.count, 1)):
                if j < span.count:
                    head, m = row_tile(j, head, m, span, variant)
                    descs, rings = (io.q_desc, io.do_desc), (smem.q, smem.do)
                    lines = (), ((io.lse_desc, smem.lse), (io.delta_desc, smem.delta))
                    load_rows(descs, rings, lines, seq, head, m, i, io.stat_rows, work, shape)
                    i += 1
                if j == 0:
                    keys = [line_of(seq, shape), seq.k_start + n0, seq.h, 0]
                    produce(smem.k, io.k_desc, keys, n)
                    produce(smem.v, io.v_desc, keys, n)
        t = upcoming


@gluon.jit
def stat_of(seq, line, m, shape):
    """Where the statistics of the m-th tile of rows are in memory; `line` is where its head's begin."""
    first = line + m * shape.BLOCK_M
    if shape.PACKED:
        first += first_stat(seq.q_start, seq.b)
    return first


@gluon.jit
def load_rows(descs, rings, lines, seq, head, m, i, stat_rows, work, shape):
    """The m-th tile of rows of q and of do as use i of the rings, each with the statistics that go with it: `lines` of
    both are pairs of descriptor and memory.
    """
    b, h, row = place_of(seq, head, m, work, shape)
    stat = stat_of(seq, (b * (work.heads * work.group) + h) * stat_rows, m, shape)
    for part in gl.static_range(2):
        load_beside(descs[part], rings[part], lines[part], [b, row, h, 0], stat, i)


@gluon.jit
def load_beside(desc, ring, lines, coord, stat, i):
    """Load the tile at `coord` as use i of the ring, and beside it the fp32 lines from `stat` on."""
    LINES: gl.constexpr = len(lines)
    ROWS: gl.constexpr = desc.block_type.shape[1]
    BYTES: gl.constexpr = desc.block_type.nbytes + LINES * ROWS * 4
    stage = i % ring.STAGES
    mbarrier.wait(ring.empty.index(stage), ((i // ring.STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), BYTES)
    for k in gl.static_range(LINES):
        tma_load(lines[k][0], [stat], ring.full.index(stage), lines[k][1].index(stage))
    tma_load(desc, coord, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def tidy(landed, smem, marks_smem, turns, band, work, variant, shape):
    """What consumers need not look for: K without what is not finite, and in packed calls no rows that are not the
    member's: q, do and delta are 0 there, and the lse is +inf.

    It takes tiles as they land. `smem` are the rings of consumers, who get them when they are ready. 0 will do in place
    of NaN, for rows that see it have an lse that is none, and so gradients that are none.
    """
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            k_smem = arrived(landed.k, n, shape.BLOCK_N, shape.BLOCK_D)
            if unread.not_finite(k_smem, marks_smem):
                unread.clean(k_smem, LOOKERS)
            ready(smem.k, n)
            if shape.PACKED:
                i = cut_rows(i, t, landed, smem, turns, band, work, variant, shape)
        t = upcoming


@gluon.jit
def cut_rows(i, t, landed, smem, turns, band, work, variant, shape):
    """Rows that pass by the tile number t, from use i of their rings on, without those that are not the member's; the
    use after them.
    """
    seq, _, span = met(t, band, work, variant, shape, turns)
    head, m = before(span)
    for j in range(span.count):
        head, m = row_tile(j, head, m, span, variant)
        left = seq.len_q - m * shape.BLOCK_M
        unread.cut(arrived(landed.q, i, shape.BLOCK_M, shape.BLOCK_D), left, LOOKERS)
        ready(smem.q, i)
        do_smem = arrived(landed.do, i, shape.BLOCK_M, shape.BLOCK_DV)
        stage = i % landed.do.STAGES
        unread.end_line(smem.lse.index(stage), left, float("inf"))
        unread.end_line(smem.delta.index(stage), left, 0.0)
        unread.cut(do_smem, left, LOOKERS)
        ready(smem.do, i)
        i += 1
    return i
