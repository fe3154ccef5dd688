"""The unit of work: some batch entries and key/value heads of one length, with their tensors laid out for products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .. import sequences
from ..block_masks import BlockMask
from ..mask_algebra import Frame, Lowered, Positions, interval
from ..problem import Inputs, Problem
from ..tiles import TileConfig, lookup

# Scores held at once by one step of the loops, over all heads of a group. More of them save Python steps and share out
# better over threads, fewer stay in the cache: of 2**17 .. 2**20, the last was best on 2 cores (8 heads, S 2048).
SCORES_PER_STEP = 1 << 20


class Span(NamedTuple):
    """The rows m0 .. m1 and keys n0 .. n1 of one tile."""

    m0: int
    m1: int
    n0: int
    n1: int


class Where(NamedTuple):
    """Batch entries b0 .. b1, key/value heads h0 .. h1, and the rows and keys that the sequences occupy."""

    b0: int
    b1: int
    h0: int
    h1: int
    rows: slice
    keys: slice


@dataclass(frozen=True)
class Group:
    """The part of a problem at `where`; tensors in the compute dtype, dense."""

    problem: Problem
    inputs: Inputs
    where: Where
    config: TileConfig
    q: torch.Tensor  # [b, h_kv, group, seqlen_q, D], times softmax_scale
    k: torch.Tensor  # [b, h_kv, seqlen_k, D]
    v: torch.Tensor  # [b, h_kv, seqlen_k, Dv]
    off: int
    lowered: Lowered
    lo: torch.Tensor  # [b|1, seqlen_q]: the rows' key intervals
    hi: torch.Tensor

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[3]

    @property
    def heads(self) -> slice:
        """The query heads of this group."""
        return slice(self.where.h0 * self.problem.group_size, self.where.h1 * self.problem.group_size)

    def spans(self) -> Iterator[tuple[int, int, list[Span]]]:
        """Row tiles, each with the key tiles that may show it something."""
        config, blocks = self.config, self.lowered.blocks
        for m0 in range(0, self.seqlen_q, config.block_m):
            m1 = min(m0 + config.block_m, self.seqlen_q)
            lo, hi = self.lo[:, m0:m1], self.hi[:, m0:m1]
            first, last = max(0, int(lo.min())), int(hi.max())
            # With a tile map, key tiles keep to the map's grid, so that an inactive tile is a skipped one.
            start = first - first % config.block_n if blocks is not None else first
            found = []
            for n0 in range(start, last, config.block_n):
                span = Span(m0, m1, n0, min(n0 + config.block_n, last))
                if blocks is None or bool(self.block_tiles(span).any()):
                    found.append(span)
            yield m0, m1, found

    def block_tiles(self, span: Span) -> torch.Tensor:
        """The part of the tile map that covers a span, [b|1, h|1, rows of tiles, columns of tiles]."""
        blocks = self.lowered.blocks
        assert blocks is not None
        tiles = blocks.tiles
        b = slice(self.where.b0, self.where.b1) if tiles.shape[0] > 1 else slice(None)
        h = self.heads if tiles.shape[1] > 1 else slice(None)
        rows = slice(span.m0 // blocks.block_q, -(-span.m1 // blocks.block_q))
        columns = slice(span.n0 // blocks.block_k, -(-span.n1 // blocks.block_k))
        return tiles[b, h, rows, columns]

    def positions(self, span: Span) -> Positions:
        """Positions of a tile, broadcasting to [b, heads, M, N]."""
        return Positions(
            torch.arange(self.where.b0, self.where.b1).view(-1, 1, 1, 1),
            torch.arange(self.heads.start, self.heads.stop).view(1, -1, 1, 1),
            torch.arange(span.m0, span.m1).view(1, 1, -1, 1),
            torch.arange(span.n0, span.n1).view(1, 1, 1, -1),
            self.off,
        )

    def visible(self, span: Span) -> torch.Tensor | None:
        """What the tile shows, bool broadcasting to [b, heads, M, N]; None: all of it."""
        lo, hi = self.lo[:, span.m0 : span.m1], self.hi[:, span.m0 : span.m1]
        parts = []
        if int(lo.max()) > span.n0 or int(hi.min()) < span.n1:
            columns = torch.arange(span.n0, span.n1)
            parts.append(((columns >= lo[..., None]) & (columns < hi[..., None]))[:, None])
        blocks, residual = self.lowered.blocks, self.lowered.residual
        if blocks is not None and not bool(self.block_tiles(span).all()):
            parts.append(blocks.visible(self.positions(span)))
        if residual is not None:
            seen = residual.visible(self.positions(span))
            parts.append(seen[(None,) * (4 - seen.ndim)])
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total & part
        return total

    def by_kv_head(self, x: torch.Tensor) -> torch.Tensor:
        """[b, heads, M, ...] as [b, h_kv, group * M, ...]: the rows that share keys, together."""
        return x.unflatten(1, (-1, self.problem.group_size)).flatten(2, 3)

    def by_q_head(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_kv_head`."""
        return x.unflatten(2, (self.problem.group_size, -1)).flatten(1, 2)

    def row_stats(self, x: torch.Tensor) -> torch.Tensor:
        """The group's rows of an LSE-shaped tensor as a view [b, heads, seqlen_q]."""
        if self.problem.packed:
            return x[self.heads, self.where.rows][None]
        return x[self.where.b0 : self.where.b1, self.heads]


