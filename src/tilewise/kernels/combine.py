"""Merge the partial results of items that were cut: ``o = sum w_j o_j``, ``w_j = exp(lse_j - lse)``.

A program for each row of each item that may have been cut; pieces are always merged in the order of their keys. Items
that are one piece have been written by whoever computed them, and are left alone here.

HBM: reads two partials per program of `decode`, writes their rows of o and lse.

Source: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import cache, decode_plan
from .cache import Limits
from .decode_plan import BALANCED, Work
from .score import LN2, LOG2E

# Partials that are merged in one go.
_PIECES = tl.constexpr(16)


@triton.jit(do_not_specialize=[*cache.LIMITS, *decode_plan.WORK, "stat_rows", "rows", "left", "right"])
def combine_kernel(
    out, lse, parts, slots, shape, batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch,
    row_tiles, splits, cut, whole, stat_rows, rows, left, right, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: (program of `decode`, or item of a fixed plan; packed row of its tile).

    EARLY: it is launched while `decode` runs, and waits here for all that it has written. The next kernel may be
    launched by then, which waits for this one in turn: so its programs are there when this one ends.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limits = Limits(batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch)
    work = Work(row_tiles, splits, cut, whole)
    index = tl.program_id(0) // rows
    r = tl.program_id(0) % rows
    # A small call takes as long as loads that wait for each other: all that is known by now is asked for at once.
    if shape.MODE == BALANCED:
        g = tl.load(parts.cuts + index * 4)
        h = tl.load(parts.cuts + index * 4 + 1)
        pieces = tl.load(parts.cuts + index * 4 + 2)
        if pieces < 2:
            return
        group = decode_plan.group_of(g, slots, limits, work, shape, left, right)
    else:
        g = index // shape.HEADS_KV
        h = index % shape.HEADS_KV
        group = decode_plan.group_of(g, slots, limits, work, shape, left, right)
        pieces = group.units
        if pieces < 2:
            return
    seq = group.seq
    packed = group.row0 + r
    offs = tl.arange(0, _PIECES)
    d = tl.arange(0, shape.BLOCK_DV)
    m_i = tl.zeros((), tl.float32) - float("inf")
    l_i = tl.zeros((), tl.float32)
    acc = tl.zeros([shape.BLOCK_DV], tl.float32)
    for c in range(0, pieces, _PIECES):
        j = c + offs
        if shape.MODE == BALANCED:
            slot = decode_plan.slot_of(index + j, j)
        else:
            slot = index * work.splits + j
        row = slot.to(tl.int64) * shape.BLOCK_M + r
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
    # Only here the sequence's lengths are needed, which say whether there is such a row.
    if packed >= seq.len_q * shape.GROUP:
        return
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    head = h * shape.GROUP + packed % shape.GROUP
    i = packed // shape.GROUP
    at = out.ptr + seq.b.to(tl.int64) * out.batch + (seq.q_start + i) * out.seq + head.to(tl.int64) * out.head
    tl.store(at + d, (acc / l_i).to(out.ptr.dtype.element_ty), mask=d < shape.HEAD_DIM_V)
    total = tl.where(empty, float("-inf"), m_i + tl.log2(l_i) * LN2)
    tl.store(lse + cache.stat_at(seq, head, i, stat_rows, shape), total)
