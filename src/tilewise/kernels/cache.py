"""Where a cache's slots lie, on the device: lengths of sequences, page ids, tiles of keys, dequantised or not.

Nothing here trusts what lengths and tables hold: they are clamped, so that no address is out of range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import score
from .score import Sequence


class Slots(NamedTuple):
    """Lengths and tables of a call in device memory, int32 or int64, as in `kvcache.CacheInputs`. None: absent."""

    used: Any
    pad: Any
    index: Any
    table: Any
    cu_q: Any


# How an fp8 cache is scaled, where it is: a scale of a whole item, or of each page.
PER_ITEM = tl.constexpr(1)
PER_PAGE = tl.constexpr(2)
# Parameters of kernels that become `Limits`, none of which is to compile anything anew.
LIMITS = ["batch", "seqlen_q", "total_q", "seqlen_new", "capacity", "cache_rows", "table_row", "tree_batch"]


class Limits(NamedTuple):
    """Sizes that no length or index of a call passes.

    `seqlen_new`: new keys of each sequence; -1: as many as it has rows. `rows`: of the cache, or pages.
    `total_q`: rows of a ragged q. `table_row`: elements from one row of the page table to the next. `tree_batch`: from
    one sequence's tree to the next.
    """

    batch: Any
    seqlen_q: Any
    total_q: Any
    seqlen_new: Any
    capacity: Any
    rows: Any
    table_row: Any
    tree_batch: Any


class Scales(NamedTuple):
    """Scales of an fp8 cache: what is stored times the scale at ``ptr + place * row + h * head`` is the value.

    `row`: elements from one sequence, or page, to the next; 0 where the scale is of the head alone.
    """

    k: Any
    k_row: Any
    k_head: Any
    v: Any
    v_row: Any
    v_head: Any


@triton.jit
def clamp(x, lo, hi):
    return tl.minimum(tl.maximum(x, lo), hi)


@triton.jit
def rows_of(slots, b, limits):
    """First row in a ragged q (int64) and rows of sequences b, a scalar or a tile; none past the last sequence."""
    inside = b < limits.batch
    len_q = tl.where(inside, limits.seqlen_q, 0)
    q_start = len_q.to(tl.int64) * 0
    if slots.cu_q is not None:
        q_start = clamp(tl.load(slots.cu_q + b, mask=inside, other=0).to(tl.int64), 0, limits.total_q)
        q_stop = tl.load(slots.cu_q + b + 1, mask=inside, other=0).to(tl.int64)
        len_q = clamp(tl.minimum(q_stop, limits.total_q) - q_start, 0, len_q).to(tl.int32)
    return q_start, len_q


@triton.jit
def slots_in_use(slots, b, limits):
    """Slots in use before the call."""
    used = tl.load(slots.used + b, mask=b < limits.batch, other=0)
    return clamp(used, 0, limits.capacity).to(tl.int32)


@triton.jit
def locate(slots, b, h, limits, TOP_LEFT: tl.constexpr):
    """Sequences b, a scalar or a tile, as the score tile wants them; `k_start` is the slot of the first key."""
    q_start, len_q = rows_of(slots, b, limits)
    used = slots_in_use(slots, b, limits)
    new = tl.where(limits.seqlen_new < 0, len_q, limits.seqlen_new)
    # Not the sum, which may pass what an int32 holds.
    end = used + tl.minimum(new, limits.capacity - used)
    pad = end * 0
    if slots.pad is not None:
        pad = clamp(tl.load(slots.pad + b, mask=b < limits.batch, other=0), 0, end).to(tl.int32)
    len_k = end - pad
    off = len_k * 0 if TOP_LEFT else len_k - len_q
    return Sequence(b, h, q_start, pad, len_q, len_k, off)


@triton.jit
def row_of(slots, b, limits):
    """The cache row of sequence b (int64); of no meaning where there are pages."""
    row = b
    if slots.index is not None:
        row = clamp(tl.load(slots.index + b), 0, limits.rows - 1)
    return row.to(tl.int64)


@triton.jit
def page_ids(slots, b, slot, inside, limits, PAGE: tl.constexpr):
    """The pages (int32) of slots of sequence b; where not `inside`, nothing is looked up."""
    at = slots.table + b.to(tl.int64) * limits.table_row + slot // PAGE
    return clamp(tl.load(at, mask=inside, other=0), 0, limits.rows - 1).to(tl.int32)


@triton.jit
def tile_pages(slots, seq, n0, offs, first, last, limits, PAGE: tl.constexpr, WHOLE: tl.constexpr):
    """The pages of the keys ``n0 + offs`` among ``first .. last``; with WHOLE the one page that holds them all."""
    if WHOLE:
        pages = page_ids(slots, seq.b, n0, n0 < last, limits, PAGE)
    else:
        keys = n0 + offs
        pages = page_ids(slots, seq.b, seq.k_start + keys, (keys >= first) & (keys < last), limits, PAGE)
    return pages


@triton.jit
def tile_rows(x, row, seq, h, n0, offs, pages, PAGE: tl.constexpr, WHOLE: tl.constexpr):
    """Where the keys ``n0 + offs`` of key head h begin: an address, and offsets from it in elements."""
    base = x.ptr + h.to(tl.int64) * x.head
    if PAGE == 0:
        base += row * x.batch + (seq.k_start + n0).to(tl.int64) * x.seq
        rows = offs * x.seq
    elif WHOLE:
        base += pages.to(tl.int64) * x.batch + (n0 % PAGE) * x.seq
        rows = offs * x.seq
    else:
        rows = pages.to(tl.int64) * x.batch + ((seq.k_start + n0 + offs) % PAGE) * x.seq
    return base, rows


@triton.jit
def load_tile(base, rows, inside, START: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The dims ``START .. STOP`` of rows, [len(rows), BLOCK]; with MASKED, rows not `inside` are unread and 0."""
    d = START + tl.arange(0, BLOCK)
    ptrs = base + rows[:, None] + d[None, :]
    if MASKED:
        if START + BLOCK <= STOP:
            tile = tl.load(ptrs, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(ptrs, mask=inside[:, None] & (d < STOP)[None, :], other=0.0)
    elif START + BLOCK <= STOP:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(d < STOP)[None, :], other=0.0)
    return tile


