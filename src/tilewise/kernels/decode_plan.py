"""`decode.plan` in closed form, on the device: what each program of a split-KV kernel has to do.

Items that differ by their key head alone have the same keys, so they are counted together, as a *group*: group
``g = b · row_tiles + m``, with ``units`` for each of its heads. A unit is what cannot be cut: a tile of keys of a
balanced plan, a piece of a fixed one. Programs share all units, group after group and head after head, evenly; what of
a share is dealt, in portions, goes to whoever draws its *ticket* first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import cache
from .score import Span

# How a plan cuts: evenly among programs, at multiples of so many keys, or into so many parts.
BALANCED = tl.constexpr(0)
BY_SIZE = tl.constexpr(1)
BY_NUMBER = tl.constexpr(2)
# `kvcache.SPLIT_UNIT`, as a kernel may name it.
SPLIT_UNIT = tl.constexpr(128)
# `decode.plan.WHOLE_COST`.
WHOLE_COST = tl.constexpr(12)
# `decode.plan.SLOT_ROWS`.
SLOT_ROWS = tl.constexpr(8)
# `decode.plan.DEALT` and `MOST_SHARES`.
DEALT = tl.constexpr(8)
MOST_SHARES = tl.constexpr(40)
# Groups that a program looks at in one go.
CHUNK = tl.constexpr(128)


# Parameters of kernels that become `Work`.
WORK = ["row_tiles", "splits", "cut", "whole", "least"]


class Work(NamedTuple):
    """The sizes of a plan: of `decode.plan.Plan`, `cut` being split_size or num_splits."""

    row_tiles: Any
    splits: Any
    cut: Any
    whole: Any
    least: Any


class Group(NamedTuple):
    """A row tile of a sequence: its rows ``first_row .. last_row``, the keys ``lo .. hi`` that they see, its units."""

    seq: Any
    row0: Any
    first_row: Any
    last_row: Any
    lo: Any
    hi: Any
    units: Any


class Division(NamedTuple):
    """How units are shared: ``total`` evenly among `busy` programs; a portion of what is dealt has so many, 0: no share
    is dealt.
    """

    total: Any
    busy: Any
    portion: Any


class Run(NamedTuple):
    """The units ``first .. last``, which are done one after the other; the run's number, the group that holds the first
    of them, and where that begins.
    """

    number: Any
    first: Any
    last: Any
    group: Any
    begin: Any


class Piece(NamedTuple):
    """Keys ``lo .. hi`` of an item, whether it has its first ones, its slot (-1: the whole item), and its last unit."""

    lo: Any
    hi: Any
    is_first: Any
    slot: Any
    stop: Any


class Parts(NamedTuple):
    """Partial results: fp32 [slots, slot_rows, head_dim_v] and [slots, slot_rows], and what programs tell `combine`.

    `cuts`, int32 [items, 2], of a balanced plan: how many pieces an item has, and the run that has the first.
    `tickets`, int32 [1], where portions may be dealt: how many have been drawn; 0 before and after.
    """

    out: Any
    lse: Any
    cuts: Any
    tickets: Any


@triton.jit
def sequence_of(g, work, shape):
    """Sequence and row tile of groups g; where there is but one to a sequence, nothing is divided."""
    b = g
    # That is 0: were it known, what depends on rows alone would be computed before all loops, and spilled.
    m = g >> 30
    if not shape.ONE_TILE:
        b = g // work.row_tiles
        m = g % work.row_tiles
    return b, m


@triton.jit
def group_of(g, slots, limits, work, shape, left, right):
    """Groups g, a scalar or a tile."""
    b, m = sequence_of(g, work, shape)
    seq = cache.locate(slots, b, 0, limits, shape.TOP_LEFT)
    row0 = m * shape.BLOCK_M
    rows = seq.len_q * shape.GROUP
    first_row = row0 // shape.GROUP
    last_row = (tl.minimum(row0 + shape.BLOCK_M, rows) - 1) // shape.GROUP + 1
    lo = seq.len_k * 0
    hi = seq.len_k
    if left is not None:
        lo = tl.maximum(lo, first_row + seq.off - left)
    if right is not None:
        hi = tl.minimum(hi, last_row + seq.off + right)
    hi = tl.maximum(lo, hi)
    if shape.MODE == BALANCED:
        units = tl.cdiv(hi, shape.BLOCK_N) - lo // shape.BLOCK_N
    elif shape.MODE == BY_SIZE:
        units = tl.cdiv(hi, work.cut) - lo // work.cut
    else:
        units = tl.minimum(tl.cdiv(hi, SPLIT_UNIT) - lo // SPLIT_UNIT, work.cut)
    # Somebody has to write the zeros of rows that see nothing.
    units = tl.where(row0 < rows, tl.maximum(units, 1), 0)
    return Group(seq, row0, first_row, last_row, lo, hi, units)


@triton.jit
def _units(g, slots, limits, work, shape, left, right):
    return group_of(g, slots, limits, work, shape, left, right).units


@triton.jit
def _items_each(total, longest, items, programs):
    """How many whole items a program has, if that is not much more than an even share; else 0."""
    each = tl.cdiv(items, programs)
    alike = WHOLE_COST * each * longest.to(tl.int64) * programs <= (WHOLE_COST + 1) * total.to(tl.int64)
    return tl.where(alike, each, 0)


@triton.jit
def _with_work(total, longest, items, programs, shape):
    """How many programs share the units: where items are equal, as many as have equal parts of them."""
    busy = programs
    if shape.MODE == BALANCED:
        equal = programs // tl.maximum(items, 1) * items
        equally = (longest.to(tl.int64) * items == total) & (WHOLE_COST * programs <= (WHOLE_COST + 1) * equal)
        busy = tl.where(equally, equal, programs)
    return busy


@triton.jit
def _bound(raw, total, before, units, work, shape):
    """A bound between programs, moved to the nearer end of an item that is not to be cut."""
    bound = raw
    if shape.MODE == BALANCED:
        begin = before + (raw - before) // tl.maximum(units, 1) * units
        nearer = tl.where(2 * (raw - begin) < units, begin, begin + units)
        bound = tl.where((units <= work.whole) & (raw < total), nearer, raw)
    return bound


@triton.jit
def _more(units, c, offs, slots, limits, work, shape, left, right):
    """Units of the groups from c on, given those of the first ones.

    They are loaded but once where shares are dealt; the latents' kernel has no registers for them, and would spill.
    """
    if (shape.PORTIONS == 0) | (c > 0):
        units = _units(c + offs, slots, limits, work, shape, left, right)
    return units


@triton.jit
def _totals(units, offs, slots, limits, work, shape, left, right):
    """Units of one head of all groups, the most of a group, and how many have any; of the first groups, `units`."""
    CHUNK: tl.constexpr = offs.shape[0]
    groups = limits.batch * work.row_tiles
    total = groups * 0
    longest = total
    there = total
    for c in range(0, groups, CHUNK):
        units = _more(units, c, offs, slots, limits, work, shape, left, right)
        total += tl.sum(units, 0)
        if shape.MODE == BALANCED:
            longest = tl.maximum(longest, tl.max(units, 0))
            there += tl.sum((units > 0).to(tl.int32), 0)
    return total, longest, there


@triton.jit
def _portion(total, longest, programs, work, shape):
    """Units of a portion: shares are dealt if they have enough, and no item takes long to merge."""
    each = total // programs
    dealt = (each >= work.least) & (longest <= MOST_SHARES * each)
    return tl.where(dealt, tl.cdiv(each, DEALT * shape.PORTIONS), 0)


@triton.jit
def _start(program, division):
    """Where a program's share begins, but for items that are not cut.

    It is ``p * total // busy``, of which no part passes what an int32 holds: longer numbers divide slowly.
    """
    at = tl.minimum(program, division.busy)
    each = division.total // division.busy
    return at * each + at * (division.total - each * division.busy) // division.busy


@triton.jit
def _located(number, raw0, raw1, item0, whole, total, units, offs, slots, limits, work, shape, left, right):
    """The units `raw0` to `raw1`, or of `whole` items from `item0` on; of the first groups, `units`."""
    CHUNK: tl.constexpr = offs.shape[0]
    groups = limits.batch * work.row_tiles
    item1 = item0 + whole
    # Of both bounds the group that holds it, units before that and of it.
    g0 = groups * 0
    before0 = g0
    units0 = g0
    before1 = g0
    units1 = g0
    sofar = g0
    items_before = g0
    for c in range(0, groups, CHUNK):
        units = _more(units, c, offs, slots, limits, work, shape, left, right)
        ends = sofar + tl.cumsum(units, 0) * shape.HEADS_KV
        begins = ends - units * shape.HEADS_KV
        past0 = ends <= raw0
        here0 = (begins <= raw0) & (raw0 < ends)
        here1 = (begins <= raw1) & (raw1 < ends)
        if shape.MODE == BALANCED:
            some = units > 0
            passed = items_before + tl.cumsum(some.to(tl.int32), 0) * shape.HEADS_KV
            reached = passed - shape.HEADS_KV
            past0 = tl.where(whole > 0, passed <= item0, past0)
            here0 = tl.where(whole > 0, some & (reached <= item0) & (item0 < passed), here0)
            here1 = tl.where(whole > 0, some & (reached <= item1) & (item1 < passed), here1)
            items_before = tl.max(passed, 0)
            # Where the item begins stands in for a bound anywhere.
            raw0 += tl.sum(tl.where(here0 & (whole > 0), begins + (item0 - reached) * units - raw0, 0), 0)
            raw1 += tl.sum(tl.where(here1 & (whole > 0), begins + (item1 - reached) * units - raw1, 0), 0)
        g0 += tl.sum(past0.to(tl.int32), 0)
        before0 += tl.sum(tl.where(here0, begins, 0), 0)
        units0 += tl.sum(tl.where(here0, units, 0), 0)
        before1 += tl.sum(tl.where(here1, begins, 0), 0)
        units1 += tl.sum(tl.where(here1, units, 0), 0)
        sofar = tl.max(ends, 0)
    first = _bound(raw0, total, before0, units0, work, shape)
    last = _bound(raw1, total, before1, units1, work, shape)
    if shape.MODE == BALANCED:
        first = tl.where(whole > 0, tl.where(item0 < items_before, raw0, total), first)
        last = tl.where(whole > 0, tl.where(item1 < items_before, raw1, total), last)
    return Run(number, first, last, g0, before0)


@triton.jit
def share(program, programs, offs, slots, limits, work, shape, left, right):
    """What a program has to do on its own, and how all is divided.

    `offs` are the numbers below a power of two, of groups that it looks at in one go.
    """
    units = _units(offs, slots, limits, work, shape, left, right)
    total, longest, there = _totals(units, offs, slots, limits, work, shape, left, right)
    total = total * shape.HEADS_KV
    items = there * shape.HEADS_KV
    busy = _with_work(total, longest, items, programs, shape)
    # With whole items alone, how many a program has; those of a group follow each other.
    whole = total * 0
    if shape.MODE == BALANCED:
        whole = _items_each(total, longest, items, programs)
    portion = total * 0
    number = program
    if shape.PORTIONS > 0:
        portion = _portion(total, longest, programs, work, shape)
        busy = tl.where(portion > 0, programs, busy)
        whole = tl.where(portion > 0, 0, whole)
        number = tl.where(portion > 0, program * (shape.PORTIONS + 1) + shape.PORTIONS, program)
    division = Division(total, tl.minimum(tl.maximum(total, 1), busy), portion)
    raw0 = _start(program, division) + portion * shape.PORTIONS
    raw1 = _start(program + 1, division)
    own = _located(
        number, raw0, raw1, program * whole, whole, total, units, offs, slots, limits, work, shape, left, right
    )  # fmt: skip
    return own, division


@triton.jit
def portion_of(ticket, division, offs, slots, limits, work, shape, left, right):
    """The run that goes with a ticket, of as many as there are portions; `offs`: see `share`."""
    program = ticket // shape.PORTIONS
    part = ticket % shape.PORTIONS
    raw = _start(program, division) + part * division.portion
    units = _units(offs, slots, limits, work, shape, left, right)
    return _located(
        ticket + program, raw, raw + division.portion, 0, 0, division.total, units, offs, slots, limits, work, shape,
        left, right,
    )  # fmt: skip


@triton.jit
def piece_of(unit, begin, run, group, item, work, shape):
    """The piece that starts with `unit` of a run, of an item that starts with `begin`."""
    local = unit - begin
    if shape.MODE == BALANCED:
        stop = tl.minimum(begin + group.units, run.last)
        tile = group.lo // shape.BLOCK_N
        lo = (tile + local) * shape.BLOCK_N
        hi = (tile + stop - begin) * shape.BLOCK_N
        slot = 2 * run.number + (local == 0).to(tl.int32)
        alone = (local == 0) & (stop == begin + group.units)
    else:
        stop = unit + 1
        if shape.MODE == BY_SIZE:
            lo = (group.lo // work.cut + local) * work.cut
            hi = lo + work.cut
        else:
            first = group.lo // SPLIT_UNIT
            blocks = tl.maximum(tl.cdiv(group.hi, SPLIT_UNIT) - first, 1).to(tl.int64)
            lo = (first + (blocks * local // group.units).to(tl.int32)) * SPLIT_UNIT
            hi = (first + (blocks * (local + 1) // group.units).to(tl.int32)) * SPLIT_UNIT
        slot = item * work.splits + local
        alone = group.units == 1
    return Piece(
        tl.maximum(lo, group.lo), tl.minimum(hi, group.hi), local == 0, tl.where(alone, -1, slot), stop
    )  # fmt: skip


@triton.jit
def run_of(unit, division, shape):
    """The number of the run that has a unit of an item which may be cut."""
    program = (((unit + 1).to(tl.int64) * division.busy + division.total - 1) // division.total - 1).to(tl.int32)
    number = program
    if shape.PORTIONS > 0:
        part = (unit - _start(program, division)) // tl.maximum(division.portion, 1)
        dealt = program * (shape.PORTIONS + 1) + tl.minimum(part, shape.PORTIONS)
        number = tl.where(division.portion > 0, dealt, program)
    return number


@triton.jit
def slot_rows(limits, shape):
    """Rows of a slot: `decode.plan.Plan.slot_rows`."""
    rows = shape.BLOCK_M
    if shape.PORTIONS > 0:
        rows = tl.minimum(tl.cdiv(limits.seqlen_q * shape.GROUP, SLOT_ROWS) * SLOT_ROWS, shape.BLOCK_M)
    return rows


@triton.jit
def tell(parts, item, piece, run, division, begin, units, shape):
    """Who has an item's first piece says where the others are."""
    if parts.cuts is not None:
        pieces = begin * 0 + 1
        if piece.is_first & (piece.slot >= 0):
            pieces = run_of(begin + units - 1, division, shape) - run.number + 1
        tl.store(parts.cuts + item * 2, pieces, mask=piece.is_first)
        tl.store(parts.cuts + item * 2 + 1, run.number, mask=piece.is_first)


@triton.jit
def span_of(piece, group, tree, left, right, shape):
    """The tiles of a piece."""
    seq = group.seq
    full_first = group.lo
    full_last = seq.len_k
    if left is not None:
        full_first = tl.maximum(full_first, group.last_row - 1 + seq.off - left)
    if right is not None:
        full_last = tl.minimum(full_last, group.first_row + seq.off + right + 1)
    if tree is not None:
        full_last = tl.minimum(full_last, seq.len_k - seq.len_q)
    lo = piece.lo // shape.BLOCK_N
    hi = tl.where(piece.hi > piece.lo, tl.cdiv(piece.hi, shape.BLOCK_N), lo)
    full_lo = cache.clamp(tl.cdiv(full_first, shape.BLOCK_N), lo, hi)
    full_hi = cache.clamp(tl.maximum(full_last, 0) // shape.BLOCK_N, full_lo, hi)
    return Span(lo, full_lo, full_hi, hi, group.lo, group.hi)
