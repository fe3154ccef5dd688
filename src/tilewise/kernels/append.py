"""Append new keys and values to a cache, in place, keys rotated first: ``cache[n + t] = rope(k_new[t]), v_new[t]``.

A program for a few tokens of one sequence and key head. HBM: reads k_new and v_new once, writes their slots once.

*Handles* contiguous and paged caches, ragged tokens, fp8 (``e4m3(clamp(x / scale))``). Slots at or beyond the capacity,
and those of pages that do not exist, are not written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import cache, rotary
from .cache import PER_ITEM, PER_PAGE, Limits

# The largest value of e4m3; beyond it comes NaN.
_LARGEST = tl.constexpr(448.0)


@triton.jit
def _places(slots, seq, tokens, used, limits, shape):
    """Rows (or pages) and slots inside them for new tokens, int64, and which of them may be written."""
    slot = used + tokens
    inside = (tokens < seq.len_k) & (slot < limits.capacity)
    if shape.PAGE == 0:
        row = cache.row_of(slots, seq.b, limits) + tokens.to(tl.int64) * 0
        at = slot
    else:
        entry = slots.table + seq.b.to(tl.int64) * limits.table_row + slot // shape.PAGE
        row = tl.load(entry, mask=inside, other=0).to(tl.int64)
        inside = inside & (row >= 0) & (row < limits.rows)
        at = slot % shape.PAGE
    return row, at, inside


@triton.jit
def _store(x, cached, row, at, inside, h, scale, scale_row, scale_head, seq, KIND: tl.constexpr, d, DIM: tl.constexpr):
    """Rows of new tokens, [T, D], into their slots."""
    element = cached.ptr.dtype.element_ty
    if element.is_fp8():
        x = x.to(tl.float32)
        if KIND == PER_ITEM:
            x = x / tl.load(scale + seq.b.to(tl.int64) * scale_row + h * scale_head)
        if KIND == PER_PAGE:
            x = x / tl.load(scale + row * scale_row + h * scale_head, mask=inside, other=1.0)[:, None]
        # NaN stays NaN.
        x = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
    base = cached.ptr + h.to(tl.int64) * cached.head
    ptrs = base + (row * cached.batch + at.to(tl.int64) * cached.seq)[:, None] + d[None, :]
    tl.store(ptrs, x.to(element), mask=inside[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=[*cache.LIMITS, "token_tiles", "rope_length"])
def append_kernel(
    k_new, v_new, k, v, slots, scales, rope, shape, batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows,
    table_row, tree_batch, token_tiles, rope_length,
):  # fmt: skip
    """Programs: (sequence, tile of tokens, key head)."""
    limits = Limits(batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch)
    pid = tl.program_id(0)
    h = pid % shape.HEADS_KV
    tile = pid // shape.HEADS_KV % token_tiles
    b = pid // shape.HEADS_KV // token_tiles
    q_start, len_q = cache.rows_of(slots, b, limits)
    used = cache.slots_in_use(slots, b, limits)
    new = tl.where(seqlen_new < 0, len_q, seqlen_new)
    if tile * shape.BLOCK_T >= new:
        return
    # (The first row of a ragged q is that of k_new too; a sequence of a dense call begins at its own.)
    seq = cache.Sequence(b, h, q_start, 0, len_q, new, 0)
    tokens = tile * shape.BLOCK_T + tl.arange(0, shape.BLOCK_T)
    row, at, inside = _places(slots, seq, tokens, used, limits, shape)
    real = tokens < new
    lines = (q_start + tokens) * k_new.seq
    base = k_new.ptr + b.to(tl.int64) * k_new.batch + h.to(tl.int64) * k_new.head
    d = tl.arange(0, shape.BLOCK_D)
    if rope.cos is None:
        x = cache.load_tile(base, lines, real, 0, shape.HEAD_DIM, shape.BLOCK_D, True)
    else:
        positions = rotary.first_position(rope, b, used) + tokens
        x = rotary.load_rotated(base, lines, real, positions, rope_length, rope, d, 0, shape.HEAD_DIM)
    _store(
        x, k, row, at, inside, h, scales.k, scales.k_row, scales.k_head, seq, shape.K_SCALES, d, shape.HEAD_DIM
    )  # fmt: skip
    lines = (q_start + tokens) * v_new.seq
    base = v_new.ptr + b.to(tl.int64) * v_new.batch + h.to(tl.int64) * v_new.head
    x = cache.load_tile(base, lines, real, 0, shape.HEAD_DIM_V, shape.BLOCK_DV, True)
    d = tl.arange(0, shape.BLOCK_DV)
    _store(
        x, v, row, at, inside, h, scales.v, scales.v_row, scales.v_head, seq, shape.V_SCALES, d, shape.HEAD_DIM_V
    )  # fmt: skip
