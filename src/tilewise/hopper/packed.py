"""The tiles of a packed call, listed on the device: who works on what follows from lengths that the host does not know.

One program per member writes a record for each of its tiles of rows, into the place that the tile has in its group of
members, the longest first: it counts, for every member in closed form, how many tiles come before. A group's members,
and so many heads, are worked on at once, so that their keys stay in L2. From each such block to the next the direction
turns round, and the last ends with its shortest tiles: programs that take the order in turns, there and back again,
then have about the same to do. Rows that belong to no member are written here, for nobody comes by there.

The order needs no exact cost, only one that is the same for all and never falls along a member's rows.
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
    """What a tile's rows see: keys up to ``last row + off + right``, at most `most` (None: no bound)."""

    right: Any
    most: Any
    TOP_LEFT: Any
    BLOCK_M: Any


class Together(NamedTuple):
    """What is worked on at once: so many heads, and members whose keys begin in the same run of so many keys."""

    heads: Any
    keys: Any


class Group(NamedTuple):
    """Members that are worked on at once: tiles of groups before them, their own, and how many groups come after."""

    start: Any
    tiles: Any
    after: Any


class Member(NamedTuple):
    """Members as vectors, or one as scalars; of tiles, how many, and the slope of their cost."""

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
    if reach.most is not None:
        most = tl.minimum(most, reach.most)
    if reach.right is not None:
        base = reach.BLOCK_M + off + reach.right
    return Member(q_start, k_start, len_q, len_k, off, tiles, base, most)


@triton.jit
def cost(member, m, reach):
    """How many keys the rows of tile m see, near enough."""
    return tl.maximum(tl.minimum(m * reach.BLOCK_M + member.base, member.most), 0)


@triton.jit
def first_above(member, level, reach):
    """The first tile of a member that costs more than `level`; its number of tiles if none does."""
    # Division rounds towards 0, so what is below 0 is cut off first.
    first = (tl.maximum(level - member.base, -reach.BLOCK_M) + reach.BLOCK_M) // reach.BLOCK_M
    first = tl.where(level < 0, 0, tl.where(member.most <= level, member.tiles, first))
    return tl.minimum(first, member.tiles)


@triton.jit
def group_of(b, own, lengths, reach, together):
    """The group of member b."""
    mine = own.k_start // together.keys
    start, tiles, after = mine * 0, mine * 0, mine * 0
    for first in range(0, lengths.members, _MEMBERS):
        others = first + tl.arange(0, _MEMBERS)
        member = member_of(others, lengths, reach)
        theirs = member.k_start // together.keys
        start += tl.sum(tl.where(theirs < mine, member.tiles, 0), 0)
        tiles += tl.sum(tl.where(theirs == mine, member.tiles, 0), 0)
        later = (others > b) & (others < lengths.members)
        before = tl.load(lengths.cu_k + others - 1, mask=later, other=0).to(tl.int32) // together.keys
        after += tl.sum((later & (theirs > before)).to(tl.int32), 0)
    return Group(start, tiles, after)


@triton.jit
def place_of(b, m, own, lengths, reach, together):
    """How many tiles of its group come before the tiles m of member b: the dearer ones, then those before it."""
    level = cost(own, m, reach)
    place = m - first_above(own, level - 1, reach)
    for start in range(0, lengths.members, _MEMBERS):
        others = start + tl.arange(0, _MEMBERS)
        member = member_of(others, lengths, reach)
        level_of = tl.where(others < b, level[:, None] - 1, level[:, None])  # [tiles, members]
        above = member.tiles[None, :] - first_above_of(member, level_of, reach)
        near = member.k_start // together.keys == own.k_start // together.keys
        place += tl.sum(tl.where(near[None, :], above, 0), 1)
    return place


@triton.jit
def put_in_order(order, place, mine, group, together, heads_all):
    """Write where the tiles of these places in their group come, for every head."""
    blocks = tl.cdiv(heads_all, together.heads)
    record = group.start + place
    for first in range(0, heads_all, _HEADS):
        head = first + tl.arange(0, _HEADS)[None, :]
        block = head // together.heads
        width = tl.minimum(together.heads, heads_all - block * together.heads)
        falls = (blocks - 1 - block + group.after * blocks) % 2 == 0
        among = tl.where(falls, place[:, None], group.tiles - 1 - place[:, None])
        at = group.start * heads_all + block * together.heads * group.tiles + among * width
        at += head - block * together.heads
        tl.store(order + at, record[:, None] * heads_all + head, mask=mine[:, None] & (head < heads_all))


