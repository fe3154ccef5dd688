"""How the score matrix is cut into tiles, and which tiles an algorithm visits.

Source: FlashAttention (Dao et al., 2022), Algorithm 1 lines 1-4 and Algorithm 5; FlashAttention-2 (Dao, 2023), section
3.1.1 (causal masking).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import errors


def cut(length: int, size: int) -> list[slice]:
    """The ranges of `size` rows that `length` rows fall into; the last one may be shorter.

    >>> cut(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


@dataclass(frozen=True)
class Blocks:
    """Tiles of `block_q` query rows and `block_k` keys, and which of them are visible.

    Args:
        block_q: B_r, rows of a tile, >= 1.
        block_k: B_c, keys of a tile, >= 1.
        causal: row i sees key j iff ``j <= i + seqlen_k - seqlen_q`` (bottom-right aligned).
        tiles: bool [T_r, T_c], the visible tiles of block-sparse attention; None for all.

    Raises:
        tilewise.errors.ArgumentError: a size is no positive integer.
        tilewise.errors.ShapeError: `tiles` is no boolean matrix; in `grid`: it has not one entry per tile.

    Example:
        >>> grid = Blocks(2, 2, causal=True).grid(4, 4)
        >>> grid.visited, [grid.keys_seen(i) for i in range(2)]
        (3, [[0], [0, 1]])
    """

    block_q: int
    block_k: int
    causal: bool = False
    tiles: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            if not isinstance(size, int) or size < 1:
                errors.fail(errors.ArgumentError, name, repr(size), "an integer >= 1", "pass the rows of one tile")
        if self.tiles is not None and (self.tiles.dtype != torch.bool or self.tiles.ndim != 2):
            got = f"{self.tiles.dtype} {list(self.tiles.shape)}"
            errors.fail(errors.ShapeError, "tiles", got, "torch.bool [T_r, T_c]", "pass one flag per tile")

    def grid(self, seqlen_q: int, seqlen_k: int) -> Grid:
        """The tiles of one score matrix [seqlen_q, seqlen_k]."""
        grid = Grid(self, cut(seqlen_q, self.block_q), cut(seqlen_k, self.block_k), seqlen_k - seqlen_q)
        if self.tiles is not None and tuple(self.tiles.shape) != (len(grid.rows), len(grid.columns)):
            wanted = f"[{len(grid.rows)}, {len(grid.columns)}] for scores [{seqlen_q}, {seqlen_k}]"
            errors.fail(errors.ShapeError, "tiles", list(self.tiles.shape), wanted, "pass one flag per tile")
        return grid


@dataclass(frozen=True)
class Grid:
    """The tiles of one score matrix: row ranges (T_r of them), key ranges (T_c), and seqlen_k - seqlen_q."""

    blocks: Blocks
    rows: list[slice]
    columns: list[slice]
    offset: int

    def visits(self, i: int, j: int) -> bool:
        """Whether tile (i, j) has a visible score."""
        if self.blocks.tiles is not None and not bool(self.blocks.tiles[i, j]):
            return False
        return not self.blocks.causal or self.columns[j].start <= self.rows[i].stop - 1 + self.offset

    def keys_seen(self, i: int) -> list[int]:
        """The key tiles j that row tile i visits."""
        return [j for j in range(len(self.columns)) if self.visits(i, j)]

    def rows_seeing(self, j: int) -> list[int]:
        """The row tiles i that visit key tile j."""
        return [i for i in range(len(self.rows)) if self.visits(i, j)]

    @property
    def visited(self) -> int:
        """How many tiles are visited."""
        return sum(len(self.keys_seen(i)) for i in range(len(self.rows)))

    def mask(self, s: torch.Tensor, i: int, j: int) -> torch.Tensor:
        """Scores of a visited tile with -inf where a row does not see a key; no work where it sees all."""
        rows, columns = self.rows[i], self.columns[j]
        if not self.blocks.causal or columns.stop - 1 <= rows.start + self.offset:
            return s
        row = torch.arange(rows.start, rows.stop)[:, None]
        return s.masked_fill(torch.arange(columns.start, columns.stop) > row + self.offset, float("-inf"))


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless q [N_q, d], k [N_k, d] and v [N_k, d_v] are fp64 matrices that go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 2:
            errors.fail(errors.ShapeError, name, list(x.shape), "a matrix [N, d] of one head", "index batch and head")
        if x.dtype != torch.float64:
            errors.fail(errors.DtypeError, name, x.dtype, "torch.float64", "pass x.double()")
    if q.shape[1] != k.shape[1]:
        errors.fail(errors.ShapeError, "k", list(k.shape), f"[N, {q.shape[1]}] as in q", "use one head dim")
    if k.shape[0] != v.shape[0]:
        errors.fail(errors.ShapeError, "v", list(v.shape), f"[{k.shape[0]}, d] as in k", "pass a value for each key")


def scale_of(q: torch.Tensor, softmax_scale: float | None) -> float:
    """The factor on scores: what was asked for, or 1/sqrt(d)."""
    return float(q.shape[1] ** -0.5) if softmax_scale is None else softmax_scale
