"""Every feature, forward and backward, against the oracle."""

from __future__ import annotations

import pytest
import torch

from targets import Target

from .calls import Draw, Shape, dense
from .features import FEATURES
from .verify import verify

RAGGED = Shape(2, 37, 53, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=24)
TALL = Shape(1, 67, 33, heads_q=3, heads_kv=3, head_dim=40, head_dim_v=40)
# Beyond one tile of every backend, in both directions, and a multiple of none.
LARGE = Shape(1, 301, 603, heads_q=2, heads_kv=1, head_dim=64, head_dim_v=64)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
SHORT = ("fp16", "bf16")


@pytest.mark.parametrize("dtype", ["fp32", *(pytest.param(name, marks=pytest.mark.large) for name in SHORT), "fp64"])
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(target: Target, feature: str, dtype: str) -> None:
    draw = Draw(target.device)
    options = FEATURES[feature](RAGGED, DTYPES[dtype], draw)
    verify(target, dense(RAGGED, DTYPES[dtype], draw, **options))


@pytest.mark.large
@pytest.mark.parametrize("feature", FEATURES)
def test_more_queries_than_keys(target: Target, feature: str) -> None:
    draw = Draw(target.device)
    verify(target, dense(TALL, target.dtype, draw, **FEATURES[feature](TALL, target.dtype, draw)))


@pytest.mark.large
@pytest.mark.parametrize("feature", FEATURES)
def test_many_tiles(target: Target, feature: str) -> None:
    draw = Draw(target.device)
    verify(target, dense(LARGE, target.dtype, draw, **FEATURES[feature](LARGE, target.dtype, draw)))


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("feature", ["causal", "everything"])
def test_short_dtype(target: Target, feature: str, dtype: str) -> None:
    draw = Draw(target.device)
    verify(target, dense(TALL, DTYPES[dtype], draw, **FEATURES[feature](TALL, DTYPES[dtype], draw)))


@pytest.mark.parametrize("dtype", SHORT)
def test_unrounded_output(target: Target, dtype: str) -> None:
    draw = Draw(target.device)
    verify(target, dense(RAGGED, DTYPES[dtype], draw, causal=True, out_dtype=torch.float32))
