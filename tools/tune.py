"""Time candidate tiles of the Triton kernels on this GPU and print the best as rows for `tilewise/tiles.py`.

    python tools/tune.py --json tiles.json          # a few minutes on an H200, most of it compilation in parallel

Each candidate is first checked against plain fp32 attention on a small ragged shape; one that fails, or does not fit,
is reported and never timed. Times are medians over rounds in which all candidates of a cell take turns, so that clocks
and temperature are the same for all of them. The winner of a head dim is the tile with the best geometric mean of
(best time / its time) over the cells: full and causal, short and long.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise._triton import gradients, launch
from tilewise._triton import tile as shipped_tile
from tilewise._triton.forward import forward
from tilewise.arguments import prepare
from tilewise.kernels.call import prepare as call_of
from tilewise.tiles import TileConfig

Sizes = tuple[int, ...]
# Rows, keys, warps, stages and, where it bounds them, registers of a thread.
CANDIDATES: dict[str, dict[int, list[Sizes]]] = {
    "forward": {
        64: [(64, 64, 4, 3, 160), (64, 64, 4, 3, 128), (128, 64, 8, 3, 128), (64, 128, 4, 2, 168), (128, 64, 4, 3)],
        128: [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2)],
        256: [(128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)],
    },
    "dq": {
        64: [(128, 64, 8, 3, 128), (64, 64, 4, 3, 128), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2)],
        128: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
        256: [(128, 32, 8, 2), (128, 64, 8, 1), (64, 32, 4, 2)],
    },
    "dkv": {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3)],
        128: [(64, 128, 8, 3), (64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2), (32, 128, 8, 2)],
    },
    "dk": {256: [(32, 128, 8, 2), (64, 128, 8, 1), (32, 64, 4, 1)]},
    "dv": {256: [(64, 128, 8, 2), (32, 64, 4, 2), (32, 128, 8, 2)]},
}
# Products of two tiles that each kernel has.
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "dk": 3, "dv": 2}
TOKENS, HIDDEN = 16384, 2048  # batch · seqlen and heads · head_dim, as in the papers
ROUNDS, BURST_MS = 7, 6.0


@dataclass(frozen=True)
class Cell:
    """One measured case of a pass."""

    pass_: str
    head_dim: int
    seqlen: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of this kernel alone; half of it when causal."""
        return PRODUCTS[self.pass_] * 2.0 * TOKENS * self.seqlen * HIDDEN / (2 if self.causal else 1)


def cells(seqlens: list[int]) -> Iterator[Cell]:
    """All cells, those of one pass and head dim together."""
    for pass_, by_dim in CANDIDATES.items():
        for head_dim in by_dim:
            for seqlen in seqlens:
                for causal in (False, True):
                    yield Cell(pass_, head_dim, seqlen, causal)


def kernel(pass_: str, tensors: tuple[torch.Tensor, ...], causal: bool, tile: TileConfig) -> Callable[[], Any]:
    """A function that launches one pass with `tile` and returns its results."""
    q, k, v, do = tensors
    problem, inputs, _ = prepare(q, k, v, causal=causal)
    if pass_ == "forward":
        return lambda: forward(problem, inputs, tile)
    out, lse = forward(problem, inputs, shipped_tile(problem, "forward"))
    call = call_of(problem, inputs)
    stats = gradients.statistics(call, (out, lse), (do, None), shipped_tile(problem, "delta"))
    operands = tuple(launch.rows(x, problem) for x in tensors)
    if pass_ == "dq":
        return lambda: gradients.gradient_of_q(call, operands, stats, tile, (inputs, None))[:1]
    return lambda: gradients.gradient_of_kv(call, operands, stats, tile, tuple(pass_[1:]))


def draw(batch: int, seqlen: int, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, do."""
    torch.manual_seed(0)
    shape = (batch, seqlen, heads, head_dim)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))


def expected(pass_: str, tensors: tuple[torch.Tensor, ...], causal: bool) -> tuple[torch.Tensor, ...]:
    """The pass in fp32, with every score in memory."""
    q, k, v, do = (x.float().transpose(1, 2) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    out = s.softmax(-1) @ leaves[2]
    if pass_ == "forward":
        return out.detach().transpose(1, 2), s.logsumexp(-1).detach()
    grads = dict(zip("qkv", torch.autograd.grad(out, leaves, do), strict=True))
    return tuple(grads[name].transpose(1, 2) for name in pass_[1:])


def check(candidate: tuple[str, int, Sizes]) -> str | None:
    """Why a candidate cannot be used, or None; compiles it into Triton's cache on the way."""
    pass_, head_dim, sizes = candidate
    tensors = draw(1, 333, 2, head_dim)
    try:
        for causal in (False, True):
            got = kernel(pass_, tensors, causal, TileConfig(*sizes))()
            for x, y in zip(got, expected(pass_, tensors, causal), strict=True):
                error = float((x.float() - y).abs().max() / y.abs().max())
                if not error < 2e-2:
                    return f"relative error {error:.2g}"
    except Exception as error:  # whatever a compiler or driver may raise: the candidate is out, and the reason is shown
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def check_all(workers: int) -> dict[tuple[str, int, Sizes], str | None]:
    """`check` of every candidate, in processes of their own."""
    todo = [(p, d, sizes) for p, by_dim in CANDIDATES.items() for d, found in by_dim.items() for sizes in found]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return dict(zip(todo, pool.map(check, todo), strict=True))


def burst(run: Callable[[], Any], repeats: int) -> float:
    """Mean time of `repeats` runs in milliseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def medians(runs: list[Callable[[], Any]]) -> list[float]:
    """The median time of each, all taking turns."""
    counts = []
    for run in runs:
        run()
        counts.append(max(1, round(BURST_MS / burst(run, 1))))
    rounds = [[burst(run, count) for run, count in zip(runs, counts, strict=True)] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def flash_attention_2(cell: Cell, tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """FlashAttention-2's forward, or for the other passes its whole backward, as PyTorch has it."""
    q, k, v, do = (x.transpose(1, 2).detach() for x in tensors)
    leaves = [x.requires_grad_(cell.pass_ != "forward") for x in (q, k, v)]

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    if cell.pass_ == "forward":
        return attend
    out = attend()
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)


