"""Programs that work on one tile after the other: a call of so many heads that each has several, against the oracle.

The heads are copies of two, so each pair of them can be held to what the oracle says of those.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subjects import BACKENDS

import tilewise
from conformance.calls import Call, Cotangents, Draw, Result, Shape, cotangents, dense, run
from conformance.verify import compare

# Tiles of 128 rows or keys: 8 · 32 · 2 · 5 are nineteen for each multiprocessor of an H200.
BATCH, COPIES, LENGTH = 8, 32, 640
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (200, 0)},
    "softcap": {"causal": True, "softcap": 30.0},
    "repeatable": {"deterministic": True},
}


def copies(x: torch.Tensor) -> torch.Tensor:
    """Of [1, S, 2, D], or of a statistic [1, 2, S]."""
    return x.repeat(BATCH, 1, COPIES, 1) if x.dim() == 4 else x.repeat(BATCH, COPIES, 1)


def pair(x: torch.Tensor, b: int, copy: int) -> torch.Tensor:
    """One of the copies."""
    heads = slice(2 * copy, 2 * copy + 2)
    return (x[b : b + 1, :, heads] if x.dim() == 4 else x[b : b + 1, heads]).contiguous()


def verify_copies(device: str, options: dict[str, Any], head_dim: int, backend: str | None) -> None:
    draw = Draw(device)
    two: Call = dense(Shape(1, LENGTH, LENGTH, 2, 2, head_dim, head_dim), torch.bfloat16, draw, **options)
    wanted: Cotangents = cotangents(two, draw)
    many = two.with_tensors(**{name: copies(x) for name, x in two.tensors().items()})
    do, dlse = (None if x is None else copies(x) for x in wanted)
    got = run(lambda call: call.attend(tilewise, backend=backend), many, (do, dlse), ("q", "k", "v"))
    for b in range(BATCH):
        part = {name: pair(x, b, (5 * b) % COPIES) for name, x in got.items()}
        compare(two, Result(part.pop("out"), part.pop("lse"), {name[1:]: x for name, x in part.items()}), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_every_round(name: str, head_dim: int, backend: str | None) -> None:
    verify_copies("cuda", CASES[name], head_dim, backend)
