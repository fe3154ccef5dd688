"""What the Hopper kernels share: names that Triton renamed, and the ring of tiles between a producer and its consumers.

A ring has STAGES buffers. `full` of a stage completes when its bytes have landed, `empty` when every consumer has
released it; use i of the ring is stage ``i % STAGES`` in the round ``i // STAGES``, whose parity the barriers wait for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.8 renamed these; 3.9 dropped the old names.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The bytes of a tile in shared memory as another type."""
    view = getattr(tile, "reinterpret", None) or tile._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


@builtin
def tma_add(desc, coord, tile, _semantic=None):
    """Add a tile in shared memory to memory, by TMA; before Triton 3.8 only the builder had it."""
    official = getattr(tma, "async_atomic_add", None)
    if official is not None:
        return official(desc, coord, tile, _semantic=_semantic)
    where = _semantic._convert_to_ir_values(coord, require_i64=False)
    return _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, where, tile.handle)


@builtin
def specialize(roles, warps, registers, _semantic=None, _generator=None):
    """`gl.warp_specialize`, where a role after the first that has no warps does not exist."""
    warps, registers = ([int(n) for n in numbers] for numbers in (warps, registers))
    there = [i for i, n in enumerate(warps) if n]
    gl.warp_specialize(
        [roles[0], *(roles[i + 1] for i in there)],
        [warps[i] for i in there],
        [registers[i] for i in there],
        _semantic=_semantic,
        _generator=_generator,
    )


class Ring(NamedTuple):
    """Tiles in shared memory [STAGES, ...] and their barriers [STAGES, 1]."""

    tiles: Any
    full: Any
    empty: Any
    STAGES: Any


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, EACH: gl.constexpr = 1):
    """A ring for tiles of `desc`, each released by CONSUMERS partitions.

    A stage holds EACH of them: tile k of it is ``stage * EACH + k``.
    """
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES * EACH] + desc.block_type.shape, desc.layout)
    return ring_of(tiles, STAGES, CONSUMERS)


@gluon.jit
def ring_of(tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of these tiles in shared memory."""
    return Ring(tiles, make_barriers(STAGES), make_barriers(STAGES, CONSUMERS), STAGES)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr = 1):
    """Barriers [NUMBER, 1] whose phases end with so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def produce(ring, desc, coord, i):
    """Load the tile at `coord` as use i of the ring, once the stage is free."""
    stage = i % ring.STAGES
    mbarrier.wait(ring.empty.index(stage), ((i // ring.STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma_load(desc, coord, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def arrived(ring, i, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Use i of the ring as a matrix, once it has landed."""
    stage = i % ring.STAGES
    mbarrier.wait(ring.full.index(stage), (i // ring.STAGES) & 1)
    return ring.tiles.index(stage).reshape([ROWS, COLUMNS])


@gluon.jit
def once_ready(ring):
    """The same ring, of a tile a stage, for consumers who wait until somebody says that what landed is `ready`."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    return Ring(ring.tiles, make_barriers(STAGES), ring.empty, STAGES)


@gluon.jit
def ready(ring, i):
    """Use i may be taken."""
    mbarrier.arrive(ring.full.index(i % ring.STAGES), count=1)


@gluon.jit
def release(ring, i):
    """This partition is done with use i."""
    mbarrier.arrive(ring.empty.index(i % ring.STAGES), count=1)


@gluon.jit
def make_turns(CONSUMERS: gl.constexpr):
    """Barriers by which consumers issue matrix products in turn: one computes weights while another multiplies."""
    return make_barriers(CONSUMERS)


@gluon.jit
def my_turn(turns, i, W: gl.constexpr):
    """Consumer W may issue its i-th products once the one before it has; the first consumer begins."""
    FIRST: gl.constexpr = 1 if W == 0 else 0
    mbarrier.wait(turns.index(W), (i & 1) ^ FIRST)


@gluon.jit
def next_turn(turns, W: gl.constexpr, CONSUMERS: gl.constexpr):
    """Consumer W has issued."""
    mbarrier.arrive(turns.index((W + 1) % CONSUMERS), count=1)
