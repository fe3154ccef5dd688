"""The packed rows of an item: loading its queries, storing its output and LSE.

Packed row ``r = i · group_size + g`` is row i of the g-th query head of a key head's group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernels import cache, rotary
from ..kernels.cache import PER_ITEM
from . import device


class Tiles(NamedTuple):
    """The packed rows of an item: both parts of q, what products with it are to be multiplied by, and row numbers.

    `rest` counts if BLOCK_REST is not 0, `factor` if FACTOR is set: a record made in a kernel holds no None.
    """

    main: Any
    rest: Any
    factor: Any
    rows: Any


@triton.jit
def factor_of(main, rest):
    """A power of two for each row of q, by which its elements are at most 2 in size."""
    peak = tl.maximum(tl.max(tl.abs(main.to(tl.float32)), 1), tl.max(tl.abs(rest.to(tl.float32)), 1))
    whole = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Not where it, or its reciprocal, is 0 or infinite.
    return tl.where((whole > 1e-30) & (whole < 1e30), whole, 1.0)


@triton.jit
def item_scale(ptr, row, head, seq, h):
    """The scale of a sequence and key head."""
    return tl.load(ptr + seq.b.to(tl.int64) * row + h * head)


@triton.jit
def load_q(q, slots, scales, rope, rope_length, group, h, heads, packed, limits, shape):
    """The rows of q of an item, rotated, and scaled down where products are in fp16 and q is not."""
    seq = group.seq
    inside = packed < seq.len_q * shape.GROUP
    i = packed // shape.GROUP
    base = q.ptr + seq.b.to(tl.int64) * q.batch + seq.q_start * q.seq
    rows = i.to(tl.int64) * q.seq + heads.to(tl.int64) * q.head
    if rope.cos is None:
        main = cache.load_tile(base, rows, inside, 0, shape.HEAD_DIM, shape.BLOCK_MAIN, True)
    else:
        used = cache.slots_in_use(slots, seq.b, limits)
        new = seq.k_start + seq.len_k - used
        at = rotary.first_position(rope, seq.b, used) + new - seq.len_q + i
        d = tl.arange(0, shape.BLOCK_MAIN)
        main = rotary.load_rotated(base, rows, inside, at, rope_length, rope, d, 0, shape.HEAD_DIM)
    rest = main
    if shape.BLOCK_REST > 0:
        if rope.cos is None:
            rest = cache.load_tile(base, rows, inside, shape.BLOCK_MAIN, shape.HEAD_DIM, shape.BLOCK_REST, True)
        else:
            d = shape.BLOCK_MAIN + tl.arange(0, shape.BLOCK_REST)
            rest = rotary.load_rotated(
                base, rows, inside, at, rope_length, rope, d, shape.BLOCK_MAIN, shape.HEAD_DIM
            )  # fmt: skip
    factor = tl.full([shape.BLOCK_M], 1.0, tl.float32)
    if main.dtype != device.number_type(shape.K_TYPE):
        factor = factor_of(main, rest)
        main = (main.to(tl.float32) / factor[:, None]).to(device.number_type(shape.K_TYPE))
        rest = (rest.to(tl.float32) / factor[:, None]).to(device.number_type(shape.K_TYPE))
    if shape.K_SCALES == PER_ITEM:
        factor *= item_scale(scales.k, scales.k_row, scales.k_head, seq, h)
    return Tiles(main, rest, factor, i[:, None])


@triton.jit
def store_rows(out, lse, parts, o, lse_tile, slot, seq, heads, packed, stat_rows, shape):
    """A whole item's rows to the output, another piece's to its slot."""
    i = packed // shape.GROUP
    d = tl.arange(0, shape.BLOCK_DV)
    inside = packed < seq.len_q * shape.GROUP
    real = inside[:, None] & (d < shape.HEAD_DIM_V)[None, :]
    if slot < 0:
        base = out.ptr + seq.b.to(tl.int64) * out.batch + seq.q_start * out.seq
        rows = i.to(tl.int64) * out.seq + heads.to(tl.int64) * out.head
        tl.store(base + rows[:, None] + d[None, :], o.to(out.ptr.dtype.element_ty), mask=real)
        tl.store(lse + cache.stat_at(seq, heads, i, stat_rows, shape), lse_tile, mask=inside)
    else:
        rows = slot.to(tl.int64) * shape.BLOCK_M + tl.arange(0, shape.BLOCK_M)
        tl.store(parts.out + rows[:, None] * shape.HEAD_DIM_V + d[None, :], o, mask=real)
        tl.store(parts.lse + rows, lse_tile, mask=inside)
