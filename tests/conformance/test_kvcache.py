"""Each feature of a call with a cache against the oracle: contiguous, paged and ragged; one row, a few, many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from targets import Target
from tilewise import masks

from .caches import CacheCall, Sizes, draw_call, paged, verify
from .calls import Draw
from .features import CURVE, near, striped

Options = dict[str, Any]
Feature = Callable[[Sizes, torch.dtype, Draw], Options]


def rotary(
    dim: int, draw: Draw, interleaved: bool = False, dtype: torch.dtype = torch.float32, length: int = 300
) -> tilewise.Rotary:
    """Tables of the usual frequencies."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (x.to(draw.device, dtype) for x in (angles.cos(), angles.sin()))
    return tilewise.Rotary(cos, sin, interleaved)


def _positions(s: Sizes, draw: Draw) -> tilewise.Rotary:
    tables = rotary(s.head_dim, draw)
    start = torch.tensor([n + 7 * b for b, n in enumerate(s.used)], dtype=torch.int64, device=draw.device)
    return tilewise.Rotary(tables.cos, tables.sin, positions=start)


def _tree(s: Sizes, draw: Draw, batch: int) -> torch.Tensor:
    own = torch.eye(s.seqlen_q, dtype=torch.bool, device=draw.device)
    return draw.bools(batch, s.seqlen_q, s.seqlen_q) | own


# A feature is a function of sizes, dtype and source of random numbers to options.
FEATURES: dict[str, Feature] = {
    "plain": lambda s, t, d: {},
    "causal": lambda s, t, d: {"causal": True},
    "causal_top_left": lambda s, t, d: {"causal": "top_left"},
    "window": lambda s, t, d: {"window": (6, 0)},
    "window_both_sides": lambda s, t, d: {"window": (9, 3)},
    "window_ahead": lambda s, t, d: {"window": (None, 1), "causal": "top_left"},
    "softcap": lambda s, t, d: {"softcap": 3.0},
    "scale": lambda s, t, d: {"softmax_scale": 0.7, "causal": True},
    "alibi": lambda s, t, d: {"alibi_slopes": d.uniform(s.heads_q), "causal": True},
    "alibi_per_sequence": lambda s, t, d: {"alibi_slopes": d.uniform(s.batch, s.heads_q)},
    "sinks": lambda s, t, d: {"sinks": d.normal(s.heads_q, dtype=t), "causal": True},
    "sinks_and_splits": lambda s, t, d: {"sinks": d.normal(s.heads_q), "num_splits": 2},
    "sinks_and_window": lambda s, t, d: {"sinks": d.normal(s.heads_q), "window": (5, 0), "split_size": 128},
    "predicate": lambda s, t, d: {"mask": tilewise.Predicate(striped)},
    "predicate_with_aux": lambda s, t, d: {
        "mask": tilewise.Predicate(near, aux=(-9, d.integers(150, s.heads_q))) & masks.Causal()
    },
    "prefix": lambda s, t, d: {"mask": masks.PrefixLM(20)},
    "prefix_of_each": lambda s, t, d: {"mask": masks.PrefixLM(d.integers(40, s.batch))},
    "either_mask": lambda s, t, d: {"mask": (masks.Window(4, 0) | masks.PrefixLM(3)) & masks.Causal()},
    "score_mod": lambda s, t, d: {"score_mod": CURVE},
    "tree": lambda s, t, d: {"mask": _tree(s, d, s.batch)},
    "tree_shared_in_a_window": lambda s, t, d: {"mask": _tree(s, d, 1), "window": (20, 0)},
    "splits": lambda s, t, d: {"num_splits": 2, "causal": True},
    "more_splits_than_keys": lambda s, t, d: {"num_splits": 9},
    "split_size": lambda s, t, d: {"split_size": 128, "causal": True},
    "assumed_maximum": lambda s, t, d: {"softmax_max": 4.0, "causal": True},
    "assumed_far_too_low": lambda s, t, d: {"softmax_max": -1000.0, "num_splits": 2},
    "assumed_far_too_high": lambda s, t, d: {"softmax_max": 1000.0, "sinks": d.normal(s.heads_q)},
    "assumed_of_the_softcap": lambda s, t, d: {"softcap": 5.0, "softmax_max": 5.0, "window": (11, 0)},
    "rotary": lambda s, t, d: {"rotary": rotary(s.head_dim, d), "causal": True},
    "rotary_interleaved": lambda s, t, d: {"rotary": rotary(s.head_dim, d, interleaved=True), "causal": True},
    "rotary_partial": lambda s, t, d: {"rotary": rotary(s.head_dim // 2, d), "window": (12, 0)},
    "rotary_partial_interleaved": lambda s, t, d: {"rotary": rotary(6, d, interleaved=True)},
    "rotary_in_q_dtype": lambda s, t, d: {"rotary": rotary(s.head_dim, d, dtype=t)},
    "rotary_positions": lambda s, t, d: {"rotary": _positions(s, d), "causal": True},
    "everything": lambda s, t, d: {
        "causal": True,
        "window": (100, None),
        "mask": tilewise.Predicate(striped),
        "softcap": 4.0,
        "score_mod": CURVE,
        "alibi_slopes": d.uniform(s.heads_q),
        "sinks": d.normal(s.heads_q),
        "softmax_scale": 0.5,
        "rotary": rotary(s.head_dim // 2, d, interleaved=True),
        "split_size": 128,
        "softmax_max": 4.0,
    },
}
ROWS = {
    "one": Sizes(),
    "few": Sizes(rows=4, new=4),
    "ragged": Sizes(rows=(3, 0, 9), new=0),
    "chunk": Sizes(used=(0, 61), rows=70, new=70, capacity=140),
}


def _call(target: Target, rows: str, feature: str, page_size: int | None, dtype: torch.dtype) -> CacheCall:
    draw = Draw(target.device)
    call = draw_call(ROWS[rows], dtype, draw)
    call = call if page_size is None else paged(call, page_size)
    return call.having(**FEATURES[feature](ROWS[rows], dtype, draw))


@pytest.mark.parametrize("page_size", [None, 16], ids=["rows", "pages"])
@pytest.mark.parametrize("rows", ["few", "ragged"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(target: Target, feature: str, rows: str, page_size: int | None) -> None:
    verify(target, _call(target, rows, feature, page_size, target.dtype))


@pytest.mark.large
@pytest.mark.parametrize("rows", ["one", "chunk"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_one_row_and_of_many(target: Target, feature: str, rows: str) -> None:
    verify(target, _call(target, rows, feature, 16, target.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("feature", ["causal", "rotary", "everything"])
def test_dtypes(target: Target, feature: str, dtype: torch.dtype) -> None:
    verify(target, _call(target, "few", feature, 16, dtype))


def test_unrounded_output(target: Target) -> None:
    verify(target, _call(target, "few", "causal", 16, torch.float16).having(out_dtype=torch.float32))


@pytest.mark.parametrize("page_size", [None, 16], ids=["rows", "pages"])
@pytest.mark.parametrize("rows", ["one", "ragged"])
def test_nothing_appended(target: Target, rows: str, page_size: int | None) -> None:
    """The rows are the newest keys, which are in the cache already."""
    draw, sizes = Draw(target.device), ROWS[rows]
    call = draw_call(sizes, target.dtype, draw)
    for name in ("k_new", "v_new"):
        call.options.pop(name)
    call = call if page_size is None else paged(call, page_size)
    verify(target, call.having(causal=True, rotary=rotary(16, draw)))
