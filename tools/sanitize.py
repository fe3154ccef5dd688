"""Run kernels under checkers: memcheck on every family, racecheck and Triton's ConSan where warps share tiles.

    python tools/sanitize.py                           # minutes; a table; exit status 1 on any finding
    python tools/sanitize.py --tool racecheck          # one tool
    python tools/sanitize.py --cells hopper-forward    # these cells in this process, without a tool

memcheck and racecheck are NVIDIA's compute-sanitizer. The cells are few and small, for a checked kernel runs up to a
hundred times longer: ragged lengths, an empty member, and every way to load a tile. PyTorch's caching of memory is off,
so that each tensor is an allocation of its own and a byte past its end is seen. A run without a tool comes first: it
compiles, and shows that the cells themselves work.

ConSan, Triton's concurrency sanitizer, compiles checks into a kernel: who reads a buffer of shared memory that another
role has yet to write, or writes one that is still read, and who waits for ever. A kernel takes minutes to compile so,
therefore few run, each in a process of its own. It knows TMA, mbarriers and wgmma; it does not count the bytes that a
barrier expects. Kernels with variants (packed calls, blocks, dropout) are left out: ptxas did not end within minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

import tilewise
from tilewise import hopper
from tilewise.arguments import prepare
from tilewise.cache_arguments import prepare as prepare_cache
from tilewise.hopper.backward import backward_kernel
from tilewise.hopper.backward_apart import apart_kernel
from tilewise.hopper.decode import decode_kernel
from tilewise.hopper.forward import forward_kernel, variant_kernel

DEVICE = "cuda"
HEADS, HEADS_KV = 4, 2
# Rows, then keys.
SEQLENS = (200, 333)
CU_Q, CU_K = (0, 77, 77, 200), (0, 133, 200, 200)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
RACE = re.compile(r"Race reported between \w+ access at (\w+)\+0x\w+ in \S+?:(\d+)")
SECONDS = 540
CONSAN = "consan"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()


def int32(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def blocks(share: float = 0.5) -> tilewise.BlockMask:
    return tilewise.BlockMask(torch.rand(1, HEADS, 2, 3, device=DEVICE) < share, 128, 128)


def finite(*found: torch.Tensor) -> None:
    """Nothing that was read is NaN, so no result is."""
    assert all(bool(x.isfinite().all()) for x in found)


def tensors(head_dim: int, packed: bool = False) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v, and what a packed call says of them: a member without rows, another without keys."""
    if packed:
        shapes = [(CU_Q[-1], HEADS), (CU_K[-1], HEADS_KV), (CU_K[-1], HEADS_KV)]
        options: dict[str, Any] = {"cu_seqlens_q": int32(CU_Q), "cu_seqlens_k": int32(CU_K)}
        return [drawn(*s, head_dim) for s in shapes], options | {"max_seqlen_q": 123, "max_seqlen_k": 133}
    shapes = [(2, SEQLENS[0], HEADS), (2, SEQLENS[1], HEADS_KV), (2, SEQLENS[1], HEADS_KV)]
    return [drawn(*s, head_dim) for s in shapes], {}


def both(backend: str, head_dim: int = 64, packed: bool = False, **options: Any) -> None:
    """Forward and backward, by the public entry points."""
    leaves, more = tensors(head_dim, packed)
    entry: Any = tilewise.attention_varlen if packed else tilewise.attention
    out = entry(*leaves, **options, **more, backend=backend)
    given = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    finite(out, *torch.autograd.grad(out, [*leaves, *given], torch.randn_like(out)))


@torch.no_grad()
def hopper_forward(head_dim: int = 64, packed: bool = False, **options: Any) -> None:
    leaves, more = tensors(head_dim, packed)
    entry: Any = tilewise.attention_varlen if packed else tilewise.attention
    finite(entry(*leaves, **options, **more, backend="hopper"))


@torch.no_grad()
def hopper_backward(head_dim: int = 64, packed: bool = False, needs: str = "qkv", **options: Any) -> None:
    """The backward pass itself, also of calls that are left to others so far."""
    leaves, more = tensors(head_dim, packed)
    problem, inputs, _ = prepare(*leaves, **options, **more)
    out, lse = hopper.forward(problem, inputs)
    found = hopper.backward(problem, inputs, out, lse, torch.randn_like(out), None, tuple(needs))
    finite(*found.values())


