"""The table of where warps wait, from a page of Nsight Compute's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "stalls.py"
PAGE = """"Kernel Name","k",
"Address","Source","Instructions Executed","stall_wait","stall_long_sb","stall_wait (Not Issued)"
"0","MOV R1, R2","1","100","0","0"
"16","FADD R1, R1, R2","1000","30","0","30"
"32","BAR.SYNC.DEFER_BLOCKING 0x0","1000","5","15","9"
"48","MUFU.EX2 R1, R1","1000","50","0","0"
"""


def test_hot_segments(tmp_path: Path) -> None:
    page = tmp_path / "source.csv"
    page.write_text(PAGE)
    done = subprocess.run([sys.executable, TOOL, page], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.split() == ["1-2", "25.00%", "BAR.SYNC.DEFER_BLOCKING", "0x0", "wait", "35,", "long_sb", "15"]
    assert second.split() == ["3-3", "25.00%", "MUFU.EX2", "R1,", "R1", "wait", "50"]
