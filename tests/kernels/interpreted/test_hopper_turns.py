"""dq of tiles of keys that take turns: every bit the same, however programs and TMA happen to meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.hopper import gradients as hopper_gradients
from tolerance import assert_close

TIMES = 3


def inputs(rows: int, keys: int, heads: int, heads_kv: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    sizes = [(rows, heads), (keys, heads_kv), (keys, heads_kv), (rows, heads)]
    return tuple(torch.randn(1, *size, head_dim, dtype=torch.float16) for size in sizes)


def gradients_of(attend: Any, q: Any, k: Any, v: Any, do: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(*given, **options), given, do)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((256, 384, 1, 1, 64), {}),
        ((384, 384, 2, 1, 64), {"causal": True}),
        ((256, 256, 1, 1, 128), {"causal": True}),
        ((250, 500, 2, 2, 64), {"window": (200, 30)}),
    ],
    ids=str,
)
def test_bits_repeat(sizes: tuple[int, int, int, int, int], options: dict[str, Any]) -> None:
    given = inputs(*sizes)
    asked = {"backend": "hopper", "deterministic": True, **options}
    first, *others = (gradients_of(tilewise.attention, *given, **asked) for _ in range(TIMES))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    exact = gradients_of(reference.attention, *(x.double() for x in given), **options)
    plain = gradients_of(tilewise.attention, *given, backend="cpu", **options)
    for name, *three in zip(("dq", "dk", "dv"), first, exact, plain, strict=True):
        assert_close(name, *three, scale=1.0, dtype=torch.float16)


def test_without_turns_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter draws orders whose sums differ, so that the test above tests something."""
    monkeypatch.setattr(hopper_gradients, "FEW_KEYS", 0)
    given = inputs(128, 1024, 1, 1, 64)
    first, *others = (gradients_of(tilewise.attention, *given, backend="hopper") for _ in range(TIMES))
    assert any(not torch.equal(first[0], other[0]) for other in others)