@torch.no_grad()
def cache(
    rows: int = 1, page_size: int | None = None, dims: tuple[int, int] = (64, 64), by: Any = None, **options: Any
) -> None:
    """Three sequences in a cache, new keys appended with RoPE, then attended to; slots not in use hold NaN.

    `by`: the backend, asked itself, also for calls that are left to others so far.
    """
    used, capacity, batch = int32((37, 5, 130)), 160, 3
    pages = (batch * capacity // page_size, page_size) if page_size else (batch, capacity)
    k, v = (drawn(*pages, HEADS_KV, d) for d in dims)
    new = [drawn(batch, rows, HEADS_KV, d) for d in dims]
    table = None
    if page_size:
        table = torch.randperm(pages[0], device=DEVICE).int().view(batch, -1)
    else:
        slots = torch.arange(capacity, device=DEVICE) >= used[:, None]
        k, v = (x.masked_fill(slots[..., None, None], float("nan")) for x in (k, v))
    if options.pop("fp8", False):
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        options |= dict.fromkeys(("k_scale", "v_scale"), torch.ones(HEADS_KV, device=DEVICE))
    angles = torch.rand(capacity, dims[0] // 2, device=DEVICE)
    rotary = tilewise.Rotary(angles.cos(), angles.sin())
    q = drawn(batch, rows, HEADS, dims[0])
    given = {"cache_seqlens": used, "k_new": new[0], "v_new": new[1], "page_table": table, "rotary": rotary, **options}
    if by is None:
        finite(tilewise.attention_with_kvcache(q, k, v, **given))
    else:
        finite(by.attend_cache(*prepare_cache(q, k, v, **given))[0])


@torch.no_grad()
def latent_cache(rows: int = 1, by: Any = None, **options: Any) -> None:
    """MLA: the values are the first dims of the keys."""
    k = drawn(2, 196, 1, 576)
    given = (drawn(2, rows, HEADS * 4, 576), k, k[..., :512], int32((196, 50)))
    if by is None:
        finite(tilewise.attention_with_kvcache(*given[:3], cache_seqlens=given[3], **options))
    else:
        finite(by.attend_cache(*prepare_cache(*given, **options))[0])


def half(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * 0.5


def half_gradient(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return ds * 0.5


def bias() -> torch.Tensor:
    return drawn(1, HEADS, *SEQLENS)


DROPOUT: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 1}
CELLS: dict[str, dict[str, Callable[[], None]]] = {
    "triton": {
        "causal": partial(both, "triton", causal=True),
        "packed": partial(both, "triton", packed=True, causal=True),
        "blocks": lambda: both("triton", mask=blocks()),
        "dropout": partial(both, "triton", **DROPOUT),
        "bias": lambda: both("triton", bias=bias()),
        "slopes": lambda: both("triton", alibi_slopes=torch.rand(HEADS, device=DEVICE).requires_grad_()),
        "wide": partial(both, "triton", 200, deterministic=True),
    },
    "caches": {
        "one row": cache,
        "split": partial(cache, num_splits=3),
        "fixed parts": partial(cache, split_size=128),
        "assumed maximum": partial(cache, softmax_max=2.0, num_splits=2),
        "pages": partial(cache, page_size=16),
        "pages of 5": partial(cache, rows=3, page_size=5, causal=True),
        "chunk": partial(cache, rows=20, causal=True, window=(50, 0)),
        "fp8": partial(cache, page_size=32, fp8=True),
        "latent": latent_cache,
    },
    "hopper-caches": {
        "one row": partial(cache, by=hopper),
        "fixed parts": partial(cache, by=hopper, split_size=128, dims=(128, 128)),
        "pages": partial(cache, by=hopper, page_size=16),
        "pages of 40": partial(cache, by=hopper, rows=3, page_size=40, causal=True),
        "chunk": partial(cache, by=hopper, rows=20, causal=True, window=(50, 0)),
        "two warpgroups": partial(cache, by=hopper, rows=40, page_size=32, causal=True),
        "wide": partial(cache, by=hopper, dims=(256, 256)),
        "latent": partial(latent_cache, by=hopper),
        "latent in parts": partial(latent_cache, 20, by=hopper, causal=True, split_size=128),
    },
    "hopper-forward": {
        "full": hopper_forward,
        "causal": partial(hopper_forward, causal=True),
        "window": partial(hopper_forward, 128, window=(100, 20)),
        "wide": partial(hopper_forward, 256, causal=True),
        "packed": partial(hopper_forward, packed=True, causal=True),
        "blocks": lambda: hopper_forward(mask=blocks()),
        "dropout": partial(hopper_forward, **DROPOUT),
        "bias": lambda: hopper_forward(bias=bias()),
        "score_mod": partial(hopper_forward, score_mod=tilewise.ScoreMod(half, half_gradient)),
    },
    "hopper-backward": {
        "full": hopper_backward,
        "causal": partial(hopper_backward, 128, causal=True),
        "packed": partial(hopper_backward, packed=True, causal=True),
        "dropout": partial(hopper_backward, **DROPOUT),
        "in turn": partial(hopper_backward, deterministic=True, causal=True),
        "in turn with dropout": partial(hopper_backward, deterministic=True, **DROPOUT),
        "apart packed": partial(hopper_backward, packed=True, deterministic=True, causal=True),
        "apart wide": partial(hopper_backward, 256),
    },
}
# Tools, and what they check: families, or for ConSan single cells.
CHECKS = {
    "memcheck": tuple(CELLS),
    "racecheck": ("hopper-forward", "hopper-backward", "hopper-caches"),
    CONSAN: (
        "hopper-forward/full", "hopper-forward/causal", "hopper-backward/full", "hopper-backward/in turn",
        "hopper-caches/one row",
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    """How many findings a check has, in how many seconds, and what is to be read of it."""

    tool: str
    cells: str
    findings: int
    seconds: float
    text: str


def cells_of(name: str) -> dict[str, Callable[[], None]]:
    """The cells of a family, or the one of ``family/cell``.

    >>> list(cells_of("hopper-forward/wide"))
    ['wide']
    """
    family, _, cell = name.partition("/")
    return {cell: CELLS[family][cell]} if cell else CELLS[family]


def launch(cells: str, *prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run cells in a process of their own, under the command in `prefix`."""
    command = [*prefix, sys.executable, str(Path(__file__).resolve()), "--cells", cells]
    whole = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **environment}
    try:
        return subprocess.run(
            command, env=whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return subprocess.CompletedProcess(command, 124, f"{said}\nnot done after {SECONDS} s")


def handed_out(kernel: str, line: int) -> bool:
    """Whether a race is that of Triton's code by which warps learn their role, which belongs to no line of a kernel.

    The first warps write a role into shared memory, meet the others at a named barrier, and these read it:
    ``BAR.SYNC 1; LDS.U8``. Racecheck does not see that barrier as one of them all.
    """
    kernels = (forward_kernel, variant_kernel, backward_kernel, apart_kernel, decode_kernel)
    found: Any = {kernel.__name__: kernel for kernel in kernels}.get(kernel)
    return found is not None and 0 <= line - found.fn.__code__.co_firstlineno <= 3


def findings(tool: str, text: str, status: int) -> int:
    """How many errors compute-sanitizer reports, those aside that are none.

    >>> findings("memcheck", "========= ERROR SUMMARY: 2 errors", 0), findings("memcheck", "killed", 1)
    (2, 1)
    """
    counts = [int(count) for count in SUMMARY.findall(text)]
    races = [(kernel, int(line)) for kernel, line in RACE.findall(text)]
    if tool == "racecheck" and counts and len(races) == sum(counts):
        return sum(not handed_out(*race) for race in races)
    # Without a summary nothing was checked, and cells that fail under a tool are a finding as well.
    return sum(counts) or int(not counts or status != 0)


def sanitized(tool: str, cells: str) -> Outcome:
    """Cells under a tool."""
    start = time.monotonic()
    if tool == CONSAN:
        done = launch(cells, TRITON_INSTRUMENTATION_MODE=CONSAN)
        found = int(done.returncode != 0)
    else:
        done = launch(cells, "compute-sanitizer", "--tool", tool, "--target-processes", "application-only")
        found = findings(tool, done.stdout, done.returncode)
    return Outcome(tool, cells, found, time.monotonic() - start, done.stdout)


def plain(cells: str) -> Outcome:
    """Cells without a tool."""
    start = time.monotonic()
    done = launch(cells)
    return Outcome("none", cells, int(done.returncode != 0), time.monotonic() - start, done.stdout)


def report(done: Outcome) -> int:
    """A line of the table, after what the tool found; the number of findings."""
    if done.findings:
        print(done.text)
    print(f"{done.tool:<10} {done.cells:<24} {done.findings:>4} findings {done.seconds:>6.0f} s", flush=True)
    return done.findings


def check(tools: list[str]) -> int:
    """All checks of these tools; the exit status."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here: kernels are checked as they run on one")
    if set(tools) - {CONSAN} and shutil.which("compute-sanitizer") is None:
        fix = "it comes with the CUDA toolkit: export PATH=/usr/local/cuda/bin:$PATH, or install cuda-sanitizer"
        sys.exit(f"compute-sanitizer is not on PATH; {fix}")
    wanted = [(tool, cells) for tool in tools for cells in CHECKS[tool]]
    if torch.cuda.get_device_capability() != (9, 0):
        print("not run here: Hopper's kernels, which need compute capability 9.0")
        wanted = [(tool, cells) for tool, cells in wanted if not cells.startswith("hopper")]
    families = list(dict.fromkeys(cells.partition("/")[0] for _, cells in wanted))
    # Compiling takes most of the time: of several families at once.
    with ThreadPoolExecutor(max_workers=8) as pool:
        if sum(report(done) for done in pool.map(plain, families)):
            print("cells that fail without a tool are not checked with one: see above")
            return 1
        compiling = [pool.submit(sanitized, *one) for one in wanted if one[0] == CONSAN]
        found = sum(report(sanitized(*one)) for one in wanted if one[0] != CONSAN)
        return 1 if found + sum(report(one.result()) for one in compiling) else 0


def run(name: str) -> None:
    """Cells in this process."""
    if triton.knobs.compilation.instrumentation_mode:
        # What ConSan knows of a program is in memory that the launch is to bring.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    for cell, call in cells_of(name).items():
        print(cell, flush=True)
        call()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*CELLS, *(f"{family}/{cell}" for family, cells in CELLS.items() for cell in cells)]
    parser.add_argument("--cells", choices=known, metavar="NAME", help="run these in this process, without a tool")
    parser.add_argument("--tool", choices=CHECKS, action="append", help="only this one; repeatable")
    chosen = parser.parse_args()
    if chosen.cells is None:
        sys.exit(check(chosen.tool or list(CHECKS)))
    run(chosen.cells)


if __name__ == "__main__":
    main()
