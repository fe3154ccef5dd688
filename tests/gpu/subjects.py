"""What the tests of this folder call: two choices of backend, and calls that between them launch every kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from conformance import calls
from conformance.calls import Call, Draw, Shape, dense

# None is what users get: on Hopper its own kernels where they serve a pass, and Triton's for the others.
BACKENDS: list[Any] = [pytest.param("triton", id="triton"), pytest.param(None, id="best")]

_SHAPE = Shape(2, 200, 333, 4, 2, 64, 64)


def _dense(draw: Draw, **options: Any) -> Call:
    return dense(_SHAPE, torch.bfloat16, draw, **options)


def _interval(draw: Draw) -> tilewise.Interval:
    rows = torch.arange(200, device=draw.device)
    return tilewise.Interval(rows - 20, rows + 90)


def packed(draw: Draw, lengths_q: list[int], lengths_k: list[int], **options: Any) -> Call:
    """Members of these lengths, none longer than 256 rows."""
    longest = {"max_seqlen_q": 256, "max_seqlen_k": 256}
    return calls.packed(lengths_q, lengths_k, draw, torch.bfloat16, dims=(64, 64), **{**longest, **options})


CALLS: dict[str, Callable[[Draw], Call]] = {
    "plain": lambda d: _dense(d),
    "causal": lambda d: _dense(d, causal=True),
    "window": lambda d: _dense(d, window=(100, 0)),
    "bias": lambda d: _dense(d, bias=d.normal(1, 4, 200, 333, dtype=torch.bfloat16), causal=True),
    "alibi_sinks": lambda d: _dense(d, alibi_slopes=d.uniform(4), sinks=d.normal(4), causal=True),
    "dropout": lambda d: _dense(d, dropout_p=0.1, dropout_seed=torch.tensor(7, device=d.device)),
    "block_mask": lambda d: _dense(d, mask=tilewise.BlockMask(d.bools(1, 4, 2, 3), 128, 128)),
    "interval": lambda d: _dense(d, mask=_interval(d)),
    "packed": lambda d: packed(d, [10, 0, 190], [7, 93, 233], causal=True),
}
