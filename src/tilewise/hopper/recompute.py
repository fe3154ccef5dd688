"""What the backward kernels compute anew: P from scores and lse, which of it dropout has kept, and dS from both.

Tiles come in either orientation: transposed, [N, M], where rows pass by a tile of keys, or [M, N]. `OF_ROWS` says that
it is the second. Rows and keys come as index tiles that broadcast.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ..kernels import philox, score
from . import scores
from .products import halves_of

# P and dS of a product, dP, lse and delta, by 1 / cap and cap in base 2; tanh is that of `score.softcapped`.
_CAPPED = """{ .reg .f32 t, e, d; mul.rn.f32 t, $2, $6; %s neg.f32 e, $4; fma.rn.f32 e, t, $7, e;
    ex2.approx.ftz.f32 e, e; sub.rn.f32 d, $3, $5; mul.rn.f32 d, d, e; mov.f32 $0, e;
    neg.f32 e, t; fma.rn.f32 t, e, t, 0f3F800000; mul.rn.f32 $1, d, t; }"""
# 1 - 2 / (exp(2x) + 1), exp in base 2.
_TANH = """mul.rn.f32 t, t, 0f4038AA3B; ex2.approx.ftz.f32 t, t; add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t;
    fma.rn.f32 t, t, 0fC0000000, 0f3F800000;"""
CAPPED = gl.constexpr(_CAPPED % _TANH)
CAPPED_ROUGH = gl.constexpr(_CAPPED % "tanh.approx.f32 t, t;")


@gluon.constexpr_function
def tile_layout(warps, n):
    """Registers of an accumulator whose rows are divided among all warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, n, 16])


@gluon.jit
def exponents(s, lse2, own, rows, keys, first, io, variant, extra, shape, OF_ROWS: gl.constexpr):
    """Scores in base 2 of the products `s` less the lse, and their chain; `first` is the first that passes by."""
    chain = score.Chain(s, s, s)
    if shape.STRAIGHT:
        s = straight(s, lse2, own, rows, keys, first, io.qk_scale, variant, OF_ROWS)
    else:
        if not variant.fold:
            chain = score.scores(s, variant, extra, own, rows, keys)
        s = chain.s * scores.unit_of(io.qk_scale, variant) - lse2
    return s, chain


@gluon.jit
def straight(s, lse2, own, rows, keys, first, qk_scale, variant, OF_ROWS: gl.constexpr):
    """`exponents` where ALiBi is linear, for no row sees a key to its right: ``slope (j - i - off)``.

    Counted from the tile: what passes by is then a constant for each register beside a number for the thread, and what
    stays a number for each of its few rows or keys.
    """
    slope = score.slope(variant, own) * score.LOG2E
    if OF_ROWS:
        lane, register = scores.split_columns(keys - first)
        line = lse2 + slope * ((rows + (own.off - first)) - lane).to(gl.float32)
        s = (s * qk_scale - line) + slope * register.to(gl.float32)
    else:
        lane, register = scores.split_columns(rows - first)
        near = slope * (keys - (own.off + first) - lane).to(gl.float32)
        s = (s * qk_scale + near) - (lse2 + slope * register.to(gl.float32))
    return s


@gluon.jit
def weights(exponents, own, rows, keys, first, masked, band, variant, extra, shape, OF_ROWS: gl.constexpr):
    """P of scores less the lse: 0 for what a row does not see, whatever its lse."""
    if masked:
        seen = which(own, rows, keys, first, band, variant, extra, shape, OF_ROWS)
        exponents = gl.where(seen, exponents, float("-inf"))
    return gl.exp2(exponents)


@gluon.jit
def weights_and_rest(exponents, dp, own, rows, keys, first, masked, band, variant, extra, shape):
    """`weights` of keys, and what dS is a multiple of, `dp`: 0 as well for what a row does not see, which may be NaN.

    Chosen at once, for P is not kept until dS is known.
    """
    if masked:
        seen = which(own, rows, keys, first, band, variant, extra, shape, False)
        exponents = gl.where(seen, exponents, float("-inf"))
        if shape.CLEAN:
            dp = gl.where(seen, dp, 0.0)
            if first + shape.BLOCK_M > own.len_q:
                dp = gl.where(rows < scores.opaque(own.len_q), dp, 0.0)
    return gl.exp2(exponents), dp


@gluon.jit
def capped(s, dp, lse2, delta, own, rows, keys, first, masked, band, variant, extra, shape):
    """P and dS of keys where softcap is all that lies between product and score.

    An element at a time: tanh, kept until dS is known, would be one tile of registers more.
    """
    INSTRUCTIONS: gl.constexpr = CAPPED_ROUGH if variant.rough else CAPPED
    given = [s, dp, lse2, delta, variant.scale / variant.cap, variant.cap * score.LOG2E]
    p, ds = gl.inline_asm_elementwise(
        INSTRUCTIONS, "=f,=f,f,f,f,f,f,f", given, dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )
    if masked:
        seen = which(own, rows, keys, first, band, variant, extra, shape, False)
        if shape.CLEAN:
            if first + shape.BLOCK_M > own.len_q:
                seen = seen & (rows < scores.opaque(own.len_q))
        p, ds = gl.where(seen, p, 0.0), gl.where(seen, ds, 0.0)
    return p, ds


