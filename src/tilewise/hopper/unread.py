"""What no row sees may be NaN, and 0 · NaN is NaN: tiles in shared memory are rid of it before they are multiplied.

In the forward pass values of masked tiles are looked through by warps that do nothing else (`look_through`), which rid
a tile of what they find and leave word of it; where there are none, consumers do so together (`clean_together`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .pipeline import cta_barrier, make_barriers, reinterpret
from .scores import score_layout

# Rows, and numbers of 32 bits in a row, that are taken together: few registers are free in the loop.
_PIECE = gl.constexpr(32)
# The signs of two 16-bit numbers, as a signed one of 32 bits.
_SIGNS = gl.constexpr(0x80008000 - (1 << 32))
# Warps that look.
LOOKERS = gl.constexpr(2)


@gluon.constexpr_function
def word_layout(warps):
    """Registers of a piece, read 16 bytes at a time."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def exponent_masks(dtype):
    """Of two 16-bit numbers in one of 32 bits: their exponents, and one unit of each."""
    return (0x7C007C00, 0x04000400) if dtype == gl.float16 else (0x7F807F80, 0x00800080)


@gluon.jit
def piece(tile_smem, row, part, HEIGHT: gl.constexpr = _PIECE):
    """HEIGHT rows of a 16-bit tile from `row` on, and of their columns a part, as numbers of 32 bits."""
    ROWS: gl.constexpr = tile_smem.shape[0]
    WORDS: gl.constexpr = tile_smem.shape[1] // 2
    words_smem = reinterpret(tile_smem, gl.int32, [ROWS, WORDS], gl.NVMMASharedLayout(128, 32, rank=2))
    return words_smem.slice(row, HEIGHT, dim=0).slice(part * _PIECE, _PIECE, dim=1)


@gluon.jit
def strange_signs(words, dtype: gl.constexpr):
    """Beside other bits, the sign of each half that is not finite: the exponent of no other number overflows."""
    MASKS: gl.constexpr = exponent_masks(dtype)
    return (words & MASKS[0]) + MASKS[1]


@gluon.jit
def mark_keys(tile_smem, flags_smem, WARPS: gl.constexpr):
    """Leave for each row of a tile, int32 [N], a number that is not 0 where it holds what is not finite."""
    ROWS: gl.constexpr = tile_smem.shape[0]
    PARTS: gl.constexpr = tile_smem.shape[1] // 2 // _PIECE
    for row in gl.static_range(0, ROWS, _PIECE):
        found = gl.zeros([_PIECE, _PIECE], gl.int32, word_layout(WARPS))
        for part in gl.static_range(PARTS):
            words = piece(tile_smem, row, part).load(word_layout(WARPS))
            found = found | strange_signs(words, tile_smem.dtype)
        flags_smem.slice(row, _PIECE).store(gl.reduce_or(found, 1) & _SIGNS)


@gluon.jit
def clean(tile_smem, WARPS: gl.constexpr):
    """Make 0 what is not finite. In the backward pass that is all: rows that see it have an lse that is none, and so
    gradients that are none.
    """
    ROWS: gl.constexpr = tile_smem.shape[0]
    PARTS: gl.constexpr = tile_smem.shape[1] // 2 // _PIECE
    for row in gl.static_range(0, ROWS, _PIECE):
        for part in gl.static_range(PARTS):
            words = piece(tile_smem, row, part).load(word_layout(WARPS))
            # Bits 0 and 16, each spread over its half.
            halves = ((strange_signs(words, tile_smem.dtype) >> 15) & 0x00010001) * 0xFFFF
            piece(tile_smem, row, part).store(words & ~halves)
    fence_async_shared()
    cta_barrier()


@gluon.jit
def cut(tile_smem, rows, WARPS: gl.constexpr):
    """Make 0 the rows from `rows` on, which are no member's, or another's."""
    ROWS: gl.constexpr = tile_smem.shape[0]
    PARTS: gl.constexpr = tile_smem.shape[1] // 2 // _PIECE
    if rows < ROWS:
        for row in gl.static_range(0, ROWS, _PIECE):
            inside = (row + gl.arange(0, _PIECE, gl.SliceLayout(1, word_layout(WARPS))) < rows)[:, None]
            for part in gl.static_range(PARTS):
                words = piece(tile_smem, row, part).load(word_layout(WARPS))
                piece(tile_smem, row, part).store(gl.where(inside, words, 0))
        fence_async_shared()
        cta_barrier()


