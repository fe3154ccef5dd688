"""Program: one causal call, forward and backward, the first in its process; prints what it took, as JSON.

    python first_call.py triton 64

`compiled` lists each kernel with the seconds until it was compiled or loaded from disk; `total` are those of the whole
call, launchers included, which a C compiler makes. Triton has been imported before, and the GPU is awake.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import triton

import tilewise
from tilewise import dispatch


def main(backend: str, head_dim: int) -> None:
    for name in dispatch.BACKENDS:
        dispatch.module(name)
    started: list[float] = []
    compiled: list[tuple[str, float]] = []

    def before(**_: Any) -> None:
        started.append(time.perf_counter())

    def after(*, fn: Any, **_: Any) -> None:
        compiled.append((fn.name, time.perf_counter() - started[-1]))

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
    q, k, v = (torch.randn(1, 512, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    do = torch.randn_like(q)
    torch.cuda.synchronize()
    start = time.perf_counter()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(q, k, v, causal=True, backend=None if backend == "best" else backend)
    torch.autograd.grad(out, leaves, do)
    torch.cuda.synchronize()
    print(json.dumps({"compiled": compiled, "total": time.perf_counter() - start}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