@gluon.jit
def which(own, rows, keys, first, band, variant, extra, shape, OF_ROWS: gl.constexpr):
    """Which of `rows` see which of `keys`."""
    if OF_ROWS or variant.predicate is not None or variant.bounds is not None or variant.mod is not None:
        # This keeps it a branch: the compiler would rather compute and select in every tile.
        seen = score.visible(variant, extra, own, rows, scores.opaque(keys), band.left, band.right)
    else:
        seen = seeing(own, rows, keys, first, band)
    return seen


@gluon.jit
def seeing(own, rows, keys, first, band):
    """Which of `rows`, from `first` on, see each of `keys`, by a band alone.

    They are an interval: a bound or two for each key of a thread, beside a constant for each register. Past the last
    row every lse is +inf.
    """
    lane, register = scores.split_columns(rows - first)
    near = first + own.off
    begin = gl.where(keys < own.len_k, 0, 1 << 30)
    if band.right is not None:
        begin = gl.maximum(begin, keys - (near + band.right))
    seen = register >= scores.opaque(begin) - lane
    if band.left is not None:
        end = keys - (near - band.left - 1)
        seen = seen & (register < scores.opaque(end) - lane)
    return seen


@gluon.jit
def unpacked(p32, LAYOUT: gl.constexpr, dtype: gl.constexpr):
    """The numbers that `products.packed` has rounded: two registers of fp32 take more than one of both."""
    if dtype == gl.bfloat16:
        low = (p32 << 16).to(gl.float32, bitcast=True)
        high = (p32 & -65536).to(gl.float32, bitcast=True)
        both = gl.join(low, high).reshape([p32.shape[0], p32.shape[1] * 2])
    else:
        both = halves_of(p32, dtype).to(gl.float32)
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def calls_of_keys(warps, rows):
    """Registers of Philox calls [8, rows], which reach the threads that need them through shared memory."""
    return gl.BlockedLayout([1, rows // 32], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def pairs_of_keys(keys, rows):
    """Registers of a tile [keys, rows], 16 keys a warp, as [call, key of the call, word of four rows]."""
    passing = [[0, 0, 4 << bit] for bit in range((rows // 16).bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 0], [2, 0, 0]]
    warps = [[0, 4, 0], [4, 0, 0], [8, 0, 0]][: (keys // 16).bit_length() - 1]
    return gl.DistributedLinearLayout([[0, 2, 0], *passing], lanes, warps, [], [keys // 8, 8, rows // 4])


@gluon.constexpr_function
def pairs_of_rows(keys):
    """Registers of a tile [128, keys] of 8 warps as [row, half of a call, pair of its keys]: a call is one thread's."""
    passing = [[0, 4 << bit, 0] for bit in range((keys // 32).bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[8, 0, 0], [0, 0, 1], [0, 0, 2], *passing]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0], [64, 0, 0]], [], [128, keys // 8, 4])


@gluon.jit
def make_bits(shape, CONSUMERS: gl.constexpr):
    """Where `draw` leaves its bits for `without_dropped`, of each consumer: what a warp reads at once of four lies in
    other banks.
    """
    CALLS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [CONSUMERS, 2 * shape.WARPS, shape.BLOCK_M // 4], CALLS)


@gluon.jit
def dropped_by_call(variant, key, b, h, rows, calls, heads):
    """Which of sixteen keys of a row dropout makes 0, for each Philox call (see `tilewise.dropout`) and either half of
    it, which is 32 keys farther on: of its key 2i + j, bit i of half j. `key` are the halves of the seed.
    """
    # The keys of all rounds follow from it sooner than registers are found to keep them.
    k0, k1 = scores.opaque(key[0]).to(gl.uint32), scores.opaque(key[1]).to(gl.uint32)
    pair = (b * heads + h).to(gl.uint32)
    w0, w1, w2, w3 = philox.words(k0, k1, rows.to(gl.uint32), calls.to(gl.uint32), pair)
    first = marks_of(w0, w1, w2, w3, variant)
    second = marks_of(philox.swapped(w0), philox.swapped(w1), philox.swapped(w2), philox.swapped(w3), variant)
    return gl.join(first, second)


@gluon.jit
def marks_of(w0, w1, w2, w3, variant):
    """Bit i of a half: whether that half of word i says that a key is dropped."""
    marks = (philox.dropped(w0, variant) & 0x10001) | (philox.dropped(w1, variant) & 0x20002)
    marks = marks | (philox.dropped(w2, variant) & 0x40004) | (philox.dropped(w3, variant) & 0x80008)
    return marks.to(gl.int32)


@gluon.jit
def draw(variant, key, b, h, m0, n0, heads, bits_smem, shape):
    """Leave the bits of `dropped_by_call` for a tile of rows from m0 and keys from n0, 16 for each warp, transposed.

    A word has a byte for each of the rows i, i + 8, i + 1 and i + 9, which are one thread's; its bits are keys 0, 2, 4,
    6, 1, 3, 5, 7 of half a call.
    """
    CALLS: gl.constexpr = calls_of_keys(shape.WARPS, shape.BLOCK_M)
    places = gl.arange(0, shape.BLOCK_M, gl.SliceLayout(0, CALLS))
    rows = m0 + (places & ~15) + (places & 1) * 8 + ((places >> 1) & 1) + ((places >> 1) & 6)
    calls = n0 // 16 + gl.arange(0, shape.WARPS, gl.SliceLayout(1, CALLS))
    bits = dropped_by_call(variant, key, b, h, rows[None, :], calls[:, None], heads)
    bits = (bits | (bits >> 12)) & 0xFF
    shifts = ((places & 3) * 8)[None, :]
    words = (bits << gl.join(shifts, shifts)).reshape([shape.WARPS // 4, 4, shape.BLOCK_M // 4, 4, 2])
    words = gl.sum(words, 3).permute([0, 3, 1, 2])  # [64 keys, half, call, word of four rows]
    bits_smem.store(words.reshape([2 * shape.WARPS, shape.BLOCK_M // 4]))


@gluon.jit
def spread_signs(words, BYTES: gl.constexpr):
    """Both halves of a word, each full of the sign of a byte: of bytes 0 and 2, or of 1 and 3."""
    INSTRUCTION: gl.constexpr = "prmt.b32 $0, $1, 0, 0xAA88;" if BYTES == 0 else "prmt.b32 $0, $1, 0, 0xBB99;"
    return gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def without_dropped(p32, bits_smem, shape):
    """Packed weights [N, M / 2] without those that dropout makes 0, by what `draw` has left."""
    OF: gl.constexpr = pairs_of_keys(p32.shape[0], shape.BLOCK_M)
    PACKED: gl.constexpr = p32.type.layout
    words = bits_smem.load(gl.SliceLayout(1, OF))[:, None, :]
    key = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, OF)))[None, :, None]
    # The key's bit becomes the sign of its byte.
    words = words << (7 - (key // 2 + (key & 1) * 4))
    marks = gl.join(spread_signs(words, 0), spread_signs(words, 1))
    marks = marks.reshape([shape.WARPS // 2, 4, 4, 2, shape.BLOCK_M // 16, 4, 2]).permute([0, 2, 1, 3, 4, 6, 5])
    return p32 & ~gl.convert_layout(marks.reshape(p32.shape), PACKED, assert_trivial=True)


@gluon.jit
def without_dropped_of_rows(p32, variant, key, b, h, m0, n0, heads, shape):
    """Likewise, [M, N / 2]: what a thread needs it draws itself."""
    OF: gl.constexpr = pairs_of_rows(shape.BLOCK_N)
    CALLS: gl.constexpr = scores.call_layout(shape.BLOCK_N, 8)
    PACKED: gl.constexpr = p32.type.layout
    rows = (m0 + gl.arange(0, shape.BLOCK_M, gl.SliceLayout(1, CALLS)))[:, None]
    calls = (n0 // 16 + gl.arange(0, shape.BLOCK_N // 16, gl.SliceLayout(0, CALLS)))[None, :]
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, OF)))[None, None, :]
    bits = dropped_by_call(variant, key, b, h, rows, calls, heads)
    bits = bits.reshape([shape.BLOCK_M, shape.BLOCK_N // 64, 4, 2]).permute([0, 1, 3, 2])
    bits = bits.reshape([shape.BLOCK_M, shape.BLOCK_N // 8])
    words = gl.convert_layout(bits, gl.SliceLayout(2, OF), assert_trivial=True)[:, :, None] << (7 - pair)
    marks = spread_signs(words, 0).reshape([shape.BLOCK_M, shape.BLOCK_N // 32, 4, 4]).permute([0, 1, 3, 2])
    return p32 & ~gl.convert_layout(marks.reshape([shape.BLOCK_M, shape.BLOCK_N // 2]), PACKED, assert_trivial=True)


@gluon.jit
def score_gradient(p, left, dp, delta, variant):
    """dS from P and dP, which starts from -delta; with dropout from P, what is left of it, dP and delta."""
    if variant.seed is None:
        ds = p * dp
    else:
        # ``P (keep dP scale - delta)``
        ds = left * (dp * (65536.0 / variant.keep)) - p * delta
    return ds


@gluon.jit
def of_weights(ds, p):
    """dS with 0 where P is 0: what is invisible may be NaN, and 0 · NaN is NaN."""
    return gl.where(bits_of(p) == 0, 0.0, ds)


@gluon.jit
def product_gradient(ds, chain, own, rows, keys, masked, variant, extra, shape):
    """The gradient of the scaled product from that of the score."""
    if variant.mod is not None or variant.cap is not None:
        gradient = score.scores_gradient(ds, chain, variant, extra, own, rows, keys)
        if shape.CLEAN:
            if masked:
                gradient = of_weights(gradient, ds)
        ds = gradient
    return ds


@gluon.jit
def bits_of(p):
    """Numbers as integers, of which the compiler knows nothing: what hangs on them stays in its branch."""
    return scores.opaque(p.to(gl.int32, bitcast=True))
