"""What `tilewise info` says of a machine: versions, devices, which backend serves what and why the others do not."""

from __future__ import annotations

import os
import platform
from importlib import metadata, util
from pathlib import Path

import torch

from . import __version__, dispatch
from .arguments import prepare
from .cache_arguments import prepare as prepare_cache

# Variables that the package, or Triton below it, reads; docs/environment.md says what each does.
VARIABLES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME")
# What each extra brings, by the names under which it is imported.
EXTRAS = {
    "cli": ("typer", "rich"),
    "demo": ("matplotlib",),
    "hf": ("transformers",),
    "triton": ("triton",),
}


def rows() -> list[tuple[str, str]]:
    """Label and value of each line."""
    return [
        *_versions(),
        *_devices(),
        *_backends(),
        *_extras(),
        *_variables(),
        ("kernel cache", str(cache_directory())),
    ]


def _versions() -> list[tuple[str, str]]:
    found = [("tilewise", __version__), ("python", platform.python_version()), ("torch", torch.__version__)]
    for package in ("triton", "numpy", "transformers"):
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            found.append((package, "not installed"))
    return found


def _devices() -> list[tuple[str, str]]:
    cpu = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"no driver or device found for CUDA {built}" if built else "this torch is built without CUDA"
        fix = "check nvidia-smi, and CUDA_VISIBLE_DEVICES" if built else "pytorch.org names the command for a GPU build"
        return [("cpu", cpu), ("gpu", f"none: {why}; {fix}")]
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        names.append((f"cuda:{index}", f"{properties.name}, {properties.major}.{properties.minor}, {memory}"))
    return [("cpu", cpu), *names]


def _backends() -> list[tuple[str, str]]:
    """Each backend's word on the plainest call, with tensors on the best device that is here."""
    return [(f"backend {name}", _word_of(name)) for name in dispatch.BACKENDS]


def _word_of(name: str) -> str:
    device = "cuda" if torch.cuda.is_available() and name != "cpu" else "cpu"
    x = torch.empty(1, 16, 1, 64, dtype=torch.bfloat16, device=device)
    plain = prepare(x, x, x)[0]
    cached = prepare_cache(x, x, x, torch.zeros(1, dtype=torch.int32))[0]
    passes = {"forward": dispatch.reasons(name, plain), "backward": dispatch.reasons(name, plain, "backward")}
    passes["caches"] = dispatch.cache_reasons(name, cached)
    serves = [what for what, why in passes.items() if not why]
    if not serves:
        return f"not available: {'; '.join(passes['forward'])}"
    lacks = [f"not {what}: {'; '.join(why)}" for what, why in passes.items() if why]
    return f"available: {'; '.join([', '.join(serves), *lacks])}"


def _extras() -> list[tuple[str, str]]:
    """Which extras are here, and how to get the others."""
    lacking = {extra: [m for m in modules if util.find_spec(m) is None] for extra, modules in EXTRAS.items()}
    here = [extra for extra, missing in lacking.items() if not missing]
    absent = [f"{extra} (no {', '.join(missing)}): pip install 'tilewise[{extra}]'"
              for extra, missing in lacking.items() if missing]  # fmt: skip
    return [("extras", "; ".join([", ".join(here) or "none", *absent]))]


def _variables() -> list[tuple[str, str]]:
    """The variables that are set."""
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return [("environment", ", ".join(found) or f"none of {', '.join(VARIABLES)} is set")]


def cache_directory() -> Path:
    """Where Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
