"""Matrix products of one warpgroup, and weights as their operand.

A head dim between two powers of two is multiplied in two parts, the lower power of two and the rest (`work.Shape`);
O then has a tail of its own.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .scores import score_layout
from .work import low


@gluon.jit
def multiply(q_smem, k_smem, zero, shape):
    """``S = Q Kᵀ``, asynchronously: one group of products, or two that follow each other."""
    if shape.D_HIGH == 0:
        s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
    else:
        LOW: gl.constexpr = low(shape.BLOCK_D, shape.D_HIGH)
        k_low = k_smem.slice(0, LOW, dim=1).permute((1, 0))
        k_high = k_smem.slice(LOW, shape.D_HIGH, dim=1).permute((1, 0))
        s = warpgroup_mma(q_smem.slice(0, LOW, dim=1), k_low, zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q_smem.slice(LOW, shape.D_HIGH, dim=1), k_high, s, is_async=True)
    return s


@gluon.jit
def add(acc, tail, p16, v_smem, shape):
    """``O += P V``, asynchronously; `tail` are the columns of the high part, which is a group of its own."""
    if shape.DV_HIGH == 0:
        acc = warpgroup_mma(p16, v_smem, acc, is_async=True)  # [M, Dv]
    else:
        LOW: gl.constexpr = low(shape.BLOCK_DV, shape.DV_HIGH)
        TAIL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_layout(shape.DV_HIGH), k_width=2)
        acc = warpgroup_mma(p16, v_smem.slice(0, LOW, dim=1), acc, is_async=True)
        p_tail = gl.convert_layout(p16, TAIL, assert_trivial=True)
        tail = warpgroup_mma(p_tail, v_smem.slice(LOW, shape.DV_HIGH, dim=1), tail, is_async=True)
    return acc, tail


@gluon.jit
def added(acc, tail, p16, shape):
    """What `add` returned, once it is there, and the operand that it read."""
    if shape.DV_HIGH == 0:
        acc, p16 = warpgroup_mma_wait(0, deps=(acc, p16))
    else:
        acc, tail, p16 = warpgroup_mma_wait(0, deps=(acc, tail, p16))
    return acc, tail, p16


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """Weights as 16-bit floats, two neighbours in an int32.

    Loops and branches hand 16-bit values over one by one, and packing them anew costs an instruction each.
    """
    even, odd = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    INSTRUCTION: gl.constexpr = cvt_instruction(dtype)
    return gl.inline_asm_elementwise(INSTRUCTION, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def cvt_instruction(dtype):
    """PTX that rounds two fp32 numbers into the halves of a register."""
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def halves_of(words, dtype: gl.constexpr):
    """The halves of words [M, N / 2] as 16-bit numbers, neighbours, [M, N]."""
    low = (words & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])


@gluon.jit
def as_operand(p32, dtype: gl.constexpr, VALUES: gl.constexpr):
    """Packed weights as the left operand of the product that accumulates in layout VALUES: the same registers."""
    return numbers_of(p32, dtype, gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2))


@gluon.jit
def numbers_of(p32, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """What `packed` has packed, in a layout of the same registers."""
    return gl.convert_layout(halves_of(p32, dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def scaled(acc, factor):
    """Rows of `acc` times `factor`, which has the rows' layout of the scores: the same threads."""
    VALUES: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUES), assert_trivial=True)[:, None]


@gluon.jit
def marred(acc, poison):
    """`acc` with NaN in the rows of NaN."""
    VALUES: gl.constexpr = acc.type.layout
    return acc + gl.convert_layout(poison, gl.SliceLayout(1, VALUES), assert_trivial=True)[:, None]
