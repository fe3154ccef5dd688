"""The model of an order of tiles: what it says of calls that can be reckoned by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "order.py"


def said(*options: str) -> tuple[float, float]:
    """How late the last program ends, and what misses L2, in percent."""
    command = [sys.executable, TOOL, "--heads", "4", "--programs", "4", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    late, missed = map(float, re.findall(r"([\d.]+)%", done.stdout))
    return late, missed


def test_pairs_end_together_and_meet_their_rows_once() -> None:
    # Sixteen pairs of two members for four programs: nobody has more to do. Eight tiles of rows of a head are met by
    # tiles of keys 1 + 2 + ... + 8 times in all.
    late, missed = said("--lengths", "1024,1024", "--causal", "--backward")
    assert late < 1 and missed == round(100 * 8 / 36, 1)


def test_where_nothing_stays_everything_is_missed() -> None:
    _, missed = said("--lengths", "1024,512", "--l2", "0.001")
    assert missed == 100
