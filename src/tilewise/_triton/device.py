"""What all kernels of this backend share: argument records, addresses, the score tile and its derivative.

The score tile is the heart: ``s = softmax_scale * q k^T -> softcap -> score_mod -> ALiBi, bias -> mask``, computed by
`scores` alone, in base 2 (times log2 e), for forward, dq and dk/dv alike. Rows and keys come as index tiles that
broadcast ([M, 1] and [1, N], or transposed), so the same functions serve both orientations.

A record's field that is None is not compiled: there are no flags for absent features.

Source: FlashAttention-2 (Dao, 2023), Algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# exp2 is one instruction, so softmax runs in base 2.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The interpreter multiplies bf16 tiles as if they were integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Rows(NamedTuple):
    """A tensor [B, S, H, D] with its strides in elements; packed ones [T, H, D] have batch stride 0."""

    ptr: Any
    batch: Any
    seq: Any
    head: Any


class Lengths(NamedTuple):
    """Device-side lengths: int32/int64 [B + 1], [B + 1] and [B], or None."""

    cu_q: Any
    cu_k: Any
    used_k: Any


class Scoring(NamedTuple):
    """How a product q·k becomes a score; `fold`: the scale, which is positive, is all there is."""

    scale: Any
    fold: Any
    cap: Any
    mod: Any
    dmod: Any
    aux: Any
    slopes: Any
    bias: Any


class Grid(NamedTuple):
    """A tensor that broadcasts to [B, Hq, Sq, Sk]: its strides, 0 where its size is 1."""

    ptr: Any
    batch: Any
    head: Any
    q: Any
    k: Any


class Visibility(NamedTuple):
    """The element test beside the band: per-row bounds (int32 ``[2, B|1, S]``) and a compiled predicate.

    `irregular`: a tile may hold keys that none of its rows sees, though they lie inside its band.
    `every_tile`: there is a predicate, so no tile is free of the test.
    """

    bounds: Any
    predicate: Any
    data: Any
    irregular: Any
    every_tile: Any


class Dropout(NamedTuple):
    """Seed (a scalar int64 in device memory) and the 16-bit threshold below which an element is kept."""

    seed: Any
    keep: Any


class Plan(NamedTuple):
    """Tiles to visit where a band does not say: int32 [B|1, H|1, tiles, ...], a row being the number of tiles that
    need no element test, the number of all, and their indices, those without test first."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Variant(NamedTuple):
    """Everything that makes one call differ from plain attention."""

    lengths: Any
    scoring: Any
    visibility: Any
    plan: Any
    dropout: Any


class Shape(NamedTuple):
    """Compile-time sizes; BLOCK_D and BLOCK_DV are the head dims, padded to powers of two."""

    HEADS: Any
    GROUP: Any
    TOP_LEFT: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any


class Sequence(NamedTuple):
    """One sequence and head as a kernel sees it: first rows in packed tensors (int64), lengths, diagonal offset."""

    b: Any
    h: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    off: Any


class Span(NamedTuple):
    """What a tile has to visit: tiles ``lo .. hi``, of which ``full_lo .. full_hi`` need no element test.

    `first .. last` are the rows or keys that anything in the tile sees.
    """

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any
    first: Any
    last: Any


class Task(NamedTuple):
    """What a program works on, beside its tiles; `left` and `right` bound the band of visible keys."""

    seq: Any
    span: Any
    variant: Any
    shape: Any
    left: Any
    right: Any


class Streams(NamedTuple):
    """The two matrices whose rows stream past a program (k and v, or q and do): addresses of row 0, and strides."""

    a: Any
    b: Any
    a_stride: Any
    b_stride: Any


class Chain(NamedTuple):
    """A score tile in base 2, and what its derivative needs: tanh of the softcap and the value given to score_mod."""

    s: Any
    tanh: Any
    capped: Any


