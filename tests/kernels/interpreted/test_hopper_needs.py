"""Gradients that Hopper's backward does not have are refused in words, however they come to be asked for."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.errors import UnsupportedError

REFUSED = pytest.raises(UnsupportedError, match="gradients of bias or ALiBi slopes")


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 40, 1, 64, dtype=torch.float16) for _ in range(3)]


def test_a_call_like_an_earlier_one_may_ask_for_more() -> None:
    q, k, v = operands()
    for learned in (False, False, True, False):
        leaf, bias = q.clone().requires_grad_(), torch.zeros(1, 40, 40, requires_grad=learned)
        if learned:
            # Before the forward pass.
            with REFUSED:
                tilewise.attention(leaf, k, v, bias=bias, backend="hopper")
        else:
            tilewise.attention(leaf, k, v, bias=bias, backend="hopper").sum().backward()
            assert leaf.grad is not None


def test_a_transform_hides_what_it_asks_for() -> None:
    q, k, v = operands()

    def total(bias: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, bias=bias, backend="hopper").sum()

    with REFUSED:
        torch.func.grad(total)(torch.zeros(1, 40, 40))
