"""Passes captured in a CUDA graph: replays compute with what the tensors hold then, offsets and seeds included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from subjects import BACKENDS, CALLS, packed

import tilewise
from conformance.calls import Call, Cotangents, Draw, Result, cotangents, run
from conformance.verify import compare

# Members of one number, of other lengths at each turn, whose rows fill the same tensors.
LENGTHS = [([10, 0, 190], [7, 93, 233]), ([100, 100, 0], [111, 0, 222]), ([1, 2, 197], [100, 133, 100])]


def seeded(draw: Draw, turn: int) -> Call:
    call = CALLS["dropout"](draw)
    return call.with_tensors(dropout_seed=torch.tensor(2**40 + turn, device=draw.device))


CAPTURED: dict[str, Callable[[Draw, int], Call]] = {
    "plain": lambda d, turn: CALLS["plain"](d),
    "causal": lambda d, turn: CALLS["causal"](d),
    "interval": lambda d, turn: CALLS["interval"](d),
    "packed": lambda d, turn: packed(d, *LENGTHS[turn], causal=True),
    "dropout": seeded,
}


def capture(
    call: Call, wanted: Cotangents, backend: str | None, needs: tuple[str, ...]
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of a forward, and of the backward that `needs` asks for, after first ones that compile; its results."""

    def step() -> Result:
        return run(lambda c: c.attend(tilewise, backend=backend), call, wanted, needs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # The second is a known call, which takes the short way (docs/backends.md).
        step(), step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def overwrite(call: Call, other: Call) -> None:
    """Give the tensors of a call the values of another's, in place."""
    pairs = list(zip(call.arguments(), other.arguments(), strict=True))
    pairs += [(x, other.options[name]) for name, x in call.options.items() if isinstance(x, torch.Tensor)]
    for x, value in pairs:
        x.copy_(value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs", [(), ("q", "k", "v")], ids=["forward", "training"])
@pytest.mark.parametrize("name", CAPTURED)
def test_replay(name: str, needs: tuple[str, ...], backend: str | None) -> None:
    call = CAPTURED[name](Draw("cuda"), 0)
    wanted = cotangents(call, Draw("cuda", seed=9), "both") if needs else (None, None)
    graph, result = capture(call, wanted, backend, needs)
    for turn in range(len(LENGTHS)):
        overwrite(call, CAPTURED[name](Draw("cuda", seed=turn), turn))
        for x, value in zip(wanted, cotangents(call, Draw("cuda", seed=turn), "both"), strict=True):
            if x is not None:
                x.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        compare(call, result, wanted)


# (PyTorch 2.11 warns of itself where it imports Inductor, and of a graph that it leaves empty to keep memory alive.)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
def test_compiled_training_in_a_graph() -> None:
    """`mode="reduce-overhead"`: torch.compile captures forward and backward, and gives what eager calls give."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, causal=True, dropout_p=0.2, dropout_seed=seed, deterministic=True)

    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for turn in range(4):
        call = CAPTURED["dropout"](Draw("cuda", seed=turn), turn)
        results = []
        for function in (compiled, attend):
            inputs = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
            torch.compiler.cudagraph_mark_step_begin()
            out = function(*inputs, call.options["dropout_seed"])
            out.float().square().sum().backward()
            results.append([out.detach().clone(), *(x.grad for x in inputs)])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)
