"""Who works on what: the tiles of rows that a program is dealt, and the key tiles that each of them visits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ..kernels import score
from ..kernels.score import Sequence
from . import scores
from .packed import RECORD

# Positions stay below this.
BEYOND = gl.constexpr(1 << 30)


class Band(NamedTuple):
    """Visible keys of row i: ``i + off - left .. i + off + right``, within ``0 .. len_k``; a side may be None.

    Of packed calls, whose members differ, left and right alone count.
    """

    off: Any
    left: Any
    right: Any
    len_q: Any
    len_k: Any


class Work(NamedTuple):
    """Tiles dealt to programs: int32 [rounds + 1, programs], -1 for none; and what a tile's number means.

    Of packed calls, `table` lists the members' tiles (see `packed`), every tile has a number for each head, and
    `rounds` says where in the table the order of these numbers begins. Where heads of a group share a tile, `heads` and
    `group` count such stacks of heads.
    """

    table: Any
    rounds: Any
    tiles_m: Any
    heads: Any
    group: Any


class Tile(NamedTuple):
    """Rows from m0 of one sequence and head, and its key tiles ``lo .. hi``, of which ``full_lo .. full_hi`` are whole.

    With a plan these count the list of key tiles that starts at `listed`. `some`: whether any key may be seen.
    """

    m0: Any
    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any
    listed: Any
    some: Any


class Shape(NamedTuple):
    """Compile-time sizes, and which of the ways the kernel takes.

    O_PARTS: O leaves in so many parts of its columns, one after the other, for want of shared memory. D_HIGH, DV_HIGH:
    0, or how much of a head dim lies beyond the power of two below it, rounded up to one: the buffer is wider, but no
    more is multiplied. PACKED: sequences are members of a packed call. DIRECT_O: no TMA for O, whose dtype or head dim
    it cannot store. CLEAN: what is not finite in v reaches the rows that see it, and no others. STACK: so many heads of
    a group share a tile, whose rows are those of the first position, one for each head, then those of the next.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    CONSUMERS: Any
    O_PARTS: Any
    D_HIGH: Any = gl.constexpr(0)
    DV_HIGH: Any = gl.constexpr(0)
    HEAD_DIM_V: Any = gl.constexpr(0)
    PACKED: Any = gl.constexpr(False)
    DIRECT_O: Any = gl.constexpr(False)
    CLEAN: Any = gl.constexpr(False)
    STACK: Any = gl.constexpr(1)


@gluon.constexpr_function
def low(block, high):
    """The columns of a buffer that are multiplied first: all of it, or half if there is a `high` part."""
    return block // 2 if high else block


@gluon.jit
def rounds_of(work, shape):
    """How many tiles a program is dealt at most."""
    rounds = work.rounds
    if shape.PACKED:
        rounds = gl.cdiv(gl.load(work.table) * work.heads, gl.num_programs(0))
    return rounds


