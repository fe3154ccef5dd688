"""The kernels on a CPU, in processes of their own: Triton is either interpreted or not in the whole of a process.

By hand: ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``, and ``TRITON_INTERPRET=1 pytest tests/conformance
--backend triton`` or ``--backend hopper`` for everything that a backend has to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
CONFORMANCE = Path(__file__).parents[1] / "conformance"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
# A process needs seconds to begin, so there are a few, of files that take about as long together.
PROCESSES = 4

# Of the conformance suite what meets every way through Hopper's kernels, forward and backward: a file, and which tests.
HOPPER = [
    ("test_features.py", "fp16"),
    ("test_shapes.py", "whole_tiles and float16 and (plain or two_sided) and not d100to20 and not d64to16"),
    ("test_varlen.py", "float16 and (seqused or dropout or sinks or deterministic)"),
]


def _interpreted(*arguments: str) -> None:
    """Run tests in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        environment.pop(variable, None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("names", [FILES[i::PROCESSES] for i in range(PROCESSES)], ids=" ".join)
def test_in_the_interpreter(names: list[str]) -> None:
    _interpreted(*(str(FOLDER / name) for name in names))


@pytest.mark.parametrize("name, which", HOPPER)
def test_hopper_conforms(name: str, which: str) -> None:
    _interpreted(str(CONFORMANCE / name), "--backend", "hopper", "-k", which)
