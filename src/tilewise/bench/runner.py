"""One run: set up, check, time, record, case by case."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import roofline
from . import check, machine, results
from .cases import Case
from .data import Data, make, problem
from .peers import Calls, Peer
from .results import Entry, Work
from .timing import Call, Clock, interleave


@dataclass(frozen=True)
class Settings:
    """How to run.

    Args:
        device: where.
        rounds: how many count.
        burst_ms: length of one burst.
        seconds: no case is begun after this time; None: no limit.
        out: the folder of results; None: nothing is written.
        what: names the file.
        commit: of the source tree, where it cannot be asked.
    """

    device: torch.device
    rounds: int = 21
    burst_ms: float = 8.0
    seconds: float | None = None
    out: Path | None = None
    what: str = "bench"
    commit: str | None = None


class Prepared(NamedTuple):
    """A case's tensors, what the oracle says about them, and the work that is in it."""

    case: Case
    data: Data
    expected: list[check.Expected]
    work: Work


def prepare(case: Case, device: torch.device) -> Prepared:
    """Draw the tensors and ask the oracle."""
    data = make(case, device)
    posed, inputs = problem(case, data)
    pairs = roofline.visible_pairs(posed, inputs).number
    work = Work(roofline.flops(posed, pairs, case.pass_), roofline.hbm_bytes(posed, inputs, case.pass_))
    return Prepared(case, data, check.expected(case, data), work)


class Contest:
    """Everyone who takes part in one case, ready to be timed or refused with the reason."""

    def __init__(self, prepared: Prepared, settings: Settings) -> None:
        self.prepared, self.settings = prepared, settings
        self.entries: dict[str, Entry] = {}
        self.calls: dict[str, Call] = {}

    def enter(self, peer: Peer) -> None:
        """Set a contestant up and check it."""
        entry = self.entries[peer.name] = Entry(peer.ours, results.UNAVAILABLE)
        entry.reason = peer.available(self.settings.device)
        if entry.reason is None:
            self._admit(peer, entry)

    def _admit(self, peer: Peer, entry: Entry) -> None:
        case, data = self.prepared.case, self.prepared.data
        try:
            ready = peer.setup(case, data)
            if isinstance(ready, str):
                entry.status, entry.reason = results.DECLINES, ready
                return
            found = self._verdict(peer, ready)
            entry.error = min(found.error, 1e30)  # JSON has no infinity
            if found.complaint is not None:
                entry.status, entry.reason = results.WRONG, found.complaint
                return
        except Exception as error:  # whatever a contestant raises is its result, and the others go on
            entry.status, entry.reason = results.FAILS, results.what_failed(error)
            return
        self.calls[peer.name] = _timed(ready, data)

    def _verdict(self, peer: Peer, ready: Calls) -> check.Verdict:
        case, data = self.prepared.case, self.prepared.data
        if not (case.dropout_p and peer.own_dropout):
            return check.verdict(case, data, ready, self.prepared.expected)
        # Nobody can predict its mask, so the rest of the call is checked without one.
        case = replace(case, dropout_p=0.0)
        data = data._replace(seed=None)
        without = peer.setup(case, data)
        if isinstance(without, str):
            return check.Verdict(float("inf"), f"cannot be checked without dropout: {without}")
        return check.verdict(case, data, without, check.expected(case, data))


def _timed(ready: Calls, data: Data) -> Call:
    if ready.backward is None:
        return ready.forward
    backward, do = ready.backward, ready.layout(data.do)
    return lambda: backward(do)


def run_case(case: Case, peers: Sequence[Peer], settings: Settings, bench: Bench) -> dict[str, Any]:
    """One case of the document: everyone who serves it, and ours without its variants beside."""
    main = Contest(prepare(case, settings.device), settings)
    for peer in peers:
        main.enter(peer)
    contests = {"": main}
    able = [peer for peer in peers if peer.ours and peer.name in main.calls]
    if able and (without := case.plain()) is not None:
        contests["plain "] = Contest(prepare(without, settings.device), settings)
        for peer in able:
            contests["plain "].enter(peer)
    calls = {prefix + name: call for prefix, contest in contests.items() for name, call in contest.calls.items()}
    series = interleave(bench.clock, calls, settings.rounds, settings.burst_ms) if calls else {}
    for prefix, contest in contests.items():
        for name in contest.calls:
            results.measure(contest.entries[name], series[prefix + name], contest.prepared.work, bench.ceilings)
    plain = contests["plain "].entries if "plain " in contests else {}
    return results.record(case.name, case.to_json(), main.prepared.work, main.entries, plain)


@dataclass(frozen=True)
class Bench:
    """What a run needs besides its settings: the clock, and the ceilings measured at its start."""

    clock: Clock
    ceilings: dict[str, Any]

    @classmethod
    def on(cls, device: torch.device) -> Bench:
        clock = machine.clock_of(device)
        return cls(clock, machine.ceilings(device, clock))


def run(
    cases: Sequence[Case],
    peers: Sequence[Peer],
    settings: Settings,
    on_case: Callable[[dict[str, Any]], None] = lambda record: None,
) -> tuple[dict[str, Any], Path | None]:
    """Run the cases; the document, and the file that it is in."""
    return records(
        cases, lambda case, bench: run_case(case, peers, settings, bench), settings, "alternating",
        versions(peers, settings.device), on_case,
    )  # fmt: skip


def versions(peers: Sequence[Peer], device: torch.device) -> dict[str, str]:
    """Of those that are here."""
    return {peer.name: peer.version() for peer in peers if peer.available(device) is None}


def records(
    cases: Sequence[Any],
    measure: Callable[[Any, Bench], dict[str, Any]],
    settings: Settings,
    order: str,
    versions: dict[str, str],
    on_case: Callable[[dict[str, Any]], None],
) -> tuple[dict[str, Any], Path | None]:
    """The document of the records that `measure` makes of cases, and the file that it is in.

    The file is written anew after each case, so that a run that is cut short leaves what it has.
    """
    started = time.monotonic()
    bench = Bench.on(settings.device)
    document: dict[str, Any] = {
        "schema": results.SCHEMA,
        "what": settings.what,
        "date": results.now(),
        "commit": settings.commit or machine.commit(),
        "machine": machine.describe(settings.device),
        "method": {"rounds": settings.rounds, "burst_ms": settings.burst_ms, "order": order},
        "ceilings": bench.ceilings,
        "versions": versions,
        "cases": [],
        "not_reached": [case.name for case in cases],
    }
    path = None
    if settings.out is not None:
        path = results.file_for(settings.out, document["machine"]["device"], document["date"], settings.what)
    for case in cases:
        if settings.seconds is not None and time.monotonic() - started >= settings.seconds:
            break
        record = measure(case, bench)
        document["cases"].append(record)
        document["not_reached"].pop(0)
        if path is not None:
            results.save(document, path)
        on_case(record)
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
    return document, path


def failures(document: dict[str, Any]) -> list[str]:
    """What of ours was not timed because it is wrong or raised an error."""
    return [
        f"{record['name']}: {name} {entry['status']}: {entry['reason']}"
        for record in document["cases"]
        for entries in (record["peers"], record["plain"])
        for name, entry in entries.items()
        if entry["ours"] and entry["status"] in (results.WRONG, results.FAILS)
    ]
