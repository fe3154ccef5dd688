"""The end of a tile of rows: O is normalised and leaves, with its LSE."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..kernels import score
from ..kernels.score import LN2, LOG2E
from .pipeline import cta_barrier, tma_store
from .products import scaled
from .scores import each_row, score_layout, unit_of
from .work import first_row, heads_of, line_of, low


@gluon.jit
def store_staged(acc, tail, seq, m0, o_smem, io, shape, W: gl.constexpr):
    """Write 64 rows of O through shared memory; TMA drops those past the end of the tensor."""
    LOW: gl.constexpr = low(shape.BLOCK_DV, shape.DV_HIGH)
    staged = o_smem.reshape([64, shape.BLOCK_DV // shape.O_PARTS])
    if shape.O_PARTS == 1:
        await_store()
        if shape.DV_HIGH == 0:
            staged.store(acc.to(io.o_desc.dtype))
        else:
            staged.slice(0, LOW, dim=1).store(acc.to(io.o_desc.dtype))
            staged.slice(LOW, shape.DV_HIGH, dim=1).store(tail.to(io.o_desc.dtype))
        send(0, seq, m0, o_smem, io, shape, W)
    else:
        HALF: gl.constexpr = shape.BLOCK_DV // 2
        first, second = acc, tail
        if shape.DV_HIGH == 0:
            first, second = halves(acc)
        await_store()
        staged.store(first.to(io.o_desc.dtype))
        send(0, seq, m0, o_smem, io, shape, W)
        await_store()
        staged.slice(0, second.shape[1], dim=1).store(second.to(io.o_desc.dtype))
        send(HALF, seq, m0, o_smem, io, shape, W)


@gluon.jit
def halves(acc):
    """The lower columns of an accumulator and the upper ones: some of a thread's registers, and the others."""
    HALF: gl.constexpr = acc.shape[1] // 2
    VALUES: gl.constexpr = score_layout(HALF)
    lower, upper = gl.split(acc.reshape([acc.shape[0], 2, HALF]).permute([0, 2, 1]))
    return (
        gl.convert_layout(lower, VALUES, assert_trivial=True),
        gl.convert_layout(upper, VALUES, assert_trivial=True),
    )


@gluon.jit
def await_store():
    """Wait until what was sent before has left shared memory."""
    tma.store_wait(0)
    cta_barrier()


@gluon.jit
def send(FIRST: gl.constexpr, seq, m0, o_smem, io, shape, W: gl.constexpr):
    """Let what is staged leave for the columns of O from FIRST on."""
    fence_async_shared()
    cta_barrier()
    row = seq.q_start + first_row(m0, W, shape)
    tma_store(io.o_desc, [line_of(seq, shape), row, seq.h * shape.STACK, FIRST], o_smem)


@gluon.jit
def store_direct(acc, tail, seq, rows, io, work, shape):
    """Write the rows of O that belong to the sequence, straight from registers."""
    store_columns(acc, 0, seq, rows, io, work, shape)
    if shape.DV_HIGH != 0:
        store_columns(tail, low(shape.BLOCK_DV, shape.DV_HIGH), seq, rows, io, work, shape)


@gluon.jit
def store_columns(acc, FIRST: gl.constexpr, seq, rows, io, work, shape):
    """Write the columns of O from FIRST on."""
    VALUES: gl.constexpr = acc.type.layout
    rows = gl.convert_layout(rows, gl.SliceLayout(1, VALUES), assert_trivial=True)
    columns = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, VALUES))
    start = seq.q_start
    if not shape.PACKED:
        start = seq.b.to(gl.int64) * seq.len_q
    head = heads_of(seq, rows, shape)
    first = ((start + rows).to(gl.int64) * (work.heads * shape.STACK) + head) * shape.HEAD_DIM_V
    inside = (rows < seq.len_q)[:, None] & (columns < shape.HEAD_DIM_V)[None, :]
    gl.store(io.o + first[:, None] + columns[None, :], acc.to(io.o.dtype.element_ty), mask=inside)


@gluon.jit
def totals(scale, shift, l_i, seq, rows, io, variant, shape):
    """Reference in base 2, sum of weights, and the factor on values, of every row; a sink is a key with value 0."""
    ROWS: gl.constexpr = scale.type.layout
    l_i = gl.convert_layout(gl.sum(l_i, 1), ROWS, assert_trivial=True)
    m_i = shift * (unit_of(io.qk_scale, variant) / scale)
    if variant.bounded:
        m_i = gl.where(l_i == 0.0, float("-inf"), score.BOUNDED)
    rest = each_row(rows, 1.0)
    if io.sinks is not None:
        sink = each_row(rows, 0.0) + gl.load(io.sinks + heads_of(seq, rows, shape)).to(gl.float32) * LOG2E
        m_i, l_i, rest = score.joined(m_i, l_i, sink)
    return m_i, l_i, rest


@gluon.jit
def store(acc, tail, scale, shift, l_i, seq, m0, rows, o_smem, io, work, variant, shape, W: gl.constexpr):
    """Normalise and write 64 rows of O and their LSE."""
    m_i, l_i, rest = totals(scale, shift, l_i, seq, rows, io, variant, shape)
    # Only a row that sees nothing has a sum of 0; comparing for equality lets a NaN through.
    empty = l_i == 0.0
    l_safe = gl.where(empty, 1.0, l_i)
    lse = gl.where(empty, float("-inf"), m_i * LN2 + gl.log(l_safe))
    if shape.PACKED:
        stat = heads_of(seq, rows, shape).to(gl.int64) * io.stat_rows + seq.q_start
    else:
        stat = (seq.b * (work.heads * shape.STACK) + heads_of(seq, rows, shape)).to(gl.int64) * io.stat_rows
    gl.store(io.lse + stat + rows, lse, mask=rows < seq.len_q)
    factor = rest / l_safe
    if variant.seed is not None:
        factor *= 65536.0 / variant.keep
    acc = scaled(acc, factor)
    if shape.DV_HIGH != 0:
        tail = scaled(tail, factor)
    if shape.DIRECT_O:
        store_direct(acc, tail, seq, rows, io, work, shape)
    elif shape.PACKED:
        # What follows a member's last row is the next one's.
        if first_row(m0, W + 1, shape) <= seq.len_q:
            store_staged(acc, tail, seq, m0, o_smem, io, shape, W)
        else:
            store_direct(acc, tail, seq, rows, io, work, shape)
    else:
        store_staged(acc, tail, seq, m0, o_smem, io, shape, W)
