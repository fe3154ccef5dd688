"""`warmup` checks a call without serving it, and what it runs on a GPU leaves the caches as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from conformance.caches import CacheCall, Sizes, bits, draw_call, indexed, paged
from conformance.calls import Draw
from conformance.features import striped
from tilewise import errors
from tilewise.cache_arguments import prepare
from tilewise.kvcache import FP8
from tilewise.warming import run

CALLS: dict[str, Callable[[], CacheCall]] = {
    "rows": lambda: draw_call(Sizes(rows=3, new=3), torch.float32, Draw("cpu")),
    "indexed": lambda: indexed(draw_call(Sizes(rows=3, new=3), torch.float32, Draw("cpu"))),
    "pages": lambda: paged(draw_call(Sizes(rows=20, new=20), torch.float32, Draw("cpu")), 16),
    "ragged": lambda: paged(draw_call(Sizes(rows=(1, 0, 5), new=0), torch.float32, Draw("cpu")), 4),
    "fp8": lambda: paged(draw_call(Sizes(), torch.float16, Draw("cpu"), FP8), 16),
    "padded": lambda: draw_call(Sizes(pad=(3, 0, 5)), torch.float32, Draw("cpu")),
    "read": lambda: draw_call(Sizes(new=None), torch.float32, Draw("cpu")).having(mask=striped),
}


@pytest.mark.parametrize("name", CALLS)
def test_caches_are_put_back(name: str) -> None:
    call = CALLS[name]()
    options = dict(call.options)
    posed, inputs = prepare(call.q, call.k_cache, call.v_cache, options.pop("cache_seqlens"), **options)
    before = [bits(x).clone() for x in (call.k_cache, call.v_cache)]
    run(posed, inputs)
    assert all(torch.equal(bits(x), y) for x, y in zip((call.k_cache, call.v_cache), before, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_tensors_or_what_stands_for_them(name: str) -> None:
    call = CALLS[name]()
    tilewise.warmup(call.q, call.k_cache, call.v_cache, **call.options)
    meta: dict[str, Any] = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call.options.items()}
    tensors = [x.to("meta") for x in (call.q, call.k_cache, call.v_cache)]
    tilewise.warmup(*tensors, device="cpu", **meta)
    with pytest.raises(errors.ArgumentError, match="device: got none, for tensors on the meta device"):
        tilewise.warmup(*tensors, **meta)


def test_refusals_are_those_of_the_call() -> None:
    call = CALLS["rows"]()
    with pytest.raises(errors.ArgumentError, match="num_splits: got 0"):
        tilewise.warmup(call.q, call.k_cache, call.v_cache, **call.options, num_splits=0)
    with pytest.raises(errors.UnsupportedError, match="hopper"):
        tilewise.warmup(call.q, call.k_cache, call.v_cache, **call.options, backend="hopper")
    with pytest.raises(errors.ArgumentError, match="device: got cuda"):
        tilewise.warmup(call.q, call.k_cache, call.v_cache, **call.options, device="cuda")