@gluon.constexpr_function
def line_layout(n):
    """Registers of a line of n numbers of those who look."""
    return gl.BlockedLayout([max(1, n // (32 * LOOKERS.value))], [32], [LOOKERS.value], [0])


@gluon.jit
def end_line(line_smem, rows, value: gl.constexpr):
    """Give a line of numbers of rows this value from `rows` on, if there are any; others see it after a barrier."""
    ROWS: gl.constexpr = line_smem.shape[0]
    if rows < ROWS:
        inside = gl.arange(0, ROWS, line_layout(ROWS)) < rows
        line_smem.store(gl.where(inside, line_smem.load(line_layout(ROWS)), value))


@gluon.jit
def flagged(flags_smem, N: gl.constexpr):
    """Which keys have what is not finite, bool [N], as the columns of scores."""
    return flags_smem.load(gl.SliceLayout(0, score_layout(N))) != 0


class Findings(NamedTuple):
    """What the looker found in the tiles of v, by stage of its ring.

    `done` are barriers [STAGES, 1]; `marks`, int32 [STAGES, warps], are not 0 where a tile held what is not finite, and
    `flags`, int32 [STAGES, N], then say in which keys.
    """

    done: Any
    marks: Any
    flags: Any


@gluon.jit
def make_findings(STAGES: gl.constexpr, N: gl.constexpr):
    """Findings about a ring of so many stages of tiles of N keys."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    done = make_barriers(STAGES)
    marks = gl.allocate_shared_memory(gl.int32, [STAGES, LOOKERS], LINE)
    return Findings(done, marks, gl.allocate_shared_memory(gl.int32, [STAGES, N], LINE))


@gluon.constexpr_function
def looking_layout():
    """Registers of the looker's part of v: 16 bytes at a time, four rows a warp."""
    return gl.BlockedLayout([1, 4], [4, 8], [LOOKERS.value, 1], [1, 0])


@gluon.constexpr_function
def sum_of_zeros(dtype):
    """PTX: the halves of $0 are NaN where those of $1 to $5 are not all finite, for nothing else is NaN times 0.

    Else they are 0 if those of $5 are. One register gathers all: few are left to wait for loads with.
    """
    fma = f"fma.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}"
    start = "{ .reg .b32 t, u, zero; mov.b32 zero, 0;"
    return f"{start} {fma} t, $1, zero, $2; {fma} u, $3, zero, $4; {fma} t, t, zero, u; {fma} $0, t, zero, $5; }}"


@gluon.jit
def inspect(v_smem, marks_smem):
    """Leave a mark for each warp that finds in a tile of v what is not finite."""
    ROWS: gl.constexpr = v_smem.shape[0]
    PARTS: gl.constexpr = v_smem.shape[1] // 2 // _PIECE
    STRIP: gl.constexpr = 4 * LOOKERS
    INSTRUCTIONS: gl.constexpr = sum_of_zeros(v_smem.dtype)
    zeros = gl.zeros([STRIP, _PIECE], gl.int32, looking_layout()).reshape([STRIP, _PIECE // 4, 2, 2])
    found, _ = gl.split(gl.split(zeros)[0])
    for row in gl.static_range(0, ROWS, STRIP):
        for part in gl.static_range(PARTS):
            words = piece(v_smem, row, part, STRIP).load(looking_layout())
            even, odd = gl.split(words.reshape([STRIP, _PIECE // 4, 2, 2]))
            w0, w2 = gl.split(even)
            w1, w3 = gl.split(odd)
            found = gl.inline_asm_elementwise(
                INSTRUCTIONS, "=r,r,r,r,r,r", [w0, w1, w2, w3, found], dtype=gl.int32, is_pure=True, pack=1
            )
    # What was finite has left zeros of either sign.
    marks_smem.store(gl.reduce_or((found & ~_SIGNS).reshape([LOOKERS, _PIECE]), 1))


@gluon.jit
def any_mark(marks_smem, WARPS: gl.constexpr):
    """Whether a warp of the looker has left a mark, as so many warps ask."""
    return gl.max(marks_smem.load(gl.BlockedLayout([LOOKERS], [32], [WARPS], [0])), 0) != 0


@gluon.jit
def not_finite(tile_smem, marks_smem):
    """Whether a tile holds what is not finite, as those who look ask; they leave their marks."""
    inspect(tile_smem, marks_smem)
    return any_mark(marks_smem, LOOKERS)


@gluon.jit
def look_through(v_smem, findings, stage):
    """The looker's part: a tile of v without what is not finite, and word of where that was."""
    if not_finite(v_smem, findings.marks.index(stage)):
        mark_keys(v_smem, findings.flags.index(stage), LOOKERS)
        clean(v_smem, LOOKERS)


@gluon.jit
def marked(findings, i, STAGES: gl.constexpr):
    """Whether use i of the ring of v held what is not finite; waits for the looker.

    Only once it has landed: until then the looker may not even have spoken of the use before it in that stage.
    """
    stage = i % STAGES
    mbarrier.wait(findings.done.index(stage), (i // STAGES) & 1)
    return any_mark(findings.marks.index(stage), 4)


class Agreement(NamedTuple):
    """Where consumers wait for each other before a tile is changed that all of them read.

    `barrier` counts them; `turns` has for each how often it came by, int32 [consumers, 1], and `flags` what it found in
    the rows of the tile, int32 [consumers, N].
    """

    barrier: Any
    turns: Any
    flags: Any


@gluon.constexpr_function
def one_layout():
    """Registers of a tensor of one element."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def make_agreement(CONSUMERS: gl.constexpr, ROWS: gl.constexpr):
    """An agreement of so many consumers on tiles of so many rows."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier = make_barriers(1, CONSUMERS)
    turns = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], LINE)
    for consumer in gl.static_range(CONSUMERS):
        turns.index(consumer).store(gl.zeros([1], gl.int32, one_layout()))
    return Agreement(barrier, turns, gl.allocate_shared_memory(gl.int32, [CONSUMERS, ROWS], LINE))


@gluon.jit
def agree(agreement, W: gl.constexpr):
    """Consumer W has read; return when all have."""
    turn_smem = agreement.turns.index(W)
    turns = turn_smem.load(one_layout())
    mbarrier.arrive(agreement.barrier.index(0), count=1)
    mbarrier.wait(agreement.barrier.index(0), gl.max(turns, 0) & 1)
    turn_smem.store(turns + 1)


@gluon.jit
def clean_together(v_smem, agreement, W: gl.constexpr):
    """Make 0 what is not finite in a tile of v; returns which keys had any, bool [N].

    Every consumer comes here for the same tiles: each has looked before any of them writes, and all write the same.
    """
    flags_smem = agreement.flags.index(W)
    mark_keys(v_smem, flags_smem, 4)
    agree(agreement, W)
    clean(v_smem, 4)
    return flagged(flags_smem, v_smem.shape[0])
