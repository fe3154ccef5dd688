"""Calls with a cache on a GPU: in CUDA graphs, without a compilation after `warmup`, in caches of 2**31 elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from subjects import BACKENDS

import tilewise
from conformance.caches import CacheCall, Result, Sizes, bits, draw_call, indexed, paged
from conformance.calls import Draw
from conformance.features import striped
from conformance.test_kvcache import rotary
from tilewise import reference
from tilewise.kvcache import FP8
from tolerance import assert_close

CAPACITY = 2048
# Batches of one size: from nothing to the capacity, with sequences that are not there.
TURNS = [(0, 0, 0, 0), (1, 0, 17, 300), (2047, 2046, 0, 128), (1500, 129, 127, 1), (2047, 2047, 2047, 2047)]
KINDS: dict[str, Callable[[Draw, tuple[int, ...]], CacheCall]] = {
    "rows": lambda d, used: _call(d, used, causal=True),
    "pages": lambda d, used: paged(_call(d, used, causal=True), 16),
    "window": lambda d, used: paged(_call(d, used, window=(700, 0), rotary=rotary(64, d, length=CAPACITY)), 64),
    "split_size": lambda d, used: paged(_call(d, used, split_size=256, sinks=d.normal(8)), 16),
    "num_splits": lambda d, used: indexed(_call(d, used, num_splits=4, softcap=9.0, softmax_max=9.0)),
    "predicate": lambda d, used: paged(_call(d, used, mask=tilewise.Predicate(striped), causal=True), 16),
    "fp8": lambda d, used: paged(_call(d, used, FP8, k_scale=torch.ones(2, device="cuda") / 2), 16),
}


def _call(draw: Draw, used: tuple[int, ...], cache_dtype: torch.dtype | None = None, **options: Any) -> CacheCall:
    sizes = Sizes(used=used, rows=1, new=1, heads_q=8, heads_kv=2, head_dim=64, head_dim_v=64, capacity=CAPACITY)
    return draw_call(sizes, torch.bfloat16, draw, cache_dtype).having(**options)


def _overwrite(call: CacheCall, other: CacheCall) -> None:
    """Give the tensors of a call the values of another's, in place."""
    pairs = [(call.q, other.q), (call.k_cache, other.k_cache), (call.v_cache, other.v_cache)]
    pairs += [(x, other.options[name]) for name, x in call.options.items() if isinstance(x, torch.Tensor)]
    for x, value in pairs:
        x.copy_(value)


def _attend(call: CacheCall, backend: str | None) -> Result:
    """The results of a call on its own caches, which change."""
    entry = tilewise.attention_with_kvcache
    out, lse = entry(call.q, call.k_cache, call.v_cache, return_lse=True, backend=backend, **call.options)
    return Result(out, lse, call.k_cache, call.v_cache)


