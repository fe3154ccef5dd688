"""Closed forms of one head: N queries, N keys, head dim d, SRAM of M elements, nothing masked.

Traffic is in elements between HBM and SRAM (bytes: times the dtype's size). The exact forms equal what the textbook's
algorithms count on their machine; the leading terms and orders are what the papers state of them.

Source: FlashAttention (Dao et al., 2022), Theorems 1 and 2, Proposition 3, Appendix B; FlashAttention-2 (Dao, 2023),
Algorithms 1 and 2.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch

from .. import errors
from .calls import FORWARD
from .devices import Device
from .sizes import check


class Traffic(NamedTuple):
    """Elements read from HBM and written to it."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def plus(self, other: Traffic) -> Traffic:
        """Both, one after the other."""
        return Traffic(self.read + other.read, self.written + other.written)


def standard_forward(n: int, d: int, block_q: int | None = None) -> Traffic:
    """4N² + 4Nd: Q, K read, S written; S read, P written; P, V read, O written.

    With products in tiles of B_r rows, which read K (V) again for each: 4N² + 2Nd + 2Nd·⌈N/B_r⌉.

    >>> standard_forward(1024, 64).total == 4 * 1024**2 + 4 * 1024 * 64
    True
    """
    rows = n if block_q is None else block_q
    check(n=n, d=d, block_q=rows)
    return Traffic(read=2 * n * n + n * d + 2 * n * d * ceil(n / rows), written=2 * n * n + n * d)


def standard_backward(n: int, d: int) -> Traffic:
    """7N² + 8Nd: P, dO → dV; dO, V → dP; P, dP → dS; dS, K → dQ; dS, Q → dK."""
    check(n=n, d=d)
    return Traffic(read=5 * n * n + 5 * n * d, written=2 * n * n + 3 * n * d)


def flash_v1_forward(n: int, d: int, block_k: int) -> Traffic:
    """3Nd + 2N + T_c·(3Nd + 4N), T_c = ⌈N/B_c⌉: O, m, ℓ are set, and read and written again for each tile of K.

    >>> flash_v1_forward(1024, 64, 384).total
    800768
    """
    check(n=n, d=d, block_k=block_k)
    steps = ceil(n / block_k)
    return Traffic(read=2 * n * d + steps * (2 * n * d + 2 * n), written=n * d + 2 * n + steps * (n * d + 2 * n))


def flash_v1_backward(n: int, d: int, block_k: int) -> Traffic:
    """5Nd + T_c·(5Nd + 2N): for each tile of K, Q, O, dO, m, ℓ are read and dQ is read and written."""
    check(n=n, d=d, block_k=block_k)
    steps = ceil(n / block_k)
    return Traffic(read=2 * n * d + steps * (4 * n * d + 2 * n), written=3 * n * d + steps * n * d)


def flash_v2_forward(n: int, d: int, block_q: int) -> Traffic:
    """2Nd·⌈N/B_r⌉ + 2Nd + N: each tile of Q reads all of K and V; O and L are written once.

    >>> flash_v2_forward(1024, 64, 384).total
    525312
    """
    check(n=n, d=d, block_q=block_q)
    return Traffic(read=n * d + 2 * n * d * ceil(n / block_q), written=n * d + n)


def flash_v2_backward(n: int, d: int, block_q: int, block_k: int, loop: str = "outer_keys") -> Traffic:
    """The backward of version 2 in its three loops, with D = rowsum(dO∘O) computed before: 2Nd + N of each.

    outer_keys 7Nd + N + T_c·(4Nd + 2N); outer_rows 7Nd + 3N + 6Nd·T_r; separate 9Nd + 3N + T_c·(2Nd + 2N) + 2Nd·T_r.

    Raises:
        tilewise.errors.ArgumentError: another `loop`, or a size that is not positive.

    >>> [flash_v2_backward(1024, 64, 128, 256, loop).total for loop in ("outer_keys", "outer_rows", "separate")]
    [1516544, 3607552, 2173952]
    """
    check(n=n, d=d, block_q=block_q, block_k=block_k)
    t_r, t_c, nd = ceil(n / block_q), ceil(n / block_k), n * d
    delta = Traffic(read=2 * nd, written=n)
    if loop == "outer_keys":
        return delta.plus(Traffic(read=2 * nd + t_c * (3 * nd + 2 * n), written=3 * nd + t_c * nd))
    if loop == "outer_rows":
        return delta.plus(Traffic(read=2 * nd + 2 * n + 4 * nd * t_r, written=3 * nd + 2 * nd * t_r))
    if loop == "separate":
        read = 4 * nd + 2 * n + t_c * (2 * nd + 2 * n) + 2 * nd * t_r
        return delta.plus(Traffic(read=read, written=3 * nd))
    errors.fail(errors.ArgumentError, "loop", repr(loop), "outer_keys, outer_rows, separate", "name one of these")