def tile_config(problem: Problem, blocks: BlockMask | None) -> TileConfig:
    """The table's tile, or one that keeps to the tile map's grid where there is one."""
    config = lookup("cpu", "forward", problem.dtype, problem.head_dim)
    if blocks is None:
        return config
    return replace(
        config,
        block_m=_multiple(blocks.block_q, config.block_m),
        block_n=_multiple(blocks.block_k, config.block_n),
    )


def _multiple(block: int, most: int) -> int:
    """A small multiple of `block` (a step below 64 rows is all overhead), halved while it is above `most`."""
    size = block * -(-64 // block)
    while size > most and size % 2 == 0:
        size //= 2
    return size


def groups(problem: Problem, inputs: Inputs) -> Iterator[Group]:
    """All the work of a problem, in a fixed order."""
    if problem.packed:
        assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
        for member in sequences.members(inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k):
            rows, keys = slice(member.q0, member.q1), slice(member.k0, member.k1)
            yield from sequences_of(problem, inputs, member.b, member.b + 1, rows, keys)
    else:
        everything = (slice(0, problem.seqlen_q), slice(0, problem.seqlen_k))
        yield from sequences_of(problem, inputs, 0, problem.batch, *everything)


def sequences_of(problem: Problem, inputs: Inputs, first: int, last: int, rows: slice, keys: slice) -> Iterator[Group]:
    """The groups of batch entries first .. last, which share their rows and keys."""
    seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
    if seqlen_q == 0 or first == last:
        return
    off = int(problem.offset(seqlen_q, seqlen_k))
    frame = Frame(first, last, seqlen_q, seqlen_k, off, problem.device)
    lowered = problem.options.mask.lower(frame)
    config = tile_config(problem, lowered.blocks)
    lo, hi = interval(lowered, frame)
    entries, heads = _group_size(problem, lowered.blocks, config, seqlen_q, seqlen_k)
    for b0 in range(first, last, entries):
        b1 = min(b0 + entries, last)
        bounds = [x if x.shape[0] == 1 else x[b0 - first : b1 - first] for x in (lo, hi)]
        for h0 in range(0, problem.heads_kv, heads):
            where = Where(b0, b1, h0, min(h0 + heads, problem.heads_kv), rows, keys)
            q = rows_of(inputs.q, problem, where) * problem.softmax_scale
            k, v = (_keys_of(x, problem, where) for x in (inputs.k, inputs.v))
            yield Group(problem, inputs, where, config, q.contiguous(), k, v, off, lowered, bounds[0], bounds[1])


def _group_size(
    problem: Problem, blocks: BlockMask | None, config: TileConfig, seqlen_q: int, seqlen_k: int
) -> tuple[int, int]:
    """Batch entries and key/value heads that are worked on together."""
    scores = max(1, min(seqlen_q, config.block_m) * min(seqlen_k, config.block_n)) * problem.group_size
    together = max(1, SCORES_PER_STEP // scores)
    heads = min(problem.heads_kv, together)
    entries = max(1, together // problem.heads_kv)
    if blocks is not None:
        # A tile is skipped only if it is inactive for the whole group.
        heads = 1 if blocks.tiles.shape[1] > 1 else heads
        entries = 1 if blocks.tiles.shape[0] > 1 or heads < problem.heads_kv else entries
    return entries, heads


def rows_view(x: torch.Tensor, problem: Problem, where: Where) -> torch.Tensor:
    """The group's rows of a q-shaped tensor as a view [b, heads, seqlen_q, D]."""
    heads = slice(where.h0 * problem.group_size, where.h1 * problem.group_size)
    part = x[None, where.rows, heads] if problem.packed else x[where.b0 : where.b1, :, heads]
    return part.transpose(1, 2)


def rows_of(x: torch.Tensor, problem: Problem, where: Where) -> torch.Tensor:
    """`rows_view` as [b, h_kv, group, seqlen_q, D] in the compute dtype."""
    return rows_view(x, problem, where).unflatten(1, (-1, problem.group_size)).to(problem.compute_dtype)


def _keys_of(x: torch.Tensor, problem: Problem, where: Where) -> torch.Tensor:
    return keys_view(x, problem, where).to(problem.compute_dtype).contiguous()


def keys_view(x: torch.Tensor, problem: Problem, where: Where) -> torch.Tensor:
    """The group's keys of a k-shaped tensor as a view [b, h_kv, seqlen_k, D]."""
    part = (
        x[None, where.keys, where.h0 : where.h1] if problem.packed else x[where.b0 : where.b1, :, where.h0 : where.h1]
    )
    return part.transpose(1, 2)
