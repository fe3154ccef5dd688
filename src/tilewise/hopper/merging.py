"""Pieces of a cut item become its output and LSE, by whoever stores the last of them: `combine` without a launch.

HBM: reads the partial results of an item, writes its output and LSE.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ..kernels import cache, decode_plan
from ..kernels.score import LOG2E
from .pipeline import cta_barrier

# Partials that are merged in one go, of so many rows: a warp has a row, and a thread all partials of its dims.
_PIECES, _ROWS = gl.constexpr(16), gl.constexpr(4)


@gluon.jit
def merge(out, lse, parts, first, pieces, group, h, stat_rows, shape):
    """What `combine` does for an item, for all of its rows: the item's first piece is program `first`'s last one."""
    EACH: gl.constexpr = shape.BLOCK_DV // 32
    CUBE: gl.constexpr = gl.BlockedLayout([_PIECES, 1, EACH], [1, 1, 32], [1, _ROWS, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.SliceLayout(2, CUBE)
    PLANE: gl.constexpr = gl.SliceLayout(0, CUBE)
    ROWS: gl.constexpr = gl.SliceLayout(1, PLANE)
    seq = group.seq
    d = gl.arange(0, shape.BLOCK_DV, gl.SliceLayout(0, PLANE))[None, :]
    for row0 in range(0, seq.len_q * shape.GROUP, _ROWS):
        r = row0 + gl.arange(0, _ROWS, gl.SliceLayout(0, PAIRS))
        m_i = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, PAIRS))
        l_i = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(0, PAIRS))
        acc = gl.zeros([_ROWS, shape.BLOCK_DV], gl.float32, PLANE)
        for c in range(0, pieces, _PIECES):
            j = c + gl.arange(0, _PIECES, gl.SliceLayout(1, PAIRS))
            slot = decode_plan.slot_of(first + j, j)
            at = slot.to(gl.int64)[:, None] * shape.BLOCK_M + r[None, :]  # [J, M]
            there = (j < pieces)[:, None] & (r < seq.len_q * shape.GROUP)[None, :]
            lse_j = gl.load(parts.lse + at, mask=there, other=float("-inf"))
            real = there[:, :, None] & (d < shape.HEAD_DIM_V)[None, :, :]
            o_j = gl.load(parts.out + (at * shape.HEAD_DIM_V)[:, :, None] + d[None, :, :], mask=real, other=0.0)
            m_new = gl.maximum(m_i, gl.max(lse_j, 0))
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            w = gl.exp2((lse_j - m_safe[None, :]) * LOG2E)
            alpha = gl.exp2((m_i - m_safe) * LOG2E)
            l_i = l_i * alpha + gl.sum(w, 0)
            acc = acc * gl.convert_layout(alpha, ROWS)[:, None] + gl.sum(w[:, :, None] * o_j, 0)
            m_i = m_new
        empty = l_i == 0.0
        l_i = gl.where(empty, 1.0, l_i)
        stat = gl.where(empty, float("-inf"), m_i + gl.log(l_i))
        inside = r < seq.len_q * shape.GROUP
        head = h * shape.GROUP + r % shape.GROUP
        gl.store(lse + cache.stat_at(seq, head, r // shape.GROUP, stat_rows, shape), stat, mask=inside)
        row = gl.convert_layout(r, ROWS)
        head = h * shape.GROUP + row % shape.GROUP
        i = seq.q_start + row // shape.GROUP
        rows = seq.b.to(gl.int64) * out.batch + i * out.seq + head.to(gl.int64) * out.head
        real = (row < seq.len_q * shape.GROUP)[:, None] & (d < shape.HEAD_DIM_V)
        o = acc / gl.convert_layout(l_i, ROWS)[:, None]
        gl.store(out.ptr + rows[:, None] + d, o.to(out.ptr.dtype.element_ty), mask=real)


@gluon.jit
def finish(out, lse, parts, first, pieces, group, h, stat_rows, shape):
    """A piece of a cut item is stored: the last one of them to come merges them, in the order of their keys."""
    # Of all threads, for the counter's release is one thread's.
    cta_barrier()
    before = gl.atomic_add(parts.cuts + first, 1, sem="acq_rel", scope="gpu")
    if before == pieces - 1:
        gl.store(parts.cuts + first, 0)
        merge(out, lse, parts, first, pieces, group, h, stat_rows, shape)
