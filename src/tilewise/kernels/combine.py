"""Merge the partial results of items that were cut: ``o = sum w_j o_j``, ``w_j = exp(lse_j - lse)``.

A program for each row of an item, or of several where there are more of them than programs of `decode`; pieces are
always merged in the order of their keys. Items that are one piece have been written by whoever computed them, and are
left alone here.

HBM: reads two partials per run of `decode`, writes their rows of o and lse.

Source: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import cache, decode_plan
from .cache import Limits
from .decode_plan import BALANCED, Work
from .score import LN2, LOG2E

# Numbers of the partials that are merged in one go, and the fewest and most partials; and how many such tiles there is
# memory for but one: a small call takes as long as loads that wait for each other, so more are under way than merged.
_NUMBERS, _FEWEST, _MOST = 2048, 4, 128
_STAGES = tl.constexpr(4)
# Items that a program looks at in one go.
_ITEMS = tl.constexpr(32)


@triton.constexpr_function
def pieces_at_once(block_dv):
    """Partials that are merged in one go."""
    return min(max(_NUMBERS // block_dv, _FEWEST), _MOST)


@triton.jit
def pieces_of(items, count, parts, slots, limits, work, shape, left, right):
    """How many pieces each of these items, of so many, has; 0: there is none."""
    if shape.MODE == BALANCED:
        there = items < count
        if shape.RAGGED:
            b, m = decode_plan.sequence_of(items // shape.HEADS_KV, work, shape)
            _, len_q = cache.rows_of(slots, b, limits)
            there &= m * shape.BLOCK_M < len_q * shape.GROUP
        pieces = tl.where(there, tl.load(parts.cuts + items * 2, mask=items < count, other=0), 0)
    else:
        pieces = decode_plan.group_of(items // shape.HEADS_KV, slots, limits, work, shape, left, right).units
    return pieces


@triton.jit
def merged(item, pieces, r, parts, limits, work, shape):
    """Row r of an item's tile: its output, not yet divided by the sum of weights, that sum, and the maximum."""
    PIECES: tl.constexpr = pieces_at_once(shape.BLOCK_DV)
    first = item
    if shape.MODE == BALANCED:
        first = tl.load(parts.cuts + item * 2 + 1)
    rows = decode_plan.slot_rows(limits, shape)
    offs = tl.arange(0, PIECES)
    d = tl.arange(0, shape.BLOCK_DV)
    m_i = tl.zeros((), tl.float32) - float("inf")
    l_i = tl.zeros((), tl.float32)
    acc = tl.zeros([shape.BLOCK_DV], tl.float32)
    for c in tl.range(0, pieces, PIECES, num_stages=_STAGES):
        j = c + offs
        if shape.MODE == BALANCED:
            slot = tl.where(j == 0, 2 * first + 1, 2 * (first + j))
        else:
            slot = first * work.splits + j
        row = slot.to(tl.int64) * rows + r
        there = j < pieces
        lse_j = tl.load(parts.lse + row, mask=there, other=float("-inf"))
        real = there[:, None] & (d < shape.HEAD_DIM_V)[None, :]
        o_j = tl.load(parts.out + row[:, None] * shape.HEAD_DIM_V + d[None, :], mask=real, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse_j, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.exp2((lse_j - m_safe) * LOG2E)
        alpha = tl.exp2((m_i - m_safe) * LOG2E)
        l_i = l_i * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(w[:, None] * o_j, 0)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def store_row(acc, l_i, m_i, out, lse, seq, head, i, stat_rows, shape):
    """Output and LSE of row i of a sequence's head, from sums and maximum."""
    d = tl.arange(0, shape.BLOCK_DV)
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    at = out.ptr + seq.b.to(tl.int64) * out.batch + (seq.q_start + i) * out.seq + head.to(tl.int64) * out.head
    tl.store(at + d, (acc / l_i).to(out.ptr.dtype.element_ty), mask=d < shape.HEAD_DIM_V)
    total = tl.where(empty, float("-inf"), m_i + tl.log2(l_i) * LN2)
    tl.store(lse + cache.stat_at(seq, head, i, stat_rows, shape), total)


@triton.jit(do_not_specialize=[*cache.LIMITS, *decode_plan.WORK, "stat_rows", "rows", "left", "right"])
def combine_kernel(
    out, lse, parts, slots, shape, batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch,
    row_tiles, splits, cut, whole, least, stat_rows, rows, left, right, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: (items that are so many apart; packed row of their tiles).

    EARLY: it is launched while `decode` runs, and waits here for all that it has written.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    limits = Limits(batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch)
    work = Work(row_tiles, splits, cut, whole, least)
    items = batch * row_tiles * shape.HEADS_KV
    lanes = tl.num_programs(0) // rows
    r = tl.program_id(0) % rows
    for start in range(tl.program_id(0) // rows, items, lanes * _ITEMS):
        some = start + tl.arange(0, _ITEMS) * lanes
        pieces = pieces_of(some, items, parts, slots, limits, work, shape, left, right)
        item = tl.min(tl.where(pieces > 1, some, items), 0)
        while item < items:
            group = decode_plan.group_of(item // shape.HEADS_KV, slots, limits, work, shape, left, right)
            count = tl.sum(tl.where(some == item, pieces, 0), 0)
            acc, l_i, m_i = merged(item, count, r, parts, limits, work, shape)
            packed = group.row0 + r
            # Only here the sequence's lengths are needed, which say whether there is such a row.
            if packed < group.seq.len_q * shape.GROUP:
                head = item % shape.HEADS_KV * shape.GROUP + packed % shape.GROUP
                store_row(acc, l_i, m_i, out, lse, group.seq, head, packed // shape.GROUP, stat_rows, shape)
            item = tl.min(tl.where((pieces > 1) & (some > item), some, items), 0)
