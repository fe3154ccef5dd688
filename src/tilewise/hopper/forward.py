"""Forward on Hopper: ``o = softmax(s) v`` and ``lse = log sum exp s``, FlashAttention-3's pipeline in Gluon.

One warp loads (TMA), two or three warpgroups compute, each 64 rows of the tile, and where there is a mask, two warps
look for what is not finite in v. Within a warpgroup the product ``S_j = Q K_jᵀ`` runs beside the softmax of S_{j-1} and
``O += P_{j-1} V_{j-1}`` (FlashAttention-3, Shah et al., 2024, Algorithms 1 and 2), and warpgroups take turns. The
softmax goes by a standing reference (see `step`) instead of a running maximum. The grid is persistent: `schedule` deals
the tiles to programs, the longest first, and Q of a program's next tile is loaded while it still computes the last.

HBM: reads q once and k, v once per tile of rows (mostly from L2), writes o and lse.

*Handles* every option of `Problem` for bf16 and fp16 and head dims up to 256. *Not here*: split keys (decode), fp8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..kernels import score
from ..kernels.score import Variant
from . import scores, unread
from .epilogue import store
from .pipeline import arrived, make_ring, make_turns, my_turn, next_turn, produce, release, specialize, tma_load
from .products import add, added, as_operand, marred, multiply, packed, scaled
from .scores import each_row, score_layout, unit_of
from .unread import LOOKERS
from .work import (
    Band,
    Work,
    dealt,
    first_key,
    first_row,
    heads_of,
    is_masked,
    key_of,
    line_of,
    low,
    own,
    rounds_of,
    rows_of,
    seen_keys,
    sequence_of,
    slope_of,
    tile_of,
)


class Io(NamedTuple):
    """What is read and written beside the variant's tensors.

    Descriptors of q, k, v and o; o itself, contiguous [..., Hq, Dv], for what TMA cannot store; the LSE [B, Hq, Sq],
    packed [Hq, T], and Sq or T; the sinks or None; the scale of raw scores in base 2; the staging of O.
    """

    q_desc: Any
    k_desc: Any
    v_desc: Any
    o_desc: Any
    o: Any
    lse: Any
    stat_rows: Any
    sinks: Any
    qk_scale: Any
    o_smem: Any


class Consumers(NamedTuple):
    """How consumers agree.

    `turns` [consumers, 1] are the barriers by which their matrix products alternate; `flags` int32 [consumers, 4] has
    a word for each warp of a consumer; `findings` are what they need not look for (see `unread`).
    """

    turns: Any
    flags: Any
    findings: Any


@gluon.jit
def load_rows(io, q, b, seq, m0, n, shape):
    """Ask for Q of a program's tile n."""
    stage = n % q.STAGES
    mbarrier.wait(q.empty.index(stage), ((n // q.STAGES) & 1) ^ 1)
    mbarrier.expect(q.full.index(stage), shape.CONSUMERS * io.q_desc.block_type.nbytes)
    for w in gl.static_range(shape.CONSUMERS):
        row = seq.q_start + first_row(m0, w, shape)
        q_smem = q.tiles.index(stage * shape.CONSUMERS + w)
        tma_load(io.q_desc, [b, row, seq.h * shape.STACK, 0], q.full.index(stage), q_smem)


@gluon.jit
def load(io, q, k, v, band, work, variant, extra, shape):
    """The producer: Q of each tile, then its K and V tiles from the last to the first."""
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, m0, keys = sequence_of(t, band, work, shape)
            tile = tile_of(seq, m0, keys, band, variant, shape)
            head = seq.h // work.group
            b = line_of(seq, shape)
            if q.STAGES > 1:
                load_rows(io, q, b, seq, m0, n, shape)
                for d in range(tile.hi - tile.lo):
                    row = seq.k_start + first_key(tile, tile.hi - 1 - d, variant, shape)
                    produce(k, io.k_desc, [b, row, head, 0], i)
                    produce(v, io.v_desc, [b, row, head, 0], i)
                    i += 1
            else:
                # The first keys need not wait until the rows before have left the one buffer.
                row = seq.k_start + first_key(tile, tile.hi - 1, variant, shape)
                produce(k, io.k_desc, [b, row, head, 0], i)
                load_rows(io, q, b, seq, m0, n, shape)
                for d in range(1, tile.hi - tile.lo):
                    produce(v, io.v_desc, [b, row, head, 0], i)
                    i += 1
                    row = seq.k_start + first_key(tile, tile.hi - 1 - d, variant, shape)
                    produce(k, io.k_desc, [b, row, head, 0], i)
                produce(v, io.v_desc, [b, row, head, 0], i)
                i += 1
        t = upcoming


@gluon.jit
def look(v, findings, band, work, variant, shape):
    """The looker: rids the values of masked tiles of what is not finite, so that consumers need not look themselves.

    It takes every use in the producer's order and releases it as a consumer does, so no barrier is more than one phase
    from what is waited for, and parity tells. It waits for uses to land alone, which takes releases of uses at least
    STAGES before; a consumer that waits for its word, on a use that has landed, has yet to release that use and the one
    before: with two stages or more, nothing that the looker waits for waits for that consumer.
    """
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, m0, keys = sequence_of(t, band, work, shape)
            tile = tile_of(seq, m0, keys, band, variant, shape)
            for d in range(tile.hi - tile.lo):
                v_smem = arrived(v, i, shape.BLOCK_N, shape.BLOCK_DV)
                stage = i % v.STAGES
                if is_masked(tile, tile.hi - 1 - d):
                    unread.look_through(v_smem, findings, stage)
                mbarrier.arrive(findings.done.index(stage), count=1)
                release(v, i)
                i += 1
        t = upcoming


@gluon.jit
def modified(s, less, seq, tile, rows, j, slope, band, variant, extra, shape, EXACT: gl.constexpr):
    """Scores of the products with the j-th key tile before the mask, less a number for each row; plain ones remain.

    Where a score is a scale, a softcap and ALiBi, subtracting is one instruction with what comes before it.
    """
    if not variant.fold:
        n0 = first_key(tile, j, variant, shape)
        if variant.mod is None and variant.bias is None:
            # Of the rows of all consumers: a tile near the diagonal may be taken for one that it crosses.
            first, last = tile.m0 + seq.off, tile.m0 + shape.BLOCK_M // shape.STACK - 1 + seq.off
            diagonal = rows + (seq.off - n0)
            s = scores.straight(s, less, slope, diagonal, n0 > last, variant, EXACT)
            if variant.slopes is not None:
                crossed = (n0 <= last) & (n0 + shape.BLOCK_N - 1 > first)
                if band.right is not None:
                    crossed &= band.right > 0
                if crossed:
                    s = scores.bent(s, slope, diagonal)
        else:
            s = scores.modified(s, variant, extra, own(seq, rows, shape), rows, n0) - less[:, None]
    return s


@gluon.jit
def hidden(s, seq, tile, rows, j, band, variant, extra, shape):
    """Scores where keys that a row does not see are -inf, or what else `scores.weights` makes 0."""
    seen = seen_keys(seq, tile, rows, j, band, variant, extra, shape)
    if scores.by_polynomial(variant.bounded, variant.rough, shape.BLOCK_DV):
        s = gl.where(seen, s, score.HIDDEN)
    else:
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def poisoned(v, i, seq, tile, rows, j, consumers, band, variant, extra, shape):
    """NaN for rows that see something in v (use i of its ring) which was not finite, else 0; the looker has cut it."""
    poison = each_row(rows, 0.0)
    if shape.CLEAN:
        arrived(v, i, shape.BLOCK_N, shape.BLOCK_DV)
        if unread.marked(consumers.findings, i, v.STAGES):
            strange = unread.flagged(consumers.findings.flags.index(i % v.STAGES), shape.BLOCK_N)
            # Asked again: kept from the mask, the answers would cost registers in every tile.
            seen = seen_keys(seq, tile, rows, j, band, variant, extra, shape) & strange[None, :]
            poison = gl.where(gl.max(seen.to(gl.int32), 1) > 0, float("nan"), 0.0)
    return poison


@gluon.jit
def dropped(p32, seq, tile, rows, j, key, work, variant, shape):
    """Ones in the halves of packed weights that dropout makes 0; the weights' layout is that of `p32`."""
    marks = 0
    if variant.seed is not None:
        PACKED: gl.constexpr = p32.type.layout
        n0 = first_key(tile, j, variant, shape)
        batch_head = seq.b * (work.heads * shape.STACK) + heads_of(seq, rows, shape)
        k0, k1 = key
        if shape.BLOCK_DV == 256:
            # The keys of all rounds follow from it sooner than registers are found to keep them.
            k0, k1 = scores.opaque(k0), scores.opaque(k1)
        # Computed where it is asked for, and not where it is needed.
        marks = scores.opaque(scores.dropped(variant, (k0, k1), batch_head, rows, n0, shape.BLOCK_N, PACKED))
    return marks


@gluon.jit
def kept(p32, marks, variant):
    """Weights that dropout leaves."""
    if variant.seed is not None:
        p32 = p32 & ~marks
    return p32


@gluon.jit
def step(
    state, q_smem, zero, k, v, seq, tile, rows, j, i, slope, key,
    io, consumers, band, work, variant, extra, shape, W: gl.constexpr,
):  # fmt: skip
    """Scores of the j-th key tile (use i of the rings) while the values of the tile before it are added.

    Its weights are taken relative to what the row was measured by so far, which need not be its maximum: nothing waits
    for one, and nothing is scaled anew. Only if a weight outgrows that reference, or a score what the softcap's
    polynomial is good for, once in a while, is the tile done again: with the maximum, and the softcap itself.
    """
    acc, tail, p32, scale, shift, l_i = state
    p16 = as_operand(p32, io.q_desc.dtype, score_layout(low(shape.BLOCK_DV, shape.DV_HIGH)))
    k_smem = arrived(k, i, shape.BLOCK_N, shape.BLOCK_D)
    my_turn(consumers.turns, i, W)
    s = multiply(q_smem, k_smem, zero, shape)
    acc, tail = add(acc, tail, p16, arrived(v, i - 1, shape.BLOCK_N, shape.BLOCK_DV), shape)
    next_turn(consumers.turns, W, shape.CONSUMERS)
    # While products are under way, where registers last: not in 64 KiB of O, nor beside a branch that cleans v.
    EARLY: gl.constexpr = shape.BLOCK_DV < 256 and not shape.CLEAN
    marks = 0
    if EARLY:
        marks = dropped(p32, seq, tile, rows, j, key, work, variant, shape)
    if shape.DV_HIGH == 0:
        s, acc, p16 = warpgroup_mma_wait(1, deps=(s, acc, p16))
    else:
        s, acc, tail, p16 = warpgroup_mma_wait(2, deps=(s, acc, tail, p16))
    far = scores.far(s, variant)
    s = modified(s, shift, seq, tile, rows, j, slope, band, variant, extra, shape, False)
    poison = each_row(rows, 0.0)
    # One loop with a branch: of two loops, the second would unpack the 16-bit operand that it takes over.
    masked = is_masked(tile, j)
    if band.left is not None or band.right is not None or variant.plan is not None or variant.predicate is not None:
        if masked:
            s = hidden(s, seq, tile, rows, j, band, variant, extra, shape)
            poison = poisoned(v, i, seq, tile, rows, j, consumers, band, variant, extra, shape)
    if variant.fold:
        s = scores.exponents(s, scale, shift)
    p = scores.weights(s, variant, shape)
    sums = scores.partial_sums(p)
    flags_smem = consumers.flags.index(W)
    if not variant.bounded:
        checked = sums
        if shape.CLEAN:
            checked += scores.spread(poison, sums)
        flags_smem.store(scores.by_warp(scores.outgrown(checked) | far))
    if not EARLY:
        marks = dropped(p32, seq, tile, rows, j, key, work, variant, shape)
    acc, tail, p16 = added(acc, tail, p16, shape)
    p32 = packed(p, io.q_desc.dtype)
    release(v, i - 1)
    outgrown = False
    if not variant.bounded:
        outgrown = scores.any_warp(flags_smem)
    elif shape.CLEAN:
        if masked:
            # This keeps it a branch: the compiler would rather add in every tile.
            poison = scores.opaque(poison.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
            acc = marred(acc, poison)
            if shape.DV_HIGH != 0:
                tail = marred(tail, poison)
    if outgrown:
        s = warpgroup_mma_wait(0, deps=(multiply(q_smem, k_smem, zero, shape),))
        # What the first time has computed costs registers if it is kept for the second.
        again = scores.opaque(j)
        none = each_row(rows, 0.0)
        s = modified(s, none, seq, tile, rows, again, slope, band, variant, extra, shape, True)
        if band.left is not None or band.right is not None or variant.plan is not None or variant.predicate is not None:
            if masked:
                s = hidden(s, seq, tile, rows, again, band, variant, extra, shape)
        scale, shift, safe, alpha = scores.reference(s, scale, shift, unit_of(io.qk_scale, variant))
        p = gl.exp2(scores.exponents(s, scale, safe))
        sums = scores.partial_sums(p)
        p32 = packed(p, io.q_desc.dtype)
        l_i = l_i * scores.spread(alpha, l_i)
        if shape.CLEAN:
            alpha += poison
        acc = scaled(acc, alpha)
        if shape.DV_HIGH != 0:
            tail = scaled(tail, alpha)
    release(k, i)
    return acc, tail, kept(p32, marks, variant), scale, shift, l_i + sums


@gluon.jit
def attend(q_smem, k, v, seq, tile, rows, i, io, consumers, band, work, variant, extra, shape, W: gl.constexpr):
    """All key tiles of a row tile, the last first; the values of the first are left to the caller."""
    SCORES: gl.constexpr = score_layout(shape.BLOCK_N)
    LOW: gl.constexpr = low(shape.BLOCK_DV, shape.DV_HIGH)
    zero = gl.zeros([64, shape.BLOCK_N], gl.float32, SCORES)
    k_smem = arrived(k, i, shape.BLOCK_N, shape.BLOCK_D)
    my_turn(consumers.turns, i, W)
    s = multiply(q_smem, k_smem, zero, shape)
    next_turn(consumers.turns, W, shape.CONSUMERS)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k, i)
    top = tile.hi - 1
    slope, key = slope_of(variant, seq, rows, shape), key_of(variant)
    less = each_row(rows, score.BOUNDED if variant.bounded else 0.0)
    s = modified(s, less, seq, tile, rows, top, slope, band, variant, extra, shape, True)
    acc = gl.zeros([64, LOW], gl.float32, score_layout(LOW))
    tail = 0
    if shape.DV_HIGH != 0:
        tail = gl.zeros([64, shape.DV_HIGH], gl.float32, score_layout(shape.DV_HIGH))
    if is_masked(tile, top):
        s = hidden(s, seq, tile, rows, top, band, variant, extra, shape)
    unit = unit_of(io.qk_scale, variant)
    scale, shift = each_row(rows, 0.0) + unit, less
    if variant.bounded:
        p = scores.weights(s, variant, shape)
    else:
        scale, shift, safe, _ = scores.reference(s, scale, each_row(rows, float("-inf")), unit)
        p = gl.exp2(scores.exponents(s, scale, safe))
    p32 = packed(p, io.q_desc.dtype)
    p32 = kept(p32, dropped(p32, seq, tile, rows, top, key, work, variant, shape), variant)
    if shape.CLEAN:
        # Last of all: the values land after the keys, and then the looker begins.
        if is_masked(tile, top):
            poison = poisoned(v, i, seq, tile, rows, top, consumers, band, variant, extra, shape)
            acc = marred(acc, poison)
            if shape.DV_HIGH != 0:
                tail = marred(tail, poison)
    state = acc, tail, p32, scale, shift, scores.partial_sums(p)
    last = tile.hi - tile.lo
    for d in range(1, last):
        state = step(
            state, q_smem, zero, k, v, seq, tile, rows, top - d, i + d, slope, key,
            io, consumers, band, work, variant, extra, shape, W,
        )  # fmt: skip
    return state, i + last


@gluon.jit
def compute(io, q, k, v, consumers, band, work, variant, extra, shape, W: gl.constexpr):
    """Consumer W: 64 rows of every tile."""
    i = 0
    t = dealt(work, 0, shape)
    for n in range(rounds_of(work, shape)):
        # Read ahead: nothing waits for it where a tile begins.
        upcoming = dealt(work, n + 1, shape)
        if t >= 0:
            seq, m0, keys = sequence_of(t, band, work, shape)
            tile = tile_of(seq, m0, keys, band, variant, shape)
            rows = rows_of(m0, W, shape)
            stage = n % q.STAGES
            q_smem = q.tiles.index(stage * shape.CONSUMERS + W).reshape([64, shape.BLOCK_D])
            mbarrier.wait(q.full.index(stage), (n // q.STAGES) & 1)
            state, i = attend(q_smem, k, v, seq, tile, rows, i, io, consumers, band, work, variant, extra, shape, W)
            acc, tail, p32, scale, shift, l_i = state
            mbarrier.arrive(q.empty.index(stage), count=1)
            p16 = as_operand(p32, io.q_desc.dtype, score_layout(low(shape.BLOCK_DV, shape.DV_HIGH)))
            acc, tail = add(acc, tail, p16, arrived(v, i - 1, shape.BLOCK_N, shape.BLOCK_DV), shape)
            acc, tail, p16 = added(acc, tail, p16, shape)
            release(v, i - 1)
            if shape.PACKED:
                # Read again: kept until here, it would cost registers in every tile.
                seq, m0, keys = sequence_of(t, band, work, shape)
                rows = rows_of(m0, W, shape)
            store(acc, tail, scale, shift, l_i, seq, m0, rows, io.o_smem.index(W), io, work, variant, shape, W)
        t = upcoming
    tma.store_wait(0)


@gluon.jit
def roles(
    q_desc, k_desc, v_desc, o_desc, o, lse, stat_rows, sinks, qk_scale, band, work, variant, extra,
    shape, STAGES: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, and who does what with them."""
    # Q of a program's next tile arrives while this one is computed, where there is room for both.
    Q_STAGES: gl.constexpr = 2 if shape.BLOCK_D + shape.BLOCK_DV <= 256 else 1
    q = make_ring(q_desc, Q_STAGES, shape.CONSUMERS, shape.CONSUMERS)
    k = make_ring(k_desc, STAGES, shape.CONSUMERS)
    # The looker releases values too.
    v = make_ring(v_desc, STAGES, shape.CONSUMERS + shape.CLEAN)
    findings = q.full
    if shape.CLEAN:
        findings = unread.make_findings(STAGES, shape.BLOCK_N)
    flags = gl.allocate_shared_memory(gl.int32, [shape.CONSUMERS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    consumers = Consumers(make_turns(shape.CONSUMERS), flags, findings)
    o_smem = q.tiles
    if not shape.DIRECT_O:
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [shape.CONSUMERS] + o_desc.block_type.shape, o_desc.layout)
    fence_async_shared()
    io = Io(q_desc, k_desc, v_desc, o_desc, o, lse, stat_rows, sinks, qk_scale, o_smem)
    specialize(
        [
            (compute, (io, q, k, v, consumers, band, work, variant, extra, shape, 0)),
            (compute, (io, q, k, v, consumers, band, work, variant, extra, shape, 1)),
            (compute, (io, q, k, v, consumers, band, work, variant, extra, shape, 2)),
            (load, (io, q, k, v, band, work, variant, extra, shape)),
            (look, (v, findings, band, work, variant, shape)),
        ],
        [4, 4 * (shape.CONSUMERS - 2), 1, LOOKERS * shape.CLEAN],
        [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )


@gluon.jit(do_not_specialize=["rounds", "tiles_m", "heads", "group", "off", "left", "right", "len_q", "len_k"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, qk_scale, rounds, tiles_m, heads, group, off, left, right, len_q, len_k,
    shape, STAGES: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """The plain variant. Programs: as many as run at once; `table` deals the tiles (see `Work`, `Band`)."""
    band = Band(off, left, right, len_q, len_k)
    work = Work(table, rounds, tiles_m, heads, group)
    roles(
        q_desc, k_desc, v_desc, o_desc, None, lse, len_q, None, qk_scale, band, work, Variant(fold=True), (),
        shape, STAGES, PRODUCER_REGS, CONSUMER_REGS,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["rounds", "stat_rows", "tiles_m", "heads", "group", "off", "left", "right", "len_q", "len_k"]
)
def variant_kernel(
    q_desc, k_desc, v_desc, o_desc, o, lse, table, sinks, qk_scale, rounds, stat_rows, tiles_m, heads, group,
    off, left, right, len_q, len_k, variant, extra,
    shape, STAGES: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """Every other variant; see `forward_kernel`."""
    band = Band(off, left, right, len_q, len_k)
    work = Work(table, rounds, tiles_m, heads, group)
    roles(
        q_desc, k_desc, v_desc, o_desc, o, lse, stat_rows, sinks, qk_scale, band, work, variant, extra,
        shape, STAGES, PRODUCER_REGS, CONSUMER_REGS,
    )  # fmt: skip
