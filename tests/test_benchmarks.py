"""The benchmarks on the CPU: a run from end to end, nothing wrong is timed, and the arithmetic of the figures."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import bench, dispatch, errors
from tilewise.bench import check, command, decode, machine, peers, report, results, runner, timing
from tilewise.bench.cases import SETS, TOKENS, WIDTH, Case, Filters, log_normal_lengths, select
from tilewise.bench.data import make, problem
from tilewise.bench.peers import Calls, Peer
from tilewise.bench.results import Entry, Work
from tilewise.bench.timing import Ratio, Reading

CPU = torch.device("cpu")
PLAIN = Case("forward", 16, 96, True, "fp32", 2, 2, 2)
BACKWARD = replace(PLAIN, pass_="backward")
CEILINGS = {"matmul_tflops": 100.0, "copy_gb_s": 1000.0}
SETTINGS = runner.Settings(CPU, rounds=3, burst_ms=0.1)
BENCH = runner.Bench(timing.CpuClock(), CEILINGS)

OURS = next(peer for peer in peers.ours() if peer.name == "tilewise.cpu")
SDPA = next(peer for peer in peers.OTHERS if peer.name == "sdpa")


# ---- from end to end


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of tiny cases, and ceilings that take no time."""
    monkeypatch.setitem(SETS, "tiny", lambda _: [PLAIN, replace(BACKWARD, softcap=20.0)])
    monkeypatch.setattr(machine, "ceilings", lambda device, clock: dict(CEILINGS, matmul="none", copy="none"))


def options(folder: Path, *more: str) -> list[str]:
    return ["--set", "tiny", "--rounds", "3", "--burst-ms", "0.1", "--device", "cpu", "--out", str(folder), *more]


@pytest.mark.usefixtures("quick")
def test_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(options(tmp_path, "--commit", "abc")) == 0
    (path,) = tmp_path.glob("cpu/*-tiny.json")
    document = results.load(path)
    assert document["commit"] == "abc"
    assert document["method"] == {"rounds": 3, "burst_ms": 0.1, "order": "alternating"}
    assert not document["not_reached"]
    assert document["versions"].keys() >= {"tilewise.cpu", "sdpa"}

    plain, capped = document["cases"]
    assert plain["case"] == PLAIN.to_json() | {"lengths": []}
    pairs = 2 * 2 * 96 * 97 // 2
    assert plain["flops"] == 4 * 16 * pairs
    ours, sdpa = plain["peers"]["tilewise.cpu"], plain["peers"]["sdpa"]
    for entry in (ours, sdpa):
        assert entry["status"] == "timed"
        assert len(entry["rounds_ms"]) == 3
        assert 0 < entry["error"] < 1e-5
        assert entry["tflops"] == pytest.approx(plain["flops"] / entry["ms"] / 1e9)
    assert (plain["ours"], plain["best_peer"]) == ("tilewise.cpu", "sdpa")
    assert plain["ratio"] == sdpa["ours_over_it"][0]
    assert not plain["plain"]

    assert capped["peers"]["sdpa"]["reason"] == "has no softcap"
    assert capped["ratio"] is None
    assert capped["plain"]["tilewise.cpu"]["status"] == "timed"
    assert capped["speed_of_plain"] == pytest.approx(capped["time_of_plain"])

    said = capsys.readouterr().out
    assert "forward D16 S96 causal" in said
    assert "not timed: sdpa declines: has no softcap (1 of 2 cases)" in said
    assert str(path) in said


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_out_of_time_says_what_it_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(options(tmp_path, "--seconds", "0")) == 0
    assert "not reached in time: forward D16 S96 causal, backward" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("quick")
def test_list_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(options(tmp_path, "--list", "--pass", "forward")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "forward D16 S96 causal"
    assert "fa4: runs on cuda, not on cpu" in said
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.DeviceError, match="device: got 'cuda:1'; supported: 'cpu' here"):
        bench.main(["--device", "cuda:1"])


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = results.file_for(tmp_path, "NVIDIA H200", "2026-01-02T03:04:05+00:00", "forward, D 64")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        names.append(str(path.relative_to(tmp_path)))
    stem = "nvidia-h200/2026-01-02-forward-d-64"
    assert names == [f"{stem}.json", f"{stem}-2.json", f"{stem}-3.json"]


