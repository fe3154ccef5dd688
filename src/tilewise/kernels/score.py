"""The score tile: ``s = softmax_scale * q k^T -> softcap -> score_mod -> ALiBi, bias -> mask``, and its derivative.

`scores` alone computes it, in base 2 (times log2 e), for every kernel of both dialects. Rows and keys come as index
tiles that broadcast ([M, 1] and [1, N], or transposed), so the same functions serve both orientations; nothing here
makes a tile of its own, so each keeps the layout that Gluon gives its operands.

A record's field that is None is not compiled: there are no flags for absent features. Records are passed on
one by one: assigning or nesting them in a kernel would make run-time values of their compile-time fields.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# exp2 is one instruction, so softmax runs in base 2.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The interpreter multiplies bf16 tiles as if they were integers, and knows no library functions.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Whether kernels may hold instructions of NVIDIA's GPUs.
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None and torch.version.xpu is None)


# In base 2. Of a softcap of 64, weights are from 2**-113 to 2**72: normal numbers of fp32 and bf16, also beside small
# values, as are sums of 2**17 of them times 2**37.
BOUNDED = tl.constexpr(20.0)
BOUNDED_CAP = 64.0
# Of which `bounded_weights` makes 0 by either way: what a row does not see.
HIDDEN = tl.constexpr(-127.0)

# With least largest error, tanh(x) / x as a polynomial of x² for |x| <= 1/2: x times it is off by 1.3e-7 at most.
NEAR = tl.constexpr(0.5)
_TANH_0, _TANH_2 = tl.constexpr(0.9999976761929735), tl.constexpr(-0.3332065521901403)
_TANH_4, _TANH_6 = tl.constexpr(0.1314514566026486), tl.constexpr(-0.04337248371229576)


def _bits(x: float) -> str:
    """A number of fp32 as PTX has it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


# With least largest relative error, 2**x as a polynomial for |x| <= 1/2: 7.5e-5. Added to a small number, the other
# constant leaves the nearest integer plus 127 in the last bits.
EXP2 = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105)
INTEGER = 1.5 * 2**23 + 127
# The exponentials of four numbers, the last of them by `EXP2`.
_THREE_AND_ONE = tl.constexpr(f"""{{ .reg .f32 whole, rest, p; .reg .b32 power;
    ex2.approx.ftz.f32 $0, $4; ex2.approx.ftz.f32 $1, $5; ex2.approx.ftz.f32 $2, $6;
    add.rn.f32 whole, $7, {_bits(INTEGER)}; add.rn.f32 rest, whole, {_bits(-INTEGER)}; sub.rn.f32 rest, $7, rest;
    fma.rn.f32 p, rest, {_bits(EXP2[3])}, {_bits(EXP2[2])}; fma.rn.f32 p, p, rest, {_bits(EXP2[1])};
    fma.rn.f32 p, p, rest, {_bits(EXP2[0])};
    mov.b32 power, whole; shl.b32 power, power, 23; mov.b32 whole, power; mul.rn.f32 $3, p, whole; }}""")


class Grid(NamedTuple):
    """A tensor that broadcasts to [B, Hq, Sq, Sk]: its strides, 0 where its size is 1."""

    ptr: Any
    batch: Any
    head: Any
    q: Any
    k: Any


