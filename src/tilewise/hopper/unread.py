"""What no row sees may be NaN, and 0 · NaN is NaN: tiles in shared memory are rid of it before they are multiplied."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .pipeline import cta_barrier, reinterpret
from .scores import strange_signs

# Rows, and numbers of 32 bits in a row, that are taken together.
_PIECE = gl.constexpr(32)


@gluon.constexpr_function
def word_layout(warps):
    """Registers of a piece, read 16 bytes at a time."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def words_of(tile_smem):
    """A 16-bit tile as numbers of 32 bits."""
    WORDS: gl.constexpr = tile_smem.shape[1] // 2
    return reinterpret(tile_smem, gl.int32, [tile_smem.shape[0], WORDS], gl.NVMMASharedLayout(128, 32, rank=2))


@gluon.jit
def clean(tile_smem, WARPS: gl.constexpr):
    """Make 0 what is not finite. Rows that see it have an lse that is none, and so gradients that are none."""
    ROWS: gl.constexpr = tile_smem.shape[0]
    WORDS: gl.constexpr = tile_smem.shape[1] // 2
    words_smem = words_of(tile_smem)
    for row in gl.static_range(0, ROWS, _PIECE):
        for column in gl.static_range(0, WORDS, _PIECE):
            piece_smem = words_smem.slice(row, _PIECE, dim=0).slice(column, _PIECE, dim=1)
            words = piece_smem.load(word_layout(WARPS))
            # Bits 0 and 16, each spread over its half.
            halves = ((strange_signs(words, tile_smem.dtype) >> 15) & 0x00010001) * 0xFFFF
            piece_smem.store(words & ~halves)
    fence_async_shared()
    cta_barrier()


@gluon.jit
def cut(tile_smem, rows, WARPS: gl.constexpr):
    """Make 0 the rows from `rows` on, which are no member's, or another's."""
    ROWS: gl.constexpr = tile_smem.shape[0]
    WORDS: gl.constexpr = tile_smem.shape[1] // 2
    if rows < ROWS:
        words_smem = words_of(tile_smem)
        for row in gl.static_range(0, ROWS, _PIECE):
            inside = (row + gl.arange(0, _PIECE, gl.SliceLayout(1, word_layout(WARPS))) < rows)[:, None]
            for column in gl.static_range(0, WORDS, _PIECE):
                piece_smem = words_smem.slice(row, _PIECE, dim=0).slice(column, _PIECE, dim=1)
                piece_smem.store(gl.where(inside, piece_smem.load(word_layout(WARPS)), 0))
        fence_async_shared()
        cta_barrier()
