"""Tiles that keep their output turned: values in the first dims of the keys, many rows, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import draw

from tilewise import _triton, masks, reference
from tilewise.cache_arguments import prepare
from tilewise.tiles import TileConfig

TILE = TileConfig(64, 32, 4, 1, programs=3)
HEADS, HEAD_DIM, LATENT, PAGE = 20, 80, 64, 16
USED = (130, 0, 37)

Options = dict[str, Any]
CALLS: dict[str, Options] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 0)},
    "parts": {"split_size": 128},
    "modified": {"softcap": 3.0, "alibi_slopes": draw(HEADS).abs(), "sinks": draw(HEADS)},
    "tree": {"mask": torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], dtype=torch.bool)},
    "predicate": {"mask": masks.PrefixLM(4)},
    "assumed": {"softmax_max": 2.0},
    "assumed_wrongly": {"softmax_max": -300.0, "sinks": draw(HEADS)},
}


def _latent(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor, Options]:
    """q, pages of keys, and where they are; slots and pages that nobody uses are NaN."""
    q = draw(len(USED), rows, HEADS, HEAD_DIM)
    pages = draw(30, PAGE, 1, HEAD_DIM, seed=1)
    table = torch.randperm(30, generator=torch.Generator().manual_seed(0)).view(3, 10).int()
    used = torch.tensor(USED, dtype=torch.int32)
    for b, n in enumerate(USED):
        for slot in range(n, 10 * PAGE):
            pages[table[b, slot // PAGE], slot % PAGE] = float("nan")
    return q, pages, {"cache_seqlens": used, "page_table": table}


def _check(q: torch.Tensor, pages: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem, inputs = prepare(q, pages, pages[..., :LATENT], **options)
    assert _triton.cache_launch.shared(inputs)
    out, lse = _triton.attend_cache(problem, inputs, TILE)
    exact = {name: x for name, x in options.items() if name not in ("split_size", "softmax_max")}
    wide = pages.double()
    truth, lse64 = reference.attention_with_kvcache(q.double(), wide, wide[..., :LATENT], **exact, return_lse=True)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-5, atol=2e-6, equal_nan=True)
    return out, lse


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    q, pages, where = _latent()
    _check(q, pages, **where, **CALLS[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_what_is_not_finite_reaches_rows_that_see_it(value: float) -> None:
    """In the last tile, of a causal call: the rows before it stay as they are."""
    q, pages, where = _latent()
    page, slot = where["page_table"][0, 8], 129 % PAGE
    clean, _ = _check(q, pages, **where, causal=True)
    pages[page, slot, 0, 5] = value
    out, _ = _triton.attend_cache(*prepare(q, pages, pages[..., :LATENT], **where, causal=True), TILE)
    assert torch.equal(out[0, :3], clean[0, :3])
    assert not out[0, 3].isfinite().all()
    assert torch.equal(out[1:], clean[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    q, pages, where = _latent()
    q, pages = q.to(dtype), pages.to(dtype)
    problem, inputs = prepare(q, pages, pages[..., :LATENT], **where)
    out, _ = _triton.attend_cache(problem, inputs, TILE)
    wide = pages.double()
    truth = reference.attention_with_kvcache(q.double(), wide, wide[..., :LATENT], **where)
    assert (out.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps
