"""Backward on Hopper, a gradient at a time: nothing is added up in memory, so every bit can be repeated.

Two warpgroups hold 128 rows of q and do (for dq), or of k and v (for dk, dv), and pass over what they meet:

    dq:  S = Q Kᵀ     dP = dO Vᵀ     dQ += dS K
    dk:  Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dK += dSᵀ Q
    dv:  Sᵀ = K Qᵀ                   dV += Pᵀ dO

So there are eight products where `backward` has five; but at head dim 256 there is no room for dk beside dv, and dq's
sum would cross L2 once for every 64 keys. dP runs beside the exponentials, the next scores beside the last product.

HBM: each kernel reads its own rows once and the others once per tile of its own (mostly from L2), and writes its
gradient.

*Handles* bf16 and fp16, head dims up to 256, every mask, packed sequences, softcap, score modifications, bias, ALiBi,
dropout. *Not here*: the gradients of bias and ALiBi slopes (`_triton.backward`).

Source: FlashAttention-2 (Dao, 2023), Algorithm 2, its loop split in three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.score import Sequence
from . import unread, work
from .arrivals import load_rows, stat_of
from .backward import store
from .key_tiles import before, is_masked, met, row_tile
from .pipeline import arrived, cta_barrier, make_ring, produce, release
from .products import packed
from .recompute import (
    draw,
    exponents,
    make_bits,
    of_weights,
    product_gradient,
    score_gradient,
    tile_layout,
    unpacked,
    weights,
    without_dropped,
    without_dropped_of_rows,
)
from .work import Band, Work, dealt, rounds_of


class Io(NamedTuple):
    """Descriptors of what stays (q and do, or k and v) and of what passes by (k and v, or q and do).

    lse2 and delta, as descriptors of one line each where rows pass by; the gradient, contiguous [B, S, H, D]; rows of a
    head in a statistic; the scale of raw scores in base 2, and that of the gradient.
    """

    own_desc: Any
    own_2_desc: Any
    other_desc: Any
    other_2_desc: Any
    lse: Any
    delta: Any
    grad: Any
    stat_rows: Any
    qk_scale: Any
    grad_scale: Any


class Buffers(NamedTuple):
    """Shared memory: what stays, rings of what passes by, and of its statistics; with dropout, its bits."""

    own: Any
    own_2: Any
    other: Any
    other_2: Any
    lse: Any
    delta: Any
    bits: Any


class Tile(NamedTuple):
    """What a tile of own rows meets: see `work.Tile` and `key_tiles.Span`. `first` is its first position."""

    seq: Any
    first: Any
    span: Any
    count: Any


@gluon.jit
def tile_of(t, band, dealing, variant, shape, WHAT: gl.constexpr):
    """The tile number t."""
    if WHAT == "q":
        seq, m0, keys = work.sequence_of(t, band, dealing, shape)
        span = work.tile_of(seq, m0, keys, band, variant, shape)
        tile = Tile(seq, m0, span, gl.where(span.some, span.hi - span.lo, 0))
    else:
        seq, n0, span = met(t, band, dealing, variant, shape)
        tile = Tile(seq, n0, span, span.count)
    return tile


@gluon.jit
def start(tile, WHAT: gl.constexpr):
    """One before the first of what a tile meets, for `following`."""
    head, at = tile.first * 0, tile.first * 0 - 1
    if WHAT != "q":
        head, at = before(tile.span)
    return head, at


@gluon.jit
def following(j, head, at, tile, variant, shape, WHAT: gl.constexpr):
    """Query head inside the group, and number, of the j-th tile that is met; the last ones were `head` and `at`."""
    if WHAT == "q":
        at = work.first_key(tile.span, tile.span.lo + j, variant, shape) // shape.BLOCK_N
    else:
        head, at = row_tile(j, head, at, tile.span, variant)
    return head, at


@gluon.jit
def needs_test(j, at, tile, variant, WHAT: gl.constexpr):
    """Whether some row does not see some key."""
    if WHAT == "q":
        n = tile.span.lo + j
        masked = (n >= tile.span.full_hi) | (n < tile.span.full_lo)
    else:
        masked = is_masked(j, at, tile.span, variant)
    return masked


@gluon.jit
def load(io, smem, band, dealing, variant, shape, WHAT: gl.constexpr):
    """The producer: what stays, then what passes by, with its statistics."""
    i = 0
    t = dealt(dealing, 0, shape)
    for n in range(rounds_of(dealing, shape)):
        upcoming = dealt(dealing, n + 1, shape)
        if t >= 0:
            tile = tile_of(t, band, dealing, variant, shape, WHAT)
            seq = tile.seq
            b = work.line_of(seq, shape)
            own = seq.k_start
            if WHAT == "q":
                own = seq.q_start
            produce(smem.own, io.own_desc, [b, own + tile.first, seq.h, 0], n)
            if WHAT != "v":
                produce(smem.own_2, io.own_2_desc, [b, own + tile.first, seq.h, 0], n)
            head, at = start(tile, WHAT)
            for j in range(tile.count):
                head, at = following(j, head, at, tile, variant, shape, WHAT)
                if WHAT == "q":
                    coord = [b, seq.k_start + at * shape.BLOCK_N, seq.h // dealing.group, 0]
                    produce(smem.other, io.other_desc, coord, i)
                    produce(smem.other_2, io.other_2_desc, coord, i)
                else:
                    lines = ((io.lse, smem.lse),), ((io.delta, smem.delta),)
                    descs, rings = (io.other_desc, io.other_2_desc), (smem.other, smem.other_2)
                    load_rows(descs, rings, lines, seq, head, at, i, io.stat_rows, dealing, shape)
                i += 1
        t = upcoming


@gluon.jit
def scores_of(smem, i, at, tile, zero, shape, WHAT: gl.constexpr):
    """Scores with the tile that is use i, asynchronously."""
    PASSING: gl.constexpr = zero.shape[1]
    other_smem = arrived(smem.other, i, PASSING, shape.BLOCK_D)
    if shape.PACKED and WHAT != "q":
        unread.cut(other_smem, tile.seq.len_q - at * PASSING, shape.WARPS)
    own_smem = smem.own.tiles.index(0).reshape([zero.shape[0], shape.BLOCK_D])
    return warpgroup_mma(own_smem, other_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def of_member(line_smem, at, tile, value: gl.constexpr, SCORES: gl.constexpr, shape):
    """A statistic of the tile of rows number `at`, as it broadcasts to its scores; `value` for rows of a packed call
    that are not the member's.
    """
    line = line_smem.load(gl.SliceLayout(0, SCORES))
    if shape.PACKED:
        rows = at * shape.BLOCK_M + gl.arange(0, shape.BLOCK_M, gl.SliceLayout(0, SCORES))
        line = gl.where(rows < tile.seq.len_q, line, value)
    return line[None, :]


@gluon.jit
def begin_of(smem, i, at, delta, tile, SCORES: gl.constexpr, shape, WHAT: gl.constexpr):
    """Delta, as it broadcasts to the scores with the tile number `at`, use i; of own rows it is `delta`."""
    if WHAT == "k":
        begin = of_member(smem.delta.index(i % smem.other_2.STAGES), at, tile, 0.0, SCORES, shape)
    else:
        begin = delta[:, None]
    return begin


@gluon.jit
def draw_of(smem, key, head, at, tile, dealing, variant, shape, WHAT: gl.constexpr):
    """Dropout's bits for the tile of rows number `at` that passes by."""
    if variant.seed is not None and WHAT != "q":
        h, heads = tile.seq.h * dealing.group + head, dealing.heads * dealing.group
        draw(variant, key, tile.seq.b, h, at * shape.BLOCK_M, tile.first, heads, smem.bits, shape)


