"""The interpreter of Gluon itself: what a kernel must not do does not pass there."""

from __future__ import annotations

import threading

import pytest
import torch

from tilewise.hopper import INTERPRETED, launch
from tilewise.hopper.interpreter.machine import Deadlock
from tilewise.hopper.pipeline import arrived, make_ring, produce, release, tma_store

# What the import above has mended.
from triton.experimental import gluon  # isort: skip
import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma  # isort: skip

assert INTERPRETED
ROWS, COLUMNS, TILES = 16, 64, 4


@gluon.jit
def load(x_desc, ring):
    """The producer."""
    for i in range(TILES):
        produce(ring, x_desc, [0, i * ROWS, 0, 0], i)


@gluon.jit
def double(y_desc, ring, y_smem, without):
    """The consumer, which leaves out one of the things that it has to do."""
    for i in range(TILES):
        x = ring.tiles.index(i % ring.STAGES).reshape([ROWS, COLUMNS]).load()
        x_smem = arrived(ring, i, ROWS, COLUMNS)
        if without != "wait":
            x = x_smem.load()
        y_smem.reshape([ROWS, COLUMNS]).store(x * 2.0)
        if without != "fence":
            fence_async_shared()
        tma_store(y_desc, [0, i * ROWS, 0, 1 if without == "alignment" else 0], y_smem)
        if without != "store_wait":
            tma.store_wait(0)
        if without != "release":
            release(ring, i)
    tma.store_wait(0)


@gluon.jit
def double_kernel(x_desc, y_desc, without):
    """``y = 2 x``, a tile at a time."""
    ring = make_ring(x_desc, 2, 1)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    fence_async_shared()
    gl.warp_specialize([(double, (y_desc, ring, y_smem, without)), (load, (x_desc, ring))], [1], [24])


def doubled(without: str | None) -> bool:
    """Whether the result is right, of a few launches: each draws another order."""
    right = True
    for _ in range(8):
        x, y = torch.randn(1, TILES * ROWS, 1, COLUMNS).half(), torch.zeros(1, TILES * ROWS, 1, COLUMNS).half()
        double_kernel[(2,)](*(launch.descriptor(z, ROWS, COLUMNS) for z in (x, y)), without)
        right = right and torch.equal(y, 2 * x)
    return right


def test_a_kernel_that_leaves_nothing_out_is_right() -> None:
    assert doubled(None)


@pytest.mark.parametrize("without", ["wait", "store_wait"])
def test_what_is_not_waited_for_is_not_there(without: str) -> None:
    assert not doubled(without)


def fails(without: str, error: type[Exception], words: str) -> None:
    """Fail unless it does, and leaves no thread behind."""
    threads = set(threading.enumerate())
    with pytest.raises(error, match=words):
        doubled(without)
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_fence_that_is_missing_is_told() -> None:
    fails("fence", RuntimeError, "without a fence")


def test_a_wait_for_nothing_is_told() -> None:
    fails("release", Deadlock, "partitions wait")


def test_a_box_that_tma_cannot_address_is_told() -> None:
    fails("alignment", RuntimeError, "no multiple of 16 bytes")
