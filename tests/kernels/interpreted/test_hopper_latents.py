"""Hopper's kernel for latents: whose turn a tile is, across pieces and items, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import draw

from tilewise import hopper, masks, reference
from tilewise.cache_arguments import prepare
from tilewise.hopper.interpreter import language

NAN = float("nan")
USED = (0, 1, 63, 64, 65, 200)
CAPACITY = 256

Options = dict[str, Any]
CALLS: dict[str, Options] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (70, 0)},
    "parts": {"split_size": 128},
    "splits": {"num_splits": 2, "causal": True},
    "modified": {"softcap": 20.0, "alibi_slopes": draw(16).abs(), "sinks": draw(16), "causal": True},
    "tree": {"mask": torch.tensor([[[1, 0], [1, 1]]], dtype=torch.bool)},
    "predicate": {"mask": masks.PrefixLM(4)},
}


def latents(
    page_size: int | None, used: tuple[int, ...] = USED, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, Options]:
    """Sequences in rows or in shuffled pages, with NaN in slots that nobody uses; entries without a key are absurd."""
    cache = draw(len(used), CAPACITY, 1, 576, dtype=dtype)
    for b, n in enumerate(used):
        cache[b, n:] = NAN
    options: Options = {"cache_seqlens": torch.tensor(used, dtype=torch.int32)}
    if page_size is not None:
        width = CAPACITY // page_size
        order = torch.randperm(len(used) * width, generator=torch.Generator().manual_seed(page_size))
        pages = torch.empty(len(used) * width, page_size, 1, 576, dtype=dtype)
        pages[order] = cache.view(-1, page_size, 1, 576)
        table = order.view(len(used), width).int()
        for b, n in enumerate(used):
            table[b, -(-n // page_size) :] = 10**6 if b else -1
        cache, options["page_table"] = pages, table
    return cache, options


def run(q: torch.Tensor, cache: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the kernel."""
    problem, inputs = prepare(q, cache, cache[..., :512], **options)
    assert hopper.cache_unsupported_reasons(problem) == []
    return hopper.attend_cache(problem, inputs)


def assert_agrees(q: torch.Tensor, cache: torch.Tensor, **options: Any) -> None:
    """Fail unless output and LSE are the oracle's."""
    out, lse = run(q, cache, **options)
    exact = {name: x for name, x in options.items() if name not in ("split_size", "num_splits")}
    wide = cache.double()
    want, want_lse = reference.attention_with_kvcache(q.double(), wide, wide[..., :512], **exact, return_lse=True)
    allowed = 8 * torch.finfo(q.dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=allowed, atol=allowed)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, page_size", [*((name, 64) for name in CALLS), *(("causal", n) for n in (None, 8))])
def test_call(name: str, page_size: int | None) -> None:
    cache, options = latents(page_size)
    assert_agrees(draw(len(USED), 2, 16, 576, dtype=torch.float16), cache, **options, **CALLS[name])


@pytest.mark.parametrize("rows, heads", [(1, 128), (3, 20)])
def test_rows(rows: int, heads: int) -> None:
    """Of one tile or several, which are filled or not."""
    cache, options = latents(64, (200, 65, 1), torch.bfloat16)
    assert_agrees(draw(3, rows, heads, 576, dtype=torch.bfloat16), cache, causal=True, **options)


@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_order_warpgroups_and_memory_meet(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of odd and even numbers of tiles, some cut; references that move late, in either warpgroup."""
    monkeypatch.setattr(language, "seeds", iter(range(seed, 1000)))
    used = tuple((seed * 37 + b * 71) % (CAPACITY + 1) for b in range(4))
    cache, options = latents(None, used, torch.bfloat16)
    growth = torch.linspace(0.2, 4.0, CAPACITY)[:, None, None]
    cache *= growth.to(cache.dtype) if seed % 2 else growth.flip(0).to(cache.dtype)
    assert_agrees(draw(4, 2, 20, 576, dtype=torch.bfloat16), cache, causal=True, softmax_scale=0.1, **options)


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("slot, dim", [(63, 5), (64, 300)])
def test_what_is_not_finite_reaches_rows_that_see_it(value: float, slot: int, dim: int) -> None:
    """The rows before it stay as they are."""
    cache, options = latents(None, (slot + 1, 64))
    q = draw(2, 2, 16, 576, dtype=torch.float16)
    clean, clean_lse = run(q, cache, causal=True, **options)
    cache[0, slot, 0, dim] = value
    out, lse = run(q, cache, causal=True, **options)
    assert torch.equal(out[0, 0], clean[0, 0]) and torch.equal(lse[0, :, 0], clean_lse[0, :, 0])
    assert out[0, 1].isnan().all()
    assert torch.equal(out[1], clean[1])


def test_a_position_that_is_not_finite_is_no_value() -> None:
    """In the dims that are keys alone: rows that give it no weight have an output."""
    cache, options = latents(None, (70, 1))
    q = draw(2, 1, 16, 576, dtype=torch.float16)
    cache[0, 69, 0, 570] = float("-inf")
    q[..., 570] = q[..., 570].abs() + 1
    assert_agrees(q, cache, **options)
