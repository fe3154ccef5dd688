"""Paged keys and values: the tiles of version 2, gathered through a page table.

The cache is a pool of pages of P positions; a sequence's position p is slot ``p % P`` of page ``table[p // P]``. Only
addresses change: every key and value is read as often as from one piece of memory, and the table beside them.

Source: "Efficient memory management for large language model serving with PagedAttention" (Kwon et al., 2023), section
4.1, equation 4.
"""

from __future__ import annotations

import torch

from .. import errors, softmax
from .flash_v2 import Output
from .memory import Chip, Hbm, Machine
from .tiling import Blocks, scale_of


def forward(
    machine: Machine,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    seqlen_k: int,
    blocks: Blocks,
    *,
    softmax_scale: float | None = None,
) -> Output:
    """``softmax(scale q k^T) v`` over the first `seqlen_k` positions that `page_table` lists.

    Traffic in elements, N = seqlen_k, d_v = d, all tiles visible: ``2 N_q d + N_q + T_r (2 Nd + E)``, version 2's and
    E table entries for each row tile: ``E = ceil(N/P)`` where block_k is a multiple of P, and one for each page that a
    tile touches otherwise. Slots beyond N and table entries beyond them are never read.

    Args:
        machine: counts.
        q: fp64 [N_q, d].
        pages: keys fp64 [num_pages, P, d] and values [num_pages, P, d_v].
        page_table: int64 [max_pages]; what it holds beyond position `seqlen_k` does not matter.
        seqlen_k: positions in use.
        blocks: tile sizes and visible tiles; `causal` is bottom-right aligned.
        softmax_scale: default 1/sqrt(d).

    Returns:
        `flash_v2.Output`.

    Raises:
        tilewise.errors.ArgumentError: `seqlen_k` beyond the table, or a page in use that the pool does not have.
        tilewise.textbook.memory.SramError: the tiles do not fit.

    Source:
        PagedAttention (Kwon et al., 2023), equation 4.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 3, 4, 8, dtype=torch.float64)  # 3 pages of 4 positions
        >>> q, table = torch.randn(1, 8, dtype=torch.float64), torch.tensor([2, 0, -1])
        >>> machine = Machine()
        >>> o, lse = forward(machine, q, (k_pages, v_pages), table, 6, Blocks(1, 4))
        >>> machine.counts.reads["k_pages"], machine.counts.reads["page_table"]
        (48, 2)
    """
    page_size, d_v = pages[0].shape[1], pages[1].shape[2]
    _check(pages[0], page_table, seqlen_k)
    grid, scale = blocks.grid(q.shape[0], seqlen_k), scale_of(q, softmax_scale)
    q_hbm, table = machine.put("q", q), machine.put("page_table", page_table)
    k, v = machine.put("k_pages", pages[0]), machine.put("v_pages", pages[1])
    o, lse = machine.new("o", q.shape[0], d_v), machine.new("lse", q.shape[0])
    for i, rows in enumerate(grid.rows):
        with machine.on_chip() as chip:
            q_i = chip.read(q_hbm, rows)  # [B_r, d]
            chip.new(q_i.shape[0], d_v)  # the space of the state's accumulator
            state = softmax.init((q_i.shape[0],), d_v, q_i)
            for j in grid.keys_seen(i):
                with machine.on_chip() as tile:
                    page, slot = addresses(tile, table, grid.columns[j], page_size)
                    k_j, v_j = tile.read(k, page, slot), tile.read(v, page, slot)  # [B_c, d], [B_c, d_v]
                    state = softmax.update(state, tile.keep(grid.mask(scale * (q_i @ k_j.T), i, j)), v_j)
            o_i, lse_i = softmax.finalize(state)
            chip.write(o, o_i, rows)
            chip.write(lse, lse_i, rows)
    return Output(o.result(), lse.result())


def addresses(chip: Chip, table: Hbm, positions: slice, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot of each position of a key tile; reads one table entry for each page that it touches."""
    first = positions.start // page_size
    entries = chip.read(table, slice(first, -(-positions.stop // page_size)))
    position = torch.arange(positions.start, positions.stop)
    return entries[position // page_size - first], position % page_size


def _check(k_pages: torch.Tensor, page_table: torch.Tensor, seqlen_k: int) -> None:
    num_pages, page_size = k_pages.shape[:2]
    room = page_table.numel() * page_size
    if not 0 <= seqlen_k <= room:
        supported = f"0 to {room} ({page_table.numel()} pages of {page_size})"
        errors.fail(errors.ArgumentError, "seqlen_k", seqlen_k, supported, "list more pages")
    used = page_table[: -(-seqlen_k // page_size)]
    outside = used[(used < 0) | (used >= num_pages)]
    if outside.numel():
        supported = f"0 to {num_pages - 1} for pages in use"
        errors.fail(errors.ArgumentError, "page_table", int(outside[0]), supported, "name a page of the pool")
