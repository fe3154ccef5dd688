"""Tile sizes as fixed data: one table, keyed by backend, pass, architecture class, dtype class and head-dim bucket.

Nothing is tuned at run time, because another tile is another rounding; `tools/tune.py` measures candidates and prints
rows to paste. A remark behind a row is its measured speed, H200, bf16, 2026-11-29: TFLOP/s at 16k full/causal, and at
4k causal, counting the products of that kernel alone (forward 2, dq 3, dkv 4, dk 3, dv 2).

Architecture classes of Triton kernels:

- "hopper": WGMMA, 227 KiB of shared memory (H100, H200).
- "large": 163 KiB (A100; also B200, whose own instructions these kernels do not use).
- "small": 99 KiB (RTX 30, 40 and 50, L4, L40) and everything unknown.
- "interpreter": Triton on a CPU, where many small tiles exercise every edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TileConfig:
    """Rows and keys of one step, and how many warps and pipeline stages a kernel runs it with.

    `max_registers` bounds the registers of a thread so that more programs share a multiprocessor; 0 leaves them to
    the compiler. `programs` is how many of a kernel whose programs share all work run on a multiprocessor.
    `register_level`, 1 to 10, is how much ptxas does to use few registers (``--register-usage-level``); 0: what it does
    unasked, 5. Where it keeps in memory what is quickly computed anew, 2 helps.
    """

    block_m: int
    block_n: int
    num_warps: int = 0
    num_stages: int = 0
    max_registers: int = 0
    programs: int = 0
    register_level: int = 0

    @property
    def launch_options(self) -> dict[str, Any]:
        """What a Triton launch takes beside its arguments; not every GPU's compiler knows a bound on registers."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        if self.register_level:
            options["ptx_options"] = f"--register-usage-level={self.register_level}"
        return options


ANY = "any"
# Of a call with a cache, rows of a tile that has at most so many keys are not split among programs.
WHOLE_KEYS = 256