def time_cell(cell: Cell, usable: list[TileConfig]) -> dict[str, Any]:
    """Milliseconds of every usable tile, and of FlashAttention-2."""
    heads = HIDDEN // cell.head_dim
    tensors = draw(TOKENS // cell.seqlen, cell.seqlen, heads, cell.head_dim)
    runs = [kernel(cell.pass_, tensors, cell.causal, tile) for tile in usable]
    *times, peer = medians([*runs, flash_attention_2(cell, tensors)])
    return {**asdict(cell), "flops": cell.flops, "ms": times, "fa2_ms": peer}


def winner(measured: list[dict[str, Any]]) -> int:
    """Index of the tile with the best geometric mean of relative speed."""
    scores = [
        sum(math.log(min(cell["ms"]) / cell["ms"][i]) for cell in measured) for i in range(len(measured[0]["ms"]))
    ]
    return max(range(len(scores)), key=scores.__getitem__)


def row(pass_: str, head_dim: int, tile: TileConfig, measured: list[dict[str, Any]], index: int) -> str:
    """One line of the table, with the GPU, the date and TFLOP/s per cell."""
    speeds = "/".join(f"{cell['flops'] / cell['ms'][index] / 1e9:.0f}" for cell in measured)
    sizes = ", ".join(str(size) for size in astuple(tile) if size)
    gpu, date = torch.cuda.get_device_name(), time.strftime("%Y-%m-%d")
    return f'    ("triton", "{pass_}", "hopper", "16bit", {head_dim}): TileConfig({sizes}),  # {gpu}, {date}, {speeds}'


def report(measured: list[dict[str, Any]], usable: dict[tuple[str, int], list[TileConfig]]) -> list[str]:
    """Print all times and return the rows of the winners."""
    rows: list[str] = []
    spent: dict[str, float] = {}
    peers: dict[str, float] = {}
    for (pass_, head_dim), tiles in usable.items():
        mine = [cell for cell in measured if (cell["pass_"], cell["head_dim"]) == (pass_, head_dim)]
        for i, tile in enumerate(tiles):
            print(f"{pass_:8}{head_dim:4} {tile}", *(f"{c['flops'] / c['ms'][i] / 1e9:7.0f}" for c in mine))
        index = winner(mine)
        rows.append(row(pass_, head_dim, tiles[index], mine, index))
        for cell in mine:
            both = "forward" if pass_ == "forward" else "backward"
            case = f"{both} D{head_dim} S{cell['seqlen']} {'causal' if cell['causal'] else 'full'}"
            spent[case] = spent.get(case, 0.0) + cell["ms"][index]
            peers[case] = cell["fa2_ms"] / spent[case]
    print("\nspeed relative to FlashAttention-2 with the winners (backward: dq, dk, dv, without delta)")
    for case, ratio in peers.items():
        print(f"{case}: {ratio:.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all times there")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--workers", type=int, default=12, help="processes that compile and check candidates")
    options = parser.parse_args()
    reasons = check_all(options.workers)
    usable: dict[tuple[str, int], list[TileConfig]] = {}
    for (pass_, head_dim, sizes), reason in reasons.items():
        tiles = usable.setdefault((pass_, head_dim), [])
        if reason is None:
            tiles.append(TileConfig(*sizes))
        else:
            print(f"out: {pass_} {head_dim} {sizes}: {reason}")
    measured = [time_cell(cell, usable[cell.pass_, cell.head_dim]) for cell in cells(options.seqlens)]
    rows = report(measured, usable)
    print("\n" + "\n".join(rows))
    if options.json:
        shapes = {f"{p} {d}": [asdict(tile) for tile in found] for (p, d), found in usable.items()}
        result = {"gpu": torch.cuda.get_device_name(), "tiles": shapes, "cells": measured, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