@gluon.jit
def left_of(
    p32, smem, key, at, tile, dealing, variant, shape, SCORES: gl.constexpr, dtype: gl.constexpr, WHAT: gl.constexpr
):  # fmt: skip
    """Weights without those that dropout makes 0, of the tile number `at` that passes by, and all of them."""
    if WHAT == "q":
        seq = tile.seq
        n0 = at * shape.BLOCK_N
        left = without_dropped_of_rows(p32, variant, key, seq.b, seq.h, tile.first, n0, dealing.heads, shape)
    else:
        left = without_dropped(p32, smem.bits, shape)
    return unpacked(left, SCORES, dtype), unpacked(p32, SCORES, dtype)


@gluon.jit
def gather(i, tile, io, smem, band, dealing, variant, extra, shape, WHAT: gl.constexpr):
    """The gradient of a tile of own rows, and the next use of the rings."""
    OWN: gl.constexpr = shape.BLOCK_M if WHAT == "q" else shape.BLOCK_N
    PASSING: gl.constexpr = shape.BLOCK_N if WHAT == "q" else shape.BLOCK_M
    WIDTH: gl.constexpr = shape.BLOCK_DV if WHAT == "v" else shape.BLOCK_D
    SCORES: gl.constexpr = tile_layout(shape.WARPS, PASSING)
    GRADIENT: gl.constexpr = tile_layout(shape.WARPS, WIDTH)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADIENT, k_width=2)
    dtype: gl.constexpr = io.own_desc.dtype
    seq = tile.seq
    zero = gl.zeros([OWN, PASSING], gl.float32, SCORES)
    acc = gl.zeros([OWN, WIDTH], gl.float32, GRADIENT)
    own = tile.first + gl.arange(0, OWN, gl.SliceLayout(1, SCORES))
    offs = gl.arange(0, PASSING, gl.SliceLayout(0, SCORES))
    lse2, delta = own, own
    if WHAT == "q":
        pair = seq.h.to(gl.int64)
        if not shape.PACKED:
            pair += seq.b.to(gl.int64) * dealing.heads
        stat = stat_of(seq, pair * io.stat_rows, 0, shape) + own
        inside = own < seq.len_q
        lse2 = gl.load(io.lse + stat, mask=inside, other=float("inf"))
        delta = gl.load(io.delta + stat, mask=inside, other=0.0)
    s, key = zero, work.key_of(variant)
    head, at = start(tile, WHAT)
    if tile.count > 0:
        head, at = following(0, head, at, tile, variant, shape, WHAT)
        s = scores_of(smem, i, at, tile, zero, shape, WHAT)
        draw_of(smem, key, head, at, tile, dealing, variant, shape, WHAT)
        s = warpgroup_mma_wait(0, deps=(s,))
    for j in range(tile.count):
        who = Sequence(seq.b, seq.h, seq.q_start, seq.k_start, seq.len_q, seq.len_k, seq.off)
        rows, keys = own[:, None], (at * PASSING + offs)[None, :]
        if WHAT != "q":
            who = Sequence(
                seq.b, seq.h * dealing.group + head, seq.q_start, seq.k_start, seq.len_q, seq.len_k, seq.off
            )  # fmt: skip
            rows, keys = (at * PASSING + offs)[None, :], own[:, None]
        masked = needs_test(j, at, tile, variant, WHAT)
        other_smem = smem.other.tiles.index(i % smem.other.STAGES).reshape([PASSING, shape.BLOCK_D])
        other_2_smem = arrived(smem.other_2, i, PASSING, shape.BLOCK_DV)
        if shape.PACKED and WHAT != "q":
            unread.cut(other_2_smem, seq.len_q - at * PASSING, shape.WARPS)
        dp, begin = zero, delta
        if WHAT != "v":
            begin = begin_of(smem, i, at, delta, tile, SCORES, shape, WHAT)
            own_2_smem = smem.own_2.tiles.index(0).reshape([OWN, shape.BLOCK_DV])
            if variant.seed is None:
                dp = warpgroup_mma(own_2_smem, other_2_smem.permute((1, 0)), zero - begin, is_async=True)
            else:
                dp = warpgroup_mma(own_2_smem, other_2_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
        limit = lse2[:, None]
        if WHAT != "q":
            limit = of_member(smem.lse.index(i % smem.other.STAGES), at, tile, float("inf"), SCORES, shape)
        s, chain = exponents(s, limit, who, rows, keys, at * PASSING, io, variant, extra, shape, WHAT == "q")
        p = weights(
            s, who, rows, keys, at * PASSING, masked, band, variant, extra, shape, WHAT == "q"
        )  # fmt: skip
        left = p
        if variant.seed is not None:
            left, p = left_of(packed(p, dtype), smem, key, at, tile, dealing, variant, shape, SCORES, dtype, WHAT)
        if WHAT == "v":
            operand = gl.convert_layout(left.to(dtype), OPERAND, assert_trivial=True)
        else:
            dp = warpgroup_mma_wait(0, deps=(dp,))
            release(smem.other_2, i)
            ds = score_gradient(p, left, dp, begin, variant)
            if shape.CLEAN:
                if masked:
                    ds = of_weights(ds, p)
                    if WHAT == "q":
                        # Every warpgroup has its scores of these keys.
                        cta_barrier()
                        unread.clean(other_smem, shape.WARPS)
            ds = product_gradient(ds, chain, who, rows, keys, masked, variant, extra, shape)
            operand = gl.convert_layout(ds.to(dtype), OPERAND, assert_trivial=True)
        # After the last tile these are scores for nobody, of the same tile once more.
        more = gl.minimum(j + 1, tile.count - 1)
        if j + 1 < tile.count:
            head, at = following(more, head, at, tile, variant, shape, WHAT)
        s = scores_of(smem, i + more - j, at, tile, zero, shape, WHAT)
        if WHAT == "v":
            acc = warpgroup_mma(operand, other_2_smem, acc, is_async=True)
        else:
            acc = warpgroup_mma(operand, other_smem, acc, is_async=True)
        draw_of(smem, key, head, at, tile, dealing, variant, shape, WHAT)
        s, acc, operand = warpgroup_mma_wait(0, deps=(s, acc, operand))
        if WHAT == "v":
            release(smem.other_2, i)
        release(smem.other, i)
        i += 1
    return acc, i


@gluon.jit
def compute(io, smem, band, dealing, variant, extra, shape, WHAT: gl.constexpr):
    """The consumers, together."""
    i = 0
    t = dealt(dealing, 0, shape)
    for n in range(rounds_of(dealing, shape)):
        upcoming = dealt(dealing, n + 1, shape)
        if t >= 0:
            tile = tile_of(t, band, dealing, variant, shape, WHAT)
            mbarrier.wait(smem.own.full.index(0), n & 1)
            if WHAT != "v":
                mbarrier.wait(smem.own_2.full.index(0), n & 1)
            acc, i = gather(i, tile, io, smem, band, dealing, variant, extra, shape, WHAT)
            release(smem.own, n)
            if WHAT != "v":
                release(smem.own_2, n)
            seq = tile.seq
            if WHAT == "q":
                # As `store` sees it, the rows that are written are keys.
                seq = Sequence(seq.b, seq.h, seq.k_start, seq.q_start, seq.len_k, seq.len_q, seq.off)
            if WHAT == "v" and variant.seed is not None:
                acc *= 65536.0 / variant.keep
            HEAD_DIM: gl.constexpr = shape.HEAD_DIM_V if WHAT == "v" else shape.HEAD_DIM
            store(acc * io.grad_scale, io.grad, HEAD_DIM, seq, tile.first, dealing, shape)
        t = upcoming


@gluon.jit(
    do_not_specialize=["rounds", "stat_rows", "tiles", "heads", "group", "off", "left", "right", "len_q", "len_k"]
)
def apart_kernel(
    own_desc, own_2_desc, other_desc, other_2_desc, lse, delta, grad, table, qk_scale, grad_scale, rounds, stat_rows,
    tiles, heads, group, off, left, right, len_q, len_k, variant, extra, shape, WHAT: gl.constexpr,
):  # fmt: skip
    """Programs: as many as run at once; `table` deals the tiles of the own rows."""
    band = Band(off, left, right, len_q, len_k)
    dealing = Work(table, rounds, tiles, heads, group)
    io = Io(own_desc, own_2_desc, other_desc, other_2_desc, lse, delta, grad, stat_rows, qk_scale, grad_scale)
    own, other = make_ring(own_desc, 1, 1), make_ring(other_desc, 2, 1)
    own_2, other_2 = own, make_ring(other_2_desc, 2 if WHAT == "v" else 1, 1)
    if WHAT != "v":
        own_2 = make_ring(own_2_desc, 1, 1)
    lines, lines_2 = own.full, own.full
    if WHAT != "q":
        lines = gl.allocate_shared_memory(gl.float32, [2, shape.BLOCK_M], lse.layout)
        lines_2 = gl.allocate_shared_memory(gl.float32, [2, shape.BLOCK_M], lse.layout)
    bits = own.full
    if variant.seed is not None and WHAT != "q":
        bits = make_bits(shape, 1).index(0)
    fence_async_shared()
    smem = Buffers(own, own_2, other, other_2, lines, lines_2, bits)
    gl.warp_specialize(
        [
            (compute, (io, smem, band, dealing, variant, extra, shape, WHAT)),
            (load, (io, smem, band, dealing, variant, shape, WHAT)),
        ],
        [1],
        [24],
    )
