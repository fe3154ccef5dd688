"""The benchmarks of calls with a cache, on the CPU: from end to end, and nothing wrong is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import bench, errors
from tilewise.bench import decode, decode_cases, decode_peers, machine, results, runner, timing
from tilewise.bench.decode_cases import DecodeCase, make
from tilewise.bench.decode_peers import Contestant

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
    plain, paged, parts = document["cases"]
    assert not plain["plain"] and plain["time_of_plain"] is None
    for record in (paged, parts):
        beside, mine = record["plain"]["tilewise.cpu"], record["peers"]["tilewise.cpu"]
        assert record["time_of_plain"] == pytest.approx(timing.ratio(mine["rounds_ms"], beside["rounds_ms"]).median)
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


class FakeWrapper:
    """FlashInfer's wrapper, by the names of its arguments; its pages are attended to by our CPU backend."""

    def __init__(self, workspace: Tensor, layout: str, *, use_cuda_graph: bool, use_tensor_cores: bool,
                 paged_kv_indptr_buffer: Tensor, paged_kv_indices_buffer: Tensor,
                 paged_kv_last_page_len_buffer: Tensor) -> None:  # fmt: skip
        assert layout == "NHD" and use_cuda_graph and workspace.dtype == torch.uint8
        self.tensor_cores, self.buffers = use_tensor_cores, (paged_kv_indptr_buffer, paged_kv_indices_buffer)
        self.last = paged_kv_last_page_len_buffer

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert torch.equal(self.buffers[0], indptr) and torch.equal(self.buffers[1], indices)
        assert torch.equal(self.last, last_page_len) and bool((last_page_len == page_size).all())
        assert (num_qo_heads, num_kv_heads, head_dim) == (4, 2, 16) and q_data_type == kv_data_type
        self.seqlens = (indptr.diff() * page_size).int()
        self.table = indices.view(len(last_page_len), -1)

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        assert q.shape == (2, 4, 16)
        return tilewise.attention_with_kvcache(q[:, None], *cache, cache_seqlens=self.seqlens, page_table=self.table)[
            :, 0
        ]


@pytest.mark.parametrize("page_size", [None, 16])
def test_flashinfer_gets_every_cache_as_pages(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    monkeypatch.setattr(decode_peers, "first_module", lambda names: fake)
    monkeypatch.setattr(decode_peers, "WORKSPACE_BYTES", 16)
    case = replace(PLAIN, page_size=page_size)
    (data,) = make(case, CPU, calls=1)
    call = decode_peers._flashinfer(case, data)
    assert not isinstance(call, str)
    assert decode_cases.error(case, data, call()) < 1e-5
    assert decode_peers._flashinfer(CASES[1], data) == "has no an fp8 cache for 16-bit queries"


def test_arguments_of_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> tuple[Tensor, None]:
        seen.append(arguments)
        return q, None

    monkeypatch.setattr(
        decode_peers, "first_module", lambda _: SimpleNamespace(__name__="build", flash_attn_with_kvcache=attend)
    )
    case = replace(PLAIN, page_size=16, rows=3)
    (data,) = make(case, CPU, calls=1)
    call = decode_peers._fa3(case, data)
    assert not isinstance(call, str) and call() is data.q
    assert seen == [{"cache_seqlens": data.seqlens, "causal": True, "page_table": data.table}]
    # The wheel has less than the build.
    monkeypatch.setattr(decode_peers, "first_module", lambda _: SimpleNamespace(__name__="fa3_fwd_interface"))
    assert decode_peers._fa3(case, data) == "has no pages"


def test_packages_that_are_not_here_say_so() -> None:
    missing = Contestant("absent", False, lambda case, data: "", lambda: decode_peers._missing(["absent_decoding"]))
    settings = runner.Settings(CPU, rounds=1, burst_ms=0.1)
    record = decode.run_case(PLAIN, [missing], settings, runner.Bench.on(CPU))
    entry = record["peers"]["absent"]
    assert (entry["status"], entry["reason"]) == (
        results.UNAVAILABLE, "absent_decoding: No module named 'absent_decoding'",
    )  # fmt: skip
    assert [peer.name for peer in decode_peers.contestants(torch.device("cuda"))][-2:] == ["fa3", "flashinfer"]


def test_names_of_contestants() -> None:
    settings = runner.Settings(CPU, rounds=1, burst_ms=0.1)
    with pytest.raises(errors.ArgumentError, match=r"peers: got 'nobody'; supported: ours, tilewise\.cpu"):
        decode.run([PLAIN], ["nobody"], settings)
