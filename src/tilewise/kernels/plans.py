"""Which tiles a kernel visits where the mask is no band: block maps, documents, prefixes.

The counts behind it are integral images, so any block size goes with any tile size. A plan of a block map alone is
made once and kept as long as the map lives: forward and backward, and every layer of a model, share it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ..block_masks import BlockMask
from ..mask_algebra import Frame, Lowered, interval
from ..tiles import TileConfig
from .kept import Kept

# In a plan of rows for tiles of keys, an entry is ``head << HEAD_SHIFT | tile``.
HEAD_SHIFT = tl.constexpr(20)
TILE_MASK = tl.constexpr((1 << 20) - 1)
# Index rows and bounds start at multiples of this: a stride is then always of one kind, and no length recompiles.
PAD = 16
_FAR = 2**30

_kept = Kept()


def bounds(lowered: Lowered, frame: Frame) -> dict[str, Any]:
    """The fields of a variant for per-row bounds, as one tensor int32 [2, B|1, seqlen_q]: lower, then upper ones."""
    if lowered.row_lo is None and lowered.row_hi is None:
        return {}
    given = [side for side in (lowered.row_lo, lowered.row_hi) if side is not None]
    batch, length = max(side.shape[0] for side in given), _round_up(frame.seqlen_q, PAD)
    both = torch.empty(2, batch, length, dtype=torch.int32, device=frame.device)
    for target, side, default in zip(both, (lowered.row_lo, lowered.row_hi), (0, _FAR), strict=True):
        if side is None:
            target.fill_(default)
        else:
            target[:, : frame.seqlen_q] = side
    return {"bounds": both, "bounds_batch": 0 if batch == 1 else length, "bounds_side": batch * length}


def plan(lowered: Lowered, frame: Frame, lengths: tuple[Any, Any], tile: TileConfig, group: int) -> dict[str, Any]:
    """The fields of a variant for the plan of this tile.

    Args:
        lowered, frame: the mask.
        lengths: rows and keys in use of each sequence, int tensors [B], or ints.
        tile: rows and keys of a kernel's tile.
        group: 0 to list keys for tiles of rows; else list rows for tiles of keys, for all heads of a group of this
            size: ``head << HEAD_SHIFT | tile``.
    """
    blocks = lowered.blocks
    if (
        blocks is None
        or lowered.row_lo is not None
        or lowered.row_hi is not None
        or isinstance(frame.off, torch.Tensor)
    ):
        return _fields(_listing(lowered, frame, lengths, tile, group))
    key = (
        blocks.tiles._version, blocks.block_q, blocks.block_k, lowered.left, lowered.right, lowered.residual is None,
        frame.seqlen_q, frame.seqlen_k, frame.off, tile.block_m, tile.block_n, group,
    )  # fmt: skip
    return _fields(_kept.get(blocks.tiles, key, lambda: _listing(lowered, frame, lengths, tile, group)))


def _fields(rows: torch.Tensor) -> dict[str, Any]:
    strides = [0 if size == 1 else stride for size, stride in zip(rows.shape[:2], rows.stride()[:2], strict=True)]
    return {"plan": rows, "plan_batch": strides[0], "plan_head": strides[1], "plan_row": rows.stride(2)}


def _listing(lowered: Lowered, frame: Frame, lengths: tuple[Any, Any], tile: TileConfig, group: int) -> torch.Tensor:
    """int32 [B|1, H|1, tiles, ...]: rows of a plan (see `score.Variant`)."""
    some, full = _band_map(lowered, frame, lengths, tile, group)
    if lowered.blocks is not None:
        some_block, full_block = _block_map(lowered.blocks, frame, tile)
        some, full = some & some_block, full & full_block
    if lowered.residual is not None:
        full = torch.zeros_like(full)
    full = full & some
    if group:
        some, full = (_by_group(x, group) for x in (some, full))
    width = _round_up(some.shape[-1] + 2, PAD)
    rows = torch.zeros(*some.shape[:-1], width, dtype=torch.int32, device=some.device)
    rows[..., 0], rows[..., 1] = full.sum(-1), some.sum(-1)
    rank = torch.where(full, 0, torch.where(some, 1, 2)).to(torch.int8)
    order = rank.argsort(dim=-1, stable=True)
    if group:
        tiles = max(order.shape[-1] // group, 1)
        order = (order // tiles << HEAD_SHIFT.value) | order % tiles
    rows[..., 2 : 2 + some.shape[-1]] = order
    return rows


def _by_group(tiles: torch.Tensor, group: int) -> torch.Tensor:
    """From [B, H|1, rows, keys] to [B, Hkv|1, keys, group · rows]."""
    heads = max(tiles.shape[1], group)
    grouped = tiles.expand(-1, heads, -1, -1).unflatten(1, (heads // group, group))
    return grouped.permute(0, 1, 4, 2, 3).flatten(3)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _band_map(
    lowered: Lowered, frame: Frame, lengths: tuple[Any, Any], tile: TileConfig, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [B|1, 1, tiles of rows, tiles of keys]: which the intervals touch, and which they cover."""
    lo, hi = interval(lowered, frame)
    len_q, len_k = (x[:, None] if isinstance(x, torch.Tensor) else x for x in lengths)
    rows = torch.arange(frame.seqlen_q, device=frame.device)[None]
    # A length as a tensor of its own would be copied from the host, which a graph that is captured does not allow.
    hi = torch.minimum(hi, len_k) if isinstance(len_k, torch.Tensor) else hi.clamp(max=len_k)
    seen, absent = lo < hi, rows >= len_q
    seen, absent = torch.broadcast_tensors(seen & ~absent, absent)
    pad = (0, _round_up(frame.seqlen_q, tile.block_m) - frame.seqlen_q)

    def per_tile(values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, pad, value=fill).unflatten(1, (-1, tile.block_m))

    starts = torch.arange(-(-frame.seqlen_k // tile.block_n), device=frame.device) * tile.block_n
    ends = starts + tile.block_n
    if frame.seqlen_q == 0:
        nothing = torch.zeros(lo.shape[0], 1, 0, len(starts), dtype=torch.bool, device=frame.device)
        return nothing, nothing
    # A row that sees nothing touches no tile and covers none. One past the end only touches none where rows are the
    # program's own, and are loaded with care; where they stream past, a tile with such rows needs the test too.
    free = 0 if group else _FAR
    first = per_tile(torch.where(seen, lo, _FAR), _FAR).amin(2)[:, None, :, None]
    last = per_tile(torch.where(seen, hi, 0), 0).amax(2)[:, None, :, None]
    cover_lo = per_tile(torch.where(seen, lo, torch.where(absent, 0, _FAR)), 0).amax(2)[:, None, :, None]
    cover_hi = per_tile(torch.where(seen, hi, torch.where(absent, free, 0)), free).amin(2)[:, None, :, None]
    return (starts < last) & (ends > first), (starts >= cover_lo) & (ends <= cover_hi)


def _block_map(blocks: BlockMask, frame: Frame, tile: TileConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [B|1, H|1, tiles of rows, tiles of keys]: which hold an active block, and which hold nothing else."""
    corner = torch.nn.functional.pad(blocks.tiles.to(frame.device).int().cumsum(2).cumsum(3), (1, 0, 1, 0))
    q0, q1 = _edges(frame.seqlen_q, tile.block_m, blocks.block_q, frame.device)
    k0, k1 = _edges(frame.seqlen_k, tile.block_n, blocks.block_k, frame.device)

    def at(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return corner[:, :, rows[:, None], columns[None]]

    active = at(q1, k1) - at(q0, k1) - at(q1, k0) + at(q0, k0)
    return active > 0, active == (q1 - q0)[:, None] * (k1 - k0)[None]


def _edges(length: int, tile: int, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each tile the first block that it meets, and the one after the last."""
    starts = torch.arange(-(-length // tile), device=device) * tile
    stops = (starts + tile).clamp(max=length)
    return starts // block, (stops + block - 1) // block