@gluon.jit
def dealt(work, n, shape):
    """The n-th tile number of this program, or -1."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    if shape.PACKED:
        # There and back again: who got the longest of one round gets the shortest of the next.
        at = n * programs + gl.where((n & 1) == 0, program, programs - 1 - program)
        t = gl.load(work.table + work.rounds + at, mask=at < gl.load(work.table) * work.heads, other=-1)
    else:
        t = gl.load(work.table + n * programs + program)
    return t


@gluon.jit
def sequence_of(t, band, work, shape):
    """The sequence and head of the tile number t, the tile's first row, and how many keys there are."""
    if shape.PACKED:
        entry = work.table + (1 + t // work.heads) * RECORD
        m0 = gl.load(entry + 1)
        keys = gl.load(entry + 5)
        # Where there is no key, indices must be those of one all the same.
        seq = Sequence(
            gl.load(entry), t % work.heads, gl.load(entry + 2), gl.load(entry + 4), gl.load(entry + 3),
            gl.maximum(keys, 1), gl.load(entry + 6),
        )  # fmt: skip
    else:
        m0 = (t % work.tiles_m) * (shape.BLOCK_M // shape.STACK)
        b, h = t // work.tiles_m // work.heads, (t // work.tiles_m) % work.heads
        keys = band.len_k
        seq = Sequence(b, h, 0, 0, band.len_q, keys, band.off)
    return seq, m0, keys


@gluon.jit
def line_of(seq, shape):
    """Where a sequence is along the first dimension of tensors: in a packed call all are in one."""
    b = seq.b
    if shape.PACKED:
        b = 0
    return b


@gluon.jit
def first_row(m0, W: gl.constexpr, shape):
    """The position of the first row of consumer W."""
    return m0 + W * (64 // shape.STACK)


@gluon.jit
def rows_of(m0, W: gl.constexpr, shape):
    """The positions of the rows of consumer W, [M]."""
    numbers = gl.arange(0, 64, gl.SliceLayout(1, scores.score_layout(shape.BLOCK_N)))
    if shape.STACK > 1:
        numbers = numbers // shape.STACK
    return first_row(m0, W, shape) + numbers


@gluon.jit
def heads_of(seq, rows, shape):
    """The query head, or those of a stack's rows, [M], in the layout of `rows`."""
    head = seq.h
    if shape.STACK > 1:
        ROWS: gl.constexpr = rows.type.layout
        head = head * shape.STACK + gl.arange(0, 64, ROWS) % shape.STACK
    return head


@gluon.jit
def own(seq, rows, shape):
    """The sequence as the rows of a tile see it: with their own heads, [M, 1]."""
    if shape.STACK > 1:
        head = heads_of(seq, rows, shape)[:, None]
        seq = Sequence(seq.b, head, seq.q_start, seq.k_start, seq.len_q, seq.len_k, seq.off)
    return seq


@gluon.jit
def slope_of(variant, seq, rows, shape):
    """The ALiBi slope in base 2 of a head, or those of rows, [M, 1]: a load in the loop would be waited for."""
    slope = 0.0
    if variant.slopes is not None:
        slope = score.slope(variant, own(seq, rows, shape)) * score.LOG2E
    return slope


@gluon.jit
def key_of(variant):
    """The halves of dropout's seed, read once for a tile of rows."""
    low, high = 0, 0
    if variant.seed is not None:
        seed = gl.load(variant.seed)
        low, high = seed.to(gl.int32), (seed >> 32).to(gl.int32)
    return low, high


@gluon.jit
def tile_of(seq, m0, keys, band, variant, shape):
    """What the rows from m0 see. There is always a key tile: a row that sees nothing is masked, not skipped."""
    if variant.plan is not None:
        row = variant.plan + seq.b.to(gl.int64) * variant.plan_batch + seq.h.to(gl.int64) * variant.plan_head
        row += (m0 // shape.BLOCK_M).to(gl.int64) * variant.plan_row
        full, hi = gl.load(row), gl.load(row + 1)
        tile = Tile(m0, 0 * m0, 0 * m0, full, gl.maximum(hi, 1), row + 2, (hi > 0) & (keys > 0))
    else:
        last_row = gl.minimum(m0 + shape.BLOCK_M // shape.STACK, seq.len_q) - 1
        first, full_first, last, full_last = 0 * m0, 0 * m0, seq.len_k, seq.len_k
        if band.left is not None:
            first = gl.maximum(first, m0 + seq.off - band.left)
            full_first = gl.maximum(first, last_row + seq.off - band.left)
        if band.right is not None:
            last = gl.minimum(last, last_row + seq.off + band.right + 1)
            full_last = gl.minimum(last, m0 + seq.off + band.right + 1)
        lo = gl.minimum(first, seq.len_k - 1) // shape.BLOCK_N
        hi = gl.maximum(gl.cdiv(gl.maximum(last, 0), shape.BLOCK_N), lo + 1)
        full_lo = gl.minimum(gl.cdiv(full_first, shape.BLOCK_N), hi)
        full_hi = gl.minimum(gl.maximum(gl.maximum(full_last, 0) // shape.BLOCK_N, full_lo), hi)
        if variant.predicate is not None:
            full_hi = full_lo
        tile = Tile(m0, lo, full_lo, full_hi, hi, m0, keys > 0)
    return tile


@gluon.jit
def is_masked(tile, j):
    """Whether some rows may not see all keys of the j-th key tile."""
    return (j >= tile.full_hi) | (j < tile.full_lo)


@gluon.jit
def first_key(tile, j, variant, shape):
    """The first key of the j-th key tile to visit."""
    if variant.plan is not None:
        j = gl.load(tile.listed + j)
    return j * shape.BLOCK_N


@gluon.jit
def seen_keys(seq, tile, rows, j, band, variant, extra, shape):
    """Which keys of the j-th key tile each row sees, [M, N]."""
    n0 = first_key(tile, j, variant, shape)
    if shape.PACKED or variant.plan is not None:
        # Beyond the last key nothing is seen.
        n0 = gl.where(tile.some, n0, BEYOND)
    return scores.visible(variant, extra, own(seq, rows, shape), rows, n0, band.left, band.right, shape.BLOCK_N)
