"""Attention over a key/value cache on Hopper: ``o = softmax(s) v``, the keys of a row tile split among programs.

One warp loads keys and values (TMA) into rings of tiles, and is as far ahead as they allow, across pieces of items too:
what a decoder waits for is memory, so as many bytes as fit are always on their way. One warpgroup multiplies the packed
rows of an item, padded to 64, with them, or two do, of 64 rows each, where a call has so many. The work is dealt as for
the kernel in plain Triton (`kernels.decode_plan`); pieces that are no whole item leave a partial output and LSE, which
`combine` merges.

HBM: reads K and V in use once per row tile, q once per piece; writes o and lse once, and two partials per program.

*Handles* caches in q's dtype, of rows or of pages that TMA can address (`cache`), with every option of
`kvcache.CacheProblem` but an assumed maximum. *Not here*: fp8, values that are part of the keys (`latent`), appending,
merging.

Source: FlashAttention-3 (Shah et al., 2024), section 3.1, for the roles; Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels import cache, decode_plan, rotary, score
from ..kernels.cache import Limits
from ..kernels.decode_plan import Work
from ..kernels.score import LN2, LOG2E, Sequence
from . import scores, unread
from .merging import finish
from .pipeline import arrived, cta_barrier, produce, release, ring_of, specialize, tma_load
from .products import scaled
from .scores import each_row, score_layout, unit_of

# Dims of q that are rotated together: a few registers for each thread.
_DIMS = gl.constexpr(64)
# Threads of the loading warp: as many boxes of a tile can be looked up at once.
_LANES = gl.constexpr(32)


class Shape(NamedTuple):
    """Compile-time sizes.

    BLOCK_D, BLOCK_DV: head dims in shared memory, where TMA fills what is missing with zeros.
    PAGE: slots of a page, 0 of a contiguous cache; BOX: keys that TMA loads at once, a part of a page. MODE: see
    `decode_plan`. MERGES: whoever finishes an item that was cut merges it, and `parts.cuts` are `counters` of pieces.
    The fields that `combine` reads have the names that they have there.
    """

    HEADS: Any
    HEADS_KV: Any
    GROUP: Any
    TOP_LEFT: Any
    RAGGED: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PAGE: Any
    BOX: Any
    MODE: Any
    CONSUMERS: Any
    MERGES: Any


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, shape):
    """A ring for tiles of BLOCK_N keys, each of one box of `desc` or several."""
    tile: gl.constexpr = [STAGES, 1, shape.BLOCK_N, 1, desc.block_type.shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, tile, desc.layout)
    return ring_of(tiles, STAGES, shape.CONSUMERS)


@gluon.constexpr_function
def lane_layout():
    """Registers of a number for each thread of the loading warp."""
    return gl.BlockedLayout([1], [32], [1], [0])


@gluon.jit
def pages_of(slots, seq, n0, first, last, limits, shape):
    """The page of each box of the keys from n0; where no key of it is among ``first .. last``, none, which is -1.

    Of pages that do not exist, TMA makes zeros: an entry is neither checked here nor looked at before it is needed.
    """
    number = gl.arange(0, _LANES, lane_layout())
    key = n0 + number * shape.BOX
    inside = (number < shape.BLOCK_N // shape.BOX) & (key + shape.BOX > first) & (key < last)
    at = slots.table + seq.b.to(gl.int64) * limits.table_row + key // shape.PAGE
    return gl.load(at, mask=inside, other=-1).to(gl.int32)


@gluon.jit
def fill(ring, desc, i, row, slot, h, pages, shape):
    """Load the tile of keys or values from `slot` on as use i of the ring, once the stage is free."""
    if shape.PAGE == 0:
        produce(ring, desc, [row, slot, h, 0], i)
    else:
        stage = i % ring.STAGES
        BYTES: gl.constexpr = desc.block_type.nbytes * (shape.BLOCK_N // shape.BOX)
        mbarrier.wait(ring.empty.index(stage), ((i // ring.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.full.index(stage), BYTES)
        number = gl.arange(0, _LANES, lane_layout())
        for box in gl.static_range(shape.BLOCK_N // shape.BOX):
            page = gl.sum(gl.where(number == box, pages, 0), 0)
            within = (slot + box * shape.BOX) % shape.PAGE
            box_smem = ring.tiles.index(stage).slice(box * shape.BOX, shape.BOX, dim=1)
            tma_load(desc, [page, within, h, 0], ring.full.index(stage), box_smem)


@gluon.jit
def load(rings, descs, slots, mine, limits, work, left, right, shape, PAIRED: gl.constexpr):
    """The producer: the tiles of all pieces of a program, one after the other, each as a use of every ring.

    PAIRED: rings have two stages, and every piece begins with the first; its uses are even, those of the second odd.
    """
    RINGS: gl.constexpr = len(rings)
    skipped = 0
    program = gl.program_id(0)
    i = 0
    unit = mine.first
    g = mine.group
    begin = mine.begin
    while unit < mine.last:
        group = decode_plan.group_of(g, slots, limits, work, shape, left, right)
        width = group.units * shape.HEADS_KV
        if unit < begin + width:
            h = (unit - begin) // group.units
            start = begin + h * group.units
            piece = decode_plan.piece_of(unit, start, program, mine, group, g * shape.HEADS_KV + h, work, shape)
            span = decode_plan.span_of(piece, group, None, left, right, shape)
            row = cache.row_of(slots, group.seq.b, limits).to(gl.int32)
            pages = row
            if shape.PAGE > 0:
                pages = pages_of(slots, group.seq, span.lo * shape.BLOCK_N, span.first, span.last, limits, shape)
            for j in range(span.lo, span.hi):
                n0 = j * shape.BLOCK_N
                here = pages
                if shape.PAGE > 0:
                    # The pages of the next tile are on their way while this one waits for its stage.
                    pages = pages_of(slots, group.seq, n0 + shape.BLOCK_N, span.first, span.last, limits, shape)
                use = i
                if PAIRED:
                    use = i - (i & 1) * skipped
                for part in gl.static_range(RINGS):
                    fill(rings[part], descs[part], use, row, group.seq.k_start + n0, h, here, shape)
                i += 1
            if PAIRED:
                skipped += 2 * (i & 1)
                i += i & 1
            unit = piece.stop
        if unit >= begin + width:
            begin += width
            g += 1


@gluon.jit
def foresee(numbers, count):
    """Have the first 128 of these brought to L2, where whoever writes them writes too: nothing is read."""
    at = gl.minimum(gl.arange(0, 32, lane_layout()) * (decode_plan.CHUNK // 32), count - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [numbers + at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def share_of(slots, limits, work, left, right, shape, WARPS: gl.constexpr, EARLY: gl.constexpr):
    """What this program has to do, as a role of so many warps finds out for itself, once the kernel before has ended.

    What reads no memory is done by then, and no role waits for another. EARLY: see `combine`.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # All of them in every warp, so that none waits for another.
    groups = gl.arange(0, decode_plan.CHUNK, gl.BlockedLayout([decode_plan.CHUNK // 32], [32], [WARPS], [0]))
    return decode_plan.share(gl.program_id(0), gl.num_programs(0), groups, slots, limits, work, shape, left, right)


@gluon.jit
def load_share(rings, descs, slots, limits, work, left, right, shape, EARLY: gl.constexpr):
    """`load` for what this program has to do."""
    if EARLY:
        foresee(slots.used, limits.batch)
    mine = share_of(slots, limits, work, left, right, shape, 1, EARLY)
    load(rings, descs, slots, mine, limits, work, left, right, shape, False)


@gluon.jit
def packed_of(row0, W: gl.constexpr, layout: gl.constexpr):
    """The packed rows of consumer W, [M]."""
    return row0 + W * 64 + gl.arange(0, 64, layout)


@gluon.jit
def fetch(
    q, q_smem, group, h, slots, rope, rope_length, limits, shape, W: gl.constexpr,
    START: gl.constexpr, STOP: gl.constexpr,
):  # fmt: skip
    """The dims ``START .. STOP`` of the rows of q of consumer W, rotated, into shared memory; past the last row, 0."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    seq = group.seq
    packed = packed_of(group.row0, W, gl.SliceLayout(1, LOADED))
    inside = packed < seq.len_q * shape.GROUP
    i = packed // shape.GROUP
    base = q.ptr + seq.b.to(gl.int64) * q.batch + seq.q_start * q.seq
    rows = i.to(gl.int64) * q.seq + (h * shape.GROUP + packed % shape.GROUP).to(gl.int64) * q.head
    for first in gl.static_range(START, STOP, _DIMS):
        d = first + gl.arange(0, _DIMS, gl.SliceLayout(0, LOADED))
        if rope.cos is None:
            real = inside[:, None] & (d < shape.HEAD_DIM)[None, :]
            x = gl.load(base + rows[:, None] + d[None, :], mask=real, other=0.0)
        else:
            used = cache.slots_in_use(slots, seq.b, limits)
            new = seq.k_start + seq.len_k - used
            at = rotary.first_position(rope, seq.b, used) + new - seq.len_q + i
            x = rotary.load_rotated(base, rows, inside, at, rope_length, rope, d, first, shape.HEAD_DIM)
        q_smem.slice(first - START, _DIMS, dim=1).store(x)
    fence_async_shared()


@gluon.jit
def seen_keys(seq, rows, n0, tree, limits, variant, extra, left, right, shape):
    """Which keys of the tile from n0 each row sees, [M, N]."""
    # This keeps it a branch: the compiler would rather compute and select in every tile.
    keys = scores.keys_from(scores.opaque(n0), shape.BLOCK_N)
    rows = rows[:, None]
    # (A predicate may ask for the key alone: the last term makes it a tile.)
    return cache.visible(variant, extra, tree, seq, rows, keys, limits, left, right) & (rows >= 0)


@gluon.jit
def poisoned(v_smem, seq, rows, n0, agreement, tree, limits, variant, extra, left, right, shape, W: gl.constexpr):
    """NaN for rows that see something in v which is not finite, else 0; v has none any more."""
    poison = each_row(rows, 0.0)
    strange = unread.clean_together(v_smem, agreement, W)
    if gl.max(strange.to(gl.int32), 0) > 0:
        seen = seen_keys(seq, rows, n0, tree, limits, variant, extra, left, right, shape) & strange[None, :]
        poison = gl.where(gl.max(seen.to(gl.int32), 1) > 0, float("nan"), 0.0)
    return poison


@gluon.jit
def step(
    state, q_smem, k, v, agreement, seq, rows, j, i, span, tree, limits, variant, extra, left, right, shape,
    W: gl.constexpr,
):  # fmt: skip
    """The j-th tile of keys and values, use i of the rings."""
    acc, scale, shift, l_i = state
    SCORES: gl.constexpr = score_layout(shape.BLOCK_N)
    VALUES: gl.constexpr = score_layout(shape.BLOCK_DV)
    n0 = j * shape.BLOCK_N
    k_smem = arrived(k, i, shape.BLOCK_N, shape.BLOCK_D)
    zero = gl.zeros([64, shape.BLOCK_N], gl.float32, SCORES)
    s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k, i)
    if not variant.fold:
        s = scores.modified(s, variant, extra, seq, rows, n0)
    v_smem = arrived(v, i, shape.BLOCK_N, shape.BLOCK_DV)
    masked = (j < span.full_lo) | (j >= span.full_hi)
    if variant.predicate is not None:
        masked = j >= span.lo
    poison = each_row(rows, 0.0)
    if masked:
        seen = seen_keys(seq, rows, n0, tree, limits, variant, extra, left, right, shape)
        s = gl.where(seen, s, float("-inf"))
        poison = poisoned(v_smem, seq, rows, n0, agreement, tree, limits, variant, extra, left, right, shape, W)
    unit = unit_of(variant.scale * LOG2E, variant)
    scale, shift, safe, alpha = scores.reference(s, scale, shift, unit)
    p = gl.exp2(scores.exponents(s, scale, safe))
    l_i = l_i * scores.spread(alpha, l_i) + scores.partial_sums(p)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    p16 = gl.convert_layout(p.to(v_smem.dtype), WEIGHTS, assert_trivial=True)
    acc = warpgroup_mma(p16, v_smem, scaled(acc, alpha + poison), is_async=True)  # [M, Dv]
    acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
    release(v, i)
    return acc, scale, shift, l_i


@gluon.jit
def row_sums(sums, like):
    """Sums of rows, [M], of partial ones."""
    ROWS: gl.constexpr = like.type.layout
    return gl.convert_layout(gl.sum(sums, 1), ROWS, assert_trivial=True)


@gluon.jit
def finished(acc, scale, shift, l_i, sink, variant):
    """Output and natural-log LSE; `sink`, of every row in base 2, is the score of a key with value 0, or None."""
    m_i = shift * (unit_of(variant.scale * LOG2E, variant) / scale)
    rest = each_row(scale, 1.0)
    if sink is not None:
        m_i, l_i, rest = score.joined(m_i, l_i, sink)
    # Only a row that sees nothing has a sum of 0; comparing for equality lets a NaN through.
    empty = l_i == 0.0
    l_i = gl.where(empty, 1.0, l_i)
    lse = gl.where(empty, float("-inf"), m_i * LN2 + gl.log(l_i))
    return scaled(acc, rest / l_i), lse


@gluon.jit
def store(
    acc, lse_rows, out, lse, parts, slot, seq, h, packed, stat_rows, shape, W: gl.constexpr, START: gl.constexpr,
):  # fmt: skip
    """The rows of consumer W of a whole item to the output, of another piece to its slot: of O the dims from START."""
    VALUES: gl.constexpr = acc.type.layout
    d = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, VALUES))
    inside = packed < seq.len_q * shape.GROUP
    row = gl.convert_layout(packed, gl.SliceLayout(1, VALUES), assert_trivial=True)
    real = (row < seq.len_q * shape.GROUP)[:, None] & (d < shape.HEAD_DIM_V)[None, :]
    if slot < 0:
        base = out.ptr + seq.b.to(gl.int64) * out.batch + seq.q_start * out.seq
        head = h * shape.GROUP + row % shape.GROUP
        rows = (row // shape.GROUP).to(gl.int64) * out.seq + head.to(gl.int64) * out.head
        gl.store(base + rows[:, None] + d[None, :], acc.to(out.ptr.dtype.element_ty), mask=real)
        head = h * shape.GROUP + packed % shape.GROUP
        at = cache.stat_at(seq, head, packed // shape.GROUP, stat_rows, shape)
        gl.store(lse + at, lse_rows, mask=inside & (START == 0))
    else:
        first = slot.to(gl.int64) * shape.BLOCK_M
        rows = first + packed_of(0, W, gl.SliceLayout(1, VALUES))
        gl.store(parts.out + rows[:, None] * shape.HEAD_DIM_V + d[None, :], acc, mask=real)
        ROWS: gl.constexpr = packed.type.layout
        gl.store(parts.lse + first + packed_of(0, W, ROWS), lse_rows, mask=inside & (START == 0))


@gluon.jit
def sink_of(sinks, heads, piece):
    """The sinks of these heads in base 2, counted once, with an item's first keys; None where there are none."""
    sink = None
    if sinks is not None:
        real = gl.load(sinks + heads).to(gl.float32) * LOG2E
        sink = gl.where(piece.is_first, real, float("-inf"))
    return sink


@gluon.jit
def attend(
    q_smem, k, v, agreement, piece, group, h, i, sinks, tree, limits, variant, extra, left, right, shape,
    W: gl.constexpr,
):  # fmt: skip
    """Output and LSE of the rows of consumer W over a piece of their item's keys; the next use of the rings."""
    ROWS: gl.constexpr = gl.SliceLayout(1, score_layout(shape.BLOCK_N))
    packed = packed_of(group.row0, W, ROWS)
    rows = packed // shape.GROUP
    heads = h * shape.GROUP + packed % shape.GROUP
    seq = Sequence(
        group.seq.b, heads[:, None], group.seq.q_start, group.seq.k_start, group.seq.len_q, group.seq.len_k,
        group.seq.off,
    )  # fmt: skip
    span = decode_plan.span_of(piece, group, tree, left, right, shape)
    acc = gl.zeros([64, shape.BLOCK_DV], gl.float32, score_layout(shape.BLOCK_DV))
    unit = unit_of(variant.scale * LOG2E, variant)
    scale, shift = each_row(rows, 0.0) + unit, each_row(rows, float("-inf"))
    sums = scores.partial_sums(gl.zeros([64, shape.BLOCK_N], gl.float32, score_layout(shape.BLOCK_N)))
    state = acc, scale, shift, sums
    for j in range(span.lo, span.hi):
        state = step(
            state, q_smem, k, v, agreement, seq, rows, j, i, span, tree, limits, variant, extra, left, right, shape, W
        )  # fmt: skip
        i += 1
    acc, scale, shift, sums = state
    o, lse_rows = finished(acc, scale, shift, row_sums(sums, scale), sink_of(sinks, heads, piece), variant)
    return o, lse_rows, packed, i


@gluon.jit
def leave(cut_group, cut_head, cut_pieces, out, lse, parts, slots, limits, stat_rows, shape):
    """A program's last words: which item it has cut, for who merges it, and 0 in rows that are no sequence's."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    if (parts.cuts is not None) & (not shape.MERGES):
        gl.store(parts.cuts + program * 4, cut_group)
        gl.store(parts.cuts + program * 4 + 1, cut_head)
        gl.store(parts.cuts + program * 4 + 2, cut_pieces)
    if shape.RAGGED:
        d = gl.arange(0, shape.BLOCK_DV, gl.BlockedLayout([shape.BLOCK_DV // 64], [32], [4], [0]))
        cache.clear_tail(out, lse, slots, limits, program, programs, stat_rows, d, shape)


@gluon.jit
def compute(
    q, k, v, q_tiles, agreement, out, lse, parts, slots, rope, tree, sinks, limits, work, variant, extra,
    stat_rows, rope_length, left, right, shape, EARLY: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Consumer W: 64 packed rows of every item."""
    program = gl.program_id(0)
    mine = share_of(slots, limits, work, left, right, shape, 4, EARLY)
    q_smem = q_tiles.index(W)
    i = 0
    unit = mine.first
    g = mine.group
    begin = mine.begin
    # (See the kernel in plain Triton: these must not begin as another name does.)
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
            if shape.MERGES:
                # While keys are on their way: these are long divisions.
                first = decode_plan.first_of(mine, start)
                pieces = decode_plan.pieces_from(first, mine, start, group.units)
            # Nobody reads the last item's rows any more: all have met where its last keys were released.
            fetch(q, q_smem, group, h, slots, rope, rope_length, limits, shape, W, 0, shape.BLOCK_D)
            cta_barrier()
            o, lse_rows, packed, i = attend(
                q_smem, k, v, agreement, piece, group, h, i, sinks, tree, limits, variant, extra, left, right, shape, W
            )  # fmt: skip
            store(o, lse_rows, out, lse, parts, piece.slot, group.seq, h, packed, stat_rows, shape, W, 0)
            if shape.MERGES:
                if piece.slot >= 0:
                    finish(out, lse, parts, first, pieces, group, h, stat_rows, shape)
            elif piece.is_first & (piece.slot >= 0):
                cut_group = g
                cut_head = h
                cut_pieces = decode_plan.pieces_from(program, mine, start, group.units)
            unit = piece.stop
        if unit >= begin + width:
            begin += width
            g += 1
    if W == 0:
        leave(cut_group, cut_head, cut_pieces, out, lse, parts, slots, limits, stat_rows, shape)


@gluon.jit(do_not_specialize=[*cache.LIMITS, *decode_plan.WORK, "stat_rows", "rope_length", "left", "right"])
def decode_kernel(
    q, k_desc, v_desc, out, lse, parts, slots, rope, tree, sinks, variant, extra, shape,
    batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch, row_tiles, splits, cut,
    whole, stat_rows, rope_length, left, right,
    EARLY: gl.constexpr, STAGES: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """Programs: as many as the device runs at once, each with its share of all work; EARLY: see `combine`."""
    limits = Limits(batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch)
    work = Work(row_tiles, splits, cut, whole)
    k = make_ring(k_desc, STAGES, shape)
    v = make_ring(v_desc, STAGES, shape)
    tile: gl.constexpr = [shape.CONSUMERS, 64, shape.BLOCK_D]
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, tile, gl.NVMMASharedLayout(128, 16, rank=2))
    agreement = unread.make_agreement(shape.CONSUMERS, shape.BLOCK_N)
    fence_async_shared()
    specialize(
        [
            (
                compute,
                (
                    q, k, v, q_tiles, agreement, out, lse, parts, slots, rope, tree, sinks, limits, work, variant,
                    extra, stat_rows, rope_length, left, right, shape, EARLY, 0,
                ),
            ),
            (
                compute,
                (
                    q, k, v, q_tiles, agreement, out, lse, parts, slots, rope, tree, sinks, limits, work, variant,
                    extra, stat_rows, rope_length, left, right, shape, EARLY, 1,
                ),
            ),
            (load_share, ((k, v), (k_desc, v_desc), slots, limits, work, left, right, shape, EARLY)),
        ],
        [4 * (shape.CONSUMERS - 1), 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
