"""From a problem to the forward kernel's arguments: descriptors, the band, the dealt tiles."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..kernels.placement import on, processors
from ..kernels.replay import Tape
from ..kvcache import is_aligned
from ..mask_algebra import Frame
from ..problem import Inputs, Problem
from ..tiles import TileConfig, lookup
from .forward import forward_kernel
from .schedule import Bounds, Dealt, deal
from .work import Shape

ROWS = 64  # of one warpgroup
# A third consumer pays for the wider tile's edges once a row sees so many keys (docs/tuning.md).
_LONG = 4096
# The keys and values of the heads at work at once are to stay in this much of L2, in bytes, beside their q and o.
_L2 = 16 << 20
GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Warps of 2 or 3 consumer warpgroups and the producer's padded one share 64 Ki registers; `maxnreg` is the entry's.
_REGISTERS = {2: (24, 240, 168), 3: (32, 160, 128)}
# Where a looker shares the producer's: it waits for several loads at once, and consumers of narrow values spare a few.
_LOOKING = (40, 232)


def block(head_dim: int) -> int:
    """The head dim in shared memory; TMA fills what is missing with zeros."""
    return next(size for size in (64, 128, 256) if head_dim <= size)


def high(head_dim: int) -> int:
    """What of a head dim lies beyond the power of two below it, rounded up to one; 0 where that saves nothing."""
    half = block(head_dim) // 2
    rest = max(16, 1 << (head_dim - half - 1).bit_length()) if head_dim > half >= 64 else half
    return rest if rest < half else 0


def addressable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy if TMA cannot address it: strides and start must be multiples of 16 bytes."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def _layout(rows: int, heads: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, rows, heads, columns], GLUON[dtype])


def descriptor(x: torch.Tensor, rows: int, columns: int, heads: int = 1) -> TensorDescriptor:
    """A TMA descriptor of [B, S, H, D] for tiles of so many rows of so many heads."""
    # A dimension of size 1 may have any stride, which TMA would still check.
    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], x.shape, strict=False)]
    tile = [1, rows, heads, columns]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], tile, _layout(rows, heads, columns, x.dtype))


def bounds(problem: Problem) -> tuple[Bounds, int, int]:
    """The band over the keys ``first .. last`` that any row sees, positions counted from `first`.

    Keys outside may be NaN, and beside a probability of 0 in the tile of a visible key they would count.
    """
    len_q, len_k = problem.seqlen_q, problem.seqlen_k
    off = int(problem.offset(len_q, len_k))
    lowered = problem.options.mask.lower(Frame(0, problem.batch, len_q, len_k, off, problem.device))
    left, right = lowered.left, lowered.right
    first = 0 if left is None else min(max(0, off - left), len_k)
    last = len_k if right is None else max(first, min(len_k, len_q - 1 + off + right + 1))
    # A bound past every key is none: fewer kernels, and no overflow of 32-bit positions.
    left = None if left is None or left >= len_q + len_k else left
    right = None if right is None or right >= len_q + len_k else right
    return Bounds(len_q, last - first, off - first, left, right), first, last


def tile_of(problem: Problem, keys: int = 0) -> TileConfig:
    """The table's tile for calls whose middle row sees so many keys: from some number on, that of a pass of its own."""
    pass_ = "long forward" if keys >= _LONG and max(problem.head_dim, problem.head_dim_v) <= 64 else "forward"
    return lookup("hopper", pass_, problem.dtype, max(problem.head_dim, problem.head_dim_v))


def plain_tile(problem: Problem) -> TileConfig:
    """The tile of the plain kernel."""
    return tile_of(problem, bounds(problem)[0].middle_keys())


class Tiles(NamedTuple):
    """Heads, or stacks of heads, that have tiles of their own; positions and keys of a tile."""

    heads: int
    block_m: int
    block_n: int


