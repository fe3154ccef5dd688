"""The contestants of the benchmarks: who takes part, and what others are called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from test_benchmarks import BACKWARD, CPU, PLAIN, VARIANTS
from tilewise import dispatch, errors
from tilewise.bench import check, peers, runner
from tilewise.bench.data import make


def test_peers_by_name() -> None:
    assert [peer.name for peer in peers.named(["ours"])] == [f"tilewise.{name}" for name in dispatch.BACKENDS]
    assert [peer.name for peer in peers.named(["fa3", "tilewise.cpu"])] == ["tilewise.cpu", "fa3"]
    with pytest.raises(errors.ArgumentError, match=r"peers: got fa9; supported: ours, tilewise\.cpu"):
        peers.named(["fa9"])


def fake_flash(seen: list[tuple[str, dict[str, Any]]]) -> Any:
    """A module with the functions of FA3 and FA4 that keeps its arguments; the LSE comes along."""

    def function(name: str) -> Callable[..., Any]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
            seen.append((name, arguments))
            return torch.zeros_like(q), None

        return attend

    names = ("flash_attn_func", "flash_attn_varlen_func")
    return SimpleNamespace(__name__="flash", **{name: function(name) for name in names})


def test_arguments_of_fa3_and_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    windowed = replace(PLAIN, dtype="bf16", window=(7, None), softcap=5.0)
    packed = replace(PLAIN, dtype="bf16", lengths=(5, 96), deterministic=True)
    monkeypatch.setattr(peers, "first_module", lambda names: fake_flash(seen))
    for setup in (peers._setup_fa3, peers._setup_fa4):
        for case in (windowed, packed):
            data = make(case, CPU)
            ready = setup(case, data)
            assert not isinstance(ready, str) and ready.forward().shape == data.q.shape
    (fa3, fa3_packed, fa4, fa4_packed) = seen
    assert fa3 == ("flash_attn_func", {"causal": True, "window_size": (7, -1), "softcap": 5.0})
    assert fa4 == ("flash_attn_func", {"causal": True, "window_size": (7, None), "softcap": 5.0})
    assert fa3_packed[0] == fa4_packed[0] == "flash_attn_varlen_func"
    assert fa4_packed[1]["max_seqlen_q"] == 96 and fa4_packed[1]["deterministic"] is True
    assert fa4_packed[1]["cu_seqlens_q"].tolist() == [0, 5, 101]
    assert peers._setup_fa4(replace(PLAIN, alibi=True), data) == "has no alibi, fp32"
    # The wheel has less than the build.
    monkeypatch.setattr(peers, "first_module", lambda names: SimpleNamespace(__name__="fa3_fwd_interface"))
    assert peers._setup_fa3(replace(BACKWARD, dtype="fp16"), data) == "has no backward, fp16"


def test_packages_that_are_missing_or_broken_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_flash.py").write_text("raise OSError('libcuda.so is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    why = peers._importable(("absent_flash", "broken_flash"), torch.device("cuda"))
    assert why == "absent_flash: No module named 'absent_flash'; broken_flash: OSError: libcuda.so is missing"
    assert peers._importable(("json",), torch.device("cuda")) is None
    assert peers._importable(("json",), CPU) == "runs on cuda, not on cpu"


@pytest.mark.parametrize("variant", ["window", "two-sided window", "softcap", "alibi", "blocks", "grouped"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_masks_and_score_mods_of_flex(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes long; what is translated is the same without.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = replace(PLAIN, **VARIANTS[variant])
    prepared = runner.prepare(case, CPU)
    ready = peers._setup_flex(replace(case, dtype="bf16"), prepared.data)
    assert not isinstance(ready, str)
    assert check.verdict(case, prepared.data, ready, prepared.expected).complaint is None
