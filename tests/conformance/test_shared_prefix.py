"""Cascade attention is attention: against the oracle of the same call without the split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from targets import Target
from tilewise import errors, reference
from tilewise.kvcache import FP8
from tolerance import assert_close

from .caches import CacheCall, Sizes, declines, draw_call, paged, verify_caches
from .caches import Result as CacheResult
from .calls import Draw
from .test_kvcache import rotary

PREFIX, PAGE = 40, 16
# Every row's token comes after the prefix.
DENSE = Sizes(used=(53, 40, 130), rows=2, new=2)
RAGGED = Sizes(used=(53, 40, 130), rows=(3, 0, 5), new=0)


def shared(sizes: Sizes, dtype: torch.dtype, draw: Draw, cache_dtype: torch.dtype | None = None) -> CacheCall:
    """A paged call whose sequences begin alike: whole pages are shared, the page where the prefix ends is copied."""
    call = draw_call(sizes, dtype, draw, cache_dtype)
    for cache in (call.k_cache, call.v_cache):
        raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        raw[:, :PREFIX] = raw[:1, :PREFIX].clone()
    call = paged(call, PAGE)
    table = call.options["page_table"].clone()
    table[:, : PREFIX // PAGE] = table[:1, : PREFIX // PAGE]
    return call.having(page_table=table)


OPTIONS: dict[str, Any] = {
    "plain": lambda s, d: {},
    "causal": lambda s, d: {"causal": True},
    "window_inside_the_suffix": lambda s, d: {"window": (4, 0)},
    "window_into_the_prefix": lambda s, d: {"window": (30, 0)},
    "window_over_everything": lambda s, d: {"window": (200, None), "causal": True},
    "softcap": lambda s, d: {"softcap": 3.0, "softmax_scale": 0.7},
    "alibi": lambda s, d: {"alibi_slopes": d.uniform(s.heads_q), "causal": True},
    "alibi_per_sequence": lambda s, d: {"alibi_slopes": d.uniform(s.batch, s.heads_q), "window": (30, 0)},
    "sinks": lambda s, d: {"sinks": d.normal(s.heads_q), "window": (20, 0)},
    "tree": lambda s, d: {"mask": d.bools(s.batch, s.seqlen_q, s.seqlen_q)},
    "rotary": lambda s, d: {"rotary": rotary(16, d), "causal": True},
    "rotary_interleaved": lambda s, d: {"rotary": rotary(8, d, interleaved=True), "causal": True},
    "split_size": lambda s, d: {"split_size": 128, "causal": True},
    "assumed_maximum": lambda s, d: {"softmax_max": 5.0, "causal": True},
    "unrounded": lambda s, d: {"causal": True, "return_lse": True},
}


def verify(target: Target, call: CacheCall, prefix: int = PREFIX) -> None:
    """Output, LSE and both caches against the call without a prefix."""
    if declines(target, call):
        return
    k, v = call.k_cache.clone(), call.v_cache.clone()
    options = {**call.options, "return_lse": True}
    out, lse = tilewise.attention_with_shared_prefix(call.q, k, v, prefix=prefix, **options, backend=target.name)
    arguments, dtype = (call.q, call.k_cache, call.v_cache), call.q.dtype
    ref_out, ref_lse = reference.attention_with_kvcache(*arguments, **options)
    plain_out, plain_lse = reference.attention_with_kvcache(*arguments, **options, dtype=dtype)
    scale = float(call.v_cache.float().nan_to_num().abs().max())
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close("out", out, ref_out, plain_out, scale, dtype)
    assert_close("lse", lse, ref_lse, plain_lse, scale, torch.float32)
    call.options.pop("return_lse", None)
    verify_caches(call, CacheResult(out, lse, k, v))


@pytest.mark.parametrize("sizes", [DENSE, RAGGED], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(target: Target, options: str, sizes: Sizes) -> None:
    draw = Draw(target.device)
    verify(target, shared(sizes, target.dtype, draw).having(**OPTIONS[options](sizes, draw)))


@pytest.mark.parametrize("prefix", [0, 1, 16, 32, 39])
def test_any_part_of_what_is_shared(target: Target, prefix: int) -> None:
    """A shorter prefix, at the edge of a page or not, is one too."""
    verify(target, shared(DENSE, target.dtype, Draw(target.device)).having(window=(33, 0)), prefix)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_dtypes(target: Target, dtype: torch.dtype) -> None:
    verify(target, shared(DENSE, dtype, Draw(target.device)).having(causal=True))


@pytest.mark.parametrize("rows", ["heads", "pages"])
def test_fp8(target: Target, rows: str) -> None:
    draw = Draw(target.device)
    call = shared(DENSE, torch.float16, draw, FP8)
    shape = (2,) if rows == "heads" else (call.k_cache.shape[0], 2)
    scales = {name: 2.0 ** -draw.integers(3, *shape).float() for name in ("k_scale", "v_scale")}
    if rows == "pages":
        # A copy of the page where the prefix ends has its scale.
        ends = call.options["page_table"][:, PREFIX // PAGE].long()
        for scale in scales.values():
            scale[ends] = scale[ends[:1]]
    verify(target, call.having(causal=True, **scales))


def test_nothing_appended(target: Target) -> None:
    """The rows' own keys are in the cache already, after the prefix."""
    sizes = Sizes(used=(53, 42, 130), rows=2, new=None)
    verify(target, shared(sizes, target.dtype, Draw(target.device)).having(causal=True))


def test_ragged_rows_past_the_end(target: Target) -> None:
    call = shared(RAGGED, target.dtype, Draw(target.device))
    more = {n: torch.cat([x, x[:2]]) for n, x in (("k_new", call.options["k_new"]), ("v_new", call.options["v_new"]))}
    longer = CacheCall(torch.cat([call.q, call.q[:2]]), call.k_cache, call.v_cache, call.options).having(**more)
    verify(target, longer.having(causal=True))


def _refused(change: dict[str, Any], prefix: Any, error: type[Exception], message: str) -> None:
    call = shared(DENSE, torch.float32, Draw("cpu"))
    before = call.k_cache.clone()
    with pytest.raises(error, match=message):
        tilewise.attention_with_shared_prefix(
            call.q, call.k_cache, call.v_cache, prefix=prefix, **{**call.options, **change}
        )
    assert torch.equal(call.k_cache.view(torch.uint8), before.view(torch.uint8))


def test_refusals() -> None:
    table = shared(DENSE, torch.float32, Draw("cpu")).options["page_table"].clone()
    table[1, 0] = 0 if int(table[0, 0]) else 1
    for change, prefix, error, message in (
        ({}, 41, errors.ArgumentError, "prefix: got 41; supported: at most 40, so that the rows of sequence 1"),
        ({}, -1, errors.ArgumentError, "prefix: got -1"),
        ({}, 161, errors.ArgumentError, "prefix: got 161; supported: a Python int, 0 to the capacity of 160"),
        ({"page_table": table}, PREFIX, errors.ArgumentError, "other pages for sequence 1 than for sequence 0"),
        ({"causal": "top_left"}, PREFIX, errors.UnsupportedError, "causal: got 'top_left'"),
        ({"mask": tilewise.Causal()}, PREFIX, errors.UnsupportedError, "mask: got Causal"),
        ({"score_mod": tilewise.ScoreMod(lambda s, b, h, q, k: s)}, PREFIX, errors.UnsupportedError, "score_mod"),
        ({"bias": torch.zeros(2, 2)}, PREFIX, errors.UnsupportedError, "bias"),
        ({"colour": 1}, PREFIX, TypeError, "colour"),
    ):
        _refused(change, prefix, error, message)
