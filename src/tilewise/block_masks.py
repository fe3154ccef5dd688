"""Block-sparse masks: a map of visible tiles, with the patterns of the literature.

Source: FlashAttention (Dao et al., 2022), section 3.3 and Algorithm 5; Longformer (Beltagy et al., 2020), section 3;
BigBird (Zaheer et al., 2020), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import errors
from .interning import constant
from .mask_algebra import Frame, Lowered, Mask, Or, Positions, pick


@dataclass(frozen=True, eq=False)
class BlockMask(Mask):
    """A map of visible tiles: key j is visible to row i iff ``tiles[b, h, i // block_q, j // block_k]``.

    Args:
        tiles: bool [B|1, Hq|1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)].
        block_q, block_k: tile size in rows and keys, >= 1.

    Printing a mask shows its sparsity. Patterns: `longformer`, `bigbird`, `from_mask`.
    """

    tiles: torch.Tensor
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        tiles = self.tiles
        if not isinstance(tiles, torch.Tensor) or tiles.dtype != torch.bool or tiles.ndim != 4:
            shown = f"{tiles.dtype} {list(tiles.shape)}" if isinstance(tiles, torch.Tensor) else type(tiles).__name__
            errors.fail(
                errors.ShapeError,
                "BlockMask.tiles",
                shown,
                "a torch.bool tensor [B|1, Hq|1, ceil(Sq/block_q), ceil(Sk/block_k)]",
                "add leading dimensions of size 1",
            )
        _check_counts(1, block_q=self.block_q, block_k=self.block_k)

    def visible(self, at: Positions) -> torch.Tensor:
        return pick(self.tiles, Positions(at.b, at.h, at.q // self.block_q, at.k // self.block_k, at.off))

    def lower(self, frame: Frame) -> Lowered:
        return Lowered(blocks=self)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        tensors.append(self.tiles)
        return f"('blocks',{len(tensors) - 1},{constant(self.block_q)!r},{constant(self.block_k)!r})"

    def __or__(self, other: Mask) -> Mask:
        if isinstance(other, BlockMask) and self._same_blocks(other):
            return BlockMask(self.tiles | other.tiles, self.block_q, self.block_k)
        return Or(self, other)

    def _same_blocks(self, other: BlockMask) -> bool:
        return (self.block_q, self.block_k) == (other.block_q, other.block_k)

    def intersection(self, other: BlockMask) -> BlockMask | None:
        """The tiles visible in both, or None where the block sizes differ."""
        if not self._same_blocks(other):
            return None
        return BlockMask(self.tiles & other.tiles, self.block_q, self.block_k)

    @property
    def density(self) -> float:
        """Share of visible tiles, in [0, 1]; 0 for an empty map."""
        return float(self.tiles.float().mean()) if self.tiles.numel() else 0.0

    def __str__(self) -> str:
        rows, columns = self.tiles.shape[2:]
        return (
            f"BlockMask({rows} x {columns} tiles of {self.block_q} x {self.block_k}, "
            f"{self.density:.1%} visible, {1 - self.density:.1%} sparse)"
        )

    @classmethod
    def longformer(cls, seqlen: int, *, block: int = 64, window_blocks: int = 1, global_blocks: int = 1) -> BlockMask:
        """A band of ``2 * window_blocks + 1`` tiles, and `global_blocks` first tiles that see and are seen by all.

        >>> print(BlockMask.longformer(512, block=64))
        BlockMask(8 x 8 tiles of 64 x 64, 53.1% visible, 46.9% sparse)
        """
        return cls(_band(_count(seqlen, block), window_blocks, global_blocks)[None, None], block, block)

    @classmethod
    def bigbird(
        cls,
        seqlen: int,
        *,
        block: int = 64,
        window_blocks: int = 1,
        global_blocks: int = 1,
        random_blocks: int = 3,
        heads: int = 1,
        seed: int = 0,
    ) -> BlockMask:
        """`longformer` plus `random_blocks` random tiles in each row of tiles, drawn per head from `seed`.

        >>> print(BlockMask.bigbird(1024, block=64, heads=2))
        BlockMask(16 x 16 tiles of 64 x 64, 41.4% visible, 58.6% sparse)
        """
        n = _count(seqlen, block)
        _check_counts(0, random_blocks=random_blocks)
        _check_counts(1, heads=heads)
        tiles = _band(n, window_blocks, global_blocks).expand(1, heads, n, n).clone()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(1, heads, n, n, generator=generator).argsort(dim=-1)[..., : min(random_blocks, n)]
        return cls(tiles.scatter(-1, drawn, True), block, block)

    @classmethod
    def from_mask(cls, mask: Mask, seqlen_q: int, seqlen_k: int, *, block: int = 64, **sizes: int) -> BlockMask:
        """The tiles in which `mask` shows anything: ``mask & BlockMask.from_mask(mask, ...)`` equals `mask`, skipping.

        Args:
            mask: any mask, bottom-right aligned unless it says otherwise.
            seqlen_q, seqlen_k: lengths that the map covers.
            block: tile size in rows and keys.
            **sizes: ``batch`` and ``heads`` (default 1) where the mask depends on them.
        """
        if not isinstance(mask, Mask):
            got = type(mask).__name__
            errors.fail(errors.ArgumentError, "from_mask", got, "a mask", "wrap a function in Predicate(...)")
        batch, heads = sizes.pop("batch", 1), sizes.pop("heads", 1)
        if sizes:
            errors.fail(errors.ArgumentError, "from_mask", str(sorted(sizes)), "batch= and heads=", "drop the others")
        tiles = torch.zeros(batch, heads, _count(seqlen_q, block), _count(seqlen_k, block), dtype=torch.bool)
        off = 0 if mask.alignment() == "top_left" else seqlen_k - seqlen_q
        b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[None, :, None, None]
        keys = torch.arange(seqlen_k)
        pad = tiles.shape[3] * block - seqlen_k
        for row in range(tiles.shape[2]):
            rows = torch.arange(row * block, min((row + 1) * block, seqlen_q))[:, None]
            seen = mask.visible(Positions(b, h, rows, keys, off)).expand(batch, heads, len(rows), seqlen_k).any(2)
            seen = torch.nn.functional.pad(seen, (0, pad))
            tiles[:, :, row] = seen.view(batch, heads, -1, block).any(-1)
        return cls(tiles, block, block)


def _check_counts(least: int, **counts: Any) -> None:
    for name, n in counts.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < least:
            errors.fail(errors.ArgumentError, name, repr(n)[:60], f"an int >= {least}", "pass a Python int")


def _count(seqlen: int, block: int) -> int:
    _check_counts(0, seqlen=seqlen)
    _check_counts(1, block=block)
    return -(-seqlen // block)


def _band(n: int, window_blocks: int, global_blocks: int) -> torch.Tensor:
    _check_counts(0, window_blocks=window_blocks, global_blocks=global_blocks)
    i = torch.arange(n)
    near = (i[:, None] - i[None]).abs() <= window_blocks
    return near | (i[:, None] < global_blocks) | (i[None] < global_blocks)
