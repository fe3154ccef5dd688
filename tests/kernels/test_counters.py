"""Counters that are cleared by whoever has used them: which calls share one, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tilewise.kernels import counters

GPU = torch.device("cuda", 0)


class Streams:
    """What CUDA says of the current stream; memory is the CPU's."""

    def __init__(self) -> None:
        self.current, self.capturing = 1, False
        self.cleared = 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    here = Streams()
    zeros = torch.zeros

    def cleared(*shape: int, device: Any, **options: Any) -> torch.Tensor:
        here.cleared += 1
        return zeros(*shape, **options)

    driver = SimpleNamespace(get_current_stream=lambda index: here.current)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch, "zeros", cleared)
    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "_of_streams", {})
    return here


def place() -> int:
    found = counters.take(GPU)
    assert found.shape == (counters.SIZE,) and found.dtype == torch.int32 and not found.any()
    return found.data_ptr()


def test_calls_of_a_stream_share_theirs(streams: Streams) -> None:
    first = place()
    streams.current = 2
    second = place()
    assert first != second and place() == second
    streams.current = 1
    assert place() == first and streams.cleared == 1


def test_each_captured_call_has_its_own(streams: Streams) -> None:
    """Without anything to clear in the graph, as long as the pool lasts; then each clears its own."""
    eager = place()
    streams.capturing = True
    own = [place() for _ in range(counters._POOL - 1)]
    assert len({eager, *own}) == counters._POOL and streams.cleared == 1
    assert all(address % 128 == own[0] % 128 for address in own)
    place()
    assert streams.cleared == 2
    # The next call outside of a graph provides for later ones.
    streams.capturing = False
    assert place() == eager and streams.cleared == 3
    streams.capturing = True
    assert place() not in own and streams.cleared == 3


def test_a_capture_before_all_else_clears_its_own(streams: Streams) -> None:
    streams.capturing = True
    place()
    assert streams.cleared == 1


def test_a_stream_that_is_new_when_a_pool_is_used_up_has_one(streams: Streams) -> None:
    place()
    streams.capturing = True
    for _ in range(counters._POOL + 3):
        counters.take(GPU)
    streams.current, streams.capturing = 9, False
    assert place() == place()
