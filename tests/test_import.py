"""`import tilewise` is cheap and touches neither Triton nor a GPU: each claim in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

BUDGET_MS = 50.0
# These cost time or may be missing; they are loaded by what needs them.
LATE = {"triton", "rich", "typer", "matplotlib", "numpy", "sympy", "transformers"}


def run(code: str) -> Any:
    """The last line that `code` prints in a new interpreter, read as JSON."""
    # Users import compiled modules; a setting against writing them would have every run compile them anew.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


MEASURE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import tilewise
ms = 1e3 * (time.process_time() - start)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"ms": ms, "new": sorted(new), "cuda": torch.cuda.is_initialized()}))
"""


def test_import_is_fast() -> None:
    times = []
    while len(times) < 5:  # CPU time, and the best of several: what else the machine does can only add to it
        times.append(run(MEASURE)["ms"])
        if times[-1] < BUDGET_MS:
            return
    raise AssertionError(f"import tilewise took {times} ms beyond torch, every time over {BUDGET_MS} ms")


def test_import_loads_nothing_late_and_no_cuda() -> None:
    found = run(MEASURE)
    assert not LATE & set(found["new"])
    assert found["cuda"] is False


def test_attention_works_without_triton() -> None:
    code = """
import json, sys
sys.modules["triton"] = None
import torch, tilewise
q = torch.randn(1, 5, 2, 8)
out = tilewise.attention(q, q, q, causal=True)
print(json.dumps({"shape": list(out.shape), "cuda": torch.cuda.is_initialized()}))
"""
    assert run(code) == {"shape": [1, 5, 2, 8], "cuda": False}


def test_public_names_exist_and_are_listed() -> None:
    code = """
import json, tilewise
missing = [name for name in tilewise.__all__ if not hasattr(tilewise, name)]
print(json.dumps({"missing": missing, "names": sorted(tilewise.__all__)}))
"""
    found = run(code)
    assert not found["missing"]
    assert {"attention", "attention_varlen", "merge_states", "explain", "BlockMask", "ScoreMod"} <= set(found["names"])
