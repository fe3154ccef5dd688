"""Every number that the page shows and does not count itself, from the rest of the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__, roofline
from ..arguments import prepare
from ..roofline import BACKWARD, FORWARD, forms
from . import mask_figures, pipeline
from .walks import Walk

DTYPE = torch.float16
LENGTHS = tuple(1 << power for power in range(7, 18))
HEAD_DIMS = (64, 128, 256)
HEADS = 32  # of the table of floor times

# The page counts these walks when it is loaded in a test, and compares.
SETS = tuple(
    Walk(n, d, m, order, causal)
    for n, d, m in ((512, 16, 4096), (1, 1, 4), (100, 8, 200), (1000, 64, 16_384), (1024, 64, 98_304), (37, 5, 111))
    for order in ("v1", "v2")
    for causal in (False, True)
)


FIRST = Walk(512, 16, 4096, "v2", False)


@dataclass(frozen=True)
class Initial:
    """What the page shows first."""

    walk: Walk = FIRST
    device: str = "h200"


def figures(initial: Initial) -> dict[str, Any]:
    """All of them, ready for JSON."""
    return {
        "version": __version__,
        "initial": {**initial.walk._asdict(), "device": initial.device},
        "sets": [_set(walk) for walk in SETS],
        "devices": [_device(on) for on in roofline.DEVICES.values()],
        "lengths": LENGTHS,
        "heads": HEADS,
        "costs": {d: {pass_: _costs(d, pass_) for pass_ in (FORWARD, BACKWARD)} for d in HEAD_DIMS},
        "decode": {d: [_cost(d, n, FORWARD, seqlen_q=1)["once"] for n in LENGTHS] for d in HEAD_DIMS},
        "traffic": {on.name: {d: _traffic(on, d) for d in HEAD_DIMS} for on in roofline.DEVICES.values()},
        "memory": _memory(),
        "masks": mask_figures.figures(),
        "pipeline": pipeline.figures(),
    }


def _set(walk: Walk) -> dict[str, Any]:
    moved = walk.traffic()
    return {**walk._asdict(), "read": moved.read, "written": moved.written, "standard": walk.standard().total}


def _device(on: roofline.Device) -> dict[str, Any]:
    return {
        "name": on.name,
        "tflops": on.tflops(DTYPE),
        "tb_s": on.hbm_tb_s,
        "hbm_gb": on.hbm_gb,
        "balance": on.balance(DTYPE),
        "sram": on.sram_elements(DTYPE),
        "source": on.source,
    }


def _cost(d: int, n: int, pass_: str, *, causal: bool = False, seqlen_q: int | None = None) -> dict[str, Any]:
    """FLOPs and bytes of one head's call, with each tensor over HBM once, and of standard attention."""
    q = torch.empty(1, seqlen_q or n, 1, d, dtype=DTYPE, device="meta")
    k = torch.empty(1, n, 1, d, dtype=DTYPE, device="meta")
    problem, inputs, _ = prepare(q, k, k, causal=causal)
    pairs = roofline.visible_pairs(problem, inputs).number
    # Standard attention computes what a mask hides, too.
    every = q.shape[1] * n
    return {
        "once": {
            "flops": roofline.flops(problem, pairs, pass_),
            "bytes": roofline.hbm_bytes(problem, inputs, pass_),
        },
        "standard": {
            "flops": roofline.flops(problem, every, pass_),
            "bytes": roofline.standard_hbm_bytes(problem, inputs, pass_),
        },
    }


def _costs(d: int, pass_: str) -> dict[str, Any]:
    found = {}
    for name, causal in (("full", False), ("causal", True)):
        each = [_cost(d, n, pass_, causal=causal) for n in LENGTHS]
        found[name] = {idea: [cost[idea] for cost in each] for idea in ("standard", "once")}
    return found


def _traffic(on: roofline.Device, d: int) -> dict[str, Any]:
    """Bytes of one head's forward against N, with tiles as large as the device's SRAM allows."""
    found = {}
    for name, causal in (("full", False), ("causal", True)):
        lines = {
            order: [Walk(n, d, on.sram_elements(DTYPE), order, causal).traffic().total for n in LENGTHS]
            for order in ("v1", "v2")
        }
        lines["standard"] = [forms.standard_forward(n, d).total for n in LENGTHS]
        lines["once"] = [4 * n * d + n for n in LENGTHS]
        found[name] = {order: [total * DTYPE.itemsize for total in totals] for order, totals in lines.items()}
    return found


def _memory() -> dict[str, list[int]]:
    """Bytes that one head's forward holds in HBM beside Q, K, V and O; row statistics are fp32."""
    statistics = torch.float32.itemsize
    return {
        "standard": [2 * n * n * DTYPE.itemsize for n in LENGTHS],
        "v1": [2 * n * statistics for n in LENGTHS],
        "v2": [n * statistics for n in LENGTHS],
    }
