"""The benchmarks of calls with a cache, on the CPU: from end to end, and nothing wrong is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise import bench, errors
from tilewise.bench import decode, decode_cases, machine, results, runner
from tilewise.bench.decode_cases import Contestant, DecodeCase, make

CPU = torch.device("cpu")
PLAIN = DecodeCase(2, 64, 4, 2, 16, dtype="fp32")
CASES = [
    PLAIN,
    replace(PLAIN, page_size=16, dtype="bf16", fp8=True),
    replace(PLAIN, heads_kv=1, head_dim=48, latent=32, rows=3, split_size=128),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small caches, and ceilings that take no time."""
    found = {"matmul_tflops": 100.0, "copy_gb_s": 1000.0, "matmul": "none", "copy": "none"}
    monkeypatch.setattr(machine, "ceilings", lambda device, clock: found)
    monkeypatch.setattr(decode_cases, "COLD_BYTES", 100)
    monkeypatch.setitem(decode_cases.SETS, "decode-tiny", tuple(CASES))


def test_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "decode-tiny", "--rounds", "3", "--burst-ms", "0.1", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main([*options, "--commit", "abc"]) == 0
    (path,) = tmp_path.glob("cpu/*-decode-tiny.json")
    document = results.load(path)
    assert [record["name"] for record in document["cases"]] == [case.name for case in CASES]
    for case, record in zip(CASES, document["cases"], strict=True):
        entry = record["peers"]["tilewise.cpu"]
        assert entry["status"] == "timed" and len(entry["rounds_ms"]) == 3
        assert entry["gb_s"] == pytest.approx(case.cache_bytes / entry["ms"] / 1e6)
    said = capsys.readouterr().out
    assert "decode B2 S64 4/2 heads D16 page 16 fp8: tilewise.cpu" in said and "of copy" in said


def test_bytes_and_operations() -> None:
    plain, eight_bit, latent = CASES
    assert plain.cache_bytes == 2 * 64 * 2 * 32 * 4 and eight_bit.cache_bytes == plain.cache_bytes // 4
    assert latent.cache_bytes == 2 * 64 * 1 * 48 * 4  # values are not read twice
    assert plain.flops == 4 * 2 * 4 * 64 * 16 and latent.flops == 2 * 2 * 3 * 4 * 64 * (48 + 32)


def test_caches_together_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cases, "COLD_BYTES", 10 * PLAIN.cache_bytes)
    assert PLAIN.calls == 10
    data = make(PLAIN, CPU)
    assert len({x.k.data_ptr() for x in data}) == 10


def test_what_is_wrong_is_not_timed() -> None:
    def zeros(case: DecodeCase, data: decode_cases.DecodeData) -> object:
        return lambda: torch.zeros(case.batch, case.rows, case.heads, case.head_dim_v)

    def breaks(case: DecodeCase, data: decode_cases.DecodeData) -> object:
        raise RuntimeError("out of order")

    peers = [Contestant("zeros", True, zeros), Contestant("breaks", False, breaks)]  # type: ignore[arg-type]  # they lie
    settings = runner.Settings(CPU, rounds=1, burst_ms=0.1)
    record = decode.run_case(PLAIN, peers, settings, runner.Bench.on(CPU))
    assert record["peers"]["zeros"]["status"] == results.WRONG
    assert record["peers"]["breaks"]["status"] == results.FAILS
    assert record["peers"]["breaks"]["reason"] == "RuntimeError: out of order"


def test_names_of_contestants() -> None:
    settings = runner.Settings(CPU, rounds=1, burst_ms=0.1)
    with pytest.raises(errors.ArgumentError, match=r"peers: got 'nobody'; supported: ours, tilewise\.cpu"):
        decode.run([PLAIN], ["nobody"], settings)
