"""What one call costs before the GPU has it: microseconds of the host, stage by stage, as JSON.

    python benchmarks/host_path.py --backend hopper > host.json
    python benchmarks/host_path.py --table

A call so small that the GPU is never behind is repeated; what is timed is the Python thread, in short runs of which the
fastest counts (others share the machine). Stages are of a call like an earlier one (docs/backends.md): `key` finds it,
`memory` takes the results', `launch` puts addresses into place and hands the kernel to the driver, of which `driver` is
Triton's C function and all below it. `replay` holds the last three, `attention` everything.

`overhead` holds the same call beside other libraries', as it is and under `torch.compile`: a forward without gradients,
and a forward and backward. ``--table`` prints these alone, as a table.
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
from tilewise.bench import machine, peers

# Calls in a run; the driver queues about a thousand launches before it makes the host wait.
CALLS = 200


Tensors = tuple[torch.Tensor, ...]
Attend = Callable[..., torch.Tensor]


def microseconds(call: Callable[[], object], runs: int) -> float:
    """Host time of one call, the fastest of `runs`."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    best = float("inf")
    for run in range(-1, runs):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        spent = time.perf_counter() - start
        if run >= 0:
            best = min(best, spent)
    wait()
    return round(best / CALLS * 1e6, 2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flash(names: tuple[str, ...]) -> Attend | str:
    """`flash_attn_func` of the first of these modules that is here, or why none is."""
    module = peers.first_module(names)
    if isinstance(module, str):
        return module

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = module.flash_attn_func(q, k, v, causal=True)
        return out[0] if isinstance(out, (tuple, list)) else out

    return attend


def contestants(backend: str | None) -> dict[str, Attend | str]:
    """The same causal call by everyone, on [B, S, H, D] tensors."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(q, k, v, causal=True, backend=backend)
        return out

    others = {"flash-attn 2": ("flash_attn",), "flash-attn 3": peers.FA3, "flash-attn 4": peers.FA4}
    return {"tilewise": ours, "sdpa": sdpa, **{name: flash(modules) for name, modules in others.items()}}


def overhead(
    found: dict[str, Attend | str], tensors: Tensors, runs: int, compiler: str = "inductor"
) -> dict[str, dict[str, float | str]]:
    """Microseconds of each contestant, or why there are none; `compiler` is torch.compile's backend."""
    learned = [x.clone().requires_grad_() for x in tensors]
    do = torch.randn_like(tensors[0])
    table: dict[str, dict[str, float | str]] = {}
    for name, attend in found.items():
        table[name] = {"not here": attend} if isinstance(attend, str) else {}
        for mode in ("eager", "compiled") if not isinstance(attend, str) else ():
            torch._dynamo.reset()
            function = torch.compile(attend, fullgraph=True, backend=compiler) if mode == "compiled" else attend
            calls: dict[str, Callable[[], object]] = {
                f"{mode}, forward": lambda function=function: function(*tensors),
                f"{mode}, training": lambda function=function: torch.autograd.grad(function(*learned), learned, do),
            }
            for what, call in calls.items():
                try:
                    call()
                    table[name][what] = microseconds(call, runs)
                except Exception as error:  # what others cannot do is a result, not a failure of the benchmark
                    if name == "tilewise":
                        raise
                    table[name][what] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return table


def as_table(found: dict[str, dict[str, float | str]]) -> str:
    """Microseconds per call in Markdown; reasons stand below it."""
    columns = [f"{mode}, {what}" for mode in ("eager", "compiled") for what in ("forward", "training")]
    lines = ["| µs per call | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    reasons = []
    for name, row in found.items():
        cells = [f"{row[c]:.1f}" if isinstance(row.get(c), float) else "–" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        reasons += [f"{name}, {what}: {why}" for what, why in row.items() if isinstance(why, str)]
    return "\n".join([*lines, "", *reasons])


def stages(tensors: Tensors, options: dict[str, Any]) -> dict[str, Callable[[], object]]:
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


def small(device: torch.device) -> Tensors:
    """q, k, v of a call that is over before the next one is ready."""
    return tuple(torch.randn(1, 256, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(3))


def measure(backend: str | None, runs: int) -> dict[str, float]:
    """All stages, for a causal call of 256 tokens."""
    q, k, v = small(torch.device("cuda"))
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {"causal": True, "backend": backend}

    def forward() -> object:
        return tilewise.attention(q, k, v, **options)

    def training() -> torch.Tensor:
        out: torch.Tensor = tilewise.attention(*learned, causal=True)
        return out

    for _ in range(3):
        forward(), training()
    calls = {**stages((q, k, v), options), "attention": forward, "attention, training": training}
    out, do = training(), torch.randn_like(q)
    other = sdpa(*learned)
    calls["backward"] = lambda: torch.autograd.grad(out, learned, do, retain_graph=True)
    calls["attention, first of its kind"] = long_way(forward)
    calls["sdpa"] = lambda: sdpa(q, k, v)
    calls["sdpa, training"] = lambda: sdpa(*learned)
    calls["sdpa, backward"] = lambda: torch.autograd.grad(other, learned, do, retain_graph=True)
    calls["one operation of PyTorch"] = lambda: do.mul_(1.0)
    return {name: microseconds(call, runs) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="default: the best that serves the call")
    parser.add_argument("--runs", type=int, default=50, help="of which the fastest counts (%(default)s)")
    parser.add_argument("--table", action="store_true", help="print the call beside other libraries', nothing else")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    found = {**machine.describe(device), "backend": options.backend, "calls": CALLS, "runs": options.runs}
    beside = overhead(contestants(options.backend), small(device), options.runs)
    if options.table:
        print(as_table(beside))
        return
    print(json.dumps({**found, "microseconds": measure(options.backend, options.runs), "overhead": beside}, indent=2))


if __name__ == "__main__":
    main()
