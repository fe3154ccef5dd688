"""Time candidate tiles of the kernels for caches on this GPU, as `tilewise bench --set decode` times them.

    python tools/tune_decode.py                     # the anchors; --kind eight_bit, latent, rows, pages for others
    python tools/tune_decode.py --kind hopper       # Hopper's kernel, whether calls are given to it yet or not

Every candidate is held against the oracle first. The table has GB/s of keys and values for each candidate and case, and
last the geometric mean of (rate / best rate of the case).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from tilewise import dispatch
from tilewise.bench import decode, decode_cases, machine, report
from tilewise.bench.check import FLOORS
from tilewise.bench.decode_cases import DecodeCase
from tilewise.bench.timing import interleave
from tilewise.tiles import TileConfig

# Rows, keys, warps, stages, bound on registers, programs on a multiprocessor, ptxas's level of saving registers; before
# them the name of a backend, if it is not Triton's.
Sizes = tuple[Any, ...]
FEW: list[Sizes] = [
    (16, 64, 4, 3, 0, 2), (16, 64, 4, 2, 168, 3), (16, 64, 4, 4, 0, 1), (16, 32, 4, 4, 168, 3), (16, 32, 4, 3, 128, 4),
    (16, 128, 4, 2, 0, 1), (16, 128, 8, 3, 0, 1), (16, 128, 4, 3, 0, 1), (16, 64, 2, 3, 0, 2), (16, 32, 2, 4, 0, 4),
]  # fmt: skip
MANY: list[Sizes] = [(64, 64, 4, 3, 0, 2), (64, 64, 4, 2, 0, 2), (64, 128, 4, 2, 0, 1), (64, 128, 8, 2, 0, 1)]
CHUNK: list[Sizes] = [*MANY, (128, 64, 8, 3, 0, 1), (128, 128, 8, 2, 0, 1)]
LATENT: list[Sizes] = [
    (64, 64, 8, 3, 0, 1, 2), (64, 64, 8, 3, 0, 1), (64, 32, 8, 4, 0, 1, 2), (16, 32, 4, 2, 0, 2, 2),
    (16, 32, 4, 2, 0, 2), (16, 32, 4, 3, 0, 1, 2), (16, 64, 8, 2, 0, 1, 2), (32, 32, 4, 2, 0, 1),
]  # fmt: skip
# And what ships for Triton.
HOPPER: list[Sizes] = [
    ("hopper", 64, 64, 4, 3, 0, 2), ("hopper", 64, 64, 4, 6, 0, 1), ("hopper", 64, 128, 4, 3, 0, 1),
    ("hopper", 64, 32, 4, 6, 0, 2), FEW[0],
]  # fmt: skip
EIGHT_BIT: list[Sizes] = [
    (16, 64, 4, 3, 0, 2), (16, 64, 4, 4, 0, 2), (16, 128, 4, 3, 0, 2), (16, 128, 4, 2, 0, 2), (16, 128, 8, 3, 0, 1),
    (16, 64, 4, 3, 168, 3), (16, 32, 4, 4, 128, 4), (16, 128, 8, 2, 0, 2),
]  # fmt: skip
KINDS: dict[str, tuple[tuple[DecodeCase, ...], list[Sizes]]] = {
    "anchors": (decode_cases.ANCHORS, FEW),
    "pages": (decode_cases.PAGED, FEW[:6]),
    "eight_bit": (decode_cases.EIGHT_BIT, EIGHT_BIT),
    "latent": (decode_cases.LATENT, LATENT),
    "rows": ((DecodeCase(16, 8192, rows=4), DecodeCase(16, 8192, rows=16)), [*FEW[:2], *MANY]),
    "chunk": ((DecodeCase(4, 8192, rows=512),), CHUNK),
    "hopper": ((*decode_cases.ANCHORS, *decode_cases.PAGED), HOPPER),
    "hopper_latent": (decode_cases.LATENT, [("hopper", 64, 64, 4, 2, 0, 1), LATENT[0]]),
    "hopper_chunk": (
        (DecodeCase(4, 8192, rows=512),),
        [("hopper", 128, 128, 4, 3, 0, 1), ("hopper", 128, 64, 4, 4, 0, 1), *CHUNK],
    ),
}


def _config(sizes: Sizes) -> tuple[ModuleType, TileConfig]:
    """The backend of a candidate, and its tile."""
    if isinstance(sizes[0], str):
        return dispatch.module(sizes[0]), TileConfig(*sizes[1:])
    return dispatch.module("triton"), TileConfig(*sizes)


def _attempt(case: DecodeCase, sizes: Sizes) -> str | float:
    """The error of one call with a candidate, or why there is none; kernels are compiled on the way."""
    try:
        with torch.no_grad():
            return decode_cases.error(case, *_first(case, sizes))
    except Exception as raised:
        return f"{type(raised).__name__}: {str(raised).splitlines()[0][:120]}"


def _first(case: DecodeCase, sizes: Sizes) -> tuple[decode_cases.DecodeData, torch.Tensor]:
    (data,) = decode_cases.make(case, torch.device("cuda"), calls=1)
    return data, _call(case, data, sizes)()


def _call(case: DecodeCase, data: decode_cases.DecodeData, sizes: Sizes) -> Callable[[], torch.Tensor]:
    problem, inputs = decode_cases.posed(case, data)
    backend, tile = _config(sizes)

    def call() -> torch.Tensor:
        return backend.attend_cache(problem, inputs, tile)[0]

    return call


def _small(case: DecodeCase) -> DecodeCase:
    """A case whose kernels are the same and whose caches are small."""
    return replace(case, batch=min(case.batch, 2), seqlen=min(case.seqlen, 1024))


def _time(case: DecodeCase, candidates: list[Sizes], rounds: int) -> dict[Sizes, float]:
    """GB/s of each candidate."""
    device = torch.device("cuda")
    data = decode_cases.make(case, device)
    with torch.no_grad():
        calls = {str(sizes): decode.series([_call(case, x, sizes) for x in data], device) for sizes in candidates}
    times = interleave(machine.clock_of(device), calls, rounds, 6.0)
    return {sizes: case.cache_bytes * case.calls / times[str(sizes)].median_ms / 1e6 for sizes in candidates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="anchors")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=12)
    chosen = parser.parse_args()
    cases, candidates = KINDS[chosen.kind]
    shapes = list(dict.fromkeys(map(_small, cases)))
    pairs = [(case, sizes) for case in shapes for sizes in candidates]
    with ProcessPoolExecutor(chosen.workers, multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(pairs, pool.map(_attempt, *zip(*pairs, strict=True)), strict=True))
    good = []
    for sizes in candidates:
        found = [errors[case, sizes] for case in shapes]
        bad = [x for x in found if isinstance(x, str) or not x <= 2 * FLOORS[torch.bfloat16]]
        if bad:
            print(f"{sizes}: {bad[0]}", flush=True)
        else:
            good.append(sizes)
    rates = {case: _time(case, good, chosen.rounds) for case in cases}
    best = {case: max(found.values()) for case, found in rates.items()}
    rows = [
        [
            str(sizes),
            *(f"{rates[case][sizes]:,.0f}" for case in cases),
            f"{math.exp(statistics.fmean(math.log(rates[case][sizes] / best[case]) for case in cases)):.3f}",
        ]
        for sizes in good
    ]
    print(report.plain_table(["tile", *(case.name.removeprefix("decode ") for case in cases), "mean"], rows))


if __name__ == "__main__":
    main()
