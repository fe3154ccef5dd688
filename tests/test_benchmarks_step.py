"""The benchmark of training steps, on the CPU: from end to end, and no attention that is wrong is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import bench, errors
from tilewise.bench import machine, peers, results, runner, step, step_cases
from tilewise.bench.cases import Case
from tilewise.bench.peers import Calls, Peer
from tilewise.bench.step_cases import StepCase, Training

CPU = torch.device("cpu")
TINY = StepCase(2, 48, layers=3, width=32, heads=4, heads_kv=2, head_dim=8, hidden=40, dtype="fp32")
SETTINGS = runner.Settings(CPU, rounds=2, burst_ms=0.1)
BENCH = runner.Bench(machine.CpuClock(), {"matmul_tflops": 100.0, "copy_gb_s": 1000.0})
OURS = next(peer for peer in peers.ours() if peer.name == "tilewise.cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny decoder, and ceilings that take no time."""
    found = {**BENCH.ceilings, "matmul": "none", "copy": "none"}
    monkeypatch.setattr(machine, "ceilings", lambda device, clock: found)
    monkeypatch.setitem(step_cases.SETS, "step-tiny", (TINY, replace(TINY, dtype="bf16")))


def options(folder: Path, *more: str) -> list[str]:
    return ["--set", "step-tiny", "--rounds", "3", "--burst-ms", "0.1", "--device", "cpu", "--out", str(folder), *more]


def test_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(options(tmp_path, "--commit", "abc")) == 0
    (path,) = tmp_path.glob("cpu/*-step-tiny.json")
    document = results.load(path)
    assert document["versions"].keys() >= {"tilewise.cpu", "sdpa"}
    single, half = document["cases"]
    assert single["case"] == TINY.to_json()
    assert single["tokens"] == 96
    assert (single["ours"], single["best_peer"]) == ("tilewise.cpu", "sdpa")
    for name in ("tilewise.cpu", "sdpa"):
        entry = single["peers"][name]
        assert (entry["status"], len(entry["rounds_ms"])) == ("timed", 3)
        assert 0 < entry["error"] < 1e-4
        assert entry["tokens_s"] == pytest.approx(1e3 * 96 / entry["ms"])
        assert entry["attention_share"] < 1
    assert single["without_attention_ms"] > 0
    assert half["peers"]["tilewise.cpu"]["status"] == "timed"
    assert half["peers"]["sdpa"]["status"] == "timed"
    said = capsys.readouterr().out
    assert f"{TINY.name}: tilewise.cpu" in said and "tokens/s  ratio" in said


def test_weights_stay_the_same() -> None:
    training = Training(TINY, CPU)
    before = [weight.clone() for weight in training.model.parameters()]
    call = training.step(step_cases.plain_attention)
    call()
    call()
    assert all(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))
    # The optimiser did its work all the same.
    moments = [training.adamw.state[weight]["exp_avg"] for weight in training.model.parameters()]
    assert all(bool(moment.abs().sum() > 0) for moment in moments)


def test_operations_of_a_step() -> None:
    training = Training(TINY, CPU)
    linear = TINY.layers * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 40) + 256 * 32
    attention = TINY.layers * 14 * 8 * 4 * 2 * 48 * 49 // 2
    assert training.flops == 6 * 96 * linear + attention


def spoilt(spoil: Callable[[Tensor], Tensor]) -> Peer:
    """Our CPU backend with something wrong about q."""

    def setup(case: Case, data: Any) -> Calls | str:
        ready = OURS.setup(case, data)
        assert not isinstance(ready, str)
        return ready._replace(attend=lambda q, k, v: ready.attend(spoil(q), k, v))

    return Peer("tilewise.spoilt", lambda _: None, setup, ours=True)


class Detached(torch.autograd.Function):
    """The same values; the gradient is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "spoil", [lambda q: 0.5 * q, lambda q: q.roll(1, dims=1), Detached.apply, lambda q: q * float("nan")]
)
def test_what_is_wrong_is_not_timed(spoil: Callable[[Tensor], Tensor], dtype: str) -> None:
    record = step.run_case(replace(TINY, dtype=dtype), [spoilt(spoil)], SETTINGS, BENCH)
    entry = record["peers"]["tilewise.spoilt"]
    assert entry["status"] == results.WRONG
    assert "is off by" in entry["reason"]
    assert record["ours"] is None and record["without_attention_ms"] is None
    assert runner.failures({"cases": [record]})


def test_who_is_not_timed_says_why() -> None:
    def breaks(case: Case, data: Any) -> Calls | str:
        raise RuntimeError("no such kernel")

    contestants = [
        Peer("absent", lambda device: f"not on {device.type}", breaks),
        Peer("broken", lambda _: None, breaks),
        Peer("choosy", lambda _: None, lambda case, data: "has no taste"),
    ]
    record = step.run_case(TINY, contestants, SETTINGS, BENCH)
    found = {name: (entry["status"], entry["reason"]) for name, entry in record["peers"].items()}
    assert found == {
        "absent": (results.UNAVAILABLE, "not on cpu"),
        "broken": (results.FAILS, "RuntimeError: no such kernel"),
        "choosy": (results.DECLINES, "has no taste"),
    }


def test_options_of_such_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--set", "step", "--s", "4k", "--list"]) == 0
    assert capsys.readouterr().out == "step 12 layers D128 16/4 heads 4 x 4096 tokens\n"
    with pytest.raises(errors.ArgumentError, match=r"set: got 'forward,step'; supported: step, step-tiny together"):
        bench.main(["--set", "forward,step"])
    with pytest.raises(
        errors.ArgumentError, match=r"d: got \(64,\); supported: --s with the set step\. Fix: leave --d"
    ):
        bench.main(["--set", "step", "--d", "64"])
    with pytest.raises(errors.ArgumentError, match=r"s: got \(1,\); supported: in step: 4096, 16384"):
        bench.main(["--set", "step", "--s", "1"])
