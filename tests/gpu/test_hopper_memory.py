"""Memory of Hopper's backward beside inputs and results: a sum of dq in fp32 and three numbers a row, for any group."""

from __future__ import annotations

import pytest
import torch
from test_gpu_memory import drawn, usage

from tilewise import hopper
from tilewise.arguments import prepare

BATCH, LENGTH, HEADS = 2, 4096, 8
# Allocations are rounded up to 512 bytes, and there are fewer than a hundred.
ROUNDED = 100 * 512


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads_kv", [8, 2, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sum_of_dq_and_rows(head_dim: int, heads_kv: int, deterministic: bool) -> None:
    q, k, v = (drawn(BATCH, LENGTH, heads, head_dim) for heads in (HEADS, heads_kv, heads_kv))
    problem, inputs, _ = prepare(q, k, v, causal=True, deterministic=deterministic)
    out, lse = hopper.forward(problem, inputs)
    do = torch.randn_like(out)

    def run() -> tuple[torch.Tensor, ...]:
        return tuple(hopper.backward(problem, inputs, out, lse, do, None, ("q", "k", "v")).values())

    usage(run)  # a first call keeps tables
    rows = BATCH * HEADS * LENGTH
    # Above, every gradient has a kernel of its own, and nothing is added up.
    dq_sum = 4 * rows * head_dim if head_dim <= 128 else 0
    assert usage(run) <= dq_sum + 3 * 4 * rows + ROUNDED