# fmt: off
TABLE: dict[tuple[str, str, str, str, int], TileConfig] = {
    # backend, pass, architecture class, dtype class, head dim up to
    ("cpu", "forward", ANY, ANY, 576): TileConfig(256, 512),
    ("hopper", "forward", ANY, "16bit", 64): TileConfig(128, 128, 4, 3),  # 491/458, 400
    ("hopper", "long forward", ANY, "16bit", 64): TileConfig(192, 128, 4, 3),  # 544/517, 371
    ("hopper", "forward", ANY, "16bit", 128): TileConfig(128, 128, 4, 2),  # 691/686, 575
    ("hopper", "forward", ANY, "16bit", 256): TileConfig(128, 64, 4, 2),  # 745/719
    ("hopper", "backward", ANY, "16bit", 64): TileConfig(128, 128, 8, 2),  # 443/431
    ("hopper", "backward", ANY, "16bit", 128): TileConfig(64, 128, 8, 2),  # 522/522
    ("hopper", "dq", ANY, "16bit", 256): TileConfig(128, 64, 8, 2),
    ("hopper", "dk", ANY, "16bit", 256): TileConfig(64, 128, 8, 2),
    ("hopper", "dv", ANY, "16bit", 256): TileConfig(64, 128, 8, 2),
    ("hopper", "decode 64", ANY, "16bit", 64): TileConfig(64, 128, 4, 3, programs=2),
    ("hopper", "decode 64", ANY, "16bit", 128): TileConfig(64, 64, 4, 2, programs=2),
    ("hopper", "decode 64", ANY, "16bit", 256): TileConfig(64, 64, 4, 3, programs=1),
    ("hopper", "decode 128", ANY, "16bit", 64): TileConfig(128, 128, 4, 4, programs=1),
    ("hopper", "decode 128", ANY, "16bit", 128): TileConfig(128, 128, 4, 3, programs=1),
    ("hopper", "decode 128", ANY, "16bit", 256): TileConfig(128, 64, 4, 2, programs=1),
    ("hopper", "latent", ANY, "16bit", 576): TileConfig(64, 64, 4, 2, programs=1),
    ("triton", "forward", "interpreter", ANY, 512): TileConfig(32, 32, 4, 1),
    ("triton", "dq", "interpreter", ANY, 512): TileConfig(32, 32, 4, 1),
    ("triton", "dkv", "interpreter", ANY, 512): TileConfig(32, 32, 4, 1),
    ("triton", "dk", "interpreter", ANY, 512): TileConfig(32, 32, 4, 1),
    ("triton", "dv", "interpreter", ANY, 512): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "interpreter", ANY, 512): TileConfig(32, 32, 4, 1),
    ("triton", "decode 16", "interpreter", ANY, 576): TileConfig(16, 32, 4, 1, programs=3),
    ("triton", "decode 64", "interpreter", ANY, 576): TileConfig(32, 32, 4, 1, programs=3),
    ("triton", "decode 128", "interpreter", ANY, 576): TileConfig(64, 32, 4, 1, programs=3),
    ("triton", "decode 16", "hopper", "16bit", 64): TileConfig(16, 128, 4, 3, programs=2),
    ("triton", "decode 16", "hopper", "16bit", 128): TileConfig(16, 64, 4, 3, programs=2),
    ("triton", "decode 16", "hopper", "16bit", 256): TileConfig(16, 32, 4, 3, programs=2),
    ("triton", "decode 16", "hopper", "16bit", 576): TileConfig(16, 32, 4, 2, programs=1),
    ("triton", "decode 16", "hopper", "8bit", 64): TileConfig(16, 128, 4, 4, programs=2),
    ("triton", "decode 16", "hopper", "8bit", 128): TileConfig(16, 128, 4, 3, programs=2),
    ("triton", "decode 16", "hopper", "8bit", 256): TileConfig(16, 64, 4, 3, programs=2),
    ("triton", "decode 16", "hopper", "8bit", 576): TileConfig(16, 32, 4, 3, programs=1),
    ("triton", "decode 64", "hopper", "8bit", 64): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 64", "hopper", "8bit", 128): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 64", "hopper", "8bit", 256): TileConfig(64, 64, 8, 2, programs=1),
    ("triton", "decode 64", "hopper", "8bit", 576): TileConfig(16, 32, 4, 2, programs=1),
    ("triton", "decode 128", "hopper", "8bit", 64): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 128", "hopper", "8bit", 128): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 128", "hopper", "8bit", 256): TileConfig(64, 64, 8, 2, programs=1),
    ("triton", "decode 128", "hopper", "8bit", 576): TileConfig(16, 32, 4, 2, programs=1),
    ("triton", "decode 16", "large", "8bit", 128): TileConfig(16, 32, 4, 2, programs=2),
    ("triton", "decode 16", "large", "8bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "large", "8bit", 128): TileConfig(32, 32, 4, 2, programs=2),
    ("triton", "decode 64", "large", "8bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 128", "large", "8bit", 128): TileConfig(32, 32, 4, 2, programs=2),
    ("triton", "decode 128", "large", "8bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 16", "small", "8bit", 128): TileConfig(16, 32, 4, 2, programs=2),
    ("triton", "decode 16", "small", "8bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "small", "8bit", 128): TileConfig(32, 32, 4, 2, programs=2),
    ("triton", "decode 64", "small", "8bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 128", "small", "8bit", 128): TileConfig(32, 32, 4, 2, programs=2),
    ("triton", "decode 128", "small", "8bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3, 168, programs=3),
    ("triton", "decode 64", "hopper", "16bit", 128): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 64", "hopper", "16bit", 256): TileConfig(64, 64, 8, 2, programs=1),
    ("triton", "decode 64", "hopper", "16bit", 576): TileConfig(32, 32, 8, 1, programs=1),
    ("triton", "decode 128", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3, 168, programs=3),
    ("triton", "decode 128", "hopper", "16bit", 128): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 128", "hopper", "16bit", 256): TileConfig(128, 64, 8, 2, programs=1),
    ("triton", "decode 128", "hopper", "16bit", 576): TileConfig(32, 32, 8, 1, programs=1),
    ("triton", "decode 16", "large", "16bit", 64): TileConfig(16, 64, 4, 3, programs=2),
    ("triton", "decode 16", "large", "16bit", 128): TileConfig(16, 64, 4, 3, programs=2),
    ("triton", "decode 16", "large", "16bit", 256): TileConfig(16, 32, 4, 2, programs=1),
    ("triton", "decode 16", "large", "16bit", 576): TileConfig(16, 32, 4, 1, programs=1),
    ("triton", "decode 64", "large", "16bit", 64): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 64", "large", "16bit", 128): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 64", "large", "16bit", 256): TileConfig(32, 32, 4, 2, programs=1),
    ("triton", "decode 64", "large", "16bit", 576): TileConfig(16, 32, 4, 1, programs=1),
    ("triton", "decode 128", "large", "16bit", 64): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 128", "large", "16bit", 128): TileConfig(64, 64, 4, 3, programs=2),
    ("triton", "decode 128", "large", "16bit", 256): TileConfig(32, 32, 4, 2, programs=1),
    ("triton", "decode 128", "large", "16bit", 576): TileConfig(16, 32, 4, 1, programs=1),
    ("triton", "decode 16", "small", "16bit", 64): TileConfig(16, 64, 4, 2, programs=2),
    ("triton", "decode 16", "small", "16bit", 128): TileConfig(16, 32, 4, 2, programs=1),
    ("triton", "decode 16", "small", "16bit", 256): TileConfig(16, 32, 4, 2, programs=1),
    ("triton", "decode 16", "small", "16bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "small", "16bit", 64): TileConfig(64, 64, 4, 2, programs=2),
    ("triton", "decode 64", "small", "16bit", 128): TileConfig(64, 32, 4, 2, programs=1),
    ("triton", "decode 64", "small", "16bit", 256): TileConfig(32, 32, 4, 2, programs=1),
    ("triton", "decode 64", "small", "16bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 128", "small", "16bit", 64): TileConfig(64, 64, 4, 2, programs=2),
    ("triton", "decode 128", "small", "16bit", 128): TileConfig(64, 32, 4, 2, programs=1),
    ("triton", "decode 128", "small", "16bit", 256): TileConfig(32, 32, 4, 2, programs=1),
    ("triton", "decode 128", "small", "16bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 16", "hopper", "32bit", 128): TileConfig(16, 32, 4, 1, programs=2),
    ("triton", "decode 16", "hopper", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "hopper", "32bit", 128): TileConfig(32, 32, 4, 1, programs=2),
    ("triton", "decode 64", "hopper", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 128", "hopper", "32bit", 128): TileConfig(32, 32, 4, 1, programs=2),
    ("triton", "decode 128", "hopper", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 16", "large", "32bit", 128): TileConfig(16, 32, 4, 1, programs=2),
    ("triton", "decode 16", "large", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "large", "32bit", 128): TileConfig(32, 32, 4, 1, programs=2),
    ("triton", "decode 64", "large", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 128", "large", "32bit", 128): TileConfig(32, 32, 4, 1, programs=2),
    ("triton", "decode 128", "large", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 16", "small", "32bit", 128): TileConfig(16, 32, 4, 1, programs=2),
    ("triton", "decode 16", "small", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 64", "small", "32bit", 128): TileConfig(32, 32, 4, 1, programs=2),
    ("triton", "decode 64", "small", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "decode 128", "small", "32bit", 128): TileConfig(32, 32, 4, 1, programs=2),
    ("triton", "decode 128", "small", "32bit", 576): TileConfig(16, 16, 4, 1, programs=1),
    ("triton", "latent 16", "hopper", "16bit", 576): TileConfig(16, 32, 4, 2, programs=2, register_level=2),
    ("triton", "latent 64", "hopper", "16bit", 576): TileConfig(64, 64, 8, 3, programs=1, register_level=2),
    ("triton", "latent 128", "hopper", "16bit", 576): TileConfig(64, 64, 8, 3, programs=1, register_level=2),
    ("triton", "delta", ANY, ANY, 512): TileConfig(32, 0, 4, 1),
    ("triton", "forward", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3, 160),  # 421/406, 366
    ("triton", "forward", "hopper", "16bit", 128): TileConfig(64, 64, 4, 3),  # 469/490, 409
    ("triton", "forward", "hopper", "16bit", 256): TileConfig(128, 64, 8, 2),  # 479/469, 389
    ("triton", "forward", "hopper", "16bit", 512): TileConfig(32, 32, 8, 1),
    ("triton", "dq", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3, 168),
    ("triton", "dq softcap", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3, 160),
    ("triton", "dq", "hopper", "16bit", 128): TileConfig(128, 64, 8, 3),  # 638/623, 522
    ("triton", "dq", "hopper", "16bit", 256): TileConfig(128, 32, 8, 2),  # 420/435, 375
    ("triton", "dq", "hopper", "16bit", 512): TileConfig(32, 32, 8, 1),
    ("triton", "dkv", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3),  # 590/583, 494
    ("triton", "dkv", "hopper", "16bit", 128): TileConfig(64, 128, 8, 3),  # 484/608, 491
    ("triton", "dkv dropout", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3),
    ("triton", "dkv dropout", "hopper", "16bit", 128): TileConfig(64, 64, 4, 2),
    ("triton", "dkv softcap", "hopper", "16bit", 64): TileConfig(64, 64, 4, 3, 224),
    ("triton", "dkv softcap", "hopper", "16bit", 128): TileConfig(32, 64, 4, 3),
    ("triton", "dk", "hopper", "16bit", 256): TileConfig(32, 128, 8, 2),  # 402/443, 363
    ("triton", "dv", "hopper", "16bit", 256): TileConfig(64, 128, 8, 2),  # 524/495, 401
    ("triton", "dk", "hopper", "16bit", 512): TileConfig(32, 32, 8, 1),
    ("triton", "dv", "hopper", "16bit", 512): TileConfig(32, 32, 8, 1),
    ("triton", "dbias", "hopper", "16bit", 128): TileConfig(64, 64, 4, 1),
    ("triton", "dbias", "hopper", "16bit", 512): TileConfig(16, 32, 4, 1),
    ("triton", "forward", "large", "16bit", 64): TileConfig(128, 64, 8, 3),
    ("triton", "forward", "large", "16bit", 128): TileConfig(128, 32, 8, 3),
    ("triton", "forward", "large", "16bit", 256): TileConfig(64, 32, 8, 2),
    ("triton", "forward", "large", "16bit", 512): TileConfig(32, 32, 8, 1),
    ("triton", "dq", "large", "16bit", 64): TileConfig(64, 64, 4, 2),
    ("triton", "dq", "large", "16bit", 128): TileConfig(64, 64, 8, 2),
    ("triton", "dq", "large", "16bit", 256): TileConfig(32, 32, 4, 1),
    ("triton", "dq", "large", "16bit", 512): TileConfig(32, 32, 8, 1),
    ("triton", "dkv", "large", "16bit", 64): TileConfig(32, 64, 4, 2),
    ("triton", "dkv", "large", "16bit", 128): TileConfig(32, 64, 4, 2),
    ("triton", "dk", "large", "16bit", 256): TileConfig(32, 32, 4, 1),
    ("triton", "dv", "large", "16bit", 256): TileConfig(32, 32, 4, 1),
    ("triton", "dk", "large", "16bit", 512): TileConfig(16, 32, 8, 1),
    ("triton", "dv", "large", "16bit", 512): TileConfig(16, 32, 8, 1),
    ("triton", "dbias", "large", "16bit", 128): TileConfig(32, 64, 4, 1),
    ("triton", "dbias", "large", "16bit", 512): TileConfig(16, 32, 4, 1),
    ("triton", "forward", "small", "16bit", 64): TileConfig(128, 64, 8, 2),
    ("triton", "forward", "small", "16bit", 128): TileConfig(128, 32, 8, 2),
    ("triton", "forward", "small", "16bit", 256): TileConfig(32, 32, 4, 2),
    ("triton", "forward", "small", "16bit", 512): TileConfig(16, 32, 8, 1),
    ("triton", "dq", "small", "16bit", 64): TileConfig(64, 64, 4, 2),
    ("triton", "dq", "small", "16bit", 128): TileConfig(64, 32, 4, 2),
    ("triton", "dq", "small", "16bit", 256): TileConfig(32, 32, 4, 1),
    ("triton", "dq", "small", "16bit", 512): TileConfig(16, 32, 8, 1),
    ("triton", "dkv", "small", "16bit", 64): TileConfig(32, 64, 4, 2),
    ("triton", "dkv", "small", "16bit", 128): TileConfig(32, 64, 4, 1),
    ("triton", "dk", "small", "16bit", 256): TileConfig(32, 32, 4, 1),
    ("triton", "dv", "small", "16bit", 256): TileConfig(32, 32, 4, 1),
    ("triton", "dk", "small", "16bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dv", "small", "16bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dbias", "small", "16bit", 128): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "small", "16bit", 512): TileConfig(16, 32, 4, 1),
    ("triton", "forward", "hopper", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "forward", "hopper", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "forward", "hopper", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dq", "hopper", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dq", "hopper", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "dq", "hopper", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dkv", "hopper", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dkv", "hopper", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "dk", "hopper", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dv", "hopper", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dbias", "hopper", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "hopper", "32bit", 128): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "hopper", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "forward", "large", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "forward", "large", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "forward", "large", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dq", "large", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dq", "large", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "dq", "large", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dkv", "large", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dkv", "large", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "dk", "large", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dv", "large", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dbias", "large", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "large", "32bit", 128): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "large", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "forward", "small", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "forward", "small", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "forward", "small", "32bit", 512): TileConfig(16, 16, 4, 1),
    ("triton", "dq", "small", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dq", "small", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "dq", "small", "32bit", 512): TileConfig(8, 16, 4, 1),
    ("triton", "dkv", "small", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dkv", "small", "32bit", 128): TileConfig(32, 32, 8, 1),
    ("triton", "dk", "small", "32bit", 512): TileConfig(16, 8, 4, 1),
    ("triton", "dv", "small", "32bit", 512): TileConfig(16, 8, 4, 1),
    ("triton", "dbias", "small", "32bit", 64): TileConfig(32, 32, 4, 1),
    ("triton", "dbias", "small", "32bit", 128): TileConfig(16, 32, 4, 1),
    ("triton", "dbias", "small", "32bit", 512): TileConfig(8, 16, 4, 1),
}
# fmt: on


_CLASSES = {1: "8bit", 2: "16bit"}


def find(backend: str, pass_: str, dtype: torch.dtype, head_dim: int, architecture: str = ANY) -> TileConfig | None:
    """The row for this dtype class and the smallest bucket that holds `head_dim`; None: there is none."""
    classes = (ANY, _CLASSES.get(dtype.itemsize, "32bit"))
    rows = [
        (bucket, config)
        for (b, p, arch, dtype_class, bucket), config in TABLE.items()
        if (b, p) == (backend, pass_) and arch in (ANY, architecture) and dtype_class in classes and head_dim <= bucket
    ]
    return min(rows, key=lambda row: row[0])[1] if rows else None


def lookup(backend: str, pass_: str, dtype: torch.dtype, head_dim: int, architecture: str = ANY) -> TileConfig:
    """`find`, where there must be a row."""
    found = find(backend, pass_, dtype, head_dim, architecture)
    assert found is not None, (backend, pass_, dtype, head_dim, architecture)
    return found
