"""benchmarks/host_path.py: what a call costs beside other libraries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
def test_overhead_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "host_path.py"
    spec = importlib.util.spec_from_file_location("host_path", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CALLS", 2)
    x = torch.randn(3, 1, 16, 2, 8)
    found = module.overhead(
        {**module.contestants(None), "broken": lambda *_: torch.tensor("no tensor")}, tuple(x), 1, "aot_eager"
    )
    numbers = [f"{mode}, {what}" for mode in ("eager", "compiled") for what in ("forward", "training")]
    for name in ("tilewise", "sdpa"):
        assert list(found[name]) == numbers
        assert all(isinstance(value, float) and value > 0 for value in found[name].values())
    assert set(found["broken"]) == set(numbers)
    table = module.as_table(found)
    assert table.startswith("| µs per call | eager, forward |")
    assert "| broken | – | – | – | – |" in table
    assert "broken, eager, forward: TypeError" in table