@triton.jit
def visible(variant, extra, tree, seq, rows, keys, limits, left, right):
    """`score.visible`, and the tree: what each row sees of the newest keys."""
    seen = score.visible(variant, extra, seq, rows, keys, left, right)
    if tree is not None:
        column = keys - (seq.len_k - seq.len_q)
        inside = (column >= 0) & (column < seq.len_q) & (rows < seq.len_q)
        at = tree + seq.b.to(tl.int64) * limits.tree_batch + rows * limits.seqlen_q + column
        seen = seen & ((column < 0) | (tl.load(at, mask=inside, other=0) != 0))
    return seen


@triton.jit
def stat_at(seq, heads, i, stat_rows, shape):
    """Where the LSE of rows is: [B, Hq, stat_rows], or ragged [Hq, stat_rows]."""
    head = heads.to(tl.int64)
    if not shape.RAGGED:
        head += seq.b.to(tl.int64) * shape.HEADS
    return head * stat_rows + seq.q_start + i


@triton.jit
def clear_tail(out, lse, slots, limits, program, programs, stat_rows, d, shape):
    """Rows of a ragged q that belong to no sequence are 0, with LSE -inf; `d` are the dims of a row."""
    end = clamp(tl.load(slots.cu_q + limits.batch), 0, limits.total_q).to(tl.int32)
    for row in range(end + program, limits.total_q, programs):
        for head in range(shape.HEADS):
            at = out.ptr + tl.cast(row, tl.int64) * out.seq + head * out.head
            tl.store(at + d, (d * 0).to(out.ptr.dtype.element_ty), mask=d < shape.HEAD_DIM_V)
            tl.store(lse + tl.cast(head, tl.int64) * stat_rows + row, float("-inf"))
