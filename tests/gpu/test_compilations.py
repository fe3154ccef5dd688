"""Kernels that are compiled on a GPU: one for each feature, whatever the lengths and values (see test_recompiles)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import tilewise
from conformance.calls import Call, run
from variations import FEATURES, PACKED, PACKED_LENGTHS, SIZES, packed, tensors

# Hopper's own kernels drop a window's bound that lies past every key, so windows are left to the other backend.
BEST = ["plain", "causal", "scale"]


def forward_and_backward(call: Call, backend: str | None) -> None:
    """Both passes, every gradient wanted."""

    def attend(c: Call) -> tuple[torch.Tensor, torch.Tensor]:
        return c.attend(tilewise, backend=backend)

    with torch.no_grad():
        out, lse = attend(call)
    run(attend, call, (torch.randn_like(out), torch.randn_like(lse)))


def calls(name: str) -> list[Call]:
    """Calls with a feature, which differ in lengths, batch and values alone."""
    made = []
    with torch.device("cuda"):
        for size in SIZES:
            q, k, v = tensors(size)
            made.append(Call(q, k, v, FEATURES[name](size)))
    return made


def packed_calls(name: str) -> list[Call]:
    made = []
    with torch.device("cuda"):
        for lengths in PACKED_LENGTHS:
            (q, k, v, *cu), longest = packed(*lengths)
            made.append(Call(q, k, v, {**longest, **PACKED[name]()}, (cu[0], cu[1])))
    return made


def assert_compiled_once(made: list[Call], compiled: list[str], backend: str | None) -> None:
    """Fail if any call but the first compiles."""
    first, *others = made
    forward_and_backward(first, backend)
    compiled.clear()
    for call in others:
        forward_and_backward(call, backend)
    assert not compiled


@pytest.mark.parametrize("name", FEATURES)
def test_lengths_batches_and_values(name: str, compiled: list[str]) -> None:
    assert_compiled_once(calls(name), compiled, "triton")


@pytest.mark.parametrize("name", BEST)
def test_the_best_backend(name: str, compiled: list[str]) -> None:
    made = calls(name)
    # Calls of few rows stack the heads of a group, in a kernel of their own.
    few = min(made, key=lambda call: call.q.shape[1])
    forward_and_backward(few, None)
    assert_compiled_once(made, compiled, None)


@pytest.mark.parametrize("name", PACKED)
def test_packed_lengths(name: str, compiled: list[str]) -> None:
    assert_compiled_once(packed_calls(name), compiled, "triton")


@triton.jit
def store_number(x: tl.tensor, N: tl.constexpr) -> None:
    tl.store(x, N)


def test_the_count_sees_a_compilation(compiled: list[str]) -> None:
    for number in (3, 3, 4):
        store_number[(1,)](torch.zeros(1, device="cuda"), number)
    assert compiled == ["store_number"] * 2