@triton.jit
def locate(lengths, b, h, seqlen_q, seqlen_k, shape):
    """The sequence b: its lengths and offset, read once per program."""
    zero = tl.zeros((), tl.int64)
    q_start = zero
    k_start = zero
    len_q = zero.to(tl.int32) + seqlen_q
    len_k = zero.to(tl.int32) + seqlen_k
    if lengths.cu_q is not None:
        q_start = tl.load(lengths.cu_q + b).to(tl.int64)
        k_start = tl.load(lengths.cu_k + b).to(tl.int64)
        # An understated maximum leaves rows out; it never lets a tile reach into the next member.
        len_q = (tl.load(lengths.cu_q + b + 1).to(tl.int64) - q_start).to(tl.int32)
        len_k = (tl.load(lengths.cu_k + b + 1).to(tl.int64) - k_start).to(tl.int32)
    if lengths.used_k is not None:
        len_k = tl.load(lengths.used_k + b).to(tl.int32)
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
    """Rows `offs` of a matrix, [len(offs), BLOCK_D]; with MASKED rows outside ``lo .. hi`` are unread and 0."""
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
def stat_offset(seq, stat_rows, lengths, shape):
    """Where the sequence's row 0 is in a statistic per row: [B, Hq, stat_rows], or packed [Hq, stat_rows]."""
    head = seq.h.to(tl.int64)
    if lengths.cu_q is None:
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
def tanh(x):
    """Exact to fp32 rounding: the series where ``1 - 2 / (exp(2x) + 1)`` would cancel."""
    y = x * x
    series = x * (1.0 + y * (-0.333333333 + y * (0.133333333 + y * (-0.0539682540 + y * 0.0218694885))))
    return tl.where(y < 0.04, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def scores(qk, scoring, seq, rows, keys):
    """The products `qk` of `rows` with `keys` as scores in base 2, before the mask (see the module's head)."""
    tanh_x = qk
    capped = qk
    if scoring.cap is not None:
        tanh_x = tanh(qk * (scoring.scale / scoring.cap))
    if scoring.mod is not None:
        capped = qk * scoring.scale
        if scoring.cap is not None:
            capped = tanh_x * scoring.cap
        at_q = tl.minimum(rows, seq.len_q - 1)
        at_k = tl.minimum(keys, seq.len_k - 1)
        s = scoring.mod(capped, seq.b, seq.h, at_q, at_k, scoring.aux) * LOG2E
    elif scoring.cap is not None:
        s = tanh_x * (scoring.cap * LOG2E)
    else:
        s = qk * (scoring.scale * LOG2E)
    if scoring.slopes is not None:
        s -= slope(scoring, seq) * LOG2E * distance(seq, rows, keys)
    if scoring.bias is not None:
        s += grid_tile(scoring.bias, seq, rows, keys).to(tl.float32) * LOG2E
    return Chain(s, tanh_x, capped)


@triton.jit
def scores_gradient(ds, chain, scoring, seq, rows, keys):
    """The gradient of ``softmax_scale * q·k`` from `ds`, that of the score before ALiBi and bias."""
    if scoring.mod is not None:
        at_q = tl.minimum(rows, seq.len_q - 1)
        at_k = tl.minimum(keys, seq.len_k - 1)
        ds = scoring.dmod(ds, chain.capped, seq.b, seq.h, at_q, at_k, scoring.aux)
    if scoring.cap is not None:
        ds = ds * (1.0 - chain.tanh * chain.tanh)
    return ds


@triton.jit
def slope(scoring, seq):
    """The ALiBi slope of this head."""
    return tl.load(scoring.slopes.ptr + seq.b * scoring.slopes.batch + seq.h * scoring.slopes.head).to(tl.float32)


@triton.jit
def distance(seq, rows, keys):
    """``|i + off - j|`` in fp32: a float subtraction whose absolute value is free."""
    return tl.abs((rows + seq.off).to(tl.float32) - keys.to(tl.float32))


@triton.jit
def grid_ptrs(grid, seq, rows, keys):
    """Addresses in a `Grid`; int64, for rows times row stride can pass 2**31."""
    base = grid.ptr + seq.b.to(tl.int64) * grid.batch + seq.h.to(tl.int64) * grid.head
    return base + rows.to(tl.int64) * grid.q + keys.to(tl.int64) * grid.k


@triton.jit
def grid_tile(grid, seq, rows, keys):
    """The elements of a `Grid`, 0 outside the sequence."""
    inside = (rows < seq.len_q) & (keys < seq.len_k)
    return tl.load(grid_ptrs(grid, seq, rows, keys), mask=inside, other=0.0)


@triton.jit
def visible(task, rows, keys):
    """Which of `keys` each of `rows` sees: the band, the per-row bounds and the predicate."""
    seq, visibility = task.seq, task.variant.visibility
    seen = keys < seq.len_k
    if task.left is not None:
        seen = seen & (keys >= rows + (seq.off - task.left))
    if task.right is not None:
        seen = seen & (keys <= rows + (seq.off + task.right))
    if visibility.bounds is not None:
        at = visibility.bounds.ptr + seq.b * visibility.bounds.batch + rows
        seen = seen & (keys >= tl.load(at, mask=rows < seq.len_q, other=0))
        seen = seen & (keys < tl.load(at + visibility.bounds.seq, mask=rows < seq.len_q, other=0))
    if visibility.predicate is not None:
        at_q = tl.minimum(rows, seq.len_q - 1)
        at_k = tl.minimum(keys, seq.len_k - 1)
        seen = seen & visibility.predicate(seq.b, seq.h, at_q, at_k, seq.off, visibility.data)
    return seen


@triton.jit
def zero_unseen(tile, seen, AXIS: tl.constexpr):
    """Zero the rows of `tile` that nothing sees, for 0 · NaN is NaN; `seen` has the other index along AXIS."""
    return tl.where((tl.max(seen.to(tl.int32), AXIS) > 0)[:, None], tile, 0.0)


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
def walk(body: tl.constexpr, state, tiles, task, own_tile, low_edge):
    """Call ``body(state, tiles, task, listed, lo, hi, MASKED)`` for each stretch of tiles that the program has to visit.

    At most three: those at the low edge of the span, those that need no element test, those at the high edge. A side
    whose bound `low_edge` is None has no edge. With a plan there are two, and `listed` is where it lists them.
    """
    span, plan = task.span, task.variant.plan
    if plan is not None:
        row = plan.ptr + task.seq.b.to(tl.int64) * plan.batch + task.seq.h.to(tl.int64) * plan.head
        row += own_tile.to(tl.int64) * plan.row
        full = tl.load(row)
        state = body(state, tiles, task, row + 2, 0, full, False)
        state = body(state, tiles, task, row + 2, full, tl.load(row + 1), True)
    elif task.variant.visibility.every_tile:
        state = body(state, tiles, task, 0, span.lo, span.hi, True)
    else:
        if low_edge is not None:
            state = body(state, tiles, task, 0, span.lo, span.full_lo, True)
        state = body(state, tiles, task, 0, span.full_lo, span.full_hi, False)
        state = body(state, tiles, task, 0, span.full_hi, span.hi, True)
    return state


@triton.jit
def start_of(i, listed, task, BLOCK: tl.constexpr):
    """The first row or key of the i-th tile to visit."""
    if task.variant.plan is not None:
        i = tl.load(listed + i)
    return i * BLOCK


@triton.jit
def _span(first, full_first, full_last, last, BLOCK: tl.constexpr):
    last = tl.maximum(last, first)
    lo = first // BLOCK
    hi = tl.where(last > first, tl.cdiv(last, BLOCK), lo)
    full_lo = tl.minimum(tl.cdiv(full_first, BLOCK), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_lo), hi)
    return Span(lo, full_lo, full_hi, hi, first, last)


