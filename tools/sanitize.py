"""Run kernels under NVIDIA's compute-sanitizer: memcheck on all of them, racecheck where warps share tiles.

    python tools/sanitize.py        # about a minute, one line for each tool; exit status 1 on any error

The cells are few and small, for a checked kernel runs up to a hundred times longer: ragged lengths, an empty member,
and every way to load a tile. PyTorch's caching of memory is off, so that each tensor is an allocation of its own and a
byte past its end is seen. A run without the tool comes first: it compiles, and shows that the cells themselves work.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise.hopper.forward import forward_kernel, variant_kernel

HEADS, HEADS_KV, HEAD_DIM = 4, 2, 64
# Tool and group of cells.
CHECKS = [("memcheck", "triton"), ("memcheck", "best"), ("racecheck", "best")]
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
RACE = re.compile(r"Race reported between \w+ access at (\w+)\+0x\w+ in \S+?:(\d+)")
SECONDS = 600


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def backward(out: torch.Tensor, *leaves: torch.Tensor) -> None:
    """The gradients of the leaves, none of them NaN, as nothing that was read is."""
    for grad in torch.autograd.grad(out, leaves, torch.randn_like(out)):
        assert bool(grad.isfinite().all())


def dense(backend: str | None, seqlens: tuple[int, int] = (200, 333), **options: Any) -> None:
    """Forward and backward of a dense call."""
    q, k, v = (
        drawn(2, n, heads, HEAD_DIM)
        for n, heads in ((seqlens[0], HEADS), (seqlens[1], HEADS_KV), (seqlens[1], HEADS_KV))
    )
    given = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    backward(tilewise.attention(q, k, v, backend=backend, **options), q, k, v, *given)


def packed(backend: str | None) -> None:
    """Forward and backward of three sequences, one of them without rows, another without keys."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 77, 77, 200], [0, 133, 200, 200]))
    q, k, v = (drawn(200, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    out = tilewise.attention_varlen(
        q, k, v, cu_q, cu_k, max_seqlen_q=123, max_seqlen_k=133, causal=True, backend=backend
    )
    backward(out, q, k, v)


def triton_cells() -> None:
    """Portable kernels: every one of them, with each kind of tile."""
    dense("triton", causal=True)
    packed("triton")
    tiles = torch.rand(1, HEADS, 2, 3, device="cuda") < 0.5
    dense("triton", mask=tilewise.BlockMask(tiles, 128, 128))
    dense("triton", dropout_p=0.1, dropout_seed=1)
    dense("triton", bias=drawn(1, HEADS, 200, 333))


def best_cells() -> None:
    """What users get: on Hopper its own kernels."""
    dense(None)
    dense(None, causal=True)
    dense(None, window=(100, 20))
    packed(None)


CELLS: dict[str, Callable[[], None]] = {"triton": triton_cells, "best": best_cells}


def launch(group: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run a group of cells in a process, under the command in `prefix`."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*prefix, sys.executable, str(Path(__file__).resolve()), "--cells", group]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
    )


def handed_out(kernel: str, line: int) -> bool:
    """Whether a race is that of Triton's code by which warps learn their role, which belongs to no line of a kernel.

    The first warps write a role into shared memory, meet the others at a named barrier, and these read it:
    ``BAR.SYNC 1; LDS.U8``. Racecheck does not see that barrier as one of them all.
    """
    found: Any = {"forward_kernel": forward_kernel, "variant_kernel": variant_kernel}.get(kernel)
    return found is not None and 0 <= line - found.fn.__code__.co_firstlineno <= 3


def errors_of(tool: str, group: str) -> int:
    """How many errors the tool finds, after it has printed them."""
    done = launch(group, "compute-sanitizer", "--tool", tool, "--target-processes", "application-only")
    counts = [int(count) for count in SUMMARY.findall(done.stdout)]
    if any(counts) or done.returncode or not counts:
        print(done.stdout)
    if not counts:
        sys.exit(f"{tool} printed no summary: see above")
    races = [(kernel, int(line)) for kernel, line in RACE.findall(done.stdout)]
    if tool == "racecheck" and len(races) == sum(counts):
        return sum(not handed_out(*race) for race in races)
    return sum(counts) + (done.returncode != 0 and not any(counts))


def check() -> int:
    """All checks; the exit status."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here: compute-sanitizer checks kernels as they run on one")
    if shutil.which("compute-sanitizer") is None:
        fix = "it comes with the CUDA toolkit: export PATH=/usr/local/cuda/bin:$PATH, or install cuda-sanitizer"
        sys.exit(f"compute-sanitizer is not on PATH; {fix}")
    for group in CELLS:
        done = launch(group)
        if done.returncode:
            sys.exit(f"{done.stdout}\nthe cells of {group} fail without a tool: see above")
    found = 0
    for tool, group in CHECKS:
        errors = errors_of(tool, group)
        print(f"{tool:<10} {group:<8} {errors} errors", flush=True)
        found += errors
    return 1 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", choices=CELLS, help="run these cells in this process, without a tool")
    group = parser.parse_args().cells
    if group is None:
        sys.exit(check())
    CELLS[group]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
