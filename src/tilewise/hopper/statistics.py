"""Around the backward kernel: what it needs of every row, and dq from its fp32 sum. Plain Triton, bound by memory.

HBM: `row_kernel` reads o, do and lse once and writes lse2, delta and the zeros of dq's sum, where it begins with zeros;
`round_kernel` reads the sum and writes dq.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.score import LOG2E


@triton.jit
def _at(x, b, rows, h, columns):
    base = x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    return base + rows.to(tl.int64)[:, None] * x.seq + columns[None, :]


@triton.jit
def first_stat(q_start, b):
    """Where the statistics of member b of a packed call begin: TMA loads lines from multiples of 16 bytes alone."""
    return (q_start // 4 + b) * 4


@triton.jit
def rows_at(slots, cu_q, members, steps):
    """The rows that have these statistics, and where there is one; `steps` halve the number of members to 1."""
    low = slots * 0
    high = low + members
    for _ in range(steps):
        middle = (low + high) // 2
        before = first_stat(tl.load(cu_q + middle).to(tl.int32), middle) <= slots
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    q_start = tl.load(cu_q + low).to(tl.int32)
    rows = q_start + slots - first_stat(q_start, low)
    return rows, rows < tl.load(cu_q + low + 1).to(tl.int32)


@triton.jit(
    do_not_specialize=["rows", "heads", "stat_rows", "members", "steps"],
    do_not_specialize_on_alignment=["dlse", "cu_q"],
)
def row_kernel(
    out, do, lse, dlse, cu_q, lse2, delta, dq_sum, rows, heads, stat_rows, members, steps,
    BLOCK: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``delta = rowsum(do o) - dlse``, and the lse in base 2, +inf for rows that see nothing: their p is then 0.

    Programs: (batch, head, block of `stat_rows`; those without a row see nothing: tiles read them). Of packed calls
    `cu_q` says where members are. `dq_sum` fp32 [B, Hq, rows, WIDTH] becomes 0, if there is one.
    """
    blocks = stat_rows // BLOCK
    pid = tl.program_id(0)
    pair = pid // blocks
    b, h = pair // heads, pair % heads
    slots = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    offs = slots
    inside = offs < rows
    if dq_sum is not None:
        first = (pair.to(tl.int64) * rows + offs) * WIDTH
        zeros = tl.zeros([BLOCK, WIDTH], tl.float32)
        tl.store(dq_sum + first[:, None] + tl.arange(0, WIDTH)[None, :], zeros, mask=inside[:, None])
    if cu_q is not None:
        offs, real = rows_at(slots, cu_q, members, steps)
        inside = real & (offs < rows)
    columns = tl.arange(0, BLOCK_DV)
    there = inside[:, None] & (columns < HEAD_DIM_V)[None, :]
    o = tl.load(_at(out, b, offs, h, columns), mask=there, other=0.0).to(tl.float32)
    d_o = tl.load(_at(do, b, offs, h, columns), mask=there, other=0.0).to(tl.float32)
    total = tl.sum(o * d_o, 1)
    if dlse is not None:
        total -= tl.load(dlse + pair.to(tl.int64) * rows + offs, mask=inside, other=0.0)
    lse_rows = tl.load(lse + pair.to(tl.int64) * rows + offs, mask=inside, other=float("-inf")) * LOG2E
    stat = pair.to(tl.int64) * stat_rows + slots
    tl.store(lse2 + stat, tl.where(lse_rows == float("-inf"), float("inf"), lse_rows))
    tl.store(delta + stat, total)


@triton.jit(do_not_specialize=["rows", "heads"])
def round_kernel(
    dq_sum, added, dq, scale, rows, heads, BLOCK: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """``dq = scale · sum``, from [B, Hq, rows, WIDTH] to [B, rows, Hq, D].

    In the sum, of every eight columns the even ones come first (`query_gradient.put`).
    `added`, int32 [B, Hq, tiles of TILE rows], if it is there, says how often a sum was added to: a sum of nothing was
    not written.
    """
    blocks = tl.cdiv(rows, BLOCK)
    pid = tl.program_id(0)
    pair = pid // blocks
    b, h = pair // heads, pair % heads
    offs = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.arange(0, WIDTH)
    inside = offs < rows
    first = (pair.to(tl.int64) * rows + offs) * WIDTH
    written = inside
    if added is not None:
        tiles = pair * tl.cdiv(rows, TILE) + offs // TILE
        written = inside & (tl.load(added + tiles, mask=inside, other=0) > 0)
    total = tl.load(dq_sum + first[:, None] + wide[None, :], mask=written[:, None], other=0.0)
    total = total.reshape(BLOCK, WIDTH // 8, 2, 4).permute(0, 1, 3, 2).reshape(BLOCK, WIDTH)
    there = inside[:, None] & (wide < HEAD_DIM)[None, :]
    tl.store(_at(dq, b, offs, h, wide), (total * scale).to(dq.ptr.dtype.element_ty), mask=there)