@triton.jit
def keep_tile(dropout, seq, m0, n0, shape):
    """The dropout mask of a tile, [M, N]: one Philox call for eight elements (`tilewise.dropout`)."""
    rows = m0 + tl.arange(0, shape.BLOCK_M)
    calls = n0 // 8 + tl.arange(0, shape.BLOCK_N // 8)
    c0 = tl.broadcast_to(rows[:, None], (shape.BLOCK_M, shape.BLOCK_N // 8)).to(tl.uint32)
    c1 = tl.broadcast_to(calls[None, :], (shape.BLOCK_M, shape.BLOCK_N // 8)).to(tl.uint32)
    c2 = c0 * 0 + (seq.b * shape.HEADS + seq.h).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(dropout.seed), c0, c1, c2, c0 * 0)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M, N/8, 2, 2]: word 2x + y
    halves = tl.join(words & 0xFFFF, words >> 16)  # [M, N/8, 2, 2, 2]
    halves = halves.reshape(shape.BLOCK_M, shape.BLOCK_N // 32, 4, 4, 2)  # [M, group, thread, word, half]
    halves = tl.permute(halves, (0, 1, 3, 2, 4)).reshape(shape.BLOCK_M, shape.BLOCK_N)
    return halves < (tl.zeros((), tl.int32) + dropout.keep).to(tl.uint32)
