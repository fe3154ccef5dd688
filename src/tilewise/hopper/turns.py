"""In which order tiles of keys add to the same rows of dq, where every bit of the sum is to be repeatable.

Every tile of rows has a counter: how many tiles of keys have added to it. The warp that adds waits until the counter
says that it is its tile's turn, and counts on once the sum is in memory. Whose turn is first overwrites what is there,
so no zeros are written before. Nobody waits for anything else, so all ends if the order is one that the programs can
keep: see `schedule.deal_in_turn`, which makes it, and why it fits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

# Reads what another processor's `release` has made visible, and asks TMA to see it too.
_AWAIT = gl.constexpr("""{
    .reg .pred early;
    .reg .b32 count;
await:
    ld.acquire.gpu.global.b32 count, [$1];
    setp.ne.b32 early, count, $2;
    @early bra await;
    fence.proxy.async.global;
    mov.b32 $0, count;
}""")
# The thread that asked TMA to add is one of the warp's; without `.read` its wait is for memory, not for the source.
_PASS_ON = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    cp.async.bulk.wait_group 0;
    fence.proxy.async.global;
    bar.warp.sync 0xffffffff;
    mov.b32 lane, %laneid;
    setp.eq.b32 first, lane, 0;
    @first red.release.gpu.global.add.u32 [$1], 1;
    mov.b32 $0, lane;
}""")


class Turns(NamedTuple):
    """`waves` int32 [tiles of keys of all heads, 2]: which of its head's tiles, from one number to before another, are
    at work together with a tile; those below add before them. `added` int32 [B, Hq, tiles of rows], 0 at first.
    """

    waves: Any
    added: Any


@gluon.jit
def wave_of(t, turns):
    """The wave of tile t of all: the first of its head's tiles there, and the one after the last."""
    return gl.load(turns.waves + 2 * t), gl.load(turns.waves + 2 * t + 1)


@gluon.jit
def first_visit(t, n, lo, hi, band, turns):
    """The tile of rows that tile t of all, n of its head, begins with.

    Without a band, those of a wave are as far apart as can be. With one, each begins where rows first see its keys, and
    so behind those of higher numbers.
    """
    start = lo
    if band.left is None and band.right is None:
        first, end = wave_of(t, turns)
        start = lo + (n - first) * (hi - lo) // (end - first)
    return start


@gluon.jit
def turn_of(m, n, first, end, seq, band, shape):
    """How many tiles of keys add to the tile m of rows before tile n of their head, whose wave is first .. end.

    First those of earlier waves. Within the wave, who has not begun anew at the first row is before who has, and the
    higher number before the lower one.
    """
    if band.left is None and band.right is None:
        last = first + ((m + 1) * (end - first) - 1) // gl.cdiv(seq.len_q, shape.BLOCK_M)
        anew = gl.where(n > last, end - first, 0)
        turn = first + last - n + anew
    else:
        # Tiles of keys that some of the rows see, up to the end of the wave: low .. high.
        low, high = 0 * m, end
        if band.left is not None:
            low = gl.maximum(m * shape.BLOCK_M + seq.off - band.left, 0) // shape.BLOCK_N
        if band.right is not None:
            beyond = gl.minimum((m + 1) * shape.BLOCK_M, seq.len_q) + seq.off + band.right
            high = gl.minimum(gl.cdiv(gl.maximum(beyond, 0), shape.BLOCK_N), end)
        turn = gl.maximum(gl.minimum(first, high) - low, 0) + high - 1 - n
    return turn


@gluon.jit
def await_turn(counter, turn):
    """Wait until so many have added."""
    gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_on(counter):
    """Wait until all that this warp added is in memory, and count one more."""
    gl.inline_asm_elementwise(_PASS_ON, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)
