"""What one call costs before the GPU has it: microseconds of the host, stage by stage, as JSON.

    python benchmarks/host_path.py --backend hopper > host.json

A call so small that the GPU is never behind is repeated; what is timed is the Python thread, in short runs of which the
fastest counts (others share the machine). Stages are of a call like an earlier one (docs/backends.md): `key` finds it,
`memory` takes the results', `launch` puts addresses into place and hands the kernel to the driver, of which `driver` is
Triton's C function and all below it. `replay` holds the last three, `attention` everything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

import tilewise
from tilewise import eager
from tilewise.bench import machine

# Calls in a run; the driver queues about a thousand launches before it makes the host wait.
CALLS = 200


def microseconds(call: Callable[[], object], runs: int) -> float:
    """Host time of one call, the fastest of `runs`."""
    best = float("inf")
    for run in range(-1, runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        spent = time.perf_counter() - start
        if run >= 0:
            best = min(best, spent)
    torch.cuda.synchronize()
    return round(best / CALLS * 1e6, 2)


def stages(tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The parts of a known call, each on its own; nothing where it is not replayed."""
    seen: list[tuple[Any, ...]] = []
    find = eager.find
    with mock.patch.object(eager, "find", lambda *given: seen.append(given) or find(*given)):
        tilewise.attention(*tensors, **options)
    (asked,) = seen
    _, known = find(*asked)
    parts: dict[str, Callable[[], object]] = {"key": lambda: find(*asked)}
    replay = getattr(known and known.forward, "_replay", None)
    if known is None or replay is None:
        return parts
    held = [*asked[0], *(allocate(*what) for allocate, *what, _ in replay._memory)]
    stream = replay._current_stream(replay._index)
    (step,) = replay._launches
    step(held, stream)
    made = next(iter(step._made.values()))
    return parts | {
        "memory": lambda: [allocate(*what) for allocate, *what, _ in replay._memory],
        "launch": lambda: step(held, stream),
        "driver": lambda: step._start(step._programs, 1, 1, stream, *made),
        "replay": lambda: replay(asked[0]),
        "known call": lambda: known(asked[0], None),
    }


def long_way(call: Callable[[], object]) -> Callable[[], object]:
    """The call as if nothing like it had been seen."""

    def run() -> object:
        eager.forget()
        return call()

    return run


def measure(backend: str | None, runs: int) -> dict[str, float]:
    """All stages, for a causal call of 256 tokens."""
    q, k, v = (torch.randn(1, 256, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {"causal": True, "backend": backend}

    def forward() -> object:
        return tilewise.attention(q, k, v, **options)

    def training() -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(*learned, causal=True)
        return out

    def sdpa(x: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = (y.transpose(1, 2) for y in x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for _ in range(3):
        forward(), training()
    calls = {**stages((q, k, v), options), "attention": forward, "attention, training": training}
    out, do = training(), torch.randn_like(q)
    other = sdpa(learned)
    calls["backward"] = lambda: torch.autograd.grad(out, learned, do, retain_graph=True)
    calls["attention, first of its kind"] = long_way(forward)
    calls["sdpa"] = lambda: sdpa([q, k, v])
    calls["sdpa, training"] = lambda: sdpa(learned)
    calls["sdpa, backward"] = lambda: torch.autograd.grad(other, learned, do.transpose(1, 2), retain_graph=True)
    calls["one operation of PyTorch"] = lambda: do.mul_(1.0)
    return {name: microseconds(call, runs) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="default: the best that serves the call")
    parser.add_argument("--runs", type=int, default=50, help="of which the fastest counts (%(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    found = {**machine.describe(device), "backend": options.backend, "calls": CALLS, "runs": options.runs}
    print(json.dumps({**found, "microseconds": measure(options.backend, options.runs)}, indent=2))


if __name__ == "__main__":
    main()