@triton.jit
def first_above_of(member, level, reach):
    """`first_above` of many members, for levels [tiles, members]."""
    wide = Member(
        member.q_start, member.k_start, member.len_q, member.len_k, member.off,
        member.tiles[None, :], member.base[None, :], member.most[None, :],
    )  # fmt: skip
    return first_above(wide, level, reach)


@triton.jit
def blank(out, lse, first, last, stride, total_q, width, heads):
    """O becomes 0 and the LSE -inf in the rows ``first .. last``, some at a time."""
    for start in range(first, last, stride):
        rows = start + tl.arange(0, _ROWS)
        inside = (rows < last)[:, None]
        for column in range(0, width, _COLUMNS):
            columns = column + tl.arange(0, _COLUMNS)
            there = rows.to(tl.int64)[:, None] * width + columns[None, :]
            tl.store(out + there, 0.0, mask=inside & (columns < width)[None, :])
        for head in range(0, heads, _COLUMNS):
            numbers = head + tl.arange(0, _COLUMNS)
            there = numbers.to(tl.int64)[None, :] * total_q + rows[:, None]
            tl.store(lse + there, float("-inf"), mask=inside & (numbers < heads)[None, :])


@triton.jit(
    do_not_specialize=[
        "members",
        "total_q",
        "max_q",
        "max_k",
        "right",
        "most",
        "width",
        "heads",
        "tile_heads",
        "near_heads",
        "near_keys",
        "most_records",
    ],
    do_not_specialize_on_alignment=["cu_q", "cu_k", "used_q", "used_k"],
)
def list_kernel(
    cu_q, cu_k, used_q, used_k, members, total_q, max_q, max_k, right, most, table, most_records, tile_heads,
    near_heads, near_keys, out, lse, width, heads, TOP_LEFT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Programs: at least one per member; all share the rows after the last member.

    There is place for `most_records`, and `tile_heads` have tiles of their own.
    """
    lengths = Lengths(cu_q, cu_k, used_q, used_k, members, total_q, max_q, max_k)
    reach = Reach(right, most, TOP_LEFT, BLOCK_M)
    together = Together(near_heads, near_keys)
    b = tl.program_id(0)
    if b < lengths.members:
        own = member_of(b, lengths, reach)
        group = group_of(b, own, lengths, reach, together)
        for start in range(0, own.tiles, _TILES):
            m = start + tl.arange(0, _TILES)
            place = place_of(b, m, own, lengths, reach, together)
            mine = m < own.tiles
            put_in_order(table + (1 + most_records) * RECORD, place, mine, group, together, tile_heads)
            record = table + (1 + group.start + place) * RECORD
            tl.store(record, b, mask=mine)
            tl.store(record + 1, m * reach.BLOCK_M, mask=mine)
            tl.store(record + 2, own.q_start, mask=mine)
            tl.store(record + 3, own.len_q, mask=mine)
            tl.store(record + 4, own.k_start, mask=mine)
            tl.store(record + 5, own.len_k, mask=mine)
            tl.store(record + 6, own.off, mask=mine)
        end = tl.load(lengths.cu_q + b + 1).to(tl.int32)
        end = tl.minimum(end, lengths.total_q)
        blank(out, lse, own.q_start + tl.maximum(own.len_q, 0), end, _ROWS, lengths.total_q, width, heads)
    if b == 0:
        count = tl.zeros([_MEMBERS], tl.int32)
        for start in range(0, lengths.members, _MEMBERS):
            count += member_of(start + tl.arange(0, _MEMBERS), lengths, reach).tiles
        tl.store(table, tl.sum(count, 0))
    first = tl.load(lengths.cu_q + lengths.members).to(tl.int32) + b * _ROWS
    blank(out, lse, first, lengths.total_q, tl.num_programs(0) * _ROWS, lengths.total_q, width, heads)
