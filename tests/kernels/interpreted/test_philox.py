"""The random numbers of kernels are those of `tilewise.dropout`, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewise import dropout
from tilewise.kernels import philox


@triton.jit
def _words_kernel(out, seed, c2, ROWS: tl.constexpr, CALLS: tl.constexpr):
    rows, calls = tl.arange(0, ROWS), tl.arange(0, CALLS)
    key = tl.load(seed)
    # Beside small positions, some that use all of 32 bits.
    c0, c1 = (rows * 0x1F123BB5)[:, None].to(tl.uint32), (calls * 0x2545F491)[None, :].to(tl.uint32)
    words = philox.words(key.to(tl.uint32), (key >> 32).to(tl.uint32), c0, c1, c2.to(tl.uint32))
    at = out + rows[:, None] * CALLS + calls[None, :]
    for n in tl.static_range(4):
        tl.store(at + n * ROWS * CALLS, words[n].to(tl.int32, bitcast=True))


def test_words() -> None:
    rows, calls, c2 = 16, 8, 77
    for seed in (0, 3, -1, 0x1234_5678_9ABC_DEF0):
        out = torch.empty(4, rows, calls, dtype=torch.int32)
        _words_kernel[(1,)](out, torch.tensor(seed), c2, rows, calls)
        c0 = (torch.arange(rows) * 0x1F123BB5 & 0xFFFFFFFF)[:, None]
        c1 = (torch.arange(calls) * 0x2545F491 & 0xFFFFFFFF)[None, :]
        key = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        wanted = dropout.philox((c0, c1, torch.tensor(c2), torch.tensor(0)), key)
        for got, word in zip(out, wanted, strict=True):
            assert torch.equal(got.long() & 0xFFFFFFFF, word.expand(rows, calls))