class Variant(NamedTuple):
    """Everything that makes one call differ from plain attention. What is None is absent.

    It is flat because Triton forgets compile-time values inside nested tuples where it compiles a loop.
    """

    # Lengths in device memory: int32/int64 [B + 1], [B + 1] and [B].
    cu_q: Any = None
    cu_k: Any = None
    used_k: Any = None
    # From product to score. `fold`: the scale, which is positive, is all there is.
    scale: Any = None
    fold: Any = None
    # Whether it is a number, `last_factor`, times what `before_factor` returns.
    scaled: Any = None
    cap: Any = None
    # Whether a softcap that is `rough`, or not `fine`, is all that lies between product and weight.
    capped: Any = None
    # Whether an error of 3e-7 of the cap would show beside that of the inputs' dtype; whether not even one of 2**-11 of
    # the score would, where the dtype rounds a score by 2**-9 of it.
    fine: Any = None
    rough: Any = None
    # Whether softcap keeps scores so close to 0 that weights need no maximum: they are relative to `BOUNDED`.
    bounded: Any = None
    # Whether a kernel that looks for large scores may use a polynomial for the others.
    near: Any = None
    mod: Any = None
    dmod: Any = None
    slopes: Any = None
    slopes_batch: Any = None
    slopes_head: Any = None
    # Whether no row sees a key to its right: ALiBi is then linear in the key, where no element test is needed.
    line: Any = None
    bias: Any = None
    bias_batch: Any = None
    bias_head: Any = None
    bias_q: Any = None
    bias_k: Any = None
    # The element test beside the band: per-row bounds, int32 [2, B|1, S], and a compiled predicate.
    bounds: Any = None
    bounds_batch: Any = None
    bounds_side: Any = None
    predicate: Any = None
    # Tiles to visit where a band does not say: int32 [B|1, H|1, tiles, ...], a row being the number of tiles that need
    # no element test, the number of all, and their indices, those without test first.
    plan: Any = None
    plan_batch: Any = None
    plan_head: Any = None
    plan_row: Any = None
    # Seed of dropout, a scalar int64 in device memory; of 65,536 how many elements are kept; and `dropout.Cut`.
    seed: Any = None
    keep: Any = None
    cut: Any = None
    drops: Any = None


class Sequence(NamedTuple):
    """One sequence and head as a kernel sees it: first rows in packed tensors (int64), lengths, diagonal offset."""

    b: Any
    h: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    off: Any


class Span(NamedTuple):
    """What a tile has to visit: tiles ``lo .. hi``, of which ``full_lo .. full_hi`` need no element test.

    `first .. last` are the rows or keys that anything in the tile sees.
    """

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any
    first: Any
    last: Any


class Chain(NamedTuple):
    """A score tile in base 2, and what its derivative needs: tanh of the softcap and the value given to score_mod."""

    s: Any
    tanh: Any
    capped: Any


@triton.jit
def ratio(x, y):
    """``x / y`` to 2 units in the last place, in two instructions."""
    if INTERPRETED:
        z = x / y
    else:
        z = libdevice.fast_dividef(x, y)
    return z


@triton.jit
def tanh(x):
    """Exact to fp32 rounding: the series where ``1 - 2 / (exp(2x) + 1)`` would cancel."""
    y = x * x
    series = x * (1.0 + y * (-0.333333333 + y * (0.133333333 + y * (-0.0539682540 + y * 0.0218694885))))
    return tl.where(y < 0.04, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def softcapped(qk, variant):
    """``cap tanh(scale qk / cap)`` in base 2, and the tanh; without `variant.fine` it may be off by 3e-7.

    With `variant.rough` it may be off by 2**-11 of itself, which is what the GPU has an instruction for.
    """
    cap = variant.cap * LOG2E
    if variant.rough and PTX:
        tanh_x = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [qk * (variant.scale / variant.cap)], tl.float32, is_pure=True, pack=1
        )
        s = tanh_x * cap
    elif variant.fine:
        tanh_x = tanh(qk * (variant.scale / variant.cap))
        s = tanh_x * cap
    else:
        y = tl.exp2(qk * (variant.scale / variant.cap * (2.0 * LOG2E))) + 1.0
        tanh_x = 1.0 - ratio(2.0, y)
        s = cap - ratio(2.0 * cap, y)
    return s, tanh_x


@triton.jit
def near_factor(qk, variant):
    """``cap tanh(scale qk / cap) / qk`` in base 2 while ``qk²`` is within `near_bound`: no exponential, no division."""
    y = qk * qk
    x = variant.scale / variant.cap
    c0 = variant.scale * LOG2E
    c2 = c0 * (x * x)
    c4 = c2 * (x * x)
    c6 = c4 * (x * x)
    return c0 * _TANH_0 + y * (c2 * _TANH_2 + y * (c4 * _TANH_4 + y * (c6 * _TANH_6)))


