"""Attention over a key/value cache: ``o = softmax(s) v``, the keys of a row tile split among programs.

A program takes an even share of all tiles of keys (`decode.plan`), one piece of an item after the other. The rows of a
tile are the query rows of all heads of a key head's group, packed, so keys and values come from memory once. Pieces
that are no whole item leave a partial output and LSE, which `combine` merges.

HBM: reads K and V in use once per row tile, q once per piece; writes o and lse once, and two partials per program.

*Handles* every `kvcache.CacheProblem` but fp64. *Not here*: appending (`append`), merging (`combine`).

Source: FlashAttention-2 (Dao, 2023), Algorithm 1; Flash-Decoding (Dao et al., 2023); Flash-Decoding++ (Hong et al.,
2023), section 3, for the unified maximum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernels import cache, decode_plan, score
from ..kernels.cache import PER_ITEM, PER_PAGE, Limits
from ..kernels.decode_plan import Work
from ..kernels.score import INTERPRETED, LN2, LOG2E, Sequence
from . import device, packed_rows

# Groups that each warp looks at for itself.
FEW_GROUPS = tl.constexpr(32)
# With an assumed maximum a row's true one may be so far from it, in base 2: then weights, and sums of 2**40 of them,
# are normal numbers of fp32 and bf16.
REACH = tl.constexpr(86.0)
# Weights in fp16 are 2**8 times as large, and the largest of a row must be in this range.
SHIFT_FP16 = tl.constexpr(8.0)
LOW_FP16, HIGH_FP16 = tl.constexpr(-4.0), tl.constexpr(15.0)


class Shape(NamedTuple):
    """Compile-time sizes.

    BLOCK_MAIN, BLOCK_REST: parts, powers of two, that together hold the head dim; BLOCK_REST may be 0. PAGE: slots of a
    page, 0 of a contiguous cache; WHOLE_PAGE: a tile of keys never crosses pages. SHARED: values are the first
    BLOCK_MAIN dims of the keys. ALIKE: both caches have the same strides. MODE: see `decode_plan`. K_SCALES, V_SCALES:
    of an fp8 cache, 0, PER_ITEM or PER_PAGE. K_TYPE, V_TYPE: what the factors of both products are, by name. FACTOR:
    whether the first is scaled. LANES: sums of a row that are kept apart until the end; where a tile has few rows, each
    warp has keys of its own. TURNED: the output is kept transposed, [Dv, M], see `add_values`.
    """

    HEADS: Any
    HEADS_KV: Any
    GROUP: Any
    TOP_LEFT: Any
    RAGGED: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_MAIN: Any
    BLOCK_REST: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PAGE: Any
    WHOLE_PAGE: Any
    SHARED: Any
    ALIKE: Any
    MODE: Any
    K_SCALES: Any
    V_SCALES: Any
    K_TYPE: Any
    V_TYPE: Any
    FACTOR: Any
    LANES: Any
    TURNED: Any


@triton.jit
def products(tiles, k_main, k_rest, step, shape):
    """``q k^T`` in fp32, [M, N]; `step` is any number that the compiler does not know."""
    if shape.TURNED:
        # A product that feeds another is laid out so that each warpgroup computes all of its rows, here twice the same.
        # The compiler follows values, but not out of a branch; and it moves no conversion into one whose sides are both
        # products. That these branches are always taken, it finds out later.
        if (step | 1) != 0:
            s = device.dot(tiles.main, tl.trans(k_main.to(device.number_type(shape.K_TYPE))))
        else:
            s = device.dot(tiles.main, tl.trans(k_main.to(device.number_type(shape.K_TYPE))))
        if shape.BLOCK_REST > 0:
            if (step | 2) != 0:
                s = device.dot_add(tiles.rest, tl.trans(k_rest.to(device.number_type(shape.K_TYPE))), s)
            else:
                s = device.dot_add(tiles.rest, tl.trans(k_rest.to(device.number_type(shape.K_TYPE))), s)
    else:
        s = device.dot(tiles.main, tl.trans(k_main.to(device.number_type(shape.K_TYPE))))
        if shape.BLOCK_REST > 0:
            s = device.dot_add(tiles.rest, tl.trans(k_rest.to(device.number_type(shape.K_TYPE))), s)
    if shape.FACTOR:
        s = s * tiles.factor[:, None]
    return s


@triton.jit
def add_values(acc, p, v_tile, shape):
    """``acc + p v``, [M, Dv], or turned, ``acc + v^T p^T``, [Dv, M].

    Turned, values with so many dims that they fill the registers of two warpgroups are divided between them, and all
    weights reach both through shared memory; else each would need, and so compute, all scores.
    """
    if shape.TURNED:
        acc = device.dot_add(tl.trans(v_tile), tl.trans(p.to(v_tile.dtype)), acc)
    else:
        acc = device.dot_add(p.to(v_tile.dtype), v_tile, acc)
    return acc


@triton.jit
def of_rows(x, shape):
    """A value for each row, [M], against an output."""
    return x[None, :] if shape.TURNED else x[:, None]


@triton.jit
def values_of(v_tile, shape):
    """Values in the type of their product."""
    if v_tile.dtype == tl.float8e4nv and shape.V_TYPE == "fp16" and not INTERPRETED:
        # The compiler would rather read single bytes in the product's layout and convert them there. Code that it does
        # not know, it leaves where it is: four values at a time, read as one word.
        v_tile = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
            "=r,=r,r", [v_tile], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return v_tile.to(device.number_type(shape.V_TYPE))


@triton.jit
def columns(p, shape):
    """What is summed of weights, tile by tile: [M, LANES]."""
    if shape.LANES == 1:
        p = tl.sum(p, 1)[:, None]
    return p


@triton.jit
def columns_max(s, shape):
    """The same of scores, for their maximum."""
    if shape.LANES == 1:
        s = tl.max(s, 1)[:, None]
    return s


@triton.jit
def update(acc, l_i, m_i, s, assumed, variant, shape, MASKED: tl.constexpr):
    """The state rescaled for, and with the sums of, a tile of scores; and their weights, [M, N]."""
    if assumed is not None:
        # Here m_i is the largest score so far of each row and lane; nothing depends on it.
        p = tl.exp2(s * (variant.scale * LOG2E) - assumed) if variant.fold else tl.exp2(s - assumed)
        m_i = tl.maximum(m_i, columns_max(s, shape))
        l_i += columns(p, shape)
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1))  # [M]
        m_safe = m_new
        if MASKED or not variant.fold:
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        if variant.fold:
            # Scaling and subtracting the maximum are one instruction here.
            scale = score.exact_scale(m_safe, tl.zeros((), tl.float32) + variant.scale * LOG2E)
            p = tl.exp2(s * scale[:, None] - (m_safe * scale)[:, None])
            alpha = tl.exp2((m_i - m_safe) * (variant.scale * LOG2E))
        else:
            p = tl.exp2(s - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha[:, None] + columns(p, shape)
        acc = acc * of_rows(alpha, shape)
        m_i = m_new
    return acc, l_i, m_i, p


@triton.jit
def mended(
    acc, v_tile, tree, seq, rows, keys, limits, variant, extra, shape, left, right,
):  # fmt: skip
    """What is not finite in v reaches the rows that see it, and no others: their output is NaN, and v without it."""
    v_tile, strange = device.finite(v_tile)
    seen = cache.visible(variant, extra, tree, seq, rows, keys, limits, left, right)
    poisoned = tl.max((seen & strange[None, :]).to(tl.int32), 1)
    return tl.where(of_rows(poisoned, shape) > 0, float("nan"), acc), v_tile


@triton.jit
def _attend(
    state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right, assumed,
    lo, hi, MASKED: tl.constexpr,
):  # fmt: skip
    """The loop body, over the tiles ``lo .. hi``; `place` is the row of the cache and the key head."""
    acc, l_i, m_i = state
    row, h = place
    rows = tiles.rows
    offs_n = tl.arange(0, shape.BLOCK_N)
    pages = row.to(tl.int32)
    if shape.PAGE > 0:
        pages = cache.tile_pages(
            slots, seq, lo * shape.BLOCK_N, offs_n, span.first, span.last, limits, shape.PAGE, shape.WHOLE_PAGE
        )
    for i in tl.range(lo, hi):
        n0 = i * shape.BLOCK_N
        here = pages
        if shape.PAGE > 0:
            # The ids of the next tile are on their way while this one is computed.
            n1 = tl.where(i + 1 < hi, n0 + shape.BLOCK_N, span.last)
            pages = cache.tile_pages(
                slots, seq, n1, offs_n, span.first, span.last, limits, shape.PAGE, shape.WHOLE_PAGE
            )
        inside = (n0 + offs_n >= span.first) & (n0 + offs_n < span.last)
        k_base, k_rows = cache.tile_rows(k, row, seq, h, n0, offs_n, here, shape.PAGE, shape.WHOLE_PAGE)
        k_main = cache.load_tile(k_base, k_rows, inside, 0, shape.HEAD_DIM, shape.BLOCK_MAIN, MASKED)
        k_rest = k_main
        if shape.BLOCK_REST > 0:
            k_rest = cache.load_tile(k_base, k_rows, inside, shape.BLOCK_MAIN, shape.HEAD_DIM, shape.BLOCK_REST, MASKED)
        s = products(tiles, k_main, k_rest, i, shape)
        if MASKED and shape.TURNED:
            # All of v takes part in every score, so what is not finite in it shows there.
            finite = (tl.abs(s) < float("inf")).to(tl.int32)
            strange_tile = tl.min(tl.min(finite, 1), 0) == 0
        if shape.K_SCALES == PER_PAGE:
            k_page = tl.load(scales.k + here * scales.k_row + h * scales.k_head)
            s = s * (k_page if shape.WHOLE_PAGE else k_page[None, :])
        if not variant.fold:
            s = score.scores_from(s, variant, extra, seq, rows, n0, offs_n[None, :]).s
        if MASKED:
            seen = cache.visible(variant, extra, tree, seq, rows, (n0 + offs_n)[None, :], limits, left, right)
            s = tl.where(seen, s, float("-inf"))
        acc, l_i, m_i, p = update(acc, l_i, m_i, s, assumed, variant, shape, MASKED)
        if shape.SHARED:
            v_tile = k_main
        else:
            v_base, v_rows = cache.tile_rows(v, row, seq, h, n0, offs_n, here, shape.PAGE, shape.WHOLE_PAGE)
            if shape.ALIKE:
                v_rows = k_rows
            v_tile = cache.load_tile(v_base, v_rows, inside, 0, shape.HEAD_DIM_V, shape.BLOCK_DV, MASKED)
        if shape.V_SCALES == PER_PAGE:
            v_page = tl.load(scales.v + here * scales.v_row + h * scales.v_head)
            v_tile = v_tile.to(tl.float32) * (v_page if shape.WHOLE_PAGE else v_page[:, None])
        v_tile = values_of(v_tile, shape)
        if MASKED and shape.TURNED:
            if strange_tile:
                # Read anew: kept until here, it would take as many registers as half of the output does.
                again = cache.load_tile(k_base, k_rows, inside, 0, shape.HEAD_DIM_V, shape.BLOCK_DV, MASKED)
                keys = (n0 + offs_n)[None, :]
                acc, again = mended(
                    acc, values_of(again, shape), tree, seq, rows, keys, limits, variant, extra, shape, left, right
                )  # fmt: skip
                acc = add_values(acc, p, again, shape)
            else:
                acc = add_values(acc, p, v_tile, shape)
        else:
            if MASKED:
                strange_tile = device.any_strange(v_tile)
                if strange_tile:
                    keys = (n0 + offs_n)[None, :]
                    acc, v_tile = mended(
                        acc, v_tile, tree, seq, rows, keys, limits, variant, extra, shape, left, right
                    )  # fmt: skip
            acc = add_values(acc, p, v_tile, shape)
    return acc, l_i, m_i


@triton.jit
def walk(
    state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right, assumed
):  # fmt: skip
    """`_attend` over a piece: at most three stretches of tiles, those between the edges without element tests."""
    if variant.predicate is not None:
        state = _attend(
            state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right,
            assumed, span.lo, span.hi, True,
        )  # fmt: skip
    else:
        if left is not None:
            state = _attend(
                state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right,
                assumed, span.lo, span.full_lo, True,
            )  # fmt: skip
        state = _attend(
            state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right,
            assumed, span.full_lo, span.full_hi, False,
        )  # fmt: skip
        state = _attend(
            state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right,
            assumed, span.full_hi, span.hi, True,
        )  # fmt: skip
    return state


@triton.jit
def nothing(shape):
    """An output before the first tile."""
    if shape.TURNED:
        acc = tl.zeros([shape.BLOCK_DV, shape.BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([shape.BLOCK_M, shape.BLOCK_DV], tl.float32)
    return acc


@triton.jit
def true_state(sink, variant, shape):
    """The state before the first tile; a sink is a key with value 0 that every row has already seen."""
    m_i = tl.full([shape.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([shape.BLOCK_M, shape.LANES], tl.float32)
    if sink is not None:
        m_i = sink / variant.scale if variant.fold else sink * LOG2E
        l_i += tl.where(tl.arange(0, shape.LANES) == 0, 1.0, 0.0)[None, :]
    return nothing(shape), l_i, m_i


@triton.jit
def assumed_state(sink, assumed, variant, shape):
    """The same where the maximum is assumed."""
    l_i = tl.zeros([shape.BLOCK_M, shape.LANES], tl.float32)
    peak = l_i + float("-inf")
    if sink is not None:
        first = (tl.arange(0, shape.LANES) == 0)[None, :]
        peak = tl.where(first, (sink / variant.scale if variant.fold else sink * LOG2E)[:, None], peak)
        l_i = tl.where(first, tl.exp2(sink * LOG2E - assumed)[:, None], l_i)
    return nothing(shape), l_i, peak


@triton.jit
def finished(acc, l_i, m_i, scale, shape):
    """Output, [M, Dv], and natural-log LSE from sums and maximum (times `scale`)."""
    l_i = tl.sum(l_i, 1)
    # Only a row that sees nothing has a sum of 0; comparing for equality lets a NaN through.
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), m_i * scale + tl.log(l_i))
    o = acc / of_rows(l_i, shape)
    return tl.trans(o) if shape.TURNED else o, lse


@triton.jit
def compute_true(
    tiles, k, v, slots, scales, tree, place, sink, span, seq, limits, variant, extra, shape, left, right
):  # fmt: skip
    """Output [M, Dv] and LSE [M] of an item over a piece of its keys."""
    state = true_state(sink, variant, shape)
    acc, l_i, m_i = walk(
        state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right, None
    )  # fmt: skip
    return finished(acc, l_i, m_i, variant.scale if variant.fold else LN2, shape)


@triton.jit
def compute(
    tiles, k, v, slots, scales, tree, place, sink, span, seq, limits, variant, extra, shape, left, right, phi
):  # fmt: skip
    """The same with the maximum `phi` assumed (None: the true one), where that holds for a row."""
    if phi is None:
        o, lse = compute_true(
            tiles, k, v, slots, scales, tree, place, sink, span, seq, limits, variant, extra, shape, left, right
        )  # fmt: skip
    else:
        assumed = phi * LOG2E
        if shape.V_TYPE == "fp16":
            assumed -= SHIFT_FP16
        state = assumed_state(sink, assumed, variant, shape)
        acc, l_i, peak = walk(
            state, tiles, k, v, slots, scales, tree, place, seq, span, limits, variant, extra, shape, left, right,
            assumed,
        )  # fmt: skip
        top = tl.max(peak, 1) * (variant.scale * LOG2E if variant.fold else 1.0) - assumed
        o, lse = finished(acc, l_i, tl.zeros_like(top) + assumed, LN2, shape)
        # Values may be so large that their weighted sum overflows where their mean does not.
        wrong = tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, 0 if shape.TURNED else 1) > 0
        if shape.V_TYPE == "fp16":
            wrong = wrong | (top > HIGH_FP16) | (top < LOW_FP16)
        else:
            wrong = wrong | (tl.abs(top) > REACH)
        wrong = wrong & (top != float("-inf")) & (tl.max(tiles.rows, 1) < seq.len_q)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            true_o, true_lse = compute_true(
                tiles, k, v, slots, scales, tree, place, sink, span, seq, limits, variant, extra, shape, left, right
            )  # fmt: skip
            # The other rows keep their bits.
            o = tl.where(wrong[:, None], true_o, o)
            lse = tl.where(wrong, true_lse, lse)
    return o, lse


@triton.jit
def share_of(program, programs, slots, limits, work, shape, left, right):
    """What a program has to do. A few groups fit one warp, and are summed up without a barrier."""
    if limits.batch * work.row_tiles <= FEW_GROUPS:
        few = tl.arange(0, FEW_GROUPS)
        mine = decode_plan.share(program, programs, few, slots, limits, work, shape, left, right)
    else:
        many = tl.arange(0, decode_plan.CHUNK)
        mine = decode_plan.share(program, programs, many, slots, limits, work, shape, left, right)
    return mine


@triton.jit(
    do_not_specialize=[*cache.LIMITS, *decode_plan.WORK, "stat_rows", "rope_length", "left", "right"],
    do_not_specialize_on_alignment=["sinks"],
)
def decode_kernel(
    q, k, v, out, lse, parts, slots, scales, rope, tree, sinks, variant, extra, shape,
    batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch, row_tiles, splits, cut,
    whole, stat_rows, rope_length, left, right, phi, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: as many as the device runs at once, each with its share of all work; EARLY: see `combine`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limits = Limits(batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch)
    work = Work(row_tiles, splits, cut, whole)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    mine = share_of(program, programs, slots, limits, work, shape, left, right)
    unit = mine.first
    g = mine.group
    begin = mine.begin
    # The item whose first piece is this program's last. Triton takes what begins as `g` and is given `g` in the loop
    # for a name that never changes, so these begin as something else.
    cut_group = g * 0
    cut_head = cut_group
    cut_pieces = cut_group
    while unit < mine.last:
        group = decode_plan.group_of(g, slots, limits, work, shape, left, right)
        width = group.units * shape.HEADS_KV
        if unit < begin + width:
            h = (unit - begin) // group.units
            start = begin + h * group.units
            piece = decode_plan.piece_of(unit, start, program, mine, group, g * shape.HEADS_KV + h, work, shape)
            packed = group.row0 + tl.arange(0, shape.BLOCK_M)
            heads = h * shape.GROUP + packed % shape.GROUP
            seq = Sequence(
                group.seq.b, heads[:, None], group.seq.q_start, group.seq.k_start, group.seq.len_q, group.seq.len_k,
                group.seq.off,
            )  # fmt: skip
            tiles = packed_rows.load_q(q, slots, scales, rope, rope_length, group, h, heads, packed, limits, shape)
            sink = None
            if sinks is not None:
                # Counted once, with an item's first keys.
                sink = tl.where(piece.is_first, tl.load(sinks + heads).to(tl.float32), float("-inf"))
            span = decode_plan.span_of(piece, group, tree, left, right, shape)
            place = cache.row_of(slots, group.seq.b, limits), h
            o, lse_tile = compute(
                tiles, k, v, slots, scales, tree, place, sink, span, seq, limits, variant, extra, shape, left, right,
                phi,
            )  # fmt: skip
            if shape.V_SCALES == PER_ITEM:
                o = o * packed_rows.item_scale(scales.v, scales.v_row, scales.v_head, seq, h)
            packed_rows.store_rows(out, lse, parts, o, lse_tile, piece.slot, seq, heads, packed, stat_rows, shape)
            if piece.is_first & (piece.slot >= 0):
                cut_group = g
                cut_head = h
                cut_pieces = decode_plan.pieces_from(program, mine, start, group.units)
            unit = piece.stop
        if unit >= begin + width:
            begin += width
            g += 1
    if parts.cuts is not None:
        tl.store(parts.cuts + program * 4, cut_group)
        tl.store(parts.cuts + program * 4 + 1, cut_head)
        tl.store(parts.cuts + program * 4 + 2, cut_pieces)
    if shape.RAGGED:
        d = tl.arange(0, shape.BLOCK_DV)
        cache.clear_tail(out, lse, slots, limits, program, programs, stat_rows, d, shape)
