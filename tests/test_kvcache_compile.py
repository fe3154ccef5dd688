"""Calls with a cache under torch.compile: one graph, whatever the lengths; caches are written in place, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise
from conformance.caches import CacheCall, Sizes, bits, draw_call, indexed, paged
from conformance.calls import Draw
from conformance.features import CURVE, near, striped
from conformance.test_kvcache import rotary
from test_compile import Compiled
from tilewise.cache_arguments import prepare


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=32):
        yield
    torch._dynamo.reset()


def attend(call: CacheCall, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tilewise.attention_with_kvcache(call.q, k, v, return_lse=True, **call.options)


SIZES = Sizes(rows=3, new=3)


def _call(**options: Any) -> CacheCall:
    return draw_call(SIZES, torch.float32, Draw("cpu")).having(**options)


def _tree() -> torch.Tensor:
    return torch.ones(3, 3, dtype=torch.bool).tril().expand(3, 3, 3)


CALLS: dict[str, Callable[[], CacheCall]] = {
    "causal": lambda: _call(causal=True),
    "pages": lambda: paged(_call(window=(20, 0)), 16),
    "indexed": lambda: indexed(_call(softcap=3.0, softmax_max=3.0)),
    "ragged": lambda: paged(draw_call(Sizes(rows=(1, 0, 5), new=0), torch.float32, Draw("cpu")), 16),
    "rotary": lambda: _call(rotary=rotary(16, Draw("cpu")), causal=True),
    "tree": lambda: _call(mask=_tree(), split_size=128),
    "predicate": lambda: _call(mask=striped, sinks=torch.zeros(4)),
    "predicate_with_aux": lambda: _call(mask=tilewise.Predicate(near, aux=(-9, torch.arange(4)))),
    "score_mod": lambda: _call(score_mod=CURVE, alibi_slopes=torch.ones(4)),
    "read": lambda: draw_call(Sizes(new=None), torch.float32, Draw("cpu")).having(causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_compiled_is_eager(name: str) -> None:
    """One graph; the same results and the same caches, bit for bit; the second call sees what the first wrote."""
    call = CALLS[name]()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor) -> torch.Tensor:
        here = CacheCall(q * 1.0, k, v, {**call.options, "cache_seqlens": seqlens})
        first, lse = attend(here, k, v)
        second, _ = attend(here.having(cache_seqlens=seqlens + 1), k, v)
        return first + second + lse.exp().sum()

    compiled = Compiled(step)
    for seqlens in (call.options["cache_seqlens"], (call.options["cache_seqlens"] - 4).clamp(min=0)):
        caches = [[x.nan_to_num() for x in (call.k_cache, call.v_cache)] for _ in range(2)]
        got, expected = (f(call.q, *own, seqlens) for f, own in zip((compiled, step), caches, strict=True))
        assert torch.equal(got, expected)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(*caches, strict=True))
    assert compiled.graphs == 1


def test_lengths_of_any_value_are_one_graph() -> None:
    """Decoding token by token: nothing depends on the lengths; prompts of two lengths make one more graph."""
    k, v = torch.zeros(2, 2, 64, 2, 16)

    def step(q: torch.Tensor, new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return tilewise.attention_with_kvcache(q, k, v, cache_seqlens=n, k_new=new, v_new=new, causal=True)

    compiled, n = Compiled(step), torch.zeros(2, dtype=torch.int32)
    for tokens in (5, 7, 1, 1, 1, 9, 6):
        q, new = torch.randn(2, tokens, 4, 16), torch.randn(2, tokens, 2, 16)
        own = [x.clone() for x in (k, v)]
        expected = step(q, new, *own, n)
        assert torch.equal(compiled(q, new, k, v, n), expected)
        assert torch.equal(k, own[0])
        n = n + tokens
    # One for the first length, one for lengths in general, one for a single token.
    assert compiled.graphs <= 3


@pytest.mark.parametrize("name", ["causal", "pages", "ragged", "rotary", "read"])
def test_operators(name: str) -> None:
    """Schema (what is mutated), fake results and tracing, as PyTorch itself checks them."""
    call = CALLS[name]()
    options = dict(call.options)
    seqlens = options.pop("cache_seqlens")
    posed, inputs = prepare(call.q, call.k_cache.nan_to_num(), call.v_cache.nan_to_num(), seqlens, **options)
    extras: list[torch.Tensor] = []
    spec = posed.options.encode(extras)
    operator = torch.ops.tilewise.append_and_attend_cache if posed.appends else torch.ops.tilewise.attend_cache
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (*inputs, extras, spec, repr(tuple(posed.static)), posed.attention.seqlen_q)
    torch.library.opcheck(operator.default, arguments, test_utils=checks)


@pytest.mark.parametrize("name", CALLS)
def test_fake_results_have_the_real_layout(name: str) -> None:
    call = CALLS[name]()
    real = attend(call, call.k_cache.clone(), call.v_cache.clone())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = attend(call, mode.from_tensor(call.k_cache), mode.from_tensor(call.v_cache))
    for x, y in zip(fake, real, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_refusals_inside_a_graph() -> None:
    call = _call(num_splits=0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="num_splits: got 0"):
        Compiled(lambda q: attend(call, call.k_cache, call.v_cache)[0])(call.q)
