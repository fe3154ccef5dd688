"""What a walk over the tiles moves between HBM and SRAM, by closed form: what the page's counters must end at.

One head: N rows and keys, head dim d, SRAM of M elements, tiles by the rule 4·B·d <= M. The textbook's machine counts
the same on the real algorithms; the page counts it move by move.

Source: FlashAttention (Dao et al., 2022), Algorithm 1; FlashAttention-2 (Dao, 2023), Algorithm 1 and section 3.1.1.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import errors
from ..roofline.forms import Traffic, standard_forward
from ..roofline.tile_rules import Tile, quarter_tile

ORDERS = ("v1", "v2")
# The page draws tiles one by one, and works a row out key by key.
MAX_TILES = 128
MAX_SEQLEN, MAX_HEAD_DIM, MAX_SRAM = 16_384, 256, 1 << 20


class Walk(NamedTuple):
    """Settings of the traversal: `n` rows and keys, head dim `d`, SRAM of `m` elements, `order` v1 or v2."""

    n: int
    d: int
    m: int
    order: str
    causal: bool

    def tile(self) -> Tile:
        """Rows and keys of a tile. Version 1 has at most d rows, as its paper prints it; version 2 as many as keys."""
        rule = quarter_tile(self.m, self.d)
        rows = rule.block_q if self.order == "v1" else rule.block_k
        return Tile(min(rows, self.n), min(rule.block_k, self.n))

    def traffic(self) -> Traffic:
        """Elements that cross, reads and writes.

        v1: ``3Nd + 2N`` and, for each key tile, ``3d + 4`` of each row that meets it. v2: ``2Nd + N`` and, for each
        row tile, ``2d`` of each key that it meets. Without a mask every row meets every tile.

        >>> Walk(16, 4, 128, "v1", False).traffic().total == 3 * 16 * 4 + 2 * 16 + 4 * (3 * 16 * 4 + 4 * 16) // 2
        True
        >>> Walk(16, 4, 128, "v2", False).traffic().total == 2 * 16 * 4 + 16 + 2 * (2 * 16 * 4)
        True
        """
        n, d = self.n, self.d
        block_q, block_k = self.tile()
        if self.order == "v1":
            met = sum(n - first // block_q * block_q if self.causal else n for first in range(0, n, block_k))
            return Traffic(read=2 * n * d + (2 * d + 2) * met, written=(d + 2) * (n + met))
        ends = [min(first + block_q, n) if self.causal else n for first in range(0, n, block_q)]
        met = sum(min(n, -(-end // block_k) * block_k) for end in ends)
        return Traffic(read=n * d + 2 * d * met, written=n * d + n)

    def standard(self) -> Traffic:
        """What standard attention moves: a mask saves it nothing."""
        return standard_forward(self.n, self.d)


def check(walk: Walk) -> Walk:
    """The walk itself.

    Raises:
        tilewise.errors.ArgumentError: it cannot be walked, or not be drawn.

    >>> check(Walk(512, 64, 128, "v2", False))
    Traceback (most recent call last):
        ...
    tilewise.errors.ArgumentError: m: got 128 elements of SRAM; supported: at least 4·d = 256 elements, one row each of
    Q, K, V and O. Fix: use more SRAM, fewer rows, or a smaller head dim.
    """
    for name, size, most in (("n", walk.n, MAX_SEQLEN), ("d", walk.d, MAX_HEAD_DIM), ("m", walk.m, MAX_SRAM)):
        if not isinstance(size, int) or not 1 <= size <= most:
            errors.fail(errors.ArgumentError, name, repr(size), f"an integer from 1 to {most}", "choose one of these")
    if walk.order not in ORDERS:
        errors.fail(errors.ArgumentError, "order", repr(walk.order), " or ".join(ORDERS), "name one of these")
    tile = walk.tile()
    if (tiles := -(-walk.n // min(tile))) > MAX_TILES:
        fix = f"use more SRAM, or at most {MAX_TILES * min(tile)} rows"
        errors.fail(errors.ArgumentError, "n", f"{walk.n}, {tiles} tiles a side", f"up to {MAX_TILES} tiles", fix)
    return walk