def flash_v2_visited(n: int, d: int, block_k: int, visited: int) -> Traffic:
    """2Nd + N + 2·B_c·d for each visited tile: version 2 where a mask leaves tiles out, B_c dividing N.

    >>> causal = 4 * 5 // 2                                       # T(T + 1)/2 of T² tiles, B_r = B_c = N/4
    >>> flash_v2_visited(1024, 64, 256, causal).total, flash_v2_forward(1024, 64, 256).total
    (459776, 656384)
    """
    check(n=n, d=d, block_k=block_k)
    return Traffic(read=n * d + 2 * block_k * d * visited, written=n * d + n)


def flash_v2_leading(n: int, d: int, m: int) -> float:
    """8N²d²/M + 2Nd: the form above at B_r = M/4d, without rounding and without L."""
    check(n=n, d=d, m=m)
    return 8 * n * n * d * d / m + 2 * n * d


def flash_order(n: int, d: int, m: int) -> float:
    """N²d²/M, the order of every flash variant (Theorem 2); constants differ by variant."""
    check(n=n, d=d, m=m)
    return n * n * d * d / m


def speedup_leading(d: int, m: int) -> float:
    """M/2d²: 4N² of standard attention over 8N²d²/M, the ratio of traffic for long sequences.

    >>> round(speedup_leading(64, 96_000), 1), speedup_leading(100, 100_000)
    (11.7, 5.0)
    """
    check(d=d, m=m)
    return m / (2 * d * d)


def lower_bound(n: int, d: int, m: int) -> int:
    """Elements that every algorithm moves which holds rows whole and writes no scores.

    The larger of two counts. Inputs and output cross once: 4Nd. And in a phase of 2M transfers at most 4M elements can
    take part (M there before, M left behind, 2M moved), so at most 2M/d rows of Q (each with one of O) and of K (each
    with one of V), hence (M/d)² pairs, and M more whose score was kept on chip from before: at least
    2M·(⌈N²/((M/d)² + M)⌉ - 1), about 2N²d²/M for d² well below M. docs/exercises.md argues it step by step.

    >>> lower_bound(4096, 64, 98_304), flash_v2_forward(4096, 64, 768).total
    (1179648, 3674112)
    """
    check(n=n, d=d, m=m)
    pairs = m * m // (d * d) + m
    return max(4 * n * d, 2 * m * (-(-n * n // pairs) - 1))


def standard_memory(n: int, d: int) -> int:
    """2N² + 4Nd: S and P beside Q, K, V and O."""
    check(n=n, d=d)
    return 2 * n * n + 4 * n * d


def flash_memory(n: int, d: int) -> int:
    """4Nd + N: Q, K, V, O and L = m + log ℓ (version 1 keeps m and ℓ: 4Nd + 2N)."""
    check(n=n, d=d)
    return 4 * n * d + n


def matmul_flops(n: int, d: int, pass_: str = FORWARD, recompute: bool = True) -> int:
    """4N²d forward; backward 8N²d, and 2N²d more where S is recomputed.

    >>> matmul_flops(1, 1), matmul_flops(1, 1, "backward"), matmul_flops(1, 1, "backward", recompute=False)
    (4, 10, 8)
    """
    check(n=n, d=d)
    products = 2 if pass_ == FORWARD else 4 + recompute
    return 2 * products * n * n * d


def intensity(flops: float, elements: float, itemsize: int = 2) -> float:
    """FLOPs per byte.

    >>> n, d = 1 << 20, 64                                   # standard attention: d/2 for long sequences, in fp16
    >>> round(intensity(matmul_flops(n, d), standard_forward(n, d).total), 1)
    32.0
    """
    return flops / (elements * itemsize)


class Floor(NamedTuple):
    """Milliseconds that a device needs at least, for the products and for the bytes."""

    arithmetic_ms: float
    memory_ms: float

    @property
    def ms(self) -> float:
        """The longer of the two: they overlap at best."""
        return max(self)

    @property
    def bound(self) -> str:
        """Which of the two decides."""
        return "arithmetic" if self.arithmetic_ms >= self.memory_ms else "memory"


def floor(flops: float, elements: float, on: Device, dtype: torch.dtype = torch.float16) -> Floor:
    """Time floors of some work on a device.

    >>> from tilewise.roofline import device
    >>> n, d = 4096, 64
    >>> floor(matmul_flops(n, d), standard_forward(n, d).total, device("a100-40gb")).bound
    'memory'
    >>> floor(matmul_flops(n, d), flash_v2_forward(n, d, 384).total, device("a100-40gb")).bound
    'arithmetic'
    """
    moved = elements * dtype.itemsize
    return Floor(1e3 * flops / (on.tflops(dtype) * 1e12), 1e3 * moved / (on.hbm_tb_s * 1e12))
