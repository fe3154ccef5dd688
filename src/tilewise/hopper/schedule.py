"""Which program works on which tiles: a table, made on the host once per shape and kept.

A persistent grid that deals tiles by number resonates with causal masks (every program gets tiles of one length). The
table deals them longest first, each to the program that is free soonest (Graham's rule, 1969: at most 4/3 of the
optimum), so causal, windowed and full calls fill the machine alike without a counter in memory.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import torch

# What a tile costs beside its key tiles, in key tiles: first scores, last values, output.
_OVERHEAD = 1.5


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

    `together`: so many pairs at once, those after them later; 0 for all.
    """
    tiles_m = -(-bounds.len_q // block_m)
    lengths = [bounds.key_tiles(m * block_m, block_m, block_n) for m in range(tiles_m)]
    order = sorted(range(tiles_m), key=lambda m: -lengths[m])
    programs = min(programs, tiles_m * pairs)
    free = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in range(programs)]
    for first in range(0, pairs, together or pairs):
        for m in order:
            # Heads of one length follow each other, so that those at work at once are few and their keys stay in L2.
            for pair in range(first, min(first + (together or pairs), pairs)):
                busy, program = heapq.heappop(free)
                lists[program].append(pair * tiles_m + m)
                heapq.heappush(free, (busy + lengths[m] + _OVERHEAD, program))
    rounds = max(map(len, lists))
    padded = [numbers + [-1] * (rounds + 1 - len(numbers)) for numbers in lists]
    return Dealt(torch.tensor(padded, dtype=torch.int32).T.contiguous().to(device), rounds, programs)
