"""Which program works on which tiles: a table, made on the host once per shape and kept.

A persistent grid that deals tiles by number resonates with causal masks (every program gets tiles of one length). The
table deals them longest first, each to the program that is free soonest (Graham's rule, 1969: at most 4/3 of the
optimum), so causal, windowed and full calls fill the machine alike without a counter in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

# What a tile costs beside its key tiles, in key tiles: first scores, last values, output.
_OVERHEAD = 1.5
# How much later than at best the last program may end for the sake of L2, and the part of the work that comes last.
_UNEVEN, _SHORT = 1.03, 7


class Bounds(NamedTuple):
    """Lengths, and the band of visible keys (`None`: no bound), as `work.Band` has them."""

    len_q: int
    len_k: int
    off: int
    left: int | None
    right: int | None

    def middle_keys(self) -> int:
        """How many keys the middle row sees."""
        row = self.len_q // 2 + self.off
        first = 0 if self.left is None else max(0, row - self.left)
        last = self.len_k if self.right is None else min(self.len_k, row + self.right + 1)
        return max(0, last - first)

    def key_tiles(self, m0: int, block_m: int, block_n: int) -> int:
        """How many key tiles the rows from m0 visit."""
        last_row = min(m0 + block_m, self.len_q) - 1
        first = 0 if self.left is None else max(0, m0 + self.off - self.left)
        last = self.len_k if self.right is None else min(self.len_k, last_row + self.off + self.right + 1)
        return max(1, -(-last // block_n) - min(first, self.len_k - 1) // block_n)


class Dealt(NamedTuple):
    """int32 [rounds + 1, programs]: tile numbers ``(b * heads + h) * tiles_m + m``, -1 for none, as in the last row."""

    table: torch.Tensor
    rounds: int
    programs: int


@lru_cache(maxsize=256)
def deal(
    bounds: Bounds, block_m: int, block_n: int, pairs: int, programs: int, device: torch.device, together: int = 0
) -> Dealt:
    """The table for `pairs` (batch entry, head) pairs on so many programs.

    So many pairs are worked on `together` (0: all), so that what their tiles see stays in L2 until all have seen it.
    Only the shortest tiles of all pairs come last, and fill what is left until the last program ends. Where that is
    still much later than with all pairs at once, more of them are at once.
    """
    together = together or pairs
    lengths = _lengths(bounds, block_m, block_n)
    order = sorted(range(len(lengths)), key=lambda m: -lengths[m])
    all_at_once, soonest = _hand_out(_by_groups(order, pairs, pairs), lengths, programs)
    while together < pairs:
        lists, end = _hand_out(_short_last(order, lengths, pairs, together), lengths, programs)
        if end <= _UNEVEN * soonest:
            return _table(lists, device)
        together *= 2
    return _table(all_at_once, device)


def _short_last(order: list[int], lengths: list[int], pairs: int, together: int) -> list[int]:
    """Tiles in groups of pairs, but for the shortest, which are at most a seventh of the work."""
    last, left = len(order), sum(lengths) // _SHORT
    while last > 0 and lengths[order[last - 1]] < lengths[order[0]] and lengths[order[last - 1]] <= left:
        last -= 1
        left -= lengths[order[last]]
    tiles = len(order)
    return _by_groups(order[:last], pairs, together, tiles) + _by_groups(order[last:], pairs, pairs, tiles)


def _lengths(bounds: Bounds, block_m: int, block_n: int) -> list[int]:
    return [bounds.key_tiles(m0, block_m, block_n) for m0 in range(0, bounds.len_q, block_m)]


def _by_groups(order: Sequence[int], pairs: int, together: int, tiles: int = 0) -> list[int]:
    """The numbers of tiles: of so many pairs at once, in this order of a pair's, all of its `tiles` (0) or some."""
    tiles = tiles or len(order)
    # Heads of one length follow each other, so that those at work at once are few and their keys stay in L2.
    groups = (range(first, min(first + together, pairs)) for first in range(0, pairs, together))
    return [pair * tiles + m for group in groups for m in order for pair in group]


def _hand_out(numbers: Sequence[int], lengths: Sequence[int], programs: int) -> tuple[list[list[int]], float]:
    """Each tile, in this order, to the program that is free soonest; and when the last one ends."""
    programs = min(programs, len(numbers))
    free = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in range(programs)]
    for number in numbers:
        busy, program = heapq.heappop(free)
        lists[program].append(number)
        heapq.heappush(free, (busy + lengths[number % len(lengths)] + _OVERHEAD, program))
    return lists, max(free)[0]


