"""Philox and the keep mask: known answers, statistics, and independence from how the mask is cut into tiles."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from tilewise import dropout

FULL = 0xFFFFFFFF
# kat_vectors of Random123 (Salmon et al.), philox4x32 with 7 rounds: counter, key, words. The last are digits of pi.
KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    "ones": ((FULL,) * 4, (FULL,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
}
HEADS = torch.arange(6).view(2, 3, 1, 1)
KEEP = dropout.keep_threshold(0.3)


def mask(seed: int = 5, rows: int = 70, keys: int = 130, keep: int = KEEP) -> torch.Tensor:
    return dropout.keep_mask(seed, HEADS, torch.arange(rows), (0, keys), keep)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name: str) -> None:
    counter, key, words = KNOWN_ANSWERS[name]
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    k0, k1 = key
    assert [int(word) for word in dropout.philox((c0, c1, c2, c3), (k0, k1))] == list(words)


def test_the_element_mapping() -> None:
    """Every element, one at a time, from the formula in the module's docstring."""
    seed = -(2**62) + 12345
    got = dropout.keep_mask(seed, torch.tensor([[[7]]]), torch.arange(3), (0, 67), KEEP)[0]
    for row in range(3):
        for column in range(67):
            counter = (row, 4 * (column // 64) + (column % 8) // 2, 7, 0)
            c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
            words = dropout.philox((c0, c1, c2, c3), (seed % 2**32, seed // 2**32 % 2**32))
            half = int(words[(column // 8) % 4]) >> (16 * (column % 2)) & 0xFFFF
            bits = half if column % 64 < 32 else (half & 0xFF) << 8 | half >> 8
            number, limit = struct.unpack("<2e", struct.pack("<2H", bits, dropout.cut(KEEP).number))
            assert bool(got[row, column]) == (not number < limit), (row, column)


def test_every_cut_keeps_as_many_as_it_should() -> None:
    """And two elements that share their bits are as good as independent."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    swapped = (bits & 0xFF) << 8 | bits >> 8
    numbers = bits.to(torch.int16).view(torch.float16)
    for keep in {
        *range(1, 1 << 16, 97),
        0x7FFF,
        0x8000,
        0x8001,
        *(dropout.keep_threshold(p / 100) for p in range(100)),
    }:
        number, drops = dropout.cut(keep)
        kept = (numbers < numbers[number]) != drops
        if 31745 in (keep, 65536 - keep):
            continue
        assert int(kept.sum()) == keep
        assert abs(float((kept & kept[swapped]).double().mean()) - (keep / 65536) ** 2) < 0.003, keep
    for keep in (31745, 65536 - 31745):
        assert abs(dropout.keep_threshold(1 - keep / 65536) - keep) == 1


@pytest.mark.parametrize("first, last", [(0, 1), (31, 33), (5, 128), (32, 64), (63, 63), (129, 130)])
def test_a_tile_is_a_part_of_the_whole(first: int, last: int) -> None:
    rows = torch.tensor([3, 60, 17])
    assert torch.equal(dropout.keep_mask(5, HEADS, rows, (first, last), KEEP), mask()[:, :, rows, first:last])


@pytest.mark.parametrize("p", [0.05, 0.2, 0.5, 0.9])
def test_rate_and_independence(p: float) -> None:
    """Kept with probability 1 - p; two heads, batch entries, seeds, rows or columns agree as independent ones do."""
    keep = dropout.keep_threshold(p)
    kept = mask(rows=256, keys=512, keep=keep)
    q = keep / dropout.KEEP_ALL

    def near(share: torch.Tensor, expected: float, n: int) -> bool:
        return abs(float(share) - expected) < 5.0 * math.sqrt(expected * (1 - expected) / n)

    assert near(kept.double().mean(), q, kept.numel())
    agree = q * q + (1 - q) * (1 - q)
    one = kept[0, 0]
    for other in (kept[0, 1], kept[1, 0], mask(seed=6, rows=256, keys=512, keep=keep)[0, 0]):
        assert near((one == other).double().mean(), agree, one.numel())
    for other in (one.roll(1, 0), one.roll(1, 1), one.roll(8, 1), one.roll(32, 1)):
        assert near((one == other).double().mean(), agree, one.numel())


def test_both_halves_of_the_seed_count() -> None:
    masks = [mask(seed) for seed in (0, 1, 2**32, -1, -(2**63), 2**63 - 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.parametrize("p", [0.0, 1e-9, 1e-4, 0.1, 1 / 3, 0.5, 0.9999, 1 - 1e-12])
def test_the_factor_is_the_exact_inverse(p: float) -> None:
    """Of the probability as quantised, so that the expectation is 1: keep / 65536 times the factor."""
    keep = dropout.keep_threshold(p)
    assert 1 <= keep <= dropout.KEEP_ALL and abs(keep / dropout.KEEP_ALL - (1 - p)) <= 1 / dropout.KEEP_ALL
    assert abs(Fraction(dropout.scale(keep)) * keep / dropout.KEEP_ALL - 1) < Fraction(1, 2**52)


def test_nothing_is_dropped_at_probability_zero() -> None:
    assert bool(mask(keep=dropout.keep_threshold(0.0)).all())
