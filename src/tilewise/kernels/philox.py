"""Philox-4x32-7 for the kernels of both dialects, the numbers of `tilewise.dropout`."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import dropout
from .score import PTX

ROUNDS = tl.constexpr(dropout.ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_STEP_0, _STEP_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def wide(x, multiplier: tl.constexpr):
    """High and low word of a product: one instruction, where `tl.philox` takes two."""
    product = x.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def swapped(x):
    """uint32 words with the bytes of both halves swapped."""
    if PTX:
        x = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x2301;", "=r,r", [x], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        x = ((x & 0x00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF)
    return x


@triton.jit
def dropped(x, variant):
    """Ones in both halves of uint32 words where that half, as a float16, says that an element is dropped."""
    cut = tl.cast(variant.cut, tl.uint32)
    if PTX:
        # What keeps an element does not keep it where it is no number.
        SET: tl.constexpr = "set.lt.u32.f16x2 $0, $1, $2;" if variant.drops else "set.geu.u32.f16x2 $0, $1, $2;"
        x = tl.inline_asm_elementwise(SET, "=r,r,r", [x, cut * 0x10001], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = below(x & 0xFFFF, cut) == variant.drops
        high = below(x >> 16, cut) == variant.drops
        x = tl.where(low, 0xFFFF, 0).to(tl.uint32) | (tl.where(high, 0xFFFF, 0).to(tl.uint32) << 16)
    return x


@triton.jit
def below(bits, cut):
    """Whether float16 numbers are below another; both are bits in integers."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) < cut.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def words(k0, k1, c0, c1, c2):
    """Four words of the counter (c0, c1, c2, 0) and the key (k0, k1), uint32 that broadcast.

    What does not depend on rows, or not on columns, is computed for these alone: three of the fourteen products are.
    """
    c3 = k0 * 0
    for _ in tl.static_range(ROUNDS):
        high_0, low_0 = wide(c0, _MULTIPLIER_0)
        high_1, low_1 = wide(c2, _MULTIPLIER_1)
        c0 = high_1 ^ c1 ^ k0
        c2 = high_0 ^ c3 ^ k1
        c1, c3 = low_1, low_0
        k0 += _STEP_0
        k1 += _STEP_1
    return c0, c1, c2, c3
