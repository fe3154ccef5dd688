"""Who works on what in the backward pass: tiles of keys, and the tiles of rows that see each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ..kernels.plans import HEAD_SHIFT, TILE_MASK
from ..kernels.score import Sequence
from .packed import RECORD
from .turns import first_visit
from .work import line_of


class Shape(NamedTuple):
    """Compile-time sizes, and which of the ways the kernel takes.

    WARPS that share a tile of scores, 16 keys or rows each. PACKED: sequences are members of a packed call. CLEAN: keys
    that some row does not see may be NaN. STRAIGHT: scores are products, a scale, and ALiBi of rows that see no key to
    their right. DIRECT: no TMA for gradients, whose head dims it does not take. STACK: as for the forward pass, which
    always is 1 here.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    WARPS: Any
    PACKED: Any
    CLEAN: Any
    STRAIGHT: Any
    DIRECT: Any
    STACK: Any = gl.constexpr(1)


class Span(NamedTuple):
    """The tiles of rows that see a tile of keys: ``lo .. hi``, of which ``full_lo .. full_hi`` are whole.

    With a plan these count the list of tiles that starts at `listed`. There are `count` over all heads of the group.
    `start` is the first to be visited: programs that add to the same rows of dq begin at different ones.
    """

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any
    listed: Any
    count: Any
    start: Any


@gluon.jit
def keys_of(t, band, work, shape):
    """The sequence and key/value head of the tile number t, and the tile's first key."""
    if shape.PACKED:
        # Listed as tiles of rows are, with queries and keys in each other's place.
        entry = work.table + (1 + t // work.heads) * RECORD
        n0 = gl.load(entry + 1)
        seq = Sequence(
            gl.load(entry), t % work.heads, gl.load(entry + 4), gl.load(entry + 2), gl.load(entry + 5),
            gl.load(entry + 3), -gl.load(entry + 6),
        )  # fmt: skip
    else:
        n0 = (t % work.tiles_m) * shape.BLOCK_N
        b, h = t // work.tiles_m // work.heads, (t // work.tiles_m) % work.heads
        seq = Sequence(b, h, 0, 0, band.len_q, band.len_k, band.off)
    return seq, n0


@gluon.jit
def span_of(seq, n0, band, work, variant, shape, t=0, turns=None):
    """Which rows see any of the keys from n0: `work.tile_of` transposed. With `turns` t is the tile's number."""
    if variant.plan is not None:
        row = variant.plan + seq.b.to(gl.int64) * variant.plan_batch + seq.h.to(gl.int64) * variant.plan_head
        row += (n0 // shape.BLOCK_N).to(gl.int64) * variant.plan_row
        full, hi = gl.load(row), gl.load(row + 1)
        span = Span(0 * n0, 0 * n0, full, hi, row + 2, hi, 0 * n0)
    else:
        last_key = gl.minimum(n0 + shape.BLOCK_N, seq.len_k) - 1
        first, full_first, last, full_last = 0 * n0, 0 * n0, seq.len_q + 0 * n0, seq.len_q + 0 * n0
        if band.right is not None:
            first = gl.minimum(gl.maximum(first, n0 - seq.off - band.right), seq.len_q)
            full_first = gl.maximum(first, last_key - seq.off - band.right)
        if band.left is not None:
            last = gl.minimum(last, last_key - seq.off + band.left + 1)
            full_last = gl.minimum(last, n0 - seq.off + band.left + 1)
        lo = first // shape.BLOCK_M
        hi = gl.where(last > first, gl.cdiv(last, shape.BLOCK_M), lo)
        full_lo = gl.minimum(gl.cdiv(full_first, shape.BLOCK_M), hi)
        full_end = full_last // shape.BLOCK_M
        if variant.mod is None:
            # Rows past the last one have an lse of +inf, and nothing else about them that is not finite.
            full_end = gl.where(full_last == seq.len_q, gl.cdiv(full_last, shape.BLOCK_M), full_end)
        full_hi = gl.minimum(gl.maximum(gl.maximum(full_end, 0), full_lo), hi)
        full_hi = gl.where(n0 + shape.BLOCK_N > seq.len_k, full_lo, full_hi)
        if variant.predicate is not None:
            full_hi = full_lo
        if turns is None:
            start = lo + (n0 // shape.BLOCK_M) % gl.maximum(hi - lo, 1)
        else:
            start = first_visit(t, n0 // shape.BLOCK_N, lo, hi, band, turns)
        span = Span(lo, full_lo, full_hi, hi, n0, (hi - lo) * work.group, start)
    return span


@gluon.jit
def met(t, band, work, variant, shape, turns=None):
    """The sequence of the tile number t, its first key, and the tiles of rows that see it."""
    seq, n0 = keys_of(t, band, work, shape)
    return seq, n0, span_of(seq, n0, band, work, variant, shape, t, turns)


@gluon.jit
def place_of(seq, head, m, work, shape):
    """Where the m-th tile of rows of a query head of the group is in tensors: sequence, head and first row."""
    return line_of(seq, shape), seq.h * work.group + head, seq.q_start + m * shape.BLOCK_M


@gluon.jit
def before(span):
    """Head and number of the tile before the first, for `row_tile`."""
    return span.lo * 0 - 1, span.start - 1


@gluon.jit
def row_tile(j, head, m, span, variant):
    """Query head inside the group, and number, of the j-th tile of rows; the last ones were `head` and `m`."""
    if variant.plan is not None:
        code = gl.load(span.listed + j)
        head, m = code >> HEAD_SHIFT, code & TILE_MASK
    else:
        m = gl.where(m + 1 >= span.hi, span.lo, m + 1)
        head = gl.where(m == span.start, head + 1, head)
    return head, m


@gluon.jit
def is_masked(j, m, span, variant):
    """Whether some row of the j-th tile, number m, does not see some key."""
    at = m
    if variant.plan is not None:
        at = j
    return (at >= span.full_hi) | (at < span.full_lo)
