"""Attention over a cache of latents (MLA) on Hopper: ``o = softmax(s) v``, where v is the first 512 dims of the keys.

64 packed rows of q meet each tile of 64 keys once, which lies in shared memory for both products. An output of 64 rows
and 512 dims fills the registers of two warpgroups, so each has half of the dims. Tiles take turns: an even one is
scored by warpgroup 0, an odd one by warpgroup 1, which leaves the weights in shared memory, and both add them, times
their half of the values, tile after tile. So one computes weights while the other multiplies. There is room for two
tiles, and each returns its memory in three parts as soon as they are done with: one warp fills it again by TMA.

Weights are relative to a reference that rows have in common in both warpgroups: their maximum, but one that is behind
by up to a factor of 2**8. So it seldom moves, and only then an output is scaled (FlashAttention-4's lazy rescaling).

HBM: reads the latents in use once per row tile (128 heads: the second time from L2), q once per piece; writes o and lse
once, and two partials per program.

*Handles* caches as `decode` does, with values in the first 512 dims of keys that have up to 64 more. *Not here*: fp8.

Source: FlashMLA (DeepSeek, 2025), the "seesaw" schedule, for halves of the output and whose turn it is.
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

from ..kernels import cache, decode_plan
from ..kernels.cache import Limits
from ..kernels.decode_plan import Work
from ..kernels.score import LOG2E, Sequence
from . import scores, unread
from .decode import fetch, finished, leave, load, make_ring, packed_of, row_sums, seen_keys, sink_of, store
from .pipeline import arrived, make_barriers, reinterpret, release, ring_of, specialize
from .products import scaled
from .scores import each_row, score_layout, unit_of

# Rows of a tile, and keys.
SIZE = gl.constexpr(64)
# Dims of values, and those of each warpgroup.
LATENT, HALF = gl.constexpr(512), gl.constexpr(256)
# Tiles in shared memory: one for each warpgroup.
TILES = gl.constexpr(2)
# Groups of matrix instructions for the scores of a tile: one for each part.
_GROUPS = gl.constexpr(3)
# A reference may be behind a maximum by so much, in base 2: fp16 holds such weights.
_SLACK = gl.constexpr(8.0)


class Buffers(NamedTuple):
    """What warpgroups share, beside the parts of tiles.

    `rope`, `left`, `right` are rings of the parts of a tile: the dims from 512 on, of warpgroup 0, of warpgroup 1.
    `q` [1, M, 512] are its dims but for the rope part. `weights` is a ring [2, M, N] of what one has computed and the
    other adds, too. `scales`, `shifts` and `factors`, fp32 [2, M], hold for each of both the reference of rows after
    its tile, and the factor on what was summed before; `moved`, int32 [2, 4], whether a warp has moved any. `sums`,
    fp32 [2, M], are the sums of weights. `met` completes twice for each item: when q is there, and at its end.
    """

    q: Any
    rope: Any
    left: Any
    right: Any
    weights: Any
    scales: Any
    shifts: Any
    factors: Any
    moved: Any
    sums: Any
    met: Any


@gluon.jit
def make_buffers(main_desc, rest_desc, shape):
    """All of shared memory: 72 KiB for each of two tiles, 64 KiB of q, 16 KiB of weights."""
    rope = make_ring(rest_desc, TILES, shape)
    left = make_ring(main_desc, TILES, shape)
    right = make_ring(main_desc, TILES, shape)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(main_desc.dtype, [1, SIZE, LATENT], SWIZZLED)
    tiles = gl.allocate_shared_memory(main_desc.dtype, [TILES, SIZE, SIZE], SWIZZLED)
    weights = ring_of(tiles, TILES, 1)
    scales = gl.allocate_shared_memory(gl.float32, [TILES, SIZE], LINE)
    shifts = gl.allocate_shared_memory(gl.float32, [TILES, SIZE], LINE)
    factors = gl.allocate_shared_memory(gl.float32, [TILES, SIZE], LINE)
    moved = gl.allocate_shared_memory(gl.int32, [TILES, 4], LINE)
    sums = gl.allocate_shared_memory(gl.float32, [TILES, SIZE], LINE)
    met = make_barriers(1, 2)
    fence_async_shared()
    return Buffers(q, rope, left, right, weights, scales, shifts, factors, moved, sums, met)


@gluon.jit
def meet(buffers, PHASE: gl.constexpr):
    """Both warpgroups have come by."""
    mbarrier.arrive(buffers.met.index(0), count=1)
    mbarrier.wait(buffers.met.index(0), PHASE)


@gluon.jit
def half_of(buffers, W: gl.constexpr):
    """The ring of the values of warpgroup W."""
    half = buffers.left
    if W == 1:
        half = buffers.right
    return half


@gluon.jit
def standing(s, scale, shift, unit):
    """`scores.reference`, but that of a row stays while no score passes it by `_SLACK`; whether it moved, too."""
    moves = gl.max(s, 1) > shift / scale + _SLACK / unit
    new_scale, new_shift, _, alpha = scores.reference(s, scale, shift, unit)
    scale = gl.where(moves, new_scale, scale)
    shift = gl.where(moves, new_shift, shift)
    return scale, shift, gl.where(moves, alpha, 1.0), moves


@gluon.jit
def poisoned(buffers, i, seen, W: gl.constexpr):
    """NaN for rows that see a key whose values are not all finite, else 0; tile i has no such values any more.

    Nobody has begun to add it. What is found is kept where its weights will be.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KEYS: gl.constexpr = gl.SliceLayout(0, score_layout(SIZE))
    found = reinterpret(buffers.weights.tiles.index(W), gl.int32, [SIZE // 2, SIZE], LINE)
    left, right = arrived(buffers.left, i, SIZE, HALF), arrived(buffers.right, i, SIZE, HALF)
    unread.mark_keys(left, found.index(0), 4)
    unread.mark_keys(right, found.index(1), 4)
    strange = (found.index(0).load(KEYS) | found.index(1).load(KEYS)) != 0
    unread.clean(left, 4)
    unread.clean(right, 4)
    return gl.where(gl.max((seen & strange[None, :]).to(gl.int32), 1) > 0, float("nan"), 0.0)


@gluon.jit
def add(acc, buffers, i, W: gl.constexpr):
    """Weights times values of tile i, for the dims of warpgroup W, asynchronously."""
    ring = half_of(buffers, W)
    v_smem = arrived(ring, i, SIZE, HALF)
    return warpgroup_mma(buffers.weights.tiles.index(i % ring.STAGES), v_smem, acc, is_async=True)


@gluon.jit
def added(acc, buffers, i, W: gl.constexpr):
    """What `add` returned, once it is there; this part of the tile is free."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(half_of(buffers, W), i)
    return acc


@gluon.jit
def told(state, s, buffers, i, W: gl.constexpr):
    """The state after what tile i, of the other warpgroup, does to the reference; its weights are there.

    `s` may be under way: nothing else that products have made is changed before it is there.
    """
    acc, scale, shift, l_i = state
    OTHER: gl.constexpr = 1 - W
    mbarrier.wait(buffers.weights.full.index(OTHER), (i // buffers.weights.STAGES) & 1)
    if scores.any_warp(buffers.moved.index(OTHER)):
        ROWS: gl.constexpr = scale.type.layout
        scale, shift = buffers.scales.index(OTHER).load(ROWS), buffers.shifts.index(OTHER).load(ROWS)
        alpha = buffers.factors.index(OTHER).load(ROWS)
        s = warpgroup_mma_wait(0, deps=(s,))
        l_i = l_i * scores.spread(alpha, l_i)
        acc = scaled(acc, alpha)
    return (acc, scale, shift, l_i), s


@gluon.jit
def follow(state, buffers, i, W: gl.constexpr):
    """Add tile i, of which the other warpgroup has computed weights."""
    none = gl.zeros([SIZE, SIZE], gl.float32, score_layout(SIZE))
    state, _ = told(state, none, buffers, i, W)
    acc, scale, shift, l_i = state
    acc = added(add(acc, buffers, i, W), buffers, i, W)
    release(buffers.weights, i)
    return acc, scale, shift, l_i


@gluon.jit
def products(buffers, q_rest, i):
    """``S = Q K^T`` of tile i, [M, N], asynchronously; each part is multiplied once it has landed."""
    # The first, and only: were that known, descriptors of q would be made before the loop, and spilled.
    q_smem = buffers.q.index(i >> 30)
    zero = gl.zeros([SIZE, SIZE], gl.float32, score_layout(SIZE))
    k_smem = arrived(buffers.rope, i, SIZE, SIZE)
    s = warpgroup_mma(q_rest, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    k_smem = arrived(buffers.left, i, SIZE, HALF)
    s = warpgroup_mma(q_smem.slice(0, HALF, dim=1), k_smem.permute((1, 0)), s, is_async=True)
    k_smem = arrived(buffers.right, i, SIZE, HALF)
    s = warpgroup_mma(q_smem.slice(HALF, HALF, dim=1), k_smem.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def publish(buffers, p, scale, shift, alpha, moves, i, W: gl.constexpr):
    """Leave the weights of tile i, and what became of the reference, for both warpgroups."""
    buffers.weights.tiles.index(W).store(p.to(buffers.q.dtype))
    buffers.scales.index(W).store(scale)
    buffers.shifts.index(W).store(shift)
    buffers.factors.index(W).store(alpha)
    buffers.moved.index(W).store(gl.max(moves.to(gl.int32).reshape([4, SIZE // 4]), 1))
    fence_async_shared()
    mbarrier.arrive(buffers.weights.full.index(W), count=1)


@gluon.jit
def step(
    state, q_rest, buffers, seq, rows, j, i, before, span, tree, limits, variant, extra, left, right, shape,
    W: gl.constexpr,
):  # fmt: skip
    """Tile j of the keys, use i of the rings, by the warpgroup whose turn it is.

    Warpgroup 0 has added the tile before it, use `before`. Warpgroup 1 does so here, while it computes weights: it has
    multiplied already when those of the other arrive, so that weights never wait for two products in a row.
    """
    n0 = j * SIZE
    s = products(buffers, q_rest, i)
    if W == 1:
        # All of its groups may be under way; what is waited for is a value that a branch can hand on.
        s, q_rest = warpgroup_mma_wait(_GROUPS, deps=(s, q_rest))
        state, s = told(state, s, buffers, before, W)
        acc, scale, shift, l_i = state
        acc = add(acc, buffers, before, W)
        s, acc, q_rest = warpgroup_mma_wait(1, deps=(s, acc, q_rest))
    else:
        acc, scale, shift, l_i = state
        s, q_rest = warpgroup_mma_wait(0, deps=(s, q_rest))
    release(buffers.rope, i)
    masked = (j < span.full_lo) | (j >= span.full_hi)
    if variant.predicate is not None:
        masked = j >= span.lo
    strange = 0 * j
    if masked:
        # All values of a key take part in each of its scores, so what is not finite in them shows there.
        finite = (gl.abs(s) < float("inf")).to(gl.int32)
        strange = 1 - gl.min(gl.min(finite, 1), 0)
    if not variant.fold:
        s = scores.modified(s, variant, extra, seq, rows, n0)
    if masked:
        seen = seen_keys(seq, rows, n0, tree, limits, variant, extra, left, right, shape)
        s = gl.where(seen, s, float("-inf"))
    unit = unit_of(variant.scale * LOG2E, variant)
    scale, shift, alpha, moves = standing(s, scale, shift, unit)
    safe = gl.where(shift == float("-inf"), 0.0, shift)
    p = gl.exp2(scores.exponents(s, scale, safe))
    l_i = l_i * scores.spread(alpha, l_i) + scores.partial_sums(p)
    # The other warpgroup has added the weights that were here.
    mbarrier.wait(buffers.weights.empty.index(W), ((i // buffers.weights.STAGES) & 1) ^ 1)
    if strange > 0:
        seen = seen_keys(seq, rows, n0, tree, limits, variant, extra, left, right, shape)
        p = p + poisoned(buffers, i, seen, W)[:, None]
    publish(buffers, p, scale, shift, alpha, moves, i, W)
    if W == 1:
        acc = added(acc, buffers, before, W)
        release(buffers.weights, before)
    if scores.any_warp(buffers.moved.index(W)):
        acc = scaled(acc, alpha)
    return added(add(acc, buffers, i, W), buffers, i, W), scale, shift, l_i


@gluon.jit
def attend(
    q_rest, buffers, piece, group, h, uses, tree, limits, variant, extra, left, right, shape, W: gl.constexpr
):  # fmt: skip
    """Half of the output, not yet divided by the sums of weights, of an item over a piece of its keys.

    `uses` are the next ones of both stages of the rings. Returns the state, the packed rows, their heads, and `uses`.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, score_layout(SIZE))
    packed = packed_of(group.row0, 0, ROWS)
    rows = packed // shape.GROUP
    heads = h * shape.GROUP + packed % shape.GROUP
    seq = Sequence(
        group.seq.b, heads[:, None], group.seq.q_start, group.seq.k_start, group.seq.len_q, group.seq.len_k,
        group.seq.off,
    )  # fmt: skip
    span = decode_plan.span_of(piece, group, tree, left, right, shape)
    acc = gl.zeros([SIZE, HALF], gl.float32, score_layout(HALF))
    unit = unit_of(variant.scale * LOG2E, variant)
    scale, shift = each_row(rows, 0.0) + unit, each_row(rows, float("-inf"))
    sums = scores.partial_sums(gl.zeros([SIZE, SIZE], gl.float32, score_layout(SIZE)))
    state = acc, scale, shift, sums
    own, other = uses[W], uses[1 - W]
    tiles = span.hi - span.lo
    for d in range(W, tiles, TILES):
        if W == 0:
            if d > 0:
                state = follow(state, buffers, other - TILES, W)
        state = step(
            state, q_rest, buffers, seq, rows, span.lo + d, own, other, span, tree, limits, variant, extra, left, right,
            shape, W,
        )  # fmt: skip
        own += TILES
        other += TILES
    # The last tile, if it is the other's.
    if W == 0:
        if (tiles > 0) & (tiles % 2 == 0):
            state = follow(state, buffers, other - TILES, W)
        uses = own, other - TILES * (tiles & 1)
    else:
        if tiles % 2 != 0:
            state = follow(state, buffers, other, W)
        uses = other + TILES * (tiles & 1), own
    return state, packed, heads, uses


@gluon.jit
def merged(state, buffers, sink, variant, W: gl.constexpr):
    """Output and LSE, with the sums of both warpgroups."""
    acc, scale, shift, l_i = state
    mine = row_sums(l_i, scale)
    buffers.sums.index(W).store(mine)
    meet(buffers, 1)
    return finished(acc, scale, shift, mine + buffers.sums.index(1 - W).load(scale.type.layout), sink, variant)


@gluon.jit
def fetch_all(q, buffers, group, h, slots, rope, rope_length, limits, shape, W: gl.constexpr):
    """Of q, the dims of warpgroup W into shared memory, and those of the rope part: as an operand in registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_layout(SIZE), k_width=2)
    half_smem = buffers.q.index(0).slice(W * HALF, HALF, dim=1)
    fetch(q, half_smem, group, h, slots, rope, rope_length, limits, shape, 0, W * HALF, W * HALF + HALF)
    # It passes where weights will be.
    rest_smem = buffers.weights.tiles.index(W)
    fetch(q, rest_smem, group, h, slots, rope, rope_length, limits, shape, 0, LATENT, LATENT + SIZE)
    q_rest = rest_smem.load(OPERAND)
    meet(buffers, 0)
    return q_rest


@gluon.jit
def compute(
    q, buffers, out, lse, parts, slots, rope, tree, sinks, mine, limits, work, variant, extra, stat_rows, rope_length,
    left, right, shape, W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: its tiles of every item, and its half of every output."""
    program = gl.program_id(0)
    even = 0
    odd = 1
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
            q_rest = fetch_all(q, buffers, group, h, slots, rope, rope_length, limits, shape, W)
            state, packed, heads, uses = attend(
                q_rest, buffers, piece, group, h, (even, odd), tree, limits, variant, extra, left, right, shape, W
            )  # fmt: skip
            even, odd = uses
            o, lse_rows = merged(state, buffers, sink_of(sinks, heads, piece), variant, W)
            store(o, lse_rows, out, lse, parts, piece.slot, group.seq, h, packed, stat_rows, shape, 0, W * HALF)
            if piece.is_first & (piece.slot >= 0):
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
def latent_kernel(
    q, left_desc, right_desc, rest_desc, out, lse, parts, slots, rope, tree, sinks, variant, extra, shape,
    batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch, row_tiles, splits, cut,
    whole, stat_rows, rope_length, left, right,
    EARLY: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """Programs: as many as the device runs at once, each with its share of all work; EARLY: see `combine`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limits = Limits(batch, seqlen_q, total_q, seqlen_new, capacity, cache_rows, table_row, tree_batch)
    work = Work(row_tiles, splits, cut, whole)
    # All of them in every warp, so that none waits for another.
    groups = gl.arange(0, decode_plan.CHUNK, gl.BlockedLayout([decode_plan.CHUNK // 32], [32], [4], [0]))
    mine = decode_plan.share(
        gl.program_id(0), gl.num_programs(0), groups, slots, limits, work, shape, left, right
    )  # fmt: skip
    buffers = make_buffers(left_desc, rest_desc, shape)
    # In the order in which they are free.
    rings, descs = (buffers.rope, buffers.left, buffers.right), (rest_desc, left_desc, right_desc)
    specialize(
        [
            (
                compute,
                (
                    q, buffers, out, lse, parts, slots, rope, tree, sinks, mine, limits, work, variant, extra,
                    stat_rows, rope_length, left, right, shape, 0,
                ),
            ),
            (
                compute,
                (
                    q, buffers, out, lse, parts, slots, rope, tree, sinks, mine, limits, work, variant, extra,
                    stat_rows, rope_length, left, right, shape, 1,
                ),
            ),
            (load, (rings, descs, slots, mine, limits, work, left, right, shape, True)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
