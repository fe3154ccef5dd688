"""From products to probabilities on one warpgroup's accumulator: modification, mask, dropout, and values made safe.

The score itself is `kernels.score`, the same for both dialects. Here is what needs a layout: where an element's row
and key are, and which thread draws its random number.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ..kernels import philox, score


@gluon.constexpr_function
def score_layout(n):
    """Registers of a [64, n] accumulator of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def call_layout(n, warps=4):
    """Registers of calls [16 warps, n / 16], each with the thread whose elements of a tile of n keys it serves."""
    groups = [[0, 4 << bit] for bit in range((n // 64).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    bases = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0], *groups], lanes, bases, [], [16 * warps, n // 16])


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


@gluon.constexpr_function
def by_polynomial(bounded, rough, width):
    """Whether `score.bounded_weights` relieves the unit for special functions, which has tanh to compute as well: where
    products are short beside it.
    """
    return bool(bounded and rough and width == 64 and score.PTX)


@gluon.jit
def weights(s, variant, shape):
    """``2**s`` of scores less what their rows are measured by."""
    if by_polynomial(variant.bounded, variant.rough, shape.BLOCK_DV):
        p = score.bounded_weights(s, variant, False)
    else:
        p = gl.exp2(s)
    return p


@gluon.jit
def dropped(variant, key, batch_head, rows, n0, N: gl.constexpr, PACKED: gl.constexpr):
    """Ones in the halves of packed weights that dropout makes 0, [M, N / 2]: a Philox call for sixteen of a thread.

    `key` are the halves of the seed, `batch_head` is ``batch * heads_q + head``, for all rows or [M].
    """
    CALLS: gl.constexpr = call_layout(N)
    k0, k1 = key[0].to(gl.uint32), key[1].to(gl.uint32)
    row = gl.convert_layout(rows, gl.SliceLayout(1, CALLS), assert_trivial=True)[:, None]
    calls = (n0 // 16 + gl.arange(0, N // 16, gl.SliceLayout(0, CALLS)))[None, :]
    if len(batch_head.shape) == 1:
        batch_head = gl.convert_layout(batch_head, gl.SliceLayout(1, CALLS), assert_trivial=True)[:, None]
    w0, w1, w2, w3 = philox.words(k0, k1, row.to(gl.uint32), calls.to(gl.uint32), batch_head.to(gl.uint32))
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # [M, N/16, 2, 2]: word 2x + y, whose halves are neighbours
    words = gl.join(words, philox.swapped(words)).reshape([64, N // 64, 4, 4, 2])
    words = words.permute([0, 1, 4, 3, 2]).reshape([64, N // 2])
    marks = philox.dropped(words, variant).to(gl.int32)
    return gl.convert_layout(marks, PACKED, assert_trivial=True)


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
