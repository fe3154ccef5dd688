"""From a problem to the records that kernels take. Nothing here launches or chooses."""

from __future__ import annotations

from collections.abc import Collection

import triton
import triton.language as tl

from ..mask_algebra import TOP_LEFT
from ..problem import Problem
from ..tiles import TileConfig
from .device import Shape


def block(head_dim: int, beside: int = 0) -> int:
    """The power of two that holds a head dimension, from 32 on, and from 64 on beside one that is more than 32.

    Tiles that are narrower lie in shared memory in another order, which their addresses say. Where keys and values take
    turns at one place there, ptxas 12.8 adds that to a register which it never writes: the product reads anywhere
    (`tests/kernels/uniform.py` looks for it).
    """
    return max(32, triton.next_power_of_2(head_dim), min(64, triton.next_power_of_2(beside)))


def shape(problem: Problem, tile: TileConfig, wanted: Collection[str] = ()) -> Shape:
    """Compile-time sizes; `wanted` are the inputs whose gradients a kernel for several computes."""
    sizes = (problem.heads_q, problem.group_size, problem.options.align == TOP_LEFT)
    d, dv = problem.head_dim, problem.head_dim_v
    dims = (d, dv, block(d, dv), block(dv, d), tile.block_m, tile.block_n)
    wants = (name in wanted for name in ("k", "v", "alibi_slopes"))
    return Shape(*(tl.constexpr(size) for size in (*sizes, *dims, *wants)))
