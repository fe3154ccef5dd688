"""`decode.plan` in closed form, on the device: what each program of a split-KV kernel has to do.

Items that differ by their key head alone have the same keys, so they are counted together, as a *group*: group
``g = b · row_tiles + m``, with ``units`` for each of its heads. A unit is what cannot be cut: a tile of keys of a
balanced plan, a piece of a fixed one. Programs share all units, group after group and head after head, evenly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import kvcache
from ..decode import plan
from . import cache
from .score import Span

# How a plan cuts: evenly among programs, at multiples of so many keys, or into so many parts.
BALANCED = tl.constexpr(0)
BY_SIZE = tl.constexpr(1)
BY_NUMBER = tl.constexpr(2)
# Numbers of the plan on the host, as a kernel may name them.
SPLIT_UNIT = tl.constexpr(kvcache.SPLIT_UNIT)
WHOLE_COST = tl.constexpr(plan.WHOLE_COST)
WHOLE_EXCESS = tl.constexpr(plan.WHOLE_EXCESS)
# Groups that a program looks at in one go.
CHUNK = tl.constexpr(128)


# Parameters of kernels that become `Work`.
WORK = ["row_tiles", "splits", "cut", "whole"]


class Work(NamedTuple):
    """The sizes of a plan: of `decode.plan.Plan`, `cut` being split_size or num_splits."""

    row_tiles: Any
    splits: Any
    cut: Any
    whole: Any


class Group(NamedTuple):
    """A row tile of a sequence: its rows ``first_row .. last_row``, the keys ``lo .. hi`` that they see, its units."""

    seq: Any
    row0: Any
    first_row: Any
    last_row: Any
    lo: Any
    hi: Any
    units: Any


class Share(NamedTuple):
    """The units ``first .. last`` of a program, of ``total`` that `busy` programs have; the group that holds the first,
    and where it begins.
    """

    first: Any
    last: Any
    total: Any
    busy: Any
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
    """Partial results: fp32 [slots, BLOCK_M, head_dim_v] and [slots, BLOCK_M], and what programs tell `combine`.

    `cuts`, int32 [programs, 4], of a balanced plan: for each program the item whose first piece is its last one, as
    group and key head, and how many pieces that has; 0: there is none.
    """

    out: Any
    lse: Any
    cuts: Any


@triton.jit
def group_of(g, slots, limits, work, shape, left, right):
    """Groups g, a scalar or a tile."""
    b = g // work.row_tiles
    seq = cache.locate(slots, b, 0, limits, shape.TOP_LEFT)
    row0 = (g % work.row_tiles) * shape.BLOCK_M
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
    excess = each * longest.to(tl.int64) * programs - total
    alike = (WHOLE_COST * excess <= total) & (excess <= WHOLE_EXCESS * programs)
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
        short = (units <= work.whole) & (raw < total)
        # Long divisions are for short items alone.
        if short:
            begin = before + (raw - before) // tl.maximum(units, 1) * units
            bound = tl.where(2 * (raw - begin) < units, begin, begin + units)
    return bound


@triton.jit
def _totals(offs, slots, limits, work, shape, left, right):
    """Of all groups: units of one head together, the most that one has, and how many have any."""
    CHUNK: tl.constexpr = offs.shape[0]
    groups = limits.batch * work.row_tiles
    total = groups * 0
    longest = total
    some = total
    for c in range(0, groups, CHUNK):
        units = _units(c + offs, slots, limits, work, shape, left, right)
        total += tl.sum(units, 0)
        if shape.MODE == BALANCED:
            longest = tl.maximum(longest, tl.max(units, 0))
            if shape.RAGGED:
                some += tl.sum((units > 0).to(tl.int32), 0)
    # Where sequences have as many rows each, this is known before their lengths are.
    there = some if shape.RAGGED else groups
    return total, longest, there


@triton.jit
def _counted(raw, item, items, whole, longest, shape):
    """A bound, the group that holds it and where that begins, if all groups have as many units as the longest."""
    width = tl.maximum(longest * shape.HEADS_KV, 1)
    raw = tl.where(whole > 0, tl.minimum(item, items) * longest, raw)
    g = raw // width
    return raw, g, g * width


@triton.jit
def _sought(raw0, raw1, item0, item1, whole, offs, slots, limits, work, shape, left, right):
    """Both bounds, the group that holds the first, and of each one's group the units before that and of it."""
    CHUNK: tl.constexpr = offs.shape[0]
    groups = limits.batch * work.row_tiles
    g0 = groups * 0
    before0 = g0
    units0 = g0
    before1 = g0
    units1 = g0
    sofar = g0
    items_before = g0
    for c in range(0, groups, CHUNK):
        units = _units(c + offs, slots, limits, work, shape, left, right)
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
    return raw0, raw1, g0, before0, units0, before1, units1