def _table(lists: list[list[int]], device: torch.device) -> Dealt:
    rounds = max(map(len, lists))
    padded = [numbers + [-1] * (rounds + 1 - len(numbers)) for numbers in lists]
    return Dealt(torch.tensor(padded, dtype=torch.int32).T.contiguous().to(device), rounds, len(lists))


class InTurn(NamedTuple):
    """Tiles dealt, and int32 [tiles, 2]: with which of its pair a tile shares a wave, from one to before another."""

    dealt: Dealt
    waves: torch.Tensor


@lru_cache(maxsize=256)
def deal_in_turn(
    bounds: Bounds, block_m: int, block_n: int, pairs: int, programs: int, device: torch.device, together: int
) -> InTurn:
    """As `deal`, for tiles of keys that add to tiles of rows one after the other (`turns`). Programs run at once.

    Where rows see all keys, tiles are equally long and dealt round by round; those of a pair that are dealt in the same
    round are a wave. Nobody waits for ever: sort the visits of a pair by round, by head of the group, by whether the
    tile has begun anew at the first row, by the steps that it has taken, and by number, the higher first. Programs and
    turns both follow that order.

    With a band the tiles of a pair are one wave, dealt from the last one on: where rows see what comes before them, it
    has the fewest rows, so each is ahead of those that are dealt after it. Turns and programs follow the order of
    dealing, so the first tile in it that is not done waits for nobody. The last tiles are then the longest. To fill the
    time until the very last ends, pairs that are done early keep back some of their higher numbers, which are dealt at
    the end in ascending order, each a wave.
    """
    lengths = _lengths(bounds, block_m, block_n)
    if bounds.left is None and bounds.right is None:
        lists, _ = _hand_out(_by_groups(range(len(lengths)), pairs, together), lengths, programs)
        waves = _rounds(lists, len(lengths))
    else:
        # Who keeps tiles back must be done before the last group begins.
        together = min(together, max(1, pairs // 2))
        tried = [
            (_hand_out(_kept_back(len(lengths), pairs, programs, together, *back), lengths, programs), back)
            for back in _to_keep_back(lengths, pairs, programs, together)
        ]
        # What is not worth a hundredth is not worth the rows that are read again either.
        shortest = min(end for (_, end), _ in tried)
        (lists, _), (first, kept) = next(x for x in tried if x[0][1] <= 1.01 * shortest)
        waves = [
            (m, m + 1) if m >= first and pair < kept else (0, first if pair < kept else len(lengths))
            for pair in range(pairs)
            for m in range(len(lengths))
        ]
    return InTurn(_table(lists, device), torch.tensor(waves, dtype=torch.int32).to(device))


def _rounds(lists: list[list[int]], tiles: int) -> list[tuple[int, int]]:
    """Of every tile, those of its pair that are dealt in the same round."""
    rounds = {number: i for numbers in lists for i, number in enumerate(numbers)}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for number, i in sorted(rounds.items()):
        pair, m = divmod(number, tiles)
        found[pair, i] = found.get((pair, i), (m, m))[0], m + 1
    return [found[number // tiles, rounds[number]] for number in range(len(rounds))]


def _to_keep_back(lengths: list[int], pairs: int, programs: int, together: int) -> list[tuple[int, int]]:
    """From which tile on how many pairs may keep theirs back: nothing first, then more and more."""
    tiles, found = len(lengths), [(len(lengths), 0)]
    for first in (tiles // 2, 3 * tiles // 8, tiles // 4, tiles // 8):
        # On average half of the last tile's time remains to be filled.
        kept = -(-programs * max(lengths) // (2 * sum(lengths[first:])))
        found.append((first, min(kept, max(pairs - together, 0))))
    return found


def _kept_back(tiles: int, pairs: int, programs: int, together: int, first: int, kept: int) -> list[int]:
    """All tiles, each pair's from the last one, but for those that the first pairs keep back."""
    soon = (x for x in _by_groups(range(tiles)[::-1], pairs, together) if x % tiles < first or x // tiles >= kept)
    late = (x for x in _by_groups(range(tiles), kept, max(kept, 1)) if x % tiles >= first)
    return [*soon, *late]