def near_keys(problem: Problem) -> tuple[int, int]:
    """What of L2 keys and values that are worked on at once may take, and those of one key and head take, in bytes."""
    return _L2, (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


def deal_rows(problem: Problem, band: Bounds, tiles: Tiles) -> Dealt:
    """Who works on which tiles of rows, of all heads."""
    l2, each = near_keys(problem)
    # Heads of a group have the same keys.
    sharing = tiles.heads // problem.heads_kv
    together = max(1, l2 // max(1, band.len_k * each)) * sharing
    pairs = problem.batch * tiles.heads
    return deal(band, tiles.block_m, tiles.block_n, pairs, processors(problem.device), problem.device, together)


class Plan(NamedTuple):
    """What a problem's launch needs beside its tensors."""

    keys: slice  # those that any row sees
    block_n: int
    dims: tuple[int, int]  # head dims in shared memory
    dealt: Dealt
    scalars: tuple[int | None, ...]  # tiles of rows, heads, group, then the band
    shape: Shape
    compiled: tuple[int, int, int]  # stages and registers
    maxnreg: int


def o_parts(d: int, d_v: int) -> int:
    """In how many parts O leaves: beside these head dims' q, keys and values there is room for half of it."""
    return 2 if d == d_v == 256 else 1


def sizes(problem: Problem, tile: TileConfig) -> tuple[int, ...]:
    """The first fields of the kernels' `work.Shape`."""
    dims = problem.head_dim, problem.head_dim_v
    d, d_v = map(block, dims)
    return (tile.block_m, tile.block_n, d, d_v, tile.block_m // ROWS, o_parts(d, d_v), *map(high, dims))


def compile_time(tile: TileConfig, shape: Shape, busy: bool = False) -> tuple[int, int, int]:
    """What kernels take behind their shape: stages, registers of the producer and of consumers.

    `busy`: scores take so much that consumers spare no register, and so long that the looker may be slow.
    """
    registers = _REGISTERS[tile.block_m // ROWS][:2]
    if shape.CLEAN.value and shape.CONSUMERS.value == 2 and shape.BLOCK_DV.value < 256 and not busy:
        registers = _LOOKING
    return tile.num_stages, *registers


def entry_registers(tile: TileConfig) -> int:
    """The option maxnreg."""
    return _REGISTERS[tile.block_m // ROWS][2]


@lru_cache(maxsize=512)
def plan(problem: Problem) -> Plan | None:
    """The plan of a problem, made once; None where there is nothing to compute."""
    band, first, last = bounds(problem)
    pairs = problem.batch * problem.heads_q
    if not pairs or not problem.seqlen_q or first == last:
        return None
    tile = tile_of(problem, band.middle_keys())
    d, d_v = block(problem.head_dim), block(problem.head_dim_v)
    clean = {"CLEAN": gl.constexpr(band.left is not None or band.right is not None)}
    shape = Shape(*map(gl.constexpr, sizes(problem, tile)), **clean)
    return Plan(
        slice(first, last),
        tile.block_n,
        (d, d_v),
        deal_rows(problem, band, Tiles(problem.heads_q, tile.block_m, tile.block_n)),
        (-(-band.len_q // tile.block_m), problem.heads_q, problem.group_size)
        + (band.off, band.left, band.right, band.len_q, band.len_k),
        shape,
        compile_time(tile, shape),
        entry_registers(tile),
    )


def forward(problem: Problem, inputs: Inputs, tape: Tape | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch: ``out`` and ``lse``."""
    tape = tape or Tape()
    q = tape.part(addressable(inputs.q), inputs.q)
    out = tape.empty(problem.out_shape(q), q.dtype, q.device)
    lse = tape.empty(problem.lse_shape(q), torch.float32, q.device)
    this = plan(problem)
    if this is None:
        return out.zero_(), lse.fill_(float("-inf"))
    k, v = (tape.part(addressable(x[:, this.keys]), x) for x in (inputs.k, inputs.v))
    d, d_v = this.dims
    arguments = (
        descriptor(q, ROWS, d),
        descriptor(k, this.block_n, d),
        descriptor(v, this.block_n, d_v),
        descriptor(out, ROWS, d_v // this.shape.O_PARTS.value),
        lse,
        tape.constant(this.dealt.table),
        problem.softmax_scale * math.log2(math.e),
        this.dealt.rounds,
        *this.scalars,
        this.shape,
        *this.compiled,
    )
    with on(q.device):
        tape.launch(forward_kernel, this.dealt.programs, arguments, num_warps=4, maxnreg=this.maxnreg)
    return out, lse