@triton.jit
def slot_of(program, number):
    """Where a program leaves an item's piece of this number: it may leave two, of which the second begins an item."""
    return 2 * program + (number == 0).to(tl.int32)


@triton.jit
def share(program, programs, offs, slots, limits, work, shape, left, right):
    """What a program has to do; `offs` are the numbers below a power of two, of groups that it looks at in one go."""
    groups = limits.batch * work.row_tiles
    total, longest, there = _totals(offs, slots, limits, work, shape, left, right)
    total = total * shape.HEADS_KV
    items = there * shape.HEADS_KV
    busy = tl.minimum(tl.maximum(total, 1), _with_work(total, longest, items, programs, shape))
    # ``p * total // busy``, of which no part passes what an int32 holds: a division of longer numbers takes its time.
    each = total // busy
    over = total - each * busy
    at0 = tl.minimum(program, busy)
    at1 = tl.minimum(program + 1, busy)
    raw0 = at0 * each + at0 * over // busy
    raw1 = at1 * each + at1 * over // busy
    # With whole items alone, how many come before each bound; those of a group follow each other.
    whole = groups * 0
    if shape.MODE == BALANCED:
        whole = _items_each(total, longest, items, programs)
    item0 = program * whole
    item1 = item0 + whole
    alike = False
    if shape.MODE == BALANCED:
        alike = longest.to(tl.int64) * groups * shape.HEADS_KV == total
    if alike:
        raw0, g0, before0 = _counted(raw0, item0, items, whole, longest, shape)
        raw1, _, before1 = _counted(raw1, item1, items, whole, longest, shape)
        units0 = longest
        units1 = longest
    else:
        raw0, raw1, g0, before0, units0, before1, units1 = _sought(
            raw0, raw1, item0, item1, whole, offs, slots, limits, work, shape, left, right
        )  # fmt: skip
    first = _bound(raw0, total, before0, units0, work, shape)
    last = _bound(raw1, total, before1, units1, work, shape)
    if shape.MODE == BALANCED:
        first = tl.where(whole > 0, tl.where(item0 < items, raw0, total), first)
        last = tl.where(whole > 0, tl.where(item1 < items, raw1, total), last)
    return Share(first, last, total, busy, g0, before0)


@triton.jit
def piece_of(unit, begin, program, mine, group, item, work, shape):
    """The piece that starts with `unit`, of an item that starts with `begin`, in the share `mine` of a program."""
    local = unit - begin
    if shape.MODE == BALANCED:
        stop = tl.minimum(begin + group.units, mine.last)
        tile = group.lo // shape.BLOCK_N
        lo = (tile + local) * shape.BLOCK_N
        hi = (tile + stop - begin) * shape.BLOCK_N
        slot = slot_of(program, local)
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
def first_of(mine, begin):
    """Of a balanced plan, the program that has the first piece of the cut item that starts with the unit `begin`."""
    return (((begin + 1).to(tl.int64) * mine.busy - 1) // mine.total).to(tl.int32)


@triton.jit
def pieces_from(program, mine, begin, units):
    """Of a balanced plan, how many pieces the item has whose first is the last of this program's share `mine`."""
    last = ((begin + units).to(tl.int64) * mine.busy + mine.total - 1) // mine.total - 1
    return (last - program + 1).to(tl.int32)


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
