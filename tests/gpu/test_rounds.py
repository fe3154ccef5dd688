"""Programs that work on one tile after the other: calls of so many heads that each has several, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from conformance.calls import Call, Draw, Shape, cotangents, dense, packed, run
from conformance.verify import compare

BACKENDS = ["triton", *(["hopper"] if torch.cuda.get_device_capability() == (9, 0) else [])]
# Tiles of 128 rows or keys: 4 · 32 · 5 are five for each multiprocessor of an H200.
BATCH, HEADS, LENGTH = 4, 32, 640
MEMBERS = ([640, 1, 300, 129, 0, 1000, 64, 500], [640, 130, 300, 1, 200, 900, 64, 600])

Options = dict[str, Any]
DENSE: dict[str, Callable[[Draw], Options]] = {
    "full": lambda d: {},
    "causal": lambda d: {"causal": True},
    "window": lambda d: {"window": (200, 0)},
    "softcap": lambda d: {"causal": True, "softcap": 30.0},
    "repeatable": lambda d: {"deterministic": True},
    "repeatable_causal": lambda d: {"causal": True, "deterministic": True},
    "dropout": lambda d: {"dropout_p": 0.2, "dropout_seed": torch.tensor(7, device=d.device)},
    "alibi": lambda d: {"causal": True, "alibi_slopes": d.uniform(HEADS)},
    "block_mask": lambda d: {"mask": tilewise.BlockMask(d.bools(1, HEADS, 5, 5), 128, 128)},
    "interval": lambda d: {"mask": _interval(d)},
}
PACKED: dict[str, Options] = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 100)}}


def _interval(draw: Draw) -> tilewise.Interval:
    rows = torch.arange(LENGTH, device=draw.device)
    return tilewise.Interval(rows - 150, rows + 90)


def verify_rounds(call: Call, draw: Draw, backend: str) -> None:
    wanted = cotangents(call, draw)
    names = ("q", "k", "v")
    compare(call, run(lambda c: c.attend(tilewise, backend=backend), call, wanted, names), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", DENSE)
def test_every_round(name: str, head_dim: int, backend: str) -> None:
    draw = Draw("cuda")
    shape = Shape(BATCH, LENGTH, LENGTH, HEADS, HEADS, head_dim, head_dim)
    verify_rounds(dense(shape, torch.bfloat16, draw, **DENSE[name](draw)), draw, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", PACKED)
def test_every_round_of_packed(name: str, head_dim: int, backend: str) -> None:
    draw = Draw("cuda")
    sizes: dict[str, Any] = {"heads": (HEADS, HEADS), "dims": (head_dim, head_dim)}
    verify_rounds(packed(*MEMBERS, draw, torch.bfloat16, **sizes, **PACKED[name]), draw, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_round_of_groups(head_dim: int, backend: str) -> None:
    draw = Draw("cuda")
    shape = Shape(2 * BATCH, LENGTH, LENGTH, HEADS, HEADS // 2, head_dim, head_dim)
    verify_rounds(dense(shape, torch.bfloat16, draw, causal=True), draw, backend)