def test_a_foreign_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(errors.ArgumentError, match="got schema 0 with keys"):
        results.load(path)


# ---- nothing wrong is timed


def spoilt(spoil: Callable[[Calls], Calls], ours: bool = True) -> Peer:
    """Our CPU backend with something wrong about it."""

    def setup(case: Case, data: Any) -> Calls | str:
        ready = OURS.setup(case, data)
        return ready if isinstance(ready, str) else spoil(ready)

    return Peer("tilewise.spoilt" if ours else "spoilt", lambda _: None, setup, ours=ours, own_dropout=False)


def out_becomes(change: Callable[[Tensor], object]) -> Callable[[Calls], Calls]:
    def forward(ready: Calls) -> Tensor:
        out = ready.forward().detach().clone()
        change(out)
        return out

    return lambda ready: ready._replace(forward=lambda: forward(ready))


def gradients_become(change: Callable[[list[Tensor]], object]) -> Callable[[Calls], Calls]:
    def backward(ready: Calls, do: Tensor) -> tuple[Tensor, ...]:
        assert ready.backward is not None
        grads = [x.clone() for x in ready.backward(do)]
        change(grads)
        return tuple(grads)

    return lambda ready: ready._replace(backward=lambda do: backward(ready, do))


WRONG: dict[str, tuple[Case, Callable[[Calls], Calls], str]] = {
    "scaled": (PLAIN, out_becomes(lambda out: out.mul_(1.001)), "out is off"),
    "one row": (PLAIN, out_becomes(lambda out: out[-1, -1].zero_()), "out is off"),
    "nan": (PLAIN, out_becomes(lambda out: out[0, 0, 0, 0].fill_(torch.nan)), "out is off by inf"),
    "dq": (BACKWARD, gradients_become(lambda g: g[0][0, 5].zero_()), "dq is off"),
    "dk": (BACKWARD, gradients_become(lambda g: g[1].neg_()), "dk is off"),
    "dv": (BACKWARD, gradients_become(lambda g: g[2][1, 90:].mul_(2)), "dv is off"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_not_timed(name: str) -> None:
    case, spoil, complaint = WRONG[name]
    record = runner.run_case(case, [spoilt(spoil), SDPA], SETTINGS, BENCH)
    entry = record["peers"]["tilewise.spoilt"]
    assert entry["status"] == results.WRONG
    assert complaint in entry["reason"]
    assert entry["ms"] is None
    assert record["ours"] is None and record["ratio"] is None
    assert record["peers"]["sdpa"]["status"] == results.TIMED
    (failure,) = runner.failures({"cases": [record]})
    assert complaint in failure


def test_a_wrong_peer_is_no_failure_of_ours() -> None:
    record = runner.run_case(PLAIN, [OURS, spoilt(out_becomes(torch.zero_), ours=False)], SETTINGS, BENCH)
    assert record["peers"]["spoilt"]["status"] == results.WRONG
    assert record["best_peer"] is None
    assert not runner.failures({"cases": [record]})


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_of_ours_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "named", lambda _: [spoilt(out_becomes(torch.zero_))])
    assert bench.main(options(tmp_path, "--pass", "forward")) == 1
    assert "WRONG: forward D16 S96 causal: tilewise.spoilt wrong: out is off by 1 " in capsys.readouterr().out


def raising(case: Case, data: Any) -> Calls | str:
    raise RuntimeError("no such kernel\nand a long trace")


def test_refusals_carry_their_reason() -> None:
    contestants = [
        Peer("absent", lambda device: f"not on {device.type}", raising),
        Peer("broken", lambda _: None, raising),
        Peer("choosy", lambda _: None, lambda case, data: "has no taste"),
    ]
    record = runner.run_case(PLAIN, contestants, SETTINGS, BENCH)
    found = {name: (entry["status"], entry["reason"]) for name, entry in record["peers"].items()}
    assert found == {
        "absent": (results.UNAVAILABLE, "not on cpu"),
        "broken": (results.FAILS, "RuntimeError: no such kernel"),
        "choosy": (results.DECLINES, "has no taste"),
    }


VARIANTS = {
    "window": {"window": (20, 0)},
    "two-sided window": {"causal": False, "window": (20, 9)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "blocks": {"causal": False, "block_density": 0.5, "seqlen": 300},
    "dropout": {"dropout_p": 0.2},
    "packed": {"lengths": (5, 96, 1, 60), "batch": 4},
    "grouped": {"heads": 4, "heads_kv": 2, "alibi": True, "softcap": 3.0},
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
    "fp64": {"dtype": "fp64"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_every_variant_is_checked_at_its_true_positions(
    variant: str, pass_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(PLAIN, pass_=pass_, **VARIANTS[variant])
    # So small that the oracle takes several chunks, and dropout is checked on some rows alone.
    monkeypatch.setattr(check, "CELLS", 32 * case.seqlen)
    monkeypatch.setattr(check, "DROPOUT_ROWS", 40)
    contest = runner.Contest(runner.prepare(case, CPU), SETTINGS)
    contest.enter(OURS)
    entry = contest.entries["tilewise.cpu"]
    assert list(contest.calls) == ["tilewise.cpu"], entry.reason
    # The oracle was not simply told the same as ours: the call without the variant is wrong.
    if (without := case.plain()) is not None and not case.lengths and case.heads == case.heads_kv:
        ready = OURS.setup(without, contest.prepared.data._replace(slopes=None, seed=None, blocks=None))
        assert not isinstance(ready, str)
        assert check.verdict(case, contest.prepared.data, ready, contest.prepared.expected).complaint


def test_a_peer_with_dropout_of_its_own_is_checked_without() -> None:
    case = replace(BACKWARD, dropout_p=0.5)
    record = runner.run_case(case, [OURS, SDPA], SETTINGS, BENCH)
    assert {entry["status"] for entry in record["peers"].values()} == {results.TIMED}


# ---- timing and ratios


class Script:
    """A clock that runs nothing and keeps who was timed, in bursts of scripted lengths."""

    def __init__(self, ms: dict[str, float]) -> None:
        self.ms, self.log, self.drift = ms, [], 1.0

    def call(self, name: str) -> Callable[[], str]:
        return lambda: name

    def burst(self, call: Callable[[], object], repeats: int) -> tuple[float, Reading]:
        name = str(call())
        self.log.append((name, repeats))
        self.drift *= 1.01
        return self.ms[name] * self.drift, Reading(1500 + len(self.log), 600.0)


def test_rounds_alternate_and_bursts_are_filled() -> None:
    clock = Script({"a": 0.5, "b": 4.0, "c": 100.0})
    series = timing.interleave(clock, {name: clock.call(name) for name in clock.ms}, rounds=3, burst_ms=8.0)
    setup, bursts = clock.log[:6], clock.log[6:]
    assert {repeats for _, repeats in setup} == {timing.WARM_UP}
    # The first round does not count.
    assert [name for name, _ in bursts] == [*"cba", *"abc", *"cba", *"abc"]
    assert dict(bursts) == {"a": 16, "b": 2, "c": 1}
    assert all(len(s.ms) == len(s.readings) == 3 for s in series.values())
    assert series["a"].median_reading == Reading(1500 + 15, 600.0)


def test_ratio_is_per_round() -> None:
    # The machine slows down twofold and the ratio does not move, though the medians' would.
    assert timing.ratio([1, 2, 2], [1.5, 3, 3]) == Ratio(1.5, 1.5, 1.5)
    assert timing.ratio([1, 1, 1, 1, 1], [1, 2, 3, 4, 5]) == Ratio(3, 2, 4)
    assert timing.ratio([2.0], [1.0]) == Ratio(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="shorter"):
        timing.ratio([1.0, 2.0], [1.0])


def entry(ours: bool, ms: list[float], work: Work) -> Entry:
    made = Entry(ours, results.DECLINES)
    results.measure(made, timing.Series(ms, [Reading(1500, 650.0)]), work, CEILINGS)
    return made


def test_figures_of_a_case() -> None:
    work, full = Work(flops=2 * 10**12, hbm_bytes=10**9), Work(flops=4 * 10**12, hbm_bytes=10**9)
    entries = {
        "tilewise.slow": entry(True, [50, 50, 50], work),
        "tilewise.fast": entry(True, [20, 40, 20], work),
        "cudnn": entry(False, [30, 44, 22], work),
        "fa2": entry(False, [40, 80, 40], work),
        "fa3": Entry(False, results.DECLINES, "has no window"),
    }
    plain = {"tilewise.fast": entry(True, [32, 64, 32], full)}
    found = results.compare(entries, plain)
    assert (found["ours"], found["best_peer"]) == ("tilewise.fast", "cudnn")
    assert found["ratio"] == 1.1
    assert found["ratio_quartiles"] == [1.1, 1.3]
    assert entries["fa2"].ours_over_it == Ratio(2, 2, 2)
    assert entries["fa3"].ours_over_it is None
    # Half of the work in 1 / 1.6 of the time: 0.8 of the speed.
    assert found["time_of_plain"] == pytest.approx(1.6)
    assert found["speed_of_plain"] == pytest.approx(0.8)
    fast = entries["tilewise.fast"]
    assert (fast.tflops, fast.gb_s, fast.sm_mhz, fast.watts) == (100, 50, 1500, 650)
    assert (fast.of_matmul, fast.of_copy) == (1.0, 0.05)


def test_tables_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.box", None)
    said: list[str] = []
    report._table(["case", "ms"], [["a", "1"]], said.append)
    assert said == ["case  ms\na      1"]


# ---- cases


def test_sets_are_of_the_common_shape() -> None:
    for name in ("forward", "backward", "deterministic"):
        cases = select([name], Filters(), "cuda")
        assert {(c.batch * c.seqlen, c.heads * c.head_dim) for c in cases} == {(TOKENS, WIDTH)}
        assert {c.head_dim for c in cases} == {64, 128, 256}
        assert {c.causal for c in cases} == {True, False}
    assert {c.seqlen for c in select(["forward"], Filters(), "cuda")} == {512, 1024, 2048, 4096, 8192, 16384}


def test_every_case_of_every_set_is_a_legal_call() -> None:
    for case in select(SETS, Filters(), "cuda"):
        # The same options on few tokens: what counts is that the library takes them.
        lengths = tuple(min(n, 40) for n in case.lengths)
        small = replace(case, seqlen=40, batch=len(lengths) or 1, heads=case.heads // case.heads_kv, heads_kv=1)
        small = replace(small, lengths=lengths)
        posed, _ = problem(small, make(small, CPU))
        assert not dispatch.reasons("cpu", posed), case.name


def test_filters() -> None:
    both = select(["forward", "backward", "forward"], Filters(head_dims=(64,), seqlens=(1024,)), "cuda")
    assert [c.name for c in both] == [f"{p} D64 S1024 {m}" for p in ("forward", "backward") for m in ("full", "causal")]
    assert len(select(["forward"], Filters(causal=True), "cuda")) == 18
    assert all(c.backward for c in select(["variants"], Filters(passes=("backward",)), "cuda"))
    assert {c.dtype for c in select(["forward"], Filters(dtype="fp16"), "cuda")} == {"fp16"}
    with pytest.raises(errors.ArgumentError, match=r"in forward: D \[64, 128, 256\].*Fix: drop a filter"):
        select(["forward"], Filters(head_dims=(65,)), "cuda")
    with pytest.raises(errors.ArgumentError, match="set: got 'other'"):
        select(["other"], Filters(), "cuda")


def test_plain_cases() -> None:
    assert PLAIN.plain() is None
    for options in VARIANTS.values():
        case = replace(PLAIN, **options)
        without = case.plain()
        if without is not None:
            assert without.plain() is None
            assert without.features() <= {"packed"}
    equal = replace(PLAIN, lengths=(96, 96))
    assert equal.plain() == PLAIN
    assert replace(PLAIN, lengths=(96, 5)).plain() is None
    assert replace(PLAIN, beside_full=True).plain() == replace(PLAIN, causal=False)
    assert sum(log_normal_lengths(64, 2048)) / 64 == pytest.approx(2048, rel=0.25)


def test_block_masks_have_equal_rows() -> None:
    case = replace(PLAIN, seqlen=20 * 128, causal=False, block_density=0.1, batch=1)
    blocks = make(case, CPU).blocks
    assert blocks is not None
    assert set(blocks.tiles.sum(-1).flatten().tolist()) == {2}
    work = runner.prepare(replace(case, seqlen=256, block_density=0.5), CPU).work
    assert work.flops == 4 * 16 * 2 * 256 * 128


# ---- what is written about them


def test_every_command_of_the_guide_selects_something() -> None:
    guide = (Path(__file__).parents[1] / "benchmarks" / "README.md").read_text(encoding="utf-8")
    commands = [text.split() for text in re.findall(r"\| `(--set [^`]+)` \|", guide)]
    assert len(commands) > 10
    for words in commands:
        chosen = command.parser().parse_args(words)
        kind = command._other_kind(chosen, chosen.set)
        if kind is None:
            filters = Filters(chosen.passes, chosen.d, chosen.s, chosen.causal, chosen.dtype)
            assert select(chosen.set, filters, "cuda") and peers.named(chosen.peers)
        else:
            assert kind.select(chosen.set)
            assert decode.named(chosen.peers, torch.device("cuda")) if kind is decode else peers.named(chosen.peers)


# ---- README's figures


def readme_table() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def document(date: str, device: str, cases: dict[Case, float], ours: str = "tilewise.triton") -> dict[str, Any]:
    records = []
    for case, ms in cases.items():
        work = Work(10**12, 10**9)
        entries = {ours: entry(True, [ms], work), "cudnn": entry(False, [4.0], work)}
        plain = {ours: entry(True, [3.0], work)} if case.plain() else {}
        records.append(results.record(case.name, case.to_json(), work, entries, plain))
    versions = {ours: "1", "cudnn": "torch 2"}
    return {"date": date, "commit": date[:4], "machine": {"device": device}, "versions": versions, "cases": records}


def test_portable_kernels_alone_replace_only_their_own_figures() -> None:
    table = readme_table()
    documents = [
        document("2026-01-01", "H200", {PLAIN: 8.0}),
        document("2026-02-01", "H200", {PLAIN: 4.0}),
        document("2026-03-01", "H200", {PLAIN: 2.0}, "tilewise.hopper"),
        document("2026-04-01", "H200", {PLAIN: 5.0}),
    ]
    assert "| D 16, causal | 250 " in table.table(documents[:2])
    assert "| D 16, causal | 500 " in table.table(documents)


def test_readme_shows_the_newest_figures() -> None:
    table = readme_table()
    long, capped = replace(PLAIN, seqlen=1024), replace(PLAIN, softcap=1.0)
    documents = [
        document("2026-02-01", "H200", {PLAIN: 2.0}),
        document("2025-01-01", "H200", {PLAIN: 9.0, long: 5.0, capped: 4.0}),
        document("2026-01-01", "cpu", {BACKWARD: 1.0}),
    ]
    text = table.table(documents)
    assert "| D 16, causal | 500 · 2.00× cudnn | 200 · 0.80× cudnn |" in text
    assert "| forward D16 S96 causal softcap 1 | 250 · 1.00× cudnn | 75% | 0.75× as fast |" in text
    assert "2025-01-01 to 2026-02-01, commit 2025, 2026." in text
    assert "backward" not in text
    entries = {
        "tilewise.triton": {
            "tflops": 300.0,
            "gb_s": 3210.0,
            "of_copy": 0.71,
            "tokens_s": 81234.5,
            "attention_share": 0.416,
        },
        "cudnn": {"tflops": 250.0, "tokens_s": 7e4, "attention_share": 0.5},
    }
    record = {"name": "step", "case": {"pass": "step"}, "peers": entries, "speed_of_plain": None}
    record |= {"ours": "tilewise.triton", "ratio": 1.158, "best_peer": "cudnn"}
    paged = {**record, "name": "paged", "case": {"pass": "decode"}, "speed_of_plain": 0.97, "time_of_plain": 0.97}
    text = table.table([{**documents[0], "cases": [record, paged]}])
    assert "| step | 81,234 · 1.16× cudnn | 42% |" in text
    assert "| paged | 3,210 · 1.16× cudnn | 71% | 97% |" in text and "| variant |" not in text
    assert table.table([]) == "No results are committed yet.\n"

    readme = f"above\n{table.BEGIN}old\n{table.END}below\n"
    assert table.rewritten(readme, text) == f"above\n{table.BEGIN}{text}{table.END}below\n"
    with pytest.raises(SystemExit, match="no place for the figures"):
        table.rewritten("nothing", text)