@triton.jit
def near_bound(variant):
    """The largest ``qk²`` for which `near_factor` is good."""
    edge = NEAR * variant.cap / variant.scale
    return edge * edge


@triton.jit
def last_factor(variant):
    """The positive number that makes scores of what `before_factor` returns."""
    factor = tl.zeros((), tl.float32) + variant.scale
    if variant.cap is not None:
        factor = tl.zeros((), tl.float32) + variant.cap
    return factor


@triton.jit
def uncapped(qk, variant):
    """The products `qk`, or the tanh of softcap if there is one."""
    if variant.cap is not None:
        _, qk = softcapped(qk, variant)
    return qk


@triton.jit
def before_factor(qk, variant, seq, rows, n0, offs):
    """The products `qk` of `rows` with the keys ``n0 + offs``, the tanh of softcap if there is one, less ALiBi."""
    qk = uncapped(qk, variant)
    if variant.slopes is not None:
        qk -= slope(variant, seq) / last_factor(variant) * distance(seq, rows - n0, offs)
    return qk


@triton.jit
def risen(variant, seq, offs):
    """What ALiBi takes from a tile's first key more than from its keys `offs`, where rows see none to their right.

    The same for all rows and tiles: one addition for each score, for which the product of q and k may start from it.
    """
    return slope(variant, seq) / last_factor(variant) * offs.to(tl.float32)


@triton.jit
def fallen(variant, seq, rows, n0):
    """What ALiBi then takes from a tile's first key `n0`, for each of `rows`; like `risen` before the last factor."""
    return slope(variant, seq) / last_factor(variant) * (rows + (seq.off - n0)).to(tl.float32)


@triton.jit
def bounded_weights(x, variant, MASKED: tl.constexpr):
    """``2**x`` of `Variant.bounded`, -inf only if MASKED; with `variant.rough` one in four is off by 8e-5 of itself.

    Beside the tanh, the unit for special functions is the bottleneck. That one is 2 to the nearest integer, from the
    bits of a sum, times a polynomial in the rest; a NaN remains one.
    """
    if variant.rough and PTX and not MASKED:
        x = tl.inline_asm_elementwise(
            _THREE_AND_ONE, "=f,=f,=f,=f,f,f,f,f", [x], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        x = tl.exp2(x)
    return x


@triton.jit
def scores(qk, variant, extra, seq, rows, keys, less=None):
    """The products `qk` of `rows` with `keys` as scores in base 2, before the mask (see the module's head).

    `less`, broadcasting to the tile, is subtracted from them: together with ALiBi it costs nothing.
    """
    tanh_x = qk
    capped = qk
    s = qk
    if variant.cap is not None:
        s, tanh_x = softcapped(qk, variant)
    if variant.mod is not None:
        capped = qk * variant.scale
        if variant.cap is not None:
            capped = tanh_x * variant.cap
        at_q = tl.minimum(rows, seq.len_q - 1)
        at_k = tl.minimum(keys, seq.len_k - 1)
        s = variant.mod(capped, seq.b, seq.h, at_q, at_k, extra) * LOG2E
    elif variant.cap is None:
        s = qk * (variant.scale * LOG2E)
    if variant.slopes is not None:
        penalty = slope(variant, seq) * LOG2E * distance(seq, rows, keys)
        if less is not None:
            penalty += less
        s -= penalty
    elif less is not None:
        s -= less
    if variant.bias is not None:
        s += bias_tile(variant, seq, rows, keys).to(tl.float32) * LOG2E
    return Chain(s, tanh_x, capped)


@triton.jit
def scores_from(qk, variant, extra, seq, rows, n0, offs):
    """`scores` of the keys ``n0 + offs``.

    Where positions serve distances alone, they are counted from the tile, whose keys are then always the same.
    """
    if variant.mod is None and variant.bias is None:
        chain = scores(qk, variant, extra, seq, rows - n0, offs)
    else:
        chain = scores(qk, variant, extra, seq, rows, n0 + offs)
    return chain


@triton.jit
def joined(m_i, l_i, sink):
    """Reference and sum of rows that see a sink, a key with value 0, beside their keys; factor on what these sum to.

    All in base 2; a sink may be -inf, and so may a reference.
    """
    m_all = tl.maximum(m_i, sink)
    m_safe = tl.where(m_all == float("-inf"), 0.0, m_all)
    rest = tl.exp2(m_i - m_safe)
    return m_all, l_i * rest + tl.exp2(sink - m_safe), rest


@triton.jit
def exact_scale(m, scale):
    """Per row a scale of raw scores by which ``scale * s - scale * m`` is 0 where the score s is the maximum `m`.

    Scaling and subtracting are one instruction, whose product is not rounded while that of `m` is: the difference grows
    with the score and passes what exp2 can hold. From 1e8 on a score is known to 8 at best, so a power of two within a
    factor of two serves as scale as well, and it multiplies exactly.
    """
    whole = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(m) > 1e8 / scale, whole, scale)


