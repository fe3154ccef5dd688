"""From a problem to the records that kernels take. Nothing here launches or chooses."""

from __future__ import annotations

import triton
import triton.language as tl

from ..mask_algebra import TOP_LEFT
from ..problem import Problem
from ..tiles import TileConfig
from .device import Shape


def block(head_dim: int) -> int:
    """The power of two that holds a head dimension, from 32 on.

    With 16, a product as wide as 16 beside one that is wider (head dims 16 and 24, say) is garbage, or reads out of
    bounds: Triton 3.6.0 on sm_90, 16-bit inputs. Both at 16 are right, and all from 32 on.
    """
    return max(32, triton.next_power_of_2(head_dim))


def shape(problem: Problem, tile: TileConfig, want_k: bool = True, want_v: bool = True) -> Shape:
    """Compile-time sizes."""
    sizes = (problem.heads_q, problem.group_size, problem.options.align == TOP_LEFT)
    dims = (problem.head_dim, problem.head_dim_v, block(problem.head_dim), block(problem.head_dim_v))
    return Shape(*(tl.constexpr(size) for size in (*sizes, *dims, tile.block_m, tile.block_n, want_k, want_v)))
