"""Kernels on a stream of their own that shift the others in time, so that their CTAs and warps meet in other orders."""

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl

MOST_CYCLES = 40_000  # a program's longest stay, about 20 µs
LENGTHS = 64  # sets of lengths of stay, one of which a launch takes
MOST_BYTES = 32 << 20


@triton.jit
def _clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["which"])
def spin_kernel(cycles, which, PROGRAMS: tl.constexpr):
    """Each program keeps the schedulers of its SM busy for as many cycles as row `which` of `cycles` says."""
    now = _clock()
    until = now + tl.load(cycles + which * PROGRAMS + tl.program_id(0))
    while now < until:
        now = _clock()


class Disturbance:
    """Called beside each launch under test: programs that stay on some SMs for random times, and sometimes a copy."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.stream = random.Random(seed), torch.cuda.Stream()
        generator = torch.Generator("cuda").manual_seed(seed)
        self.programs = 4 * torch.cuda.get_device_properties("cuda").multi_processor_count
        shape = (LENGTHS, self.programs)
        cycles = torch.randint(MOST_CYCLES, shape, generator=generator, device="cuda", dtype=torch.int64)
        # Every other one leaves at once: who is alone on an SM shall not wait like everyone else.
        self.cycles = cycles * torch.randint(2, shape, generator=generator, device="cuda")
        self.source, self.target = (torch.zeros(MOST_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream())

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            which, warps = self.random.randrange(LENGTHS), self.random.choice((1, 4))
            spin_kernel[(self.programs,)](self.cycles, which, self.programs, num_warps=warps)
            if self.random.random() < 0.25:
                size = self.random.randrange(1, MOST_BYTES)
                self.target[:size].copy_(self.source[:size])
