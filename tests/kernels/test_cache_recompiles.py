"""Lengths, tables, batch sizes and values of calls with a cache compile nothing anew (see `test_recompiles`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from offline import Key, keys
from test_recompiles import assert_one_key, on_hopper  # noqa: F401 - a fixture

import tilewise
from tilewise import _triton, masks
from tilewise.cache_arguments import prepare
from tilewise.kvcache import FP8

Options = dict[str, Any]
HEADS, HEADS_KV, DIM = 8, 2, 64


class Size(NamedTuple):
    """One call: sequences, rows of each (at most 4), capacity, slots in use; `turn` varies values."""

    batch: int
    rows: int
    capacity: int
    used: int
    turn: int


SIZES = [Size(1, 1, 16, 0, 0), Size(2, 3, 64, 61, 1), Size(16, 4, 1024, 1, 2), Size(7, 2, 208, 200, 3)]


def _rotary(s: Size, interleaved: bool = False) -> tilewise.Rotary:
    tables = torch.empty(s.capacity + 4, DIM // 2), torch.empty(s.capacity + 4, DIM // 2)
    return tilewise.Rotary(*tables, interleaved, torch.full((s.batch,), s.turn) if interleaved else None)


def _near(b: Any, h: Any, q: Any, k: Any, far: Any) -> Any:
    return q - k < far


FEATURES: dict[str, Any] = {
    "plain": lambda s: {},
    "causal": lambda s: {"causal": True},
    "window": lambda s: {"window": (1 + 15 * s.turn, 0)},
    "modified": lambda s: {"softcap": 1.0 + s.turn, "alibi_slopes": torch.rand(HEADS), "sinks": torch.rand(HEADS)},
    "predicate": lambda s: {"mask": masks.Predicate(_near, aux=(16 * s.turn + 1,))},
    "tree": lambda s: {"mask": torch.ones(s.batch, s.rows, s.rows, dtype=torch.bool)},
    "rotated": lambda s: {"rotary": _rotary(s)},
    "rotated_in_pairs": lambda s: {"rotary": _rotary(s, interleaved=True)},
    "split_size": lambda s: {"split_size": 128 * (s.turn + 1)},
    "num_splits": lambda s: {"num_splits": s.turn + 1},
    "assumed": lambda s: {"softmax_max": float(s.turn)},
    "padded": lambda s: {"cache_leftpad": torch.zeros(s.batch, dtype=torch.int32)},
}


def caches(s: Size, page_size: int | None, dtype: torch.dtype) -> tuple[list[torch.Tensor], Options]:
    """Both caches, and the table of pages."""
    if page_size is None:
        return [torch.empty(s.batch, s.capacity, HEADS_KV, DIM, dtype=dtype) for _ in range(2)], {}
    width = -(-s.capacity // page_size)
    pages = [torch.empty(s.batch * width + s.turn, page_size, HEADS_KV, DIM, dtype=dtype) for _ in range(2)]
    return pages, {"page_table": torch.zeros(s.batch, width, dtype=torch.int32)}


def launched(s: Size, page_size: int | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[Key]:
    """The keys of a call that appends its rows."""
    (k, v), table = caches(s, page_size, dtype)
    q = torch.empty(s.batch, s.rows, HEADS, DIM, dtype=torch.bfloat16)
    new = {name: torch.empty(s.batch, s.rows, HEADS_KV, DIM, dtype=q.dtype) for name in ("k_new", "v_new")}
    seqlens = torch.full((s.batch,), s.used, dtype=torch.int32)
    problem, inputs = prepare(q, k, v, seqlens, **new, **table, **options)
    with keys() as caught:
        _triton.attend_cache(problem, inputs)
    return caught


@pytest.mark.parametrize("page_size", [None, 16], ids=["rows", "pages"])
@pytest.mark.parametrize("name", FEATURES)
def test_lengths_batches_and_values(name: str, page_size: int | None) -> None:
    calls = [launched(s, page_size, **FEATURES[name](s)) for s in SIZES]
    # Where the capacity is a single part there is nothing to merge.
    longest = max(calls, key=len)
    for i in range(len(longest)):
        assert_one_key([call[i : i + 1] for call in calls if len(call) > i])


def test_scales() -> None:
    assert_one_key([launched(s, 16, FP8, k_scale=torch.rand(s.batch, 2), v_scale=torch.rand(2)) for s in SIZES[1:]])


def test_ragged_rows() -> None:
    calls = []
    for lengths, longest in (([1], 1), ([4, 0, 1], 4), ([1] * 16, 2)):
        batch, total = len(lengths), sum(lengths)
        k, v = (torch.empty(batch, 16 * batch, HEADS_KV, DIM, dtype=torch.bfloat16) for _ in range(2))
        q = torch.empty(total, HEADS, DIM, dtype=torch.bfloat16)
        new = {name: torch.empty(total, HEADS_KV, DIM, dtype=q.dtype) for name in ("k_new", "v_new")}
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seqlens = torch.zeros(batch, dtype=torch.int32)
        problem, inputs = prepare(q, k, v, seqlens, cu_seqlens_q=offsets, max_seqlen_q=longest, causal=True, **new)
        with keys() as caught:
            _triton.attend_cache(problem, inputs)
        calls.append(caught)
    assert_one_key(calls)
