"""Split-KV plans: how the keys of a batch are divided among programs, and where partial results lie.

The *items* of a call are its row tiles, ``item = (b · row_tiles + m) · heads_kv + h``: block_m of the packed rows of
sequence b and key head h, packed row ``r = i · group_size + g`` being query row i of head ``h · group_size + g``. An
item's keys are those that any of its rows sees through the band (`kvcache.key_range`); they lie in whole tiles of the
grid of block_n keys. A *piece* is a run of tiles of one item. An item that is one piece is finished by whoever computes
it; pieces of cut items leave a partial result, output and LSE, in a *slot*, and are merged.

Two ways to cut, both from sizes and lengths alone, so a plan is computed on the device, inside a CUDA graph too:

- *Balanced*: all tiles in a row, item after item, are cut into as many runs as there are programs, or tiles if those
  are fewer; they differ by one tile at most (stream-K). Items of at most `whole` tiles are never cut: a cut inside one
  moves to its nearer end (the adaptive rule of Flash-Decoding++: short contexts are not split). Nor is any, where the
  items are so alike that programs with the same number of whole ones have little more to do (`WHOLE_COST`,
  `WHOLE_EXCESS`): then there is nothing to merge. Items of equal length are cut into equal parts, as many as there are
  programs for, if hardly any is left without: each then begins once, and not in the middle of its work again. Piece of
  program p: slot ``2 p + 1`` if it is its item's first, else ``2 p``. A program cuts at most the item that it starts
  with and the one it ends with, hence two slots.
- *Fixed*: each item into parts of its own, by `split_size` or `num_splits` (`parts`); slot ``item · splits + part``.

Source: Osama et al., "Stream-K" (2023); LeanAttention (Sanovar et al., 2024); Flash-Decoding++ (Hong et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kvcache import SPLIT_UNIT, CacheProblem, Lengths, Static, key_range

# Columns of `WorkList.pieces`.
SEQUENCE, ROW_TILE, HEAD, KEY_LO, KEY_HI, SLOT = range(6)
# No item is cut if the busiest program then has at most an nth more than an even share, and at most so many tiles:
# merging costs as much.
WHOLE_COST = 12
WHOLE_EXCESS = 8
# In the column SLOT: the piece is its whole item, which goes straight to the output.
WHOLE = -1


@dataclass(frozen=True)
class Plan:
    """What is known before any length: sizes, and so grids and memory.

    Args:
        batch, heads_kv: of the call.
        row_tiles: of the longest sequence, for each key head.
        block_m, block_n: packed rows and keys of a tile; block_n divides 128.
        group_size, head_dim_v: of the call.
        capacity: keys that a sequence may have.
        static: the call's num_splits or split_size; without either the plan is balanced.
        programs: runs of a balanced plan.
        whole: tiles up to which an item of a balanced plan is not cut.
    """

    batch: int
    heads_kv: int
    row_tiles: int
    block_m: int
    block_n: int
    group_size: int
    head_dim_v: int
    capacity: int
    static: Static
    programs: int
    whole: int

    @classmethod
    def of(cls, problem: CacheProblem, block_m: int, block_n: int, programs: int, whole: int) -> Plan:
        """The plan of a call for kernels with these tiles, on a device that runs `programs` of them at once."""
        call = problem.attention
        return cls(
            batch=call.batch,
            heads_kv=call.heads_kv,
            row_tiles=-(-call.seqlen_q * call.group_size // block_m),
            block_m=block_m,
            block_n=block_n,
            group_size=call.group_size,
            head_dim_v=call.head_dim_v,
            capacity=problem.capacity,
            static=problem.static,
            programs=programs,
            whole=whole,
        )

    @property
    def balanced(self) -> bool:
        return self.static.num_splits is None and self.static.split_size is None

    @property
    def items(self) -> int:
        return self.batch * self.row_tiles * self.heads_kv

    @property
    def splits(self) -> int:
        """Parts that an item of a fixed plan can have."""
        if self.static.split_size is not None:
            return max(1, -(-self.capacity // self.static.split_size))
        return self.static.num_splits or 1

    @property
    def max_pieces(self) -> int:
        """Pieces that there can be: each item is one, and each cut adds one."""
        return self.items + self.programs - 1 if self.balanced else self.items * self.splits

    @property
    def slots(self) -> int:
        """Places for partial results."""
        if self.balanced:
            return 2 * self.programs
        return self.items * self.splits if self.splits > 1 else 0

    def workspace_bytes(self) -> int:
        """What partial results take: fp32, block_m rows of head_dim_v values and an LSE for each slot."""
        return self.slots * self.block_m * (self.head_dim_v + 1) * 4


class WorkList(NamedTuple):
    """A plan for given lengths, int32, on the device of the lengths; entries that are not used have sequence -1.

    pieces: [max_pieces, 6]: sequence, row tile, key head, first key, last key (exclusive), slot or -1; in the order of
        items, and of keys inside an item. A piece without keys has ``KEY_LO >= KEY_HI``: its rows see nothing.
    starts: [programs + 1]: the pieces of program p are ``starts[p] .. starts[p + 1]``; of a fixed plan each piece.
    merges: [items, 3]: the first slot of an item, its second, and how many pieces there are; later slots follow by
        steps of 2 (balanced) or 1 (fixed). Nothing is to be merged where there are less than two.
    """

    pieces: torch.Tensor
    starts: torch.Tensor
    merges: torch.Tensor


class Items(NamedTuple):
    """Of all items, int64 [items]: the keys ``lo .. hi``, the first tile and their number (0: no such row tile)."""

    lo: torch.Tensor
    hi: torch.Tensor
    first: torch.Tensor
    tiles: torch.Tensor


def items_of(plan: Plan, at: Lengths, left: int | None, right: int | None) -> Items:
    """The items for these lengths. One whose rows see nothing has one tile all the same: someone writes its zeros."""
    row0 = torch.arange(plan.row_tiles, device=at.q.device)[None] * plan.block_m  # [1, M], packed
    rows = at.q[:, None] * plan.group_size
    first, last = row0 // plan.group_size, (torch.minimum(row0 + plan.block_m, rows) - 1) // plan.group_size + 1
    each = Lengths(*(x[:, None].expand(-1, plan.row_tiles) for x in at))
    lo, hi = key_range(each, left, right, first, last)
    hi = torch.maximum(lo, hi)
    tile = lo // plan.block_n
    tiles = torch.where(row0 < rows, (-(-hi // plan.block_n) - tile).clamp(min=1), 0)
    columns = (
        x.expand(plan.batch, -1)[..., None].expand(-1, -1, plan.heads_kv).flatten() for x in (lo, hi, tile, tiles)
    )
    return Items(*columns)


def work_list(plan: Plan, at: Lengths, left: int | None, right: int | None) -> WorkList:
    """The work for these lengths, in tensor operators of fixed shapes: nothing is read on the host.

    Args:
        plan: sizes.
        at: lengths [batch].
        left, right: the band, of `kvcache.band`.
    """
    if not plan.items:
        pieces = torch.full((plan.max_pieces, 6), -1, dtype=torch.int32, device=at.q.device)
        programs = plan.programs if plan.balanced else 0
        return WorkList(pieces, pieces.new_zeros(programs + 1), pieces.new_zeros(0, 3))
    items = items_of(plan, at, left, right)
    return _balanced(plan, items) if plan.balanced else _fixed(plan, items)


def _balanced(plan: Plan, items: Items) -> WorkList:
    n = items.tiles.numel()
    ends = items.tiles.cumsum(0)
    begins = ends - items.tiles
    bounds = _bounds(plan, items, begins, ends)  # [programs + 1], in tiles
    # Each item begins a piece, and so does each bound inside one.
    inner = bounds[1:-1]
    owner = _owner(ends, inner)
    cuts = (inner > begins[owner]) & (inner < ends[owner])
    begin = torch.cat([begins, inner])
    item = torch.cat([torch.arange(n, device=ends.device), owner])
    exists = torch.cat([items.tiles > 0, cuts])
    order = torch.argsort(torch.where(exists, begin, torch.iinfo(torch.int64).max), stable=True)
    begin, item, exists = begin[order], item[order], exists[order]
    after = torch.cat([begin[1:], begin[-1:]])
    last = torch.cat([exists[1:] & (item[1:] == item[:-1]), exists.new_zeros(1)])
    end = torch.where(last, after, ends[item])
    program = torch.searchsorted(bounds, begin, right=True) - 1
    is_first = begin == begins[item]
    whole = is_first & (end == ends[item])
    slot = torch.where(whole, WHOLE, 2 * program + is_first)
    pieces = _pieces(plan, items, item, (begin - begins[item], end - begins[item]), slot, exists)
    starts = torch.searchsorted(torch.where(exists, begin, torch.iinfo(torch.int64).max), bounds)
    return WorkList(pieces, starts.int(), _merges(n, item, program, exists))


def _owner(ends: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """The item that holds a tile."""
    return torch.searchsorted(ends, tile, right=True).clamp(max=max(0, ends.numel() - 1))


def _bounds(plan: Plan, items: Items, begins: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Where each program's run of tiles begins; the last entry is the number of tiles."""
    total = ends[-1]
    program = torch.arange(plan.programs + 1, device=ends.device)
    # Equal items have equal parts, one for each program that has anything to do.
    rank, longest = (items.tiles > 0).cumsum(0), items.tiles.max()
    there = rank[-1]
    equal = plan.programs // there.clamp(min=1) * there
    equally = (longest * there == total) & (WHOLE_COST * plan.programs <= (WHOLE_COST + 1) * equal)
    # A program more than there are tiles would have none, and come between those that share an item.
    busy = torch.minimum(torch.where(equally, equal, plan.programs), total).clamp(min=1)
    raw = torch.minimum(program, busy) * total // busy
    owner = _owner(ends, raw)
    begin, end = begins[owner], ends[owner]
    nearer = torch.where(2 * (raw - begin) < end - begin, begin, end)
    even = torch.where((items.tiles[owner] <= plan.whole) & (raw < total), nearer, raw)
    # Or each program has the same number of items, of those that there are.
    each = -(-there // plan.programs)
    excess = each * longest * plan.programs - total
    alike = (WHOLE_COST * excess <= total) & (excess <= WHOLE_EXCESS * plan.programs)
    item = torch.searchsorted(rank, program * each, right=True)
    return torch.where(alike, torch.cat([begins, ends[-1:]])[item], even)


def _fixed(plan: Plan, items: Items) -> WorkList:
    n, splits = items.tiles.numel(), plan.splits
    unit = SPLIT_UNIT if plan.static.split_size is None else plan.static.split_size
    first = items.lo // unit
    units = (-(-items.hi // unit) - first).clamp(min=1)
    part = torch.arange(splits, device=items.lo.device)
    if plan.static.split_size is None:
        cuts = first[:, None] + units[:, None] * torch.arange(splits + 1, device=part.device) // splits
    else:
        cuts = first[:, None] + torch.minimum(torch.arange(splits + 1, device=part.device), units[:, None])
    lo = torch.maximum(cuts[:, :-1] * unit, items.lo[:, None])
    hi = torch.minimum(cuts[:, 1:] * unit, items.hi[:, None])
    exists = (cuts[:, 1:] > cuts[:, :-1]) & (items.tiles > 0)[:, None]
    count = exists.sum(1)
    item = torch.arange(n, device=part.device)
    rank = exists.cumsum(1) - 1
    slot = torch.where(count[:, None] > 1, item[:, None] * splits + rank, WHOLE)
    columns = (*_names(plan, item), lo, hi, slot)
    pieces = torch.stack([x.expand(n, splits) for x in (c if c.ndim == 2 else c[:, None] for c in columns)], dim=-1)
    pieces[..., SEQUENCE].masked_fill_(~exists, -1)
    starts = torch.arange(n * splits + 1, device=part.device)
    merges = torch.stack([item * splits, item * splits + 1, count], dim=1)
    return WorkList(pieces.flatten(0, 1).int(), starts.int(), merges.int())


def _names(plan: Plan, item: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequence, row tile and key head of items."""
    tile = item // plan.heads_kv
    return tile // plan.row_tiles, tile % plan.row_tiles, item % plan.heads_kv


def _pieces(
    plan: Plan,
    items: Items,
    item: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    slot: torch.Tensor,
    exists: torch.Tensor,
) -> torch.Tensor:
    """The table of pieces from their items and the tiles of those, first and last."""
    base = items.first[item]
    lo = torch.maximum((base + tiles[0]) * plan.block_n, items.lo[item])
    hi = torch.minimum((base + tiles[1]) * plan.block_n, items.hi[item])
    pieces = torch.stack([*_names(plan, item), lo, hi, slot], dim=1)
    pieces[:, SEQUENCE].masked_fill_(~exists, -1)
    return pieces.int()


def _merges(n: int, item: torch.Tensor, program: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Slots and number of pieces of each item of a balanced plan: its pieces belong to successive programs."""
    item = torch.where(exists, item, n)
    count = torch.zeros(n + 1, dtype=torch.int64, device=item.device).index_add_(0, item, torch.ones_like(item))
    first = torch.full((n + 1,), torch.iinfo(torch.int64).max, device=item.device)
    first = first.scatter_reduce_(0, item, program, "amin")[:n]
    first = torch.where(count[:n] > 0, first, 0)
    return torch.stack([2 * first + 1, 2 * first + 2, count[:n]], dim=1).int()


def parts(static: Static, lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts that a call asks the keys ``lo .. hi`` of a row tile to be cut into; at least one, which may be empty.

    >>> parts(Static(split_size=256), 100, 600)
    [(100, 256), (256, 512), (512, 600)]
    >>> parts(Static(num_splits=2), 100, 600)
    [(100, 256), (256, 600)]
    """
    hi = max(lo, hi)
    if static.split_size is not None:
        step = static.split_size
        cuts = [*range(lo // step * step, hi, step)]
    else:
        first, n = lo // SPLIT_UNIT, static.num_splits or 1
        units = -(-hi // SPLIT_UNIT) - first
        cuts = [(first + units * i // n) * SPLIT_UNIT for i in range(n)]
    cuts[:1] = [lo]
    found = [(max(lo, start), min(stop, hi)) for start, stop in zip(cuts, [*cuts[1:], hi], strict=True)]
    return [part for part in found if part[0] < part[1]] or [(lo, hi)]
