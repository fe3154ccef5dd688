"""`import tilewise` is cheap and touches neither Triton nor a GPU: each claim in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import guards
import tilewise
from tilewise.kvcache import CacheInputs

# Milliseconds of CPU time on a machine that takes YARDSTICK_MS for the yardstick: a slower or a busier one takes longer
# for both, and their ratio stays within a fifth.
BUDGET_MS = 40.0
YARDSTICK_MS = 25.0
# These cost time or may be missing; they are loaded by what needs them.
LATE = {"triton", "rich", "typer", "matplotlib", "numpy", "sympy", "transformers"}
# Modules of our own that few programs need.
OWN_LATE = {"cache_api", "cached", "compat", "cpu", "explanation", "kvcache", "nn", "paged_cache", "roofline",
            "shared_prefix", "softmax", "tiles", "warming"}  # fmt: skip


def run(code: str) -> Any:
    """The last line that `code` prints in a new interpreter, read as JSON."""
    # Users import compiled modules; a setting against writing them would have every run compile them anew.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=guards.SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


MEASURE = """
import dataclasses, json, sys, time
import torch

def yardstick():
    start = time.process_time()
    for _ in range(40):
        dataclasses.make_dataclass("C", [("a", int), ("b", int, 1)], frozen=True)
    return 1e3 * (time.process_time() - start)

before, around = set(sys.modules), [yardstick(), yardstick()]
start = time.process_time()
import tilewise
ms = 1e3 * (time.process_time() - start)
around.append(yardstick())
new = sorted(set(sys.modules) - before)
print(json.dumps({"ms": ms, "yardstick": min(around), "new": new, "cuda": torch.cuda.is_initialized()}))
"""


def test_import_is_fast() -> None:
    times = []
    while len(times) < 5:  # the best of several: what else the machine does can only add to it
        found = run(MEASURE)
        times.append(found["ms"] * YARDSTICK_MS / found["yardstick"])
        if times[-1] < BUDGET_MS:
            return
    raise AssertionError(f"import tilewise took {times} ms beyond torch, every time over {BUDGET_MS} ms")


def test_import_loads_nothing_late_and_no_cuda() -> None:
    found = run(MEASURE)
    assert not (LATE | {f"tilewise.{name}" for name in OWN_LATE}) & set(found["new"])
    assert found["cuda"] is False


def test_operators_are_there_before_what_serves_them() -> None:
    """A saved graph may call them after no more than `import tilewise`."""
    code = """
import json, sys
import torch, tilewise
names = ["forward", "backward", "attend_cache", "append_and_attend_cache"]
there = [name for name in names if hasattr(torch.ops.tilewise, name)]
loaded = "tilewise.cached" in sys.modules
x, n = torch.ones(1, 4, 1, 8), torch.tensor([4])
rest = [None] * 14
options = tilewise.problem.Options(tilewise.masks.Full()).encode([])
out, _ = torch.ops.tilewise.attend_cache(x, x, x, n, *rest, [], options, "()", 4)
print(json.dumps({"missing": sorted(set(names) - set(there)), "loaded": loaded, "right": bool((out == 1).all())}))
"""
    assert run(code) == {"missing": [], "loaded": False, "right": True}


@pytest.mark.parametrize("name", ["attend_cache", "append_and_attend_cache"])
def test_the_operators_of_caches_take_their_inputs_in_order(name: str) -> None:
    schema = getattr(torch.ops.tilewise, name).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == [*CacheInputs._fields, "extras", "options", "static", "max_seqlen_q"]
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == (["k_cache", "v_cache"] if name.startswith("append") else [])


def test_late_names_stay_what_they_are() -> None:
    """Whatever is imported first: no module takes the place of a name of ours."""
    code = """
import importlib, json, pickle, pkgutil, types
import tilewise
for module in pkgutil.iter_modules(tilewise.__path__):
    if module.name not in ("__main__", "_triton", "hopper", "kernels"):
        importlib.import_module(f"tilewise.{module.name}")
wrong = [name for name in tilewise.__all__ if isinstance(getattr(tilewise, name), types.ModuleType)]
star = {}
exec("from tilewise import *", star)
lacking = [name for name in tilewise.__all__ if star[name] is not getattr(tilewise, name)]
pickled = [tilewise.explain, tilewise.Rotary, tilewise.Explanation, tilewise.flex]
same = all(pickle.loads(pickle.dumps(x)) is x for x in pickled)
print(json.dumps({"wrong": sorted(wrong), "lacking": lacking, "same": same}))
"""
    assert run(code) == {"wrong": ["errors", "masks"], "lacking": [], "same": True}


def test_late_names_are_listed_and_others_refused() -> None:
    assert {*tilewise.__all__, "compat", "roofline"} <= set(dir(tilewise))
    assert tilewise.roofline.DEVICES
    with pytest.raises(AttributeError, match="module 'tilewise' has no attribute 'attention_with_cache'"):
        _ = tilewise.attention_with_cache


def test_compilation_sees_late_names() -> None:
    """The first use of a name may be in a function that is compiled."""
    code = """
import json
import torch, tilewise

def step(q, k, v, lengths):
    return tilewise.attention_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)

q, k, v = torch.randn(3, 1, 4, 1, 8).unbind()
with torch.no_grad():
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, torch.tensor([4]))
print(json.dumps({"equal": torch.equal(compiled, step(q, k, v, torch.tensor([4])))}))
"""
    assert run(code) == {"equal": True}


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
