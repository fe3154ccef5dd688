"""Dropout as a pure function of position: the keep mask needs no storage and is the same on every backend.

Whether element (row i, column j) of head h of sequence b is kept, 16 bits say that are drawn by Philox-4x32-7 (Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ``keep`` = round((1 - p) * 65536) of their values do.
Kept values are multiplied by the exact inverse of the quantised probability, ``65536 / keep``, so the expectation is
unbiased. Seven rounds are the fewest with which Philox passes the tests of TestU01's BigCrush (the paper's Table 2);
its default of ten keeps a margin that a mask has no use for.

One Philox call yields four 32-bit words, which serve sixteen elements: those that one thread of a tensor-core
accumulator owns (NVIDIA ``mma``/``wgmma`` layout: columns 2t, 2t+1 of every group of eight), so that nothing is
exchanged between threads:

    counter = (row, 4 * (column // 64) + (column % 8) // 2, batch * heads_q + head, 0)
    word    = (column // 8) % 4
    half    = column % 2                      # low 16 bits first
    bits    = half, with its bytes swapped in the second 32 of 64 columns
    key     = (seed mod 2**32, seed // 2**32 mod 2**32)

GPUs compare two float16 numbers in one instruction, and two integers of 16 bits in none. So the bits are read as a
float16: those below `Cut.number` are dropped, or kept if they are the fewer. As many of all values are below it as have
to be; NaN is not below anything.

Two elements of a row, 32 columns apart, read the same 16 bits in either order. Each is kept with exactly the
probability ``keep / 65536``; that both are differs from its square by less than 0.003, for only where the first byte of
a number is that of the cut the other byte decides anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KEEP_ALL = 1 << 16
COLUMNS = 64  # what four calls cover

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_LOW_BYTES = 0x00FF00FF
_INFINITY, _SIGN = 0x7C00, 0x8000  # bits of a float16
# So many values are below 0, or below the number next to it: 0 and -0 are equal.
_BELOW_ZERO, _BELOW_NEXT = _INFINITY, _INFINITY + 2

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def keep_threshold(dropout_p: float) -> int:
    """`keep` for a drop probability in [0, 1), rounded to 1/65536; never 0, so that 1/keep exists.

    >>> keep_threshold(0.0), keep_threshold(0.25), keep_threshold(1 - 1e-9)
    (65536, 49152, 1)
    """
    keep = max(1, round((1.0 - dropout_p) * KEEP_ALL))
    # There is no cut for these two.
    none = _BELOW_ZERO + 1
    return {none: none - 1, KEEP_ALL - none: KEEP_ALL - none + 1}.get(keep, keep)


class Cut(NamedTuple):
    """What tells elements that are kept from others: the bits of a float16, and whether what is below it is dropped."""

    number: int
    drops: bool


def cut(keep: int) -> Cut:
    """The cut for a `keep` from `keep_threshold`.

    >>> cut(65536), cut(1)
    (Cut(number=64512, drops=True), Cut(number=64511, drops=False))
    """
    drops = 2 * keep >= KEEP_ALL
    below = KEEP_ALL - keep if drops else keep
    if below <= _BELOW_ZERO:
        return Cut(_SIGN | (_INFINITY - below), drops)
    return Cut(below - _BELOW_NEXT + 1, drops)


def scale(keep: int) -> float:
    """The factor on kept values: the exact inverse of the quantised keep probability."""
    return KEEP_ALL / keep


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox-4x32-7 of int64 tensors that hold 32-bit numbers and broadcast together.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
    ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # c1 and c3 keep whole 64-bit products: what is above their low word is cut off when they meet c0 and c2,
        # as are the copies of the sign that the shift brings in where a product wrapped.
        wide0, wide1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((wide1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_LOW), wide1
        c2, c3 = ((wide0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_LOW), wide0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def keep_mask(
    seed: int, batch_head: torch.Tensor, rows: torch.Tensor, columns: tuple[int, int], keep: int
) -> torch.Tensor:
    """Which elements are kept.

    Args:
        seed: int64; both 32-bit halves are the key.
        batch_head: int64 [..., 1, 1], ``batch * heads_q + head``.
        rows: int64 [M], positions inside the sequence.
        columns: the range ``[first, last)`` of keys, positions inside the sequence.
        keep: from `keep_threshold`.

    Returns:
        bool [..., M, last - first].

    Example:
        >>> head = torch.arange(2)[:, None, None]
        >>> kept = keep_mask(7, head, torch.arange(64), (0, 4096), keep_threshold(0.25))
        >>> kept.shape, round(float(kept.float().mean()), 2)
        (torch.Size([2, 64, 4096]), 0.75)
    """
    first, last = columns
    start, stop = first // COLUMNS, -(-last // COLUMNS)
    calls = torch.arange(4 * start, 4 * stop, device=rows.device)
    zero = torch.zeros(1, dtype=torch.int64, device=rows.device)
    words = philox((rows[:, None], calls, batch_head, zero), (seed & _LOW, (seed >> 32) & _LOW))
    # Stacked between group and thread, the words' halves are in the order of the columns: group, byte order, word,
    # thread, half.
    grid = torch.stack([word.unflatten(-1, (stop - start, 4)).to(torch.int32) for word in words], dim=-2)
    swapped = ((grid & _LOW_BYTES) << 8) | ((grid >> 8) & _LOW_BYTES)
    numbers = torch.stack((grid, swapped), dim=-3).flatten(-4).view(torch.float16)
    number, drops = cut(keep)
    mask = numbers < torch.tensor([number], dtype=torch.int32, device=rows.device).to(torch.int16).view(torch.float16)
    if drops:
        mask.logical_not_()
    return mask[..., first - start * COLUMNS : last - start * COLUMNS]
