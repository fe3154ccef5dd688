"""Memory: forward and backward hold O(S·D), whatever the call asks for; no allocation is as large as a map of S × S."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tilewise
from tilewise import BlockMask, Document, Predicate, PrefixLM, ScoreMod, Window

SHORT, LONG = 1024, 2048


class Usage(NamedTuple):
    """Bytes, of all allocations that PyTorch made on the CPU, its own kernels' included."""

    peak: int
    largest: int


def usage(run: Callable[[], Any]) -> Usage:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return Usage(peak, max(event.nbytes() for event in events))


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 3 == 0


def halved(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * 0.5


def dhalved(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return ds * 0.5


# Options of a call over n rows and n keys.
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "causal": lambda n: {"causal": True},
    "bias_over_rows": lambda n: {"bias": leaf(1, 1, 1, n).detach()},
    "bias_gradient": lambda n: {"bias": leaf(1, 1, 1, n)},
    "softcap": lambda n: {"softcap": 3.0},
    "dropout": lambda n: {"dropout_p": 0.1, "dropout_seed": 1, "window": (200, 0)},
    "window": lambda n: {"window": (100, 0)},
    "alibi_and_sinks": lambda n: {"alibi_slopes": leaf(2), "sinks": leaf(2), "causal": True},
    "document": lambda n: {"mask": Document.from_lengths([n // 3, n // 2, n - n // 3 - n // 2])},
    "scattered_document": lambda n: {"mask": Document(torch.arange(n) % 3)},
    "blocks": lambda n: {"mask": BlockMask.longformer(n, block=64)},
    "either": lambda n: {"mask": Window(50, 0) | PrefixLM(50)},
    "predicate": lambda n: {"mask": Predicate(near), "causal": True},
    "score_mod": lambda n: {"score_mod": ScoreMod(halved, dhalved), "causal": True},
    "unrounded": lambda n: {"out_dtype": torch.float32},
}


def dense(n: int, heads_kv: int, options: dict[str, Any], with_lse: bool) -> Usage:
    inputs = leaf(1, n, 2, 16), leaf(1, n, heads_kv, 16), leaf(1, n, heads_kv, 16)

    def run() -> None:
        out, lse = tilewise.attention(*inputs, return_lse=True, **options)
        (out.sum() + lse.sum() if with_lse else out.sum()).backward()

    return usage(run)


def packed(n: int) -> Usage:
    x = leaf(n, 2, 16)
    offsets = torch.tensor([0, n // 4, n // 4, n])
    used = torch.tensor([n // 4, 0, n // 2])

    def run() -> None:
        tilewise.attention_varlen(
            x, x, x, offsets, offsets, max_seqlen_q=n, max_seqlen_k=n, seqused_k=used, causal=True
        ).sum().backward()

    return usage(run)


def assert_linear(short: Usage, long: Usage) -> None:
    # A map of bytes over rows and keys would be larger, whatever its dtype.
    assert long.largest < LONG * LONG
    assert long.peak < 2.1 * short.peak


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    assert_linear(*(dense(n, 2, OPTIONS[name](n), with_lse=False) for n in (SHORT, LONG)))


@pytest.mark.parametrize("heads_kv, with_lse", [(1, False), (1, True), (2, True)], ids=["gqa", "gqa_lse", "lse"])
def test_grouped_heads_and_lse(heads_kv: int, with_lse: bool) -> None:
    assert_linear(*(dense(n, heads_kv, {}, with_lse) for n in (SHORT, LONG)))


def test_packed_sequences() -> None:
    assert_linear(packed(SHORT), packed(LONG))


def test_the_measure_sees_a_matrix_of_scores() -> None:
    q = leaf(1, 2, LONG, 16)
    assert usage(lambda: (q @ q.mT).softmax(-1) @ q).largest >= LONG * LONG
