"""Calls with a cache that were seen before: the same results and the same errors as the first one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewise
from conformance.caches import CacheCall, Sizes, attend, bits, draw_call, indexed, paged
from conformance.calls import Draw
from conformance.features import CURVE, striped
from conformance.test_kvcache import rotary
from targets import Target
from tilewise import cache_arguments, eager_cache, errors


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    eager_cache.forget()
    yield
    eager_cache.forget()


def _call(target: Target, **options: Any) -> CacheCall:
    return draw_call(Sizes(rows=2, new=2), target.dtype, Draw(target.device)).having(**options)


KNOWN: dict[str, Any] = {
    "causal": lambda t: _call(t, causal=True),
    "pages": lambda t: paged(_call(t, window=(20, 0)), 16),
    "indexed": lambda t: indexed(_call(t, softcap=3.0)),
    "ragged": lambda t: draw_call(Sizes(rows=(1, 0, 5), new=0), t.dtype, Draw(t.device)),
    "rotary": lambda t: _call(t, rotary=rotary(16, Draw(t.device))),
    "tree": lambda t: _call(t, mask=torch.ones(1, 2, 2, dtype=torch.bool, device=t.device).tril()),
    "mask": lambda t: _call(t, mask=tilewise.Causal() & tilewise.Window(9, 0)),
    "sinks": lambda t: _call(t, sinks=torch.zeros(4, device=t.device), num_splits=2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_second_call_skips_the_checks(target: Target, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = KNOWN[name](target)
    first = attend(target, call)
    assert len(eager_cache._calls) == 1

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a call that is known was prepared again")

    monkeypatch.setattr("tilewise.cache_api.prepare", never)
    monkeypatch.setattr(cache_arguments, "prepare", never)
    other = call.having(cache_seqlens=(call.options["cache_seqlens"] - 3).clamp(min=0))
    attend(target, other)
    again = attend(target, call)
    assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
    assert torch.equal(bits(again.k_cache), bits(first.k_cache)) and torch.equal(
        bits(again.v_cache), bits(first.v_cache)
    )


@pytest.mark.parametrize("options", [{"mask": striped}, {"score_mod": CURVE}], ids=["predicate", "score_mod"])
def test_functions_take_the_long_way(target: Target, options: dict[str, Any]) -> None:
    call = _call(target, **options)
    assert torch.equal(attend(target, call).out, attend(target, call).out)
    assert not eager_cache._calls


DIFFERENT: dict[str, dict[str, Any]] = {
    "causal": {"causal": "top_left"},
    "window": {"window": (9, 0)},
    "window_of_bools": {"window": (True, False)},
    "softcap": {"softcap": 2.0},
    "splits": {"num_splits": 1},
    "interleaved": {"rotary": True},
    "a_pair_for_a_rotary": {"rotary": (1, 2)},
    "lse_as_a_number": {"return_lse": 1},
    "negative_maximum": {"softmax_max": "high"},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_options_are_another_call(name: str) -> None:
    """What differs in anything that was checked is checked again."""
    call = _call(Target("cpu", "cpu"), causal=True)
    entry, change = tilewise.attention_with_kvcache, DIFFERENT[name]

    def run(options: dict[str, Any]) -> torch.Tensor | str:
        try:
            caches = (call.k_cache.clone(), call.v_cache.clone())
            return entry(call.q, *caches, **{**call.options, **options})
        except errors.TilewiseError as error:
            return str(error)

    if name == "interleaved":
        tables = rotary(16, Draw("cpu"))
        run({"rotary": tables})
        change = {"rotary": tilewise.Rotary(tables.cos, tables.sin, interleaved=True)}
    run({})
    run({})
    after = run(change)
    eager_cache.forget()
    alone = run(change)
    assert torch.equal(after, alone) if isinstance(after, torch.Tensor) else after == alone


def test_values_are_looked_at_anew() -> None:
    """Lengths and tables on the CPU are checked in each call, and one that is refused changes nothing."""
    call = paged(_call(Target("cpu", "cpu"), causal=True), 16)
    entry, options = tilewise.attention_with_kvcache, dict(call.options)
    entry(call.q, call.k_cache, call.v_cache, **options)
    before = bits(call.k_cache).clone()
    for change, message in (
        ({"cache_seqlens": options["cache_seqlens"] + 200}, r"cache_seqlens\[0\]: got 237"),
        ({"page_table": options["page_table"] - 100}, r"page_table\[0, 0\]: got"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            entry(call.q, call.k_cache, call.v_cache, **{**options, **change})
    assert torch.equal(bits(call.k_cache), before)
    with pytest.raises(errors.UnsupportedError, match="requires a gradient"):
        entry(call.q.clone().requires_grad_(), call.k_cache, call.v_cache, **options)
