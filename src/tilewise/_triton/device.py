"""What all kernels of this backend share beside the score tile (`kernels.score`): addresses, loads, products, walks.

A record's field that is None is not compiled: there are no flags for absent features. Records are passed on
one by one: assigning or nesting them in a kernel would make run-time values of their compile-time fields.

Source: FlashAttention-2 (Dao, 2023), Algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernels import philox
from ..kernels.plans import HEAD_SHIFT, TILE_MASK
from ..kernels.score import INTERPRETED, PTX, Sequence, Span


class Shape(NamedTuple):
    """Compile-time sizes; BLOCK_D and BLOCK_DV are the head dims, padded to powers of two.

    WANT_K and WANT_V: which of dk and dv a kernel for them computes. WANT_SLOPES: whether that of dq computes the
    gradient of ALiBi's slopes too.
    """

    HEADS: Any
    GROUP: Any
    TOP_LEFT: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    WANT_K: Any
    WANT_V: Any
    WANT_SLOPES: Any


@triton.constexpr_function
def number_type(name):
    """The type of numbers with this name: fp16, bf16, fp32."""
    return tl.dtype(name)


@triton.jit
def locate(variant, b, h, seqlen_q, seqlen_k, shape):
    """The sequence b: its lengths and offset, read once per program."""
    zero = tl.zeros((), tl.int64)
    q_start = zero
    k_start = zero
    len_q = zero.to(tl.int32) + seqlen_q
    len_k = zero.to(tl.int32) + seqlen_k
    if variant.cu_q is not None:
        q_start = tl.load(variant.cu_q + b).to(tl.int64)
        k_start = tl.load(variant.cu_k + b).to(tl.int64)
        # An understated maximum leaves rows out; it never lets a tile reach into the next member.
        len_q = (tl.load(variant.cu_q + b + 1).to(tl.int64) - q_start).to(tl.int32)
        len_k = (tl.load(variant.cu_k + b + 1).to(tl.int64) - k_start).to(tl.int32)
    if variant.used_k is not None:
        len_k = tl.load(variant.used_k + b).to(tl.int32)
    off = len_k - len_q
    if shape.TOP_LEFT:
        off = len_k * 0
    return Sequence(b, h, q_start, k_start, len_q, len_k, off)


@triton.jit
def row_ptr(x, b, row, h):
    """Address of element 0 of one row; `row` is int64, as b and h products can pass 2**31 too."""
    return x.ptr + b.to(tl.int64) * x.batch + row * x.seq + h.to(tl.int64) * x.head


@triton.jit
def load_rows(base, stride, offs, lo, hi, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows `offs` of a matrix, [len(offs), BLOCK_D]; with MASKED, rows outside ``lo .. hi`` are unread and 0."""
    d = tl.arange(0, BLOCK_D)
    ptrs = base + offs[:, None] * stride + d[None, :]
    if MASKED:
        inside = (offs >= lo) & (offs < hi)
        if BLOCK_D == HEAD_DIM:
            tile = tl.load(ptrs, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(ptrs, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def store_rows(base, stride, offs, hi, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows `offs` below `hi`."""
    d = tl.arange(0, BLOCK_D)
    ptrs = base + offs[:, None] * stride + d[None, :]
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=(offs < hi)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def stat_offset(seq, stat_rows, variant, shape):
    """Where the sequence's row 0 is in a statistic per row: [B, Hq, stat_rows], or packed [Hq, stat_rows]."""
    head = seq.h.to(tl.int64)
    if variant.cu_q is None:
        head += seq.b.to(tl.int64) * shape.HEADS
    return head * stat_rows + seq.q_start


@triton.jit
def dot(a, b):
    """``a @ b`` in fp32; fp32 operands are multiplied as fp32, never as TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """``acc + a @ b``; see `dot`."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def any_strange(tile):
    """Whether anything in `tile` is NaN or infinite."""
    if tile.dtype == tl.float32:
        bits, most = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F7FFFFF
    elif tile.dtype == tl.float16:
        bits, most = (tile.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 0x7BFF
    else:
        bits, most = (tile.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 0x7F7F
    return tl.max(tl.max(bits, 1), 0) > most


@triton.jit
def finite(tile):
    """`tile` with NaN and infinities made 0, and which of its rows had any: 0 · NaN is NaN, also where p is 0."""
    good = tl.abs(tile.to(tl.float32)) < float("inf")
    return tl.where(good, tile, 0.0), tl.min(good.to(tl.int32), 1) == 0


@triton.jit
def keys_of(seq, m0, left, right, shape):
    """The tiles of keys that the rows ``m0 .. m0 + BLOCK_M`` see through the band."""
    last_row = tl.minimum(m0 + shape.BLOCK_M, seq.len_q) - 1
    first = seq.len_k * 0
    full_first = first
    last = seq.len_k
    full_last = last
    if left is not None:
        first = tl.maximum(first, m0 + seq.off - left)
        full_first = tl.maximum(first, last_row + seq.off - left)
    if right is not None:
        last = tl.minimum(last, last_row + seq.off + right + 1)
        full_last = tl.minimum(last, m0 + seq.off + right + 1)
    return _span(first, full_first, full_last, last, shape.BLOCK_N)


@triton.jit
def rows_of(seq, n0, left, right, shape):
    """The tiles of rows that see the keys ``n0 .. n0 + BLOCK_N`` through the band: `keys_of` transposed."""
    last_key = tl.minimum(n0 + shape.BLOCK_N, seq.len_k) - 1
    first = seq.len_q * 0
    full_first = first
    last = seq.len_q
    full_last = last
    if right is not None:
        first = tl.maximum(first, n0 - seq.off - right)
        full_first = tl.maximum(first, last_key - seq.off - right)
    if left is not None:
        last = tl.minimum(last, last_key - seq.off + left + 1)
        full_last = tl.minimum(full_last, n0 - seq.off + left + 1)
    return _span(first, full_first, full_last, last, shape.BLOCK_M)


@triton.jit
def walk(
    body: tl.constexpr, state, tiles, a, b, seq, span, variant, extra, shape, left, right, own_head, own_tile, low_edge
):  # fmt: skip
    """Call ``body(state, tiles, ..., listed, lo, hi, MASKED)`` for the tiles that the program has to visit.

    Those at the low edge, if its bound `low_edge` is not None, come before those that need no element test, and those
    at the high one after them; or both before (`of_edges`). With a plan, `listed` is where it lists them.
    """
    if variant.plan is not None:
        row = variant.plan + seq.b.to(tl.int64) * variant.plan_batch + own_head.to(tl.int64) * variant.plan_head
        row += own_tile.to(tl.int64) * variant.plan_row
        full = tl.load(row)
        state = body(state, tiles, a, b, seq, span, variant, extra, shape, left, right, row + 2, 0, full, False)
        state = body(
            state, tiles, a, b, seq, span, variant, extra, shape, left, right, row + 2, full, tl.load(row + 1), True
        )
    elif variant.predicate is not None:
        state = body(state, tiles, a, b, seq, span, variant, extra, shape, left, right, 0, span.lo, span.hi, True)
    else:
        end = span.full_lo
        if edges_together(low_edge, shape):
            end = span.hi - (span.full_hi - span.full_lo)
        if low_edge is not None:
            state = body(state, tiles, a, b, seq, span, variant, extra, shape, left, right, 0, span.lo, end, True)
        state = body(
            state, tiles, a, b, seq, span, variant, extra, shape, left, right, 0, span.full_lo, span.full_hi, False
        )
        if not edges_together(low_edge, shape):
            state = body(
                state, tiles, a, b, seq, span, variant, extra, shape, left, right, 0, span.full_hi, span.hi, True
            )
    return state


@triton.jit
def edges_together(low_edge, shape):
    """Whether one loop visits both edges: with 128 keys a tile, ptxas then waits for products where it need not."""
    return low_edge is not None and shape.BLOCK_N <= 64


@triton.jit
def of_edges(i, span, low_edge, variant, shape, MASKED: tl.constexpr):
    """Index of the i-th tile: a stretch of both edges jumps over the tiles that need no element test."""
    if MASKED and edges_together(low_edge, shape) and variant.plan is None and variant.predicate is None:
        i = tl.where(i >= span.full_lo, i + (span.full_hi - span.full_lo), i)
    return i


@triton.jit
def key_tile(i, listed, span, left, variant, shape, MASKED: tl.constexpr):
    """Index of the i-th tile of keys to visit."""
    if variant.plan is not None:
        i = tl.load(listed + i)
    return of_edges(i, span, left, variant, shape, MASKED)


@triton.jit
def row_tile(i, head, tile, lo, hi, listed, variant, shape):
    """Query head inside the group, and index, of the i-th tile of rows to visit; the last ones were `head`, `tile`.

    One loop over heads and tiles: nested ones would keep every address of the inner one alive across the outer. It
    counts, for a division in it would be a function call, beside which no WGMMA runs asynchronously.
    """
    if variant.plan is not None:
        code = tl.load(listed + i)
        head = code >> HEAD_SHIFT
        tile = code & TILE_MASK
    elif shape.GROUP > 1:
        wraps = tile + 1 >= hi
        head = tl.where(wraps, head + 1, head)
        tile = tl.where(wraps, lo, tile + 1)
    else:
        tile = i
    return head, tile


@triton.jit
def _span(first, full_first, full_last, last, BLOCK: tl.constexpr):
    last = tl.maximum(last, first)
    lo = first // BLOCK
    hi = tl.where(last > first, tl.cdiv(last, BLOCK), lo)
    full_lo = tl.minimum(tl.cdiv(full_first, BLOCK), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_lo), hi)
    return Span(lo, full_lo, full_hi, hi, first, last)


@triton.jit
def pairs_tile(variant, seq, m0, n0, shape):
    """What dropout draws for a tile, uint32 [M, N / 2 or 16]: two numbers of 16 bits for two columns.

    A Philox call serves sixteen: see `tilewise.dropout`.
    """
    # Four calls cover 64 columns, of which a narrower tile is a part.
    CALLS: tl.constexpr = max(shape.BLOCK_N, 64) // 16
    rows = m0 + tl.arange(0, shape.BLOCK_M)
    calls = n0 // 64 * 4 + tl.arange(0, CALLS)
    c0 = tl.broadcast_to(rows[:, None], (shape.BLOCK_M, CALLS)).to(tl.uint32)
    c1 = tl.broadcast_to(calls[None, :], (shape.BLOCK_M, CALLS)).to(tl.uint32)
    c2 = c0 * 0 + (seq.b * shape.HEADS + seq.h).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(variant.seed), c0, c1, c2, c0 * 0, n_rounds=philox.ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M, calls, 2, 2]: word 2x + y
    if shape.BLOCK_N >= 64:
        words = tl.join(words, philox.swapped(words)).reshape(shape.BLOCK_M, CALLS // 4, 4, 4, 2)
        pairs = tl.permute(words, (0, 1, 4, 3, 2)).reshape(shape.BLOCK_M, CALLS * 8)
    else:
        words = tl.where(n0 % 64 < 32, words, philox.swapped(words)).reshape(shape.BLOCK_M, 4, 4)
        pairs = tl.permute(words, (0, 2, 1)).reshape(shape.BLOCK_M, 16)
    return pairs


@triton.jit
def by_columns(pairs):
    """The halves of words for two columns each, as [M, N] numbers."""
    return tl.join(pairs & 0xFFFF, pairs >> 16).reshape(pairs.shape[0], pairs.shape[1] * 2)


@triton.jit
def keep_tile(variant, seq, m0, n0, shape):
    """The dropout mask of a tile, [M, N]."""
    pairs = pairs_tile(variant, seq, m0, n0, shape)
    keep = philox.below(by_columns(pairs), tl.cast(variant.cut, tl.uint32))
    if variant.drops:
        keep = ~keep
    if shape.BLOCK_N < 32:
        parts = keep.reshape(shape.BLOCK_M, 32 // shape.BLOCK_N, shape.BLOCK_N).to(tl.int32)
        mine = tl.arange(0, 32 // shape.BLOCK_N) == n0 % 32 // shape.BLOCK_N
        keep = tl.max(tl.where(mine[None, :, None], parts, 0), 1) > 0
    return keep


@triton.jit
def without_dropped(p, variant, seq, m0, n0, dtype, shape):
    """Weights in `dtype`, [M, N], 0 where dropout drops them."""
    if variant.seed is None:
        p = p.to(dtype)
    elif dtype == tl.float32 or shape.BLOCK_N < 32 or not PTX:
        p = tl.where(keep_tile(variant, seq, m0, n0, shape), p, 0.0).to(dtype)
    else:
        # Two at a time, as they lie in registers.
        dropped = philox.dropped(pairs_tile(variant, seq, m0, n0, shape), variant)
        p = (p.to(dtype).to(tl.int16, bitcast=True) & ~by_columns(dropped).to(tl.int16)).to(dtype, bitcast=True)
    return p
