"""From products to probabilities on one warpgroup's accumulator: modification, mask, dropout, and values made safe.

The score itself is `kernels.score`, the same for both dialects. Here is what needs a layout: where an element's row
and key are, and which thread draws its random number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..kernels import philox, score
from .pipeline import cta_barrier, reinterpret

# Rows of v, and numbers of 32 bits in a row, that are looked at together: few registers are free in the loop.
_PIECE = gl.constexpr(32)
# The signs of two 16-bit numbers, as a signed one of 32 bits.
_SIGNS = gl.constexpr(0x80008000 - (1 << 32))


@gluon.constexpr_function
def score_layout(n):
    """Registers of a [64, n] accumulator of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def call_layout(n):
    """Registers of [64, n / 8] Philox calls: each with the thread whose elements of a [64, n] accumulator it serves."""
    groups = [[0, 4 << bit] for bit in range((n // 32).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *groups], lanes, [[16, 0], [32, 0]], [], [64, n // 8])


@gluon.constexpr_function
def word_layout():
    """Registers of a piece of v, read 16 bytes at a time."""
    return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def exponent_masks(dtype):
    """Of two 16-bit numbers in one of 32 bits: their exponents, and one unit of each."""
    return (0x7C007C00, 0x04000400) if dtype == gl.float16 else (0x7F807F80, 0x00800080)


@gluon.jit
def keys_from(n0, N: gl.constexpr):
    """The keys of a tile, [1, N]."""
    return (n0 + gl.arange(0, N, gl.SliceLayout(0, score_layout(N))))[None, :]


@gluon.jit
def columns(N: gl.constexpr):
    """The columns of a tile as two numbers to add, [1, N]: one for the thread, and one for the register, a constant."""
    return split_columns(keys_from(0, N))


@gluon.jit
def split_columns(columns):
    """Likewise, of the columns that an accumulator has."""
    return columns & 6, columns & ~6


@gluon.jit
def modified(s, variant, extra, seq, rows, n0):
    """Scores in base 2 of products, for whatever is more than a scale."""
    return score.scores_from(s, variant, extra, seq, rows[:, None], n0, keys_from(0, s.shape[1])).s


@gluon.jit
def straight(s, less, slope, diagonal, beyond, variant, EXACT: gl.constexpr):
    """Scores in base 2 less a number for each row, of products with keys that are all on one side of the diagonal.

    ALiBi is then linear: a part for each row, which goes with that number, and one for each key, which is a constant
    for each register. `diagonal` [M] is that key of each row, counted from the tile; `beyond` says whether all keys are
    to its right. Without EXACT the softcap is as `far` allows.
    """
    line = -less[:, None]
    if variant.slopes is not None:
        lane, register = columns(s.shape[1])
        slope = slope * gl.where(beyond, -1.0, 1.0)
        line = line - slope * (diagonal[:, None].to(gl.float32) - lane.to(gl.float32))
        line = line + slope * register.to(gl.float32)
    if variant.cap is None:
        s = s * (variant.scale * score.LOG2E) + line
    elif variant.near and not EXACT:
        s = s * score.near_factor(s, variant) + line
    else:
        s = score.softcapped(s, variant)[0] + line
    return s


@gluon.jit
def opaque(x):
    """Integers of which the compiler cannot know that they are `x`: it shares nothing, and foresees nothing."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bent(s, slope, diagonal):
    """`straight` of keys on both sides of the diagonal: those beyond were given what they lose."""
    lane, register = columns(s.shape[1])
    beyond = gl.maximum(register - (opaque(diagonal)[:, None] - lane), 0)
    return s - (2.0 * slope) * beyond.to(gl.float32)


@gluon.jit
def visible(variant, extra, seq, rows, n0, left, right, N: gl.constexpr):
    """Which keys each row sees, [M, N]."""
    # This keeps it a branch: the compiler would rather compute and select in every tile.
    n0 = opaque(n0)
    rows = rows[:, None]
    if variant.predicate is not None:
        # A predicate may ask for the key alone: this makes it a tile.
        seen = score.visible(variant, extra, seq, rows, keys_from(n0, N), left, right) & (rows >= 0)
    else:
        lo, hi = score.interval(variant, seq, rows, left, right)
        lane, register = columns(N)
        seen = register < hi - (n0 + lane)
        if left is not None or variant.bounds is not None:
            seen = (register >= lo - (n0 + lane)) & seen
    return seen


@gluon.jit
def dropped(variant, key, batch_head, rows, n0, N: gl.constexpr, PACKED: gl.constexpr):
    """Ones in the halves of packed weights that dropout makes 0, [M, N / 2]: a Philox call for eight of a thread.

    `key` are the halves of the seed, `batch_head` is ``batch * heads_q + head``, for all rows or [M].
    """
    CALLS: gl.constexpr = call_layout(N)
    k0, k1 = key[0].to(gl.uint32), key[1].to(gl.uint32)
    row = gl.convert_layout(rows, gl.SliceLayout(1, CALLS), assert_trivial=True)[:, None]
    calls = (n0 // 8 + gl.arange(0, N // 8, gl.SliceLayout(0, CALLS)))[None, :]
    if len(batch_head.shape) == 1:
        batch_head = gl.convert_layout(batch_head, gl.SliceLayout(1, CALLS), assert_trivial=True)[:, None]
    w0, w1, w2, w3 = philox.words(k0, k1, row.to(gl.uint32), calls.to(gl.uint32), batch_head.to(gl.uint32))
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # [M, N/8, 2, 2]: word 2x + y, the halves of which are neighbours
    words = words.reshape([64, N // 32, 4, 4]).permute([0, 1, 3, 2]).reshape([64, N // 2])
    marks = at_least(words.to(gl.int32), gl.to_tensor(variant.keep).to(gl.int32))
    return gl.convert_layout(marks, PACKED, assert_trivial=True)


@gluon.jit
def at_least(words, keep):
    """Ones in both halves of an int32 where that half, without sign, is at least `keep` (1 to 65535)."""
    return over(words, keep) * 0xFFFF


@gluon.jit
def over(words, keep):
    """1 in both halves of an int32 where that half, without sign, is at least `keep` (1 to 65535), else 0.

    Cut off to ``keep - 1 .. keep`` it is one of two numbers, both halves at once.
    """
    CUT: gl.constexpr = "{ .reg .b32 t; max.u16x2 t, $1, $2; min.u16x2 $0, t, $3; }"
    least = (keep - 1) * 0x10001
    cut = gl.inline_asm_elementwise(
        CUT, "=r,r,r,r", [words, least, keep * 0x10001], dtype=gl.int32, is_pure=True, pack=1
    )
    return cut - least


@gluon.jit
def each_row(rows, value):
    """One number for every row."""
    ROWS: gl.constexpr = rows.type.layout
    return gl.full([64], value, gl.float32, ROWS)


@gluon.jit
def unit_of(qk_scale, variant):
    """The scale of what `modified` returns in base 2."""
    unit = qk_scale
    if not variant.fold:
        unit = gl.to_tensor(1.0)
    return unit


@gluon.jit
def exponents(s, scale, shift):
    """``scale s - shift``, scale and shift for each row: one instruction."""
    return s * scale[:, None] - shift[:, None]


@gluon.jit
def reference(s, scale, shift, unit):
    """What a row is measured by from now on: its maximum so far, of `unit` times the scores `s` and of what it was.

    Returns scale and shift for `exponents`, the shift with 0 for -inf, and the factor on what has been summed before.
    """
    m_new = gl.maximum(shift / scale, gl.max(s, 1))  # [M]
    new_scale = gl.where(m_new == float("-inf"), unit, score.exact_scale(m_new, unit))
    new_shift = m_new * new_scale
    safe = gl.where(new_shift == float("-inf"), 0.0, new_shift)
    return new_scale, new_shift, safe, gl.exp2(shift * (new_scale / scale) - safe)


@gluon.jit
def joined(m_i, l_i, sink):
    """Reference and sum of rows that see a sink, a key with value 0, beside their keys; factor on what these sum to.

    All in base 2; a sink may be -inf, and so may a reference.
    """
    m_all = gl.maximum(m_i, sink)
    m_safe = gl.where(m_all == float("-inf"), 0.0, m_all)
    rest = gl.exp2(m_i - m_safe)
    return m_all, l_i * rest + gl.exp2(sink - m_safe), rest


@gluon.jit
def partial_sums(p):
    """Sums of what each thread holds of a row, [M, 4]."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def spread(row, like):
    """A number for each row, for each of the threads that share it: in the layout of partial sums."""
    LAYOUT: gl.constexpr = like.type.layout
    return gl.convert_layout(row, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def outgrown(sums):
    """Where weights may be more than a 16-bit float holds, or the reference is none: NaN is neither more nor less."""
    return gl.where(sums <= 32768.0, 0, 1)


@gluon.jit
def far(s, variant):
    """Of products as of `partial_sums`, where one is beyond `score.near_bound`; 0 where that does not matter."""
    marks = 0
    if variant.near:
        # Of numbers that are not negative, the bits have the same order, and three of them a maximum.
        squares = (s * s).to(gl.int32, bitcast=True).reshape([s.shape[0], s.shape[1] // 8, 4, 2])
        most = gl.max(gl.max(squares, 3), 1).to(gl.float32, bitcast=True)
        marks = gl.where(most <= score.near_bound(variant), 0, 1)
    return marks


@gluon.jit
def by_warp(marks):
    """Marks [M, 4] of a warpgroup, one for each warp: int32 [4]."""
    return gl.max(marks.reshape([4, 64]), 1)


@gluon.jit
def any_warp(flags_smem):
    """Whether a warp has left a mark; the compiler puts the barrier between."""
    return gl.max(flags_smem.load(gl.BlockedLayout([4], [32], [4], [0])), 0) != 0


@gluon.jit
def piece(v_smem, row, part, HEIGHT: gl.constexpr = _PIECE):
    """HEIGHT rows of a tile of v from `row` on, and of their columns a part, as numbers of 32 bits."""
    ROWS: gl.constexpr = v_smem.shape[0]
    WORDS: gl.constexpr = v_smem.shape[1] // 2
    words_smem = reinterpret(v_smem, gl.int32, [ROWS, WORDS], gl.NVMMASharedLayout(128, 32, rank=2))
    return words_smem.slice(row, HEIGHT, dim=0).slice(part * _PIECE, _PIECE, dim=1)


@gluon.jit
def strange_signs(words, dtype: gl.constexpr):
    """Beside other bits, the sign of each half that is not finite: the exponent of no other number overflows."""
    MASKS: gl.constexpr = exponent_masks(dtype)
    return (words & MASKS[0]) + MASKS[1]


@gluon.jit
def strange_in(v_smem, row):
    """Beside other bits, the signs of what is not finite in some rows of a tile of v, each where it is."""
    PARTS: gl.constexpr = v_smem.shape[1] // 2 // _PIECE
    found = gl.zeros([_PIECE, _PIECE], gl.int32, word_layout())
    for part in gl.static_range(PARTS):
        found = found | strange_signs(piece(v_smem, row, part).load(word_layout()), v_smem.dtype)
    return found


class Findings(NamedTuple):
    """What the looker found in the tiles of v, by stage of its ring.

    `done` are barriers [STAGES, 1]; `marks`, int32 [STAGES, warps], are not 0 where a tile holds what is not finite.
    """

    done: Any
    marks: Any


# Warps that look.
LOOKERS = gl.constexpr(2)


@gluon.jit
def make_findings(STAGES: gl.constexpr):
    """Findings about a ring of so many stages."""
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(done.index(stage), count=1)
    return Findings(done, gl.allocate_shared_memory(gl.int32, [STAGES, LOOKERS], gl.SwizzledSharedLayout(1, 1, 1, [0])))


@gluon.constexpr_function
def looking_layout():
    """Registers of the looker's part of v: 16 bytes at a time, four rows a warp."""
    return gl.BlockedLayout([1, 4], [4, 8], [LOOKERS.value, 1], [1, 0])


@gluon.constexpr_function
def sum_of_zeros(dtype):
    """PTX: the halves of $0 are NaN where those of $1 to $5 are not all finite, for nothing else is NaN times 0.

    Else they are 0 if those of $5 are. One register gathers all: few are left to wait for loads with.
    """
    fma = f"fma.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}"
    start = "{ .reg .b32 t, u, zero; mov.b32 zero, 0;"
    return f"{start} {fma} t, $1, zero, $2; {fma} u, $3, zero, $4; {fma} t, t, zero, u; {fma} $0, t, zero, $5; }}"


@gluon.jit
def inspect(v_smem, marks_smem):
    """Leave a mark for each warp that finds in a tile of v what is not finite."""
    ROWS: gl.constexpr = v_smem.shape[0]
    PARTS: gl.constexpr = v_smem.shape[1] // 2 // _PIECE
    STRIP: gl.constexpr = 4 * LOOKERS
    INSTRUCTIONS: gl.constexpr = sum_of_zeros(v_smem.dtype)
    zeros = gl.zeros([STRIP, _PIECE], gl.int32, looking_layout()).reshape([STRIP, _PIECE // 4, 2, 2])
    found, _ = gl.split(gl.split(zeros)[0])
    for row in gl.static_range(0, ROWS, STRIP):
        for part in gl.static_range(PARTS):
            words = piece(v_smem, row, part, STRIP).load(looking_layout())
            even, odd = gl.split(words.reshape([STRIP, _PIECE // 4, 2, 2]))
            w0, w2 = gl.split(even)
            w1, w3 = gl.split(odd)
            found = gl.inline_asm_elementwise(
                INSTRUCTIONS, "=r,r,r,r,r,r", [w0, w1, w2, w3, found], dtype=gl.int32, is_pure=True, pack=1
            )
    # What was finite has left zeros of either sign.
    marks_smem.store(gl.reduce_or((found & ~_SIGNS).reshape([LOOKERS, _PIECE]), 1))


@gluon.jit
def marked(findings, i, STAGES: gl.constexpr):
    """Whether use i of the ring of v holds what is not finite; waits for the looker.

    Only once it has landed: until then the looker may not even have spoken of the use before it in that stage.
    """
    stage = i % STAGES
    mbarrier.wait(findings.done.index(stage), (i // STAGES) & 1)
    EVERY: gl.constexpr = gl.BlockedLayout([LOOKERS], [32], [4], [0])
    return gl.max(findings.marks.index(stage).load(EVERY), 0) != 0


class Agreement(NamedTuple):
    """Where consumers wait for each other before a tile is changed that all of them read.

    `barrier` counts them; `turns` has for each how often it came by, int32 [consumers, 1], and `flags` what it found in
    the rows of the tile, int32 [consumers, N].
    """

    barrier: Any
    turns: Any
    flags: Any


@gluon.constexpr_function
def one_layout():
    """Registers of a tensor of one element."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def make_agreement(CONSUMERS: gl.constexpr, ROWS: gl.constexpr):
    """An agreement of so many consumers on tiles of so many rows."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=CONSUMERS)
    turns = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], LINE)
    for consumer in gl.static_range(CONSUMERS):
        turns.index(consumer).store(gl.zeros([1], gl.int32, one_layout()))
    return Agreement(barrier, turns, gl.allocate_shared_memory(gl.int32, [CONSUMERS, ROWS], LINE))


@gluon.jit
def agree(agreement, W: gl.constexpr):
    """Consumer W has read; return when all have."""
    turn_smem = agreement.turns.index(W)
    turns = turn_smem.load(one_layout())
    mbarrier.arrive(agreement.barrier.index(0), count=1)
    mbarrier.wait(agreement.barrier.index(0), gl.max(turns, 0) & 1)
    turn_smem.store(turns + 1)


@gluon.jit
def mark_keys(v_smem, flags_smem):
    """Leave for each key of a tile of v, int32 [N], a number that is not 0 where any value of it is not finite."""
    ROWS: gl.constexpr = v_smem.shape[0]
    for row in gl.static_range(0, ROWS, _PIECE):
        flags_smem.slice(row, _PIECE).store(gl.reduce_or(strange_in(v_smem, row), 1) & _SIGNS)


@gluon.jit
def clean(v_smem, agreement, W: gl.constexpr):
    """Make 0 what is not finite in a tile of v, of which 0 · NaN would make NaN where nothing is seen.

    Returns which keys had any, bool [N]. Every consumer comes here for the same tiles: each has looked before any of
    them writes, and all write the same.
    """
    ROWS: gl.constexpr = v_smem.shape[0]
    PARTS: gl.constexpr = v_smem.shape[1] // 2 // _PIECE
    flags_smem = agreement.flags.index(W)
    mark_keys(v_smem, flags_smem)
    agree(agreement, W)
    for row in gl.static_range(0, ROWS, _PIECE):
        for part in gl.static_range(PARTS):
            words = piece(v_smem, row, part).load(word_layout())
            # Bits 0 and 16, each spread over its half.
            halves = ((strange_signs(words, v_smem.dtype) >> 15) & 0x00010001) * 0xFFFF
            piece(v_smem, row, part).store(words & ~halves)
    fence_async_shared()
    cta_barrier()
    return flags_smem.load(gl.SliceLayout(0, score_layout(ROWS))) != 0
