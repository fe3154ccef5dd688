"""Which tiles fit into SRAM: the rules of the papers, what they leave out, and the largest tiles under them.

The papers' B_r and B_c are `block_q` (rows of Q and O) and `block_k` (rows of K and V); M is `m`, in elements.

Source: FlashAttention (Dao et al., 2022), Algorithm 1, line 1; FlashAttention-2 (Dao, 2023), section 3.1.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from .. import errors
from .sizes import check


class Tile(NamedTuple):
    """Rows of Q (B_r) and of K (B_c) that one step works on."""

    block_q: int
    block_k: int

    def tensors(self, d: int) -> int:
        """Elements of the tiles of Q, K, V and O: what the rule B = ⌊M/4d⌋ counts."""
        return 2 * (self.block_q + self.block_k) * d

    def with_scores(self, d: int) -> int:
        """B_r·d + B_c·d + B_r·B_c: Q, one of K and V at a time, and the scores; O in registers."""
        return (self.block_q + self.block_k) * d + self.block_q * self.block_k

    def resident(self, d: int) -> int:
        """Everything that one step holds: Q, K, V, O, the scores (P in their place), and m, ℓ."""
        return self.tensors(d) + self.block_q * self.block_k + 2 * self.block_q


def quarter_tile(m: int, d: int) -> Tile:
    """B_c = ⌊M/4d⌋ and B_r = min(B_c, d): four tiles of B rows of Q, K, V and O fit into M elements.

    The paper prints ⌈M/4d⌉. Rounded up, the tiles overflow whenever 4d does not divide M; `quarter_tile_rounded_up`
    shows it. Either way the rule leaves the B_r·B_c scores to the registers: `Tile.resident` counts them too.

    Args:
        m: elements of SRAM.
        d: head dim.

    Raises:
        tilewise.errors.ArgumentError: `m` holds no tile of one row (below 4d), or a size is not positive.

    >>> quarter_tile(98_304, 64)
    Tile(block_q=64, block_k=384)
    >>> rule = Tile(390, 390)                             # B_r = B_c: four tiles of ⌊M/4d⌋ rows
    >>> rule.tensors(64), quarter_tile_rounded_up(100_000, 64).block_k, Tile(391, 391).tensors(64)
    (99840, 391, 100096)
    """
    check(m=m, d=d)
    if m < 4 * d:
        _too_small(m, f"at least 4·d = {4 * d} elements, one row each of Q, K, V and O")
    block_k = m // (4 * d)
    return Tile(min(block_k, d), block_k)


def quarter_tile_rounded_up(m: int, d: int) -> Tile:
    """The rule as printed, B_c = ⌈M/4d⌉ and B_r = min(B_c, d), for comparison: four tiles of ⌈M/4d⌉ rows overflow."""
    check(m=m, d=d)
    block_k = -(-m // (4 * d))
    return Tile(min(block_k, d), block_k)


def rows_beside(block_k: int, m: int, d: int) -> int:
    """The most rows B_r with B_r·d + B_c·d + B_r·B_c <= M, for a given B_c; 0 where not one fits.

    >>> rows_beside(128, 98_304, 64)
    469
    """
    check(block_k=block_k, m=m, d=d)
    return max(0, m - block_k * d) // (d + block_k)


def square_tile(m: int, d: int) -> Tile:
    """The largest B_r = B_c with 2·B·d + B² <= M, that is B = ⌊√(M + d²)⌋ - d.

    Raises:
        tilewise.errors.ArgumentError: `m` holds no tile of one row (below 2d + 1), or a size is not positive.

    >>> tile = square_tile(98_304, 64)
    >>> tile, tile.with_scores(64), Tile(tile.block_q + 1, tile.block_k + 1).with_scores(64)
    (Tile(block_q=256, block_k=256), 98304, 98945)
    """
    check(m=m, d=d)
    block = isqrt(m + d * d) - d
    if block < 1:
        _too_small(m, f"at least 2·d + 1 = {2 * d + 1} elements, a row of Q, a row of K and their score")
    return Tile(block, block)


def tiles(m: int, d: int, multiple: int = 16) -> list[Tile]:
    """Tiles that fill M under B_r·d + B_c·d + B_r·B_c <= M: for each B_c the largest B_r, both multiples of `multiple`.

    The first has the most rows, hence the least traffic of K and V: 2·N·d for each B_r rows.

    Raises:
        tilewise.errors.ArgumentError: not even one tile of `multiple` rows fits, or a size is not positive.

    >>> tiles(49_152, 64)[:3]
    [Tile(block_q=592, block_k=16), Tile(block_q=480, block_k=32), Tile(block_q=400, block_k=48)]
    """
    check(m=m, d=d, multiple=multiple)
    found: list[Tile] = []
    block_k = multiple
    while (block_q := rows_beside(block_k, m, d) // multiple * multiple) >= multiple:
        found.append(Tile(block_q, block_k))
        block_k += multiple
    if not found:
        least = Tile(multiple, multiple).with_scores(d)
        _too_small(m, f"at least {least} elements, {multiple} rows of Q and K and their scores")
    return found


def _too_small(m: int, supported: str) -> None:
    fix = "use more SRAM, fewer rows, or a smaller head dim"
    errors.fail(errors.ArgumentError, "m", f"{m} elements of SRAM", supported, fix)
