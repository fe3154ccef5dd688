"""Wheel and sdist: they build, hold every file of the package, and run in an environment that never saw this tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import guards

ROOT = Path(__file__).parents[1]


def test_the_wheel_runs_elsewhere() -> None:
    command = [sys.executable, str(ROOT / "tools" / "check_build.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=guards.SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("the wheel runs from", "backend cpu", "wrote tilewise.html"):
        assert said in done.stdout