@triton.jit
def scores_gradient(ds, chain, variant, extra, seq, rows, keys):
    """The gradient of ``softmax_scale * q·k`` from `ds`, that of the score before ALiBi and bias."""
    if variant.mod is not None:
        at_q = tl.minimum(rows, seq.len_q - 1)
        at_k = tl.minimum(keys, seq.len_k - 1)
        ds = variant.dmod(ds, chain.capped, seq.b, seq.h, at_q, at_k, extra)
    if variant.cap is not None:
        ds = ds * (1.0 - chain.tanh * chain.tanh)
    return ds


@triton.jit
def slope(variant, seq):
    """The ALiBi slope of this head."""
    return tl.load(variant.slopes + seq.b * variant.slopes_batch + seq.h * variant.slopes_head).to(tl.float32)


@triton.jit
def distance(seq, rows, keys):
    """``|i + off - j|`` in fp32: a float subtraction whose absolute value is free."""
    return tl.abs((rows + seq.off).to(tl.float32) - keys.to(tl.float32))


@triton.jit
def bias_tile(variant, seq, rows, keys):
    """The bias of a tile, 0 outside the sequence; offsets are int64, for rows times row stride can pass 2**31."""
    base = variant.bias + seq.b.to(tl.int64) * variant.bias_batch + seq.h.to(tl.int64) * variant.bias_head
    ptrs = base + rows.to(tl.int64) * variant.bias_q + keys.to(tl.int64) * variant.bias_k
    return tl.load(ptrs, mask=(rows < seq.len_q) & (keys < seq.len_k), other=0.0)


@triton.jit
def interval(variant, seq, rows, left, right):
    """The keys ``lo .. hi`` of each row before the predicate; `lo` means something where `left` or bounds are there.

    Rows past the end see nothing.
    """
    lo = rows
    hi = tl.where(rows < seq.len_q, seq.len_k, 0)
    if right is not None:
        hi = tl.minimum(hi, rows + (seq.off + right + 1))
    if variant.bounds is not None:
        at = variant.bounds + seq.b.to(tl.int64) * variant.bounds_batch + rows
        lo = tl.load(at, mask=rows < seq.len_q, other=0)
        hi = tl.minimum(hi, tl.load(at + variant.bounds_side, mask=rows < seq.len_q, other=0))
        if left is not None:
            lo = tl.maximum(lo, rows + (seq.off - left))
    elif left is not None:
        lo = rows + (seq.off - left)
    return lo, hi


@triton.jit
def visible(variant, extra, seq, rows, keys, left, right):
    """Which of `keys` each of `rows` sees: an interval of keys for each row, and the predicate.

    Everything but the predicate goes into the interval, so that an element costs one comparison a side, and no more.
    """
    lo, hi = interval(variant, seq, rows, left, right)
    seen = keys < hi
    if left is not None or variant.bounds is not None:
        seen = (keys >= lo) & seen
    if variant.predicate is not None:
        at_q = tl.minimum(rows, seq.len_q - 1)
        at_k = tl.minimum(keys, seq.len_k - 1)
        seen = seen & variant.predicate(seq.b, seq.h, at_q, at_k, seq.off, extra)
    return seen
