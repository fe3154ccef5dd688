"""A forward captured in a CUDA graph: replays compute with what the tensors hold then, offsets and seeds included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from subjects import BACKENDS, CALLS, packed

import tilewise
from conformance.calls import Call, Draw, Result
from conformance.verify import compare

# Members of one number, of other lengths at each turn, whose rows fill the same tensors.
LENGTHS = [([10, 0, 190], [7, 93, 233]), ([100, 100, 0], [111, 0, 222]), ([1, 2, 197], [100, 133, 100])]


def seeded(draw: Draw, turn: int) -> Call:
    call = CALLS["dropout"](draw)
    return call.with_tensors(dropout_seed=torch.tensor(2**40 + turn, device=draw.device))


CAPTURED: dict[str, Callable[[Draw, int], Call]] = {
    "plain": lambda d, turn: CALLS["plain"](d),
    "causal": lambda d, turn: CALLS["causal"](d),
    "packed": lambda d, turn: packed(d, *LENGTHS[turn], causal=True),
    "dropout": seeded,
}


def capture(call: Call, backend: str | None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of a forward, after a first call that compiles, and where its results lie."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.attend(tilewise, backend=backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call.attend(tilewise, backend=backend)
    return graph, Result(out, lse, {})


def overwrite(call: Call, other: Call) -> None:
    """Give the tensors of a call the values of another's, in place."""
    pairs = list(zip(call.arguments(), other.arguments(), strict=True))
    pairs += [(x, other.options[name]) for name, x in call.options.items() if isinstance(x, torch.Tensor)]
    for x, value in pairs:
        x.copy_(value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CAPTURED)
def test_replay(name: str, backend: str | None) -> None:
    call = CAPTURED[name](Draw("cuda"), 0)
    graph, result = capture(call, backend)
    for turn in range(len(LENGTHS)):
        overwrite(call, CAPTURED[name](Draw("cuda", seed=turn), turn))
        graph.replay()
        torch.cuda.synchronize()
        compare(call, result, (None, None))
