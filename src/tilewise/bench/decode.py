"""Times calls with a key/value cache as an inference server makes them: captured in a CUDA graph, with a cold L2.

One replay runs a call for each cache of the case, in turn; together the caches are larger than the L2. Rates are bytes
of keys and values over time. A wrong result is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import errors
from . import report, results
from .check import FLOORS
from .decode_cases import SETS, DecodeCase, DecodeData, error, make
from .decode_peers import Contestant, contestants
from .results import Entry, Work
from .runner import Bench, Settings, records
from .timing import Call, interleave

# What an error of a row may be, in steps of the dtype: products of a row are rounded once each.
_STEPS = 2.0


def series(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> Call:
    """A function that makes all calls: a graph's replay on a GPU, which keeps the memory that it reads."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return partial(_replayed, graph, calls)


def _replayed(graph: torch.cuda.CUDAGraph, _: Sequence[Callable[[], Tensor]]) -> None:
    graph.replay()


def _admit(
    case: DecodeCase, peer: Contestant, entry: Entry, data: list[DecodeData], device: torch.device
) -> Call | None:
    """What to time, or None with the reason in the entry."""
    try:
        offered = [peer.make(case, x) for x in data]
        made = [call for call in offered if not isinstance(call, str)]
        if len(made) < len(offered):
            entry.status = results.DECLINES
            entry.reason = next(text for text in offered if isinstance(text, str))
            return None
        entry.error = min(error(case, data[0], made[0]()), 1e30)
        allowed = _STEPS * FLOORS[data[0].q.dtype]
        if not entry.error <= allowed:
            entry.status, entry.reason = results.WRONG, f"off by {entry.error:.2g} of a row, {allowed:.2g} is allowed"
            return None
        return series(made, device)
    except Exception as raised:  # whatever a contestant raises is its result, and the others go on
        entry.status, entry.reason = results.FAILS, results.what_failed(raised)
        return None


def run_case(case: DecodeCase, peers: Sequence[Contestant], settings: Settings, bench: Bench) -> dict[str, Any]:
    """One case of the document: everyone who serves it, and ours without pages and parts of one size beside."""
    entries: dict[str, dict[str, Entry]] = {"": {}, "plain ": {}}
    calls: dict[str, Call] = {}
    work = Work(case.flops, case.cache_bytes)
    with torch.no_grad():
        _enter(case, peers, settings.device, entries[""], calls)
        able = [peer for peer in peers if peer.ours and peer.name in calls]
        if able and (without := case.plain()) is not None:
            found: dict[str, Call] = {}
            _enter(without, able, settings.device, entries["plain "], found)
            calls |= {f"plain {name}": call for name, call in found.items()}
        timed = interleave(bench.clock, calls, settings.rounds, settings.burst_ms) if calls else {}
    for prefix, group in entries.items():
        for name, entry in group.items():
            if (measured := timed.get(prefix + name)) is not None:
                measured.ms = [ms / case.calls for ms in measured.ms]
                results.measure(entry, measured, work, bench.ceilings)
    return results.record(case.name, case.to_json(), work, entries[""], entries["plain "])


def _enter(
    case: DecodeCase, peers: Sequence[Contestant], device: torch.device, entries: dict[str, Entry],
    calls: dict[str, Call],
) -> None:  # fmt: skip
    """An entry for each contestant, and what to time of those that are right."""
    data = make(case, device)
    for peer in peers:
        entry = entries[peer.name] = Entry(peer.ours, results.UNAVAILABLE, peer.available())
        call = None if entry.reason is not None else _admit(case, peer, entry, data, device)
        if call is not None:
            calls[peer.name] = call


def line(record: Mapping[str, Any]) -> str:
    """A case in one line."""
    return report.line(record, "gb_s", "GB/s")


def show(document: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
    """The table of a document: microseconds of the best of ours, everyone's GB/s, the share of a copy's rate, and how
    fast ours is beside a call without pages or parts of one size."""
    names = list(dict.fromkeys(name for record in document["cases"] for name in record["peers"]))
    rows = []
    for record in document["cases"]:
        mine = record["peers"].get(record["ours"]) or {}
        cells = [record["peers"][name]["gb_s"] for name in names]
        rows.append(
            [
                record["name"],
                report.NOTHING if not mine else f"{1e3 * mine['ms']:,.1f}",
                *(report.NOTHING if rate is None else f"{rate:,.0f}" for rate in cells),
                report.NOTHING if record["ratio"] is None else f"{record['ratio']:.3f}",
                report.NOTHING if not mine else f"{mine['of_copy']:.0%}",
                report.NOTHING if record["time_of_plain"] is None else f"{record['time_of_plain']:.0%}",
            ]
        )
    say(report.heading(document))
    say(report.plain_table(["case", "us", *names, "ratio", "of copy", "of plain"], rows))
    for text in report.remarks(document):
        say(text)


def select(names: Sequence[str]) -> list[DecodeCase]:
    """The cases of the named sets, each once."""
    return list(dict.fromkeys(case for name in names for case in SETS[name]))


def named(names: Sequence[str] | None, device: torch.device) -> list[Contestant]:
    """The contestants of these names; "ours" stands for all backends; None: everyone.

    Raises:
        tilewise.errors.ArgumentError: a name that nobody has.
    """
    known = contestants(device)
    wanted = {peer.name for peer in known} if names is None else set(names)
    unknown = wanted - {peer.name for peer in known} - {"ours"}
    if unknown:
        has = ", ".join(["ours", *(peer.name for peer in known)])
        errors.fail(errors.ArgumentError, "peers", repr(", ".join(sorted(unknown))), has, "name some of these")
    return [peer for peer in known if peer.name in wanted or (peer.ours and "ours" in wanted)]


def run(
    cases: Sequence[DecodeCase],
    peers: Sequence[str] | None,
    settings: Settings,
    on_case: Callable[[dict[str, Any]], None] = lambda record: None,
) -> tuple[dict[str, Any], Path | None]:
    """Run the cases; the document, and the file that it is in."""
    entrants = named(peers, settings.device)
    return records(
        cases, lambda case, bench: run_case(case, entrants, settings, bench), settings, "alternating, graph, cold L2",
        {peer.name: peer.version() for peer in entrants if peer.available() is None}, on_case,
    )  # fmt: skip
