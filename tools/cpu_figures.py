"""Time and peak memory of a training step's attention on the CPU, beside PyTorch's: the figures in README.

Each memory figure comes from a fresh process (Linux), each time from alternating runs of both on one thread.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import tilewise

SHAPE = (1, 8, 64)  # batch, heads, head_dim; fp32
WINDOW = 256
CASES = ("causal", "causal, window of 256", "causal, 8 documents")
Step = Callable[[], object]


def steps(case: str, seqlen: int) -> dict[str, Step]:
    """Forward and backward of the case, by this package and by PyTorch in the way it offers for it."""
    batch, heads, head_dim = SHAPE
    leaves = [torch.randn(batch, seqlen, heads, head_dim, requires_grad=True) for _ in range(3)]
    position = torch.arange(seqlen)
    documents = torch.arange(8).repeat_interleave(seqlen // 8)
    ours: dict[str, object] = {"causal": True}
    visible: torch.Tensor | None = None
    if case == CASES[1]:
        ours["window"] = (WINDOW - 1, 0)
        age = position[:, None] - position
        visible = (age >= 0) & (age < WINDOW)
    elif case == CASES[2]:
        ours["mask"] = tilewise.Document(documents)
        visible = (documents[:, None] == documents) & (position[:, None] >= position)

    def torch_step() -> None:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None).sum().backward()

    return {
        "tilewise": lambda: tilewise.attention(*leaves, **ours).sum().backward(),  # type: ignore[arg-type]  # by name
        "torch": torch_step,
    }


def resident(name: str) -> int:
    """A line of this process's memory status, in KiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def own_peak(who: str, case: str, seqlen: int) -> float:
    """MiB that one step needs beyond the inputs and, for PyTorch, beyond the mask that it is given."""
    small, step = steps(case, 64)[who], steps(case, seqlen)[who]
    small()  # libraries load what they need
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step()
    return (resident("VmHWM") - before) / 1024


def peak(who: str, case: str, seqlen: int) -> float:
    command = [sys.executable, __file__, "--peak", who, case, str(seqlen)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def seconds(case: str, seqlen: int, rounds: int) -> dict[str, float]:
    """Median CPU time of a step of each, in alternating rounds; on one thread, other work does not count into it."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for who, step in steps(case, seqlen).items():
            start = time.process_time()
            step()
            times.setdefault(who, []).append(time.process_time() - start)
    return {who: statistics.median(found[1:]) for who, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", nargs=3, metavar=("WHO", "CASE", "SEQLEN"), help="used for the fresh processes")
    parser.add_argument("--seqlens", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        who, case, seqlen = arguments.peak
        print(own_peak(who, case, int(seqlen)))
        return
    print(f"torch {torch.__version__}, one thread, batch, heads, head dim {SHAPE}, fp32")
    print("| visible | seqlen | CPU time, tilewise / torch | peak memory, tilewise / torch |\n|---|---|---|---|")
    for case in CASES:
        for seqlen in arguments.seqlens:
            took = seconds(case, seqlen, arguments.rounds)
            memory = {who: peak(who, case, seqlen) for who in took}
            time_cell = " / ".join(f"{1e3 * took[who]:,.0f}" for who in ("tilewise", "torch"))
            memory_cell = " / ".join(f"{memory[who]:,.0f}" for who in ("tilewise", "torch"))
            print(f"| {case} | {seqlen} | {time_cell} ms | {memory_cell} MiB |", flush=True)


if __name__ == "__main__":
    main()
