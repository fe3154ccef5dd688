"""The first call of a process: seconds per kernel where nothing is cached, and from disk in the next process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("first_call.py")
SECONDS = 3.0  # for each kernel


def first_call(backend: str, head_dim: int, cache: Path) -> dict[str, Any]:
    """What `first_call.py` reports from a process with this cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(PROGRAM), backend, str(head_dim)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def cached(cache: Path) -> set[Path]:
    """Every binary, and launcher, that was built."""
    return {path for pattern in ("*.cubin", "*.so") for path in cache.rglob(pattern)}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", ["triton", "best"])
def test_cold_and_from_disk(backend: str, head_dim: int, tmp_path: Path) -> None:
    cold = first_call(backend, head_dim, tmp_path)
    built = cached(tmp_path)
    assert len(built) >= len(cold["compiled"]) > 0
    assert max(seconds for _, seconds in cold["compiled"]) <= SECONDS, cold
    assert cold["total"] <= SECONDS * len(cold["compiled"]), cold
    again = first_call(backend, head_dim, tmp_path)
    assert cached(tmp_path) == built, "the second process compiled"
    assert [name for name, _ in again["compiled"]] == [name for name, _ in cold["compiled"]]
    assert again["total"] < cold["total"], (cold, again)
