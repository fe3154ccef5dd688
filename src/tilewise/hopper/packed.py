"""The tiles of a packed call, listed on the device: who works on what follows from lengths that the host does not know.

One program per member writes a record for each of its tiles of rows, and where the tile comes in the order, for every
head. Programs take the order in turns, there and back again. What is worked on at once has to be little, for its keys
are to stay in L2, and all programs must have about the same to do, or they drift apart and it is not little any more.

So tiles come in pairs, the dearest of a head with its cheapest and so on inwards, which cost the same under a causal
mask as under none; middle ones with the next head's. As many pairs as there are programs are a round trip: one of each
on the way there, the other on the way back. Heads of a member follow each other, and members the dearest first; every
other round trip begins with the cheaper end. Where there are few rounds the dearest tiles of all come first instead.

Rows that belong to no member are written here, for nobody comes by there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Numbers in a record: batch entry, first row inside the member, first row of the member in q, rows, first row in k,
# keys, offset of the diagonal. Record 0 holds how many records follow. Behind the last record that there can be lies
# the order: for tiles of all heads, ``record * heads + head``.
RECORD = tl.constexpr(8)
# Tiles, members and heads that are looked at at once, and a piece of what is blank.
_TILES, _MEMBERS, _HEADS, _ROWS, _COLUMNS = (tl.constexpr(n) for n in (16, 128, 16, 8, 256))


def room(rows: int, members: int, heads: int, block_m: int) -> tuple[int, int, int]:
    """Of the table for so many rows in all: the most records after the first, where the order begins, and its size."""
    most = -(-rows // block_m) + members
    order = (1 + most) * RECORD.value
    return most, order, order + most * heads


class Lengths(NamedTuple):
    """Where members begin and end, and how much of their q and k is in use, in device memory; rows of q in all; the
    longest member, as the call states it.
    """

    cu_q: Any
    cu_k: Any
    used_q: Any
    used_k: Any
    members: Any
    total_q: Any
    max_q: Any
    max_k: Any


class Reach(NamedTuple):
    """What a row sees: from ``row + off - before`` to ``row + off + after`` (None: no bound)."""

    before: Any
    after: Any
    TOP_LEFT: Any
    BLOCK_M: Any


class Ahead(NamedTuple):
    """What there is of members that come before one: records, pairs, and tiles without a second; and of all members."""

    records: Any
    pairs: Any
    singles: Any
    all_records: Any
    all_pairs: Any


class Blanks(NamedTuple):
    """Results that have a row for each of q, and their columns: one, perhaps another, and perhaps an LSE of heads."""

    out: Any
    also: Any
    lse: Any
    width: Any
    also_width: Any
    heads: Any


class Member(NamedTuple):
    """Members as vectors, or one as scalars; how many tiles, and what they cost: from `base` on BLOCK_M more for each,
    at most `most`.
    """

    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    off: Any
    tiles: Any
    base: Any
    most: Any


@triton.jit
def member_of(b, lengths, reach):
    """The members b, with no rows beyond the last."""
    real = b < lengths.members
    q_start = tl.load(lengths.cu_q + b, mask=real, other=0).to(tl.int32)
    q_end = tl.load(lengths.cu_q + b + 1, mask=real, other=0).to(tl.int32)
    k_start = tl.load(lengths.cu_k + b, mask=real, other=0).to(tl.int32)
    keys = tl.load(lengths.cu_k + b + 1, mask=real, other=0).to(tl.int32) - k_start
    if lengths.used_k is not None:
        keys = tl.load(lengths.used_k + b, mask=real, other=0).to(tl.int32)
    rows = q_end - q_start
    if lengths.used_q is not None:
        rows = tl.load(lengths.used_q + b, mask=real, other=0).to(tl.int32)
    off = keys - rows
    if reach.TOP_LEFT:
        off = keys * 0
    # What an understated maximum leaves out is not computed; nothing ever reaches beyond the tensors.
    len_q = tl.minimum(tl.minimum(rows, lengths.max_q), lengths.total_q - q_start)
    len_k = tl.maximum(tl.minimum(keys, lengths.max_k), 0)
    tiles = tl.maximum(tl.cdiv(len_q, reach.BLOCK_M), 0)
    most = len_k
    base = len_k
    if reach.after is not None:
        base = reach.BLOCK_M + off + reach.after
        if reach.before is not None:
            most = tl.minimum(most, reach.before + reach.after + reach.BLOCK_M)
    elif reach.before is not None:
        base = len_k - ((tiles - 1) * reach.BLOCK_M + off - reach.before)
    return Member(q_start, k_start, len_q, len_k, off, tiles, base, most)


@triton.jit
def rising(m, member, reach):
    """Which tile it is when they are counted so that the cost never falls."""
    if reach.after is None and reach.before is not None:
        m = member.tiles - 1 - m
    return m


@triton.jit
def cost(member, m, reach):
    """How many keys the rows of tile m see, counted as `rising` does, near enough."""
    return tl.maximum(tl.minimum(m * reach.BLOCK_M + member.base, member.most), 0)


@triton.jit
def pair_cost(member, reach):
    """What the first and the last tile cost together."""
    return cost(member, 0, reach) + cost(member, member.tiles - 1, reach)


@triton.jit
def first_above(member, level, reach):
    """The first tile of a member that costs more than `level`; its number of tiles if none does."""
    # Division rounds towards 0, so what is below 0 is cut off first.
    first = (tl.maximum(level - member.base, -reach.BLOCK_M) + reach.BLOCK_M) // reach.BLOCK_M
    first = tl.where(level < 0, 0, tl.where(member.most <= level, member.tiles, first))
    return tl.minimum(first, member.tiles)


@triton.jit
def ahead_of(b, own, lengths, reach, heads):
    """What comes before member b: its records follow those of lower numbers, its pairs those of dearer members."""
    mine = pair_cost(own, reach)
    records, pairs, singles, all_records, all_pairs = b * 0, b * 0, b * 0, b * 0, b * 0
    for first in range(0, lengths.members, _MEMBERS):
        others = first + tl.arange(0, _MEMBERS)
        member = member_of(others, lengths, reach)
        theirs = pair_cost(member, reach)
        earlier = (theirs > mine) | ((theirs == mine) & (others < b))
        tiles = member.tiles * heads
        records += tl.sum(tl.where(others < b, member.tiles, 0), 0)
        pairs += tl.sum(tl.where(earlier, tiles // 2, 0), 0)
        singles += tl.sum(tl.where(earlier, tiles & 1, 0), 0)
        all_records += tl.sum(member.tiles, 0)
        all_pairs += tl.sum(tiles // 2, 0)
    return Ahead(records, pairs, singles, all_records, all_pairs)


@triton.jit
def slot_in_pairs(m, head, own, ahead, heads, programs):
    """Where tiles m of these heads of a member come in the order; m as `rising` counts."""
    other = own.tiles - 1 - m
    middle = m == other
    number = tl.where(middle, own.tiles - 1, (head & 1) * (own.tiles // 2) + tl.minimum(m, other))
    pair = ahead.pairs + (head // 2) * own.tiles + number
    second = tl.where(middle, head & 1, (m < other).to(tl.int32)) == 1
    trip = pair // programs
    size = tl.minimum(programs, ahead.all_pairs - trip * programs)
    at = pair % programs
    at = tl.where(trip & 1 == 1, size - 1 - at, at)
    slot = 2 * programs * trip + tl.where(second, 2 * size - 1 - at, at)
    alone = middle & (head == heads - 1) & (heads & 1 == 1)
    return tl.where(alone, 2 * ahead.all_pairs + ahead.singles, slot)


@triton.jit
def place_of(b, m, own, lengths, reach):
    """How many tiles come before the tiles m of member b in the order of cost: dearer ones, then those before it."""
    level = cost(own, m, reach)
    place = m - first_above(own, level - 1, reach)
    for start in range(0, lengths.members, _MEMBERS):
        others = start + tl.arange(0, _MEMBERS)
        member = member_of(others, lengths, reach)
        level_of = tl.where(others < b, level[:, None] - 1, level[:, None])  # [tiles, members]
        place += tl.sum(member.tiles[None, :] - first_above_of(member, level_of, reach), 1)
    return place


@triton.jit
def put_in_order(order, b, m, own, ahead, lengths, reach, heads, programs):
    """Write where the tiles m of member b come, for every head."""
    record = ahead.records + m
    mine = m < own.tiles
    m = rising(m, own, reach)
    place = m * 0
    if programs == 0:
        place = place_of(b, m, own, lengths, reach)
    for first in range(0, heads, _HEADS):
        head = first + tl.arange(0, _HEADS)[None, :]
        slot = place[:, None] * heads + head
        if programs > 0:
            slot = slot_in_pairs(m[:, None], head, own, ahead, heads, programs)
        tl.store(order + slot, record[:, None] * heads + head, mask=mine[:, None] & (head < heads))


@triton.jit
def first_above_of(member, level, reach):
    """`first_above` of many members, for levels [tiles, members]."""
    wide = Member(
        member.q_start, member.k_start, member.len_q, member.len_k, member.off,
        member.tiles[None, :], member.base[None, :], member.most[None, :],
    )  # fmt: skip
    return first_above(wide, level, reach)


@triton.jit
def blank(blanks, first, last, stride, total_q):
    """Results become 0, and the LSE -inf, in the rows ``first .. last``, some at a time."""
    for start in range(first, last, stride):
        rows = start + tl.arange(0, _ROWS)
        inside = (rows < last)[:, None]
        blank_matrix(blanks.out, rows, inside, blanks.width)
        if blanks.also is not None:
            blank_matrix(blanks.also, rows, inside, blanks.also_width)
        if blanks.lse is not None:
            for head in range(0, blanks.heads, _COLUMNS):
                numbers = head + tl.arange(0, _COLUMNS)
                there = numbers.to(tl.int64)[None, :] * total_q + rows[:, None]
                tl.store(blanks.lse + there, float("-inf"), mask=inside & (numbers < blanks.heads)[None, :])


@triton.jit
def blank_matrix(x, rows, inside, width):
    """Rows of so many columns become 0."""
    for column in range(0, width, _COLUMNS):
        columns = column + tl.arange(0, _COLUMNS)
        there = rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(x + there, 0.0, mask=inside & (columns < width)[None, :])


@triton.jit(
    do_not_specialize=[
        "members",
        "total_q",
        "max_q",
        "max_k",
        "before",
        "after",
        "width",
        "also_width",
        "heads",
        "tile_heads",
        "programs",
        "most_records",
    ],
    do_not_specialize_on_alignment=["cu_q", "cu_k", "used_q", "used_k"],
)
def list_kernel(
    cu_q, cu_k, used_q, used_k, members, total_q, max_q, max_k, before, after, table, most_records, tile_heads,
    programs, out, also, lse, width, also_width, heads, TOP_LEFT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Programs: at least one per member; all share the rows after the last member.

    There is place for `most_records`, and `tile_heads` have tiles of their own. `programs` take them in turns; 0: the
    dearest come first.
    """
    lengths = Lengths(cu_q, cu_k, used_q, used_k, members, total_q, max_q, max_k)
    reach = Reach(before, after, TOP_LEFT, BLOCK_M)
    blanks = Blanks(out, also, lse, width, also_width, heads)
    order = table + (1 + most_records) * RECORD
    b = tl.program_id(0)
    if b < lengths.members:
        own = member_of(b, lengths, reach)
        ahead = ahead_of(b, own, lengths, reach, tile_heads)
        if b == 0:
            tl.store(table, ahead.all_records)
        for start in range(0, own.tiles, _TILES):
            m = start + tl.arange(0, _TILES)
            mine = m < own.tiles
            put_in_order(order, b, m, own, ahead, lengths, reach, tile_heads, programs)
            record = table + (1 + ahead.records + m) * RECORD
            tl.store(record, b, mask=mine)
            tl.store(record + 1, m * reach.BLOCK_M, mask=mine)
            tl.store(record + 2, own.q_start, mask=mine)
            tl.store(record + 3, own.len_q, mask=mine)
            tl.store(record + 4, own.k_start, mask=mine)
            tl.store(record + 5, own.len_k, mask=mine)
            tl.store(record + 6, own.off, mask=mine)
        end = tl.load(lengths.cu_q + b + 1).to(tl.int32)
        end = tl.minimum(end, lengths.total_q)
        blank(blanks, own.q_start + tl.maximum(own.len_q, 0), end, _ROWS, lengths.total_q)
    first = tl.load(lengths.cu_q + lengths.members).to(tl.int32) + b * _ROWS
    blank(blanks, first, lengths.total_q, tl.num_programs(0) * _ROWS, lengths.total_q)
