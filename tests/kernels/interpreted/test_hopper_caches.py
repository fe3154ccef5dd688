"""Hopper's kernel for caches, whose boxes and rings depend on sizes that the conformance suite does not vary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import draw

from tilewise import cpu, hopper
from tilewise.cache_arguments import prepare
from tilewise.hopper.interpreter import language

NAN = float("nan")
USED = (300, 0, 77)


def sequences(page_size: int | None, heads_kv: int = 2) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Three sequences of `USED` keys with NaN behind them, in rows or in shuffled pages; unused entries are absurd."""
    caches = [draw(3, 384, heads_kv, 64, dtype=torch.float16, seed=i) for i in (1, 2)]
    for x in caches:
        for b, n in enumerate(USED):
            x[b, n:] = NAN
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(USED, dtype=torch.int32)}
    if page_size is not None:
        width = 384 // page_size
        order = torch.randperm(3 * width, generator=torch.Generator().manual_seed(page_size))
        pages = [torch.empty(3 * width, page_size, heads_kv, 64, dtype=x.dtype) for x in caches]
        for pool, x in zip(pages, caches, strict=True):
            pool[order] = x.view(-1, page_size, heads_kv, 64)
        table = order.view(3, width).int()
        for b, n in enumerate(USED):
            table[b, -(-n // page_size) :] = 10**6 if b else -1
        caches, options["page_table"] = pages, table
    return caches, options


def assert_agrees(q: torch.Tensor, caches: list[torch.Tensor], **options: Any) -> None:
    """Fail unless output and LSE are those of the CPU backend, which computes in fp32."""
    problem, inputs = prepare(q, *caches, **options)
    assert hopper.cache_unsupported_reasons(problem) == []
    want, want_lse = cpu.attend_cache(problem, inputs)
    out, lse = hopper.attend_cache(problem, inputs)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [8, 16, 24, 48, 64, 128, 192])
def test_pages_of_any_multiple_of_eight(page_size: int) -> None:
    caches, options = sequences(page_size)
    assert_agrees(draw(3, 3, 8, 64, dtype=torch.float16), caches, causal=True, **options)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rows, heads", [(1, 2), (3, 10), (70, 4), (40, 16)])
def test_one_warpgroup_or_two(rows: int, heads: int, page_size: int | None) -> None:
    caches, options = sequences(page_size)
    assert_agrees(draw(3, rows, heads, 64, dtype=torch.float16), caches, causal=True, window=(200, 0), **options)


@pytest.mark.parametrize("seed", range(8))
def test_in_whatever_order_partitions_and_memory_meet(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More items than programs, some cut, some whole; two warpgroups agree before they rid values of NaN."""
    monkeypatch.setattr(language, "seeds", iter(range(seed, 1000)))
    (k, v), options = sequences(None)
    # A value that some of the rows see.
    v[0, 298, 1] = NAN
    q = draw(3, 33, 4, 64, dtype=torch.float16)
    problem, inputs = prepare(q, k, v, causal=True, **options)
    want, _ = cpu.attend_cache(problem, inputs)
    out, _ = hopper.attend_cache(problem, inputs)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3, equal_nan=True)
    assert out.isnan().any() and not out[:, :, :2].isnan().any()
