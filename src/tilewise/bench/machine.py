"""The machine that figures belong to: what it is, what it can do at most, and what it is doing. Nothing is changed."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tilewise

from .timing import Clock, CpuClock, CudaClock, Reading


def slug(text: str) -> str:
    """A name for a folder.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def name(device: torch.device) -> str:
    """Of the GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def describe(device: torch.device) -> dict[str, Any]:
    """Device, driver, settings as found, and versions."""
    found: dict[str, Any] = {"device": name(device), "python": platform.python_version(), "torch": torch.__version__}
    found["triton"] = _version("triton")
    found["tilewise"] = tilewise.__version__
    if device.type == "cpu":
        return found | {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        **_query(device, "driver_version", "clocks.max.sm", "power.limit"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _query(device: torch.device, *fields: str) -> dict[str, str]:
    """What nvidia-smi says of the device; empty where there is none."""
    which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", "-i", which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=False))


def commit() -> str | None:
    """The commit of the source tree, marked where it has changes; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Sensors:
    """SM clock and power while a kernel runs, through NVML if it is here; reading them changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._working = device.type == "cuda"

    def read(self) -> Reading | None:
        """The sensors now; None where there are none."""
        if not self._working:
            return None
        try:
            return Reading(torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device) / 1e3)
        except Exception:  # no NVML, or a virtual GPU without sensors: the figures stand without them
            self._working = False
            return None


def clock_of(device: torch.device) -> Clock:
    """How to time on the device."""
    return CudaClock(device, Sensors(device).read) if device.type == "cuda" else CpuClock()


def ceilings(device: torch.device, clock: Clock) -> dict[str, Any]:
    """What copying and matrix products reach here and now, on random data: the rates that kernels are held against."""
    on_gpu = device.type == "cuda"
    n, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.randn((1 << 28) if on_gpu else (1 << 22), device=device)
    target = torch.empty_like(source)
    product = _median_ms(clock, lambda: torch.matmul(a, b))
    copy = _median_ms(clock, lambda: target.copy_(source))
    return {
        "matmul_tflops": 2 * n**3 / product / 1e9,
        "matmul": f"{n}^3 {str(dtype).removeprefix('torch.')}",
        "copy_gb_s": 2 * source.numel() * source.element_size() / copy / 1e6,
        "copy": f"{source.numel() * source.element_size() / 2**20:.0f} MiB, bytes read and written",
    }


def _median_ms(clock: Clock, call: Callable[[], object]) -> float:
    clock.burst(call, 3)
    return statistics.median(clock.burst(call, 5)[0] for _ in range(5))
