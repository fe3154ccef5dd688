"""Rotary position embedding in a kernel (`tilewise.Rotary` says what it is)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rope(NamedTuple):
    """Tables [positions, DIM / 2], their row strides, and positions of first new tokens or None.

    DIM: dims that are rotated, compile-time. INTERLEAVED: pairs are neighbours. Without rotation all fields are None: a
    record that holds None cannot itself be compared with None in a kernel.
    """

    cos: Any
    sin: Any
    cos_row: Any
    sin_row: Any
    positions: Any
    DIM: Any
    INTERLEAVED: Any


@triton.jit
def first_position(rope, b, used):
    """The position of the first new token of sequence b, which has so many slots in use."""
    first = used
    if rope.positions is not None:
        first = tl.load(rope.positions + b).to(tl.int32)
    return first


@triton.jit
def load_rotated(
    base, rows, inside, positions, length, rope, d, START: tl.constexpr, STOP: tl.constexpr
):  # fmt: skip
    """The dims `d`, of ``START .. STOP``, of rows, rotated to `positions` in fp32 and rounded once; see `load_tile`.

    `positions` (int32) are clamped to the `length` of the tables.
    """
    real = inside[:, None] & (d < STOP)[None, :]
    x = tl.load(base + rows[:, None] + d[None, :], mask=real, other=0.0)
    if START < rope.DIM:
        HALF: tl.constexpr = rope.DIM // 2
        turned = real & (d < rope.DIM)[None, :]
        if rope.INTERLEAVED:
            partner = d ^ 1
            pair = d // 2
            lower = d % 2 == 0
        else:
            lower = d < HALF
            partner = tl.where(lower, d + HALF, d - HALF)
            pair = tl.where(lower, d, d - HALF)
        y = tl.load(base + rows[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        at = tl.minimum(tl.maximum(positions, 0), length - 1).to(tl.int64)[:, None]
        cos = tl.load(rope.cos + at * rope.cos_row + pair[None, :], mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(rope.sin + at * rope.sin_row + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + tl.where(lower[None, :], -y, y) * sin).to(x.dtype)
    return x