def _check(call: CacheCall, got: Result) -> None:
    """Hold results against the oracle, for the call as it was before it ran."""
    options = {**call.options, "return_lse": True}
    arguments = (call.q, call.k_cache, call.v_cache)
    ref_out, ref_lse = reference.attention_with_kvcache(*arguments, **options)
    plain_out, plain_lse = reference.attention_with_kvcache(*arguments, **options, dtype=call.q.dtype)
    scale = max(float(x.float().nan_to_num().abs().max()) for x in (call.v_cache, call.options["v_new"]))
    assert_close("out", got.out, ref_out, plain_out, scale, call.q.dtype)
    assert_close("lse", got.lse, ref_lse, plain_lse, scale, torch.float32)
    for x, want in zip((got.k_cache, got.v_cache), reference.appended(*arguments, **call.options), strict=True):
        # Rotated keys are compared by what is computed from them.
        same = bits(x) == bits(want)
        assert bool(same.all()) or "rotary" in call.options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_replay_with_other_lengths(kind: str, backend: str | None) -> None:
    """Captured once, for sequences of one length; replayed from nothing to the capacity, with other tables too."""
    call = KINDS[kind](Draw("cuda"), TURNS[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # The second is a known call, which takes the short way.
        _attend(call, backend), _attend(call, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _attend(call, backend)
    for turn, used in enumerate(TURNS):
        other = KINDS[kind](Draw("cuda", seed=turn), used)
        _overwrite(call, other)
        graph.replay()
        torch.cuda.synchronize()
        _check(replace(call, k_cache=other.k_cache, v_cache=other.v_cache), result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_after_warmup(kind: str, backend: str | None, compiled: list[str]) -> None:
    """Whether `warmup` was given the tensors, or others that stand for them."""
    call = KINDS[kind](Draw("cuda"), TURNS[1])
    before = bits(call.k_cache).clone()
    tilewise.warmup(call.q, call.k_cache, call.v_cache, backend=backend, **call.options)
    assert torch.equal(bits(call.k_cache), before)
    compiled.clear()
    for turn, used in enumerate(TURNS):
        _attend(KINDS[kind](Draw("cuda", seed=turn), used), backend)
    tensors = {name: x for name, x in call.options.items() if isinstance(x, torch.Tensor)}
    meta = {**call.options, **{name: x.to("meta") for name, x in tensors.items()}}
    if kind in ("rows", "pages", "fp8"):
        given = (x.to("meta") for x in (call.q, call.k_cache, call.v_cache))
        tilewise.warmup(*given, device="cuda", backend=backend, **meta)
    assert not compiled


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [None, 16], ids=["rows", "pages"])
def test_addresses_beyond_2_31(page_size: int | None, backend: str | None) -> None:
    """The last row, or page, of a cache of more than 2**31 elements."""
    heads, dim, used = 8, 128, 100
    slots = 2**31 // (heads * dim) + 4096
    shape = (slots // page_size, page_size) if page_size else (slots // 2048, 2048)
    k, v = (torch.zeros(*shape, heads, dim, dtype=torch.float16, device="cuda") for _ in range(2))
    assert k.numel() > 2**31
    draw, last = Draw("cuda"), shape[0] - 1
    small = draw_call(
        Sizes(used=(used,), heads_q=16, heads_kv=heads, head_dim=dim, head_dim_v=dim), torch.float16, draw
    )
    if page_size is None:
        k[last, :used], v[last, :used] = small.k_cache[0, :used], small.v_cache[0, :used]
        where = {"cache_batch_idx": torch.tensor([last], device="cuda")}
    else:
        pages = -(-(used + 1) // page_size)
        table = torch.arange(last, last - pages, -1, device="cuda", dtype=torch.int32)[None]
        for x, cache in ((k, small.k_cache), (v, small.v_cache)):
            for i, page in enumerate(table[0].tolist()):
                x[page] = cache[0, i * page_size : (i + 1) * page_size]
        where = {"page_table": table}
    got = _attend(replace(small, k_cache=k, v_cache=v).having(**where), backend)
    ref, _ = reference.attention_with_kvcache(small.q, small.k_cache, small.v_cache, **small.options, return_lse=True)
    plain, _ = reference.attention_with_kvcache(
        small.q, small.k_cache, small.v_cache, **small.options, return_lse=True, dtype=torch.float16
    )
    assert_close("out", got.out, ref, plain, 5.0, torch.float16)
    at = (last, used) if page_size is None else (last - used // page_size, used % page_size)
    assert torch.equal(k[at], small.options["k_new"][0, 0]) and torch.equal(v[at], small.options["v_new"][0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_in_one_graph(backend: str | None) -> None:
    """A sequence grows from one token to the capacity, its length kept on the device, and nothing is read back."""
    draw, steps = Draw("cuda"), 200
    q, new = draw.normal(steps, 1, 1, 8, 64, dtype=torch.float16), draw.normal(steps, 1, 1, 2, 64, dtype=torch.float16)
    pages = torch.zeros(2, 13, 16, 2, 64, dtype=torch.float16, device="cuda")
    table = torch.randperm(13, generator=torch.Generator().manual_seed(0)).int()[None].cuda()
    length, row, key = torch.zeros(1, dtype=torch.int32, device="cuda"), q[0].clone(), new[0].clone()
    step = {"cache_seqlens": length, "page_table": table, "k_new": key, "v_new": key, "causal": True}

    def decode() -> torch.Tensor:
        out = tilewise.attention_with_kvcache(row, pages[0], pages[1], backend=backend, **step)
        length.add_(1)
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode(), decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    length.zero_()
    found = []
    for i in range(steps):
        row.copy_(q[i])
        key.copy_(new[i])
        graph.replay()
        found.append(out.clone())
    together = tilewise.attention(q[:, 0].transpose(0, 1), *[new[:, 0].transpose(0, 1)] * 2, causal=True)
    torch.testing.assert_close(torch.cat(found, dim=1), together, rtol=4e-3, atol=4e-3)
