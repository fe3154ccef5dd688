"""Times training steps of a decoder, one contestant's attention in it at a time, in tokens per second.

Each contestant's loss and gradients are first held against a run with more digits. A step without attention is timed in
the same rounds: what a contestant takes beyond it is attention's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report, results, step_cases
from .data import make
from .peers import Attend, Peer, named
from .results import Entry, Work
from .runner import Bench, Settings, records, versions
from .step_cases import SETS, Expected, StepCase, Training
from .timing import Call, interleave, ratio

# The step that is timed beside the contestants'.
NOTHING = "no attention"


@dataclass
class StepEntry(Entry):
    """One contestant on one case.

    Args:
        tokens_s: tokens of the batch over `ms`, per second.
        attention_share: of the step's time, what goes when attention does: median over rounds.
    """

    tokens_s: float | None = None
    attention_share: float | None = None


def select(names: Sequence[str]) -> list[StepCase]:
    """The cases of the named sets, each once."""
    return list(dict.fromkeys(case for name in names for case in SETS[name]))


def _attend(peer: Peer, case: StepCase, settings: Settings) -> Attend | str:
    """A contestant's function of q, k and v, [batch, seqlen, heads, head_dim] like its output, or why it has none."""
    ready = peer.setup(case.attention, make(case.attention, settings.device))
    if isinstance(ready, str):
        return ready
    return lambda q, k, v: ready.layout(ready.attend(q, k, v))


def _admit(peer: Peer, training: Training, wanted: Expected, entry: Entry, settings: Settings) -> Call | None:
    """What to time, or None with the reason in the entry."""
    try:
        attend = _attend(peer, training.case, settings)
        if isinstance(attend, str):
            entry.status, entry.reason = results.DECLINES, attend
            return None
        errors = step_cases.errors(training.outcome(attend), wanted.truth)
    except Exception as raised:  # whatever a contestant raises is its result, and the others go on
        entry.status, entry.reason = results.FAILS, results.what_failed(raised)
        return None
    entry.error = min(max(errors.values()), 1e30)  # JSON has no infinity
    wrong = [
        f"{name} is off by {error:.2g} of its size, {wanted.limits[name]:.2g} is allowed"
        for name, error in errors.items()
        if not error <= wanted.limits[name]
    ]
    if wrong:
        entry.status, entry.reason = results.WRONG, "; ".join(wrong)
        return None
    return training.step(attend)


def run_case(case: StepCase, peers: Sequence[Peer], settings: Settings, bench: Bench) -> dict[str, Any]:
    """One case of the document."""
    training = Training(case, settings.device)
    wanted = step_cases.expected(training)
    entries: dict[str, StepEntry] = {}
    calls: dict[str, Call] = {}
    for peer in peers:
        entry = entries[peer.name] = StepEntry(peer.ours, results.UNAVAILABLE, peer.available(settings.device))
        call = None if entry.reason is not None else _admit(peer, training, wanted, entry, settings)
        if call is not None:
            calls[peer.name] = call
    if calls:
        calls[NOTHING] = training.step(step_cases.without_attention)
    timed = interleave(bench.clock, calls, settings.rounds, settings.burst_ms)
    work = Work(training.flops, training.hbm_bytes)
    without = timed.pop(NOTHING, None)
    for name, series in timed.items():
        entry = entries[name]
        results.measure(entry, series, work, bench.ceilings)
        entry.tokens_s = 1e3 * case.tokens / series.median_ms
        assert without is not None
        entry.attention_share = 1 - 1 / ratio(without.ms, series.ms).median
    found = results.record(case.name, case.to_json(), work, entries)
    return found | {"tokens": case.tokens, "without_attention_ms": None if without is None else without.median_ms}


def line(record: Mapping[str, Any]) -> str:
    """A case in one line."""
    return report.line(record, "tokens_s", "tokens/s")


def show(document: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
    """The table of a document: each contestant's tokens per second, and in brackets attention's share of its step."""
    names, rows = report.contestants(document), []
    for record in document["cases"]:
        mine = record["peers"].get(record["ours"]) or {}
        cells = [record["peers"][name] for name in names]
        rows.append(
            [
                record["name"],
                report.NOTHING if not mine else f"{mine['ms']:,.1f}",
                *(
                    report.NOTHING if x["tokens_s"] is None else f"{x['tokens_s']:,.0f} ({x['attention_share']:.0%})"
                    for x in cells
                ),
                report.NOTHING if record["ratio"] is None else f"{record['ratio']:.3f}",
                record["best_peer"] or report.NOTHING,
            ]
        )
    say(report.heading(document))
    say(report.plain_table(["case", "ms", *names, "ratio", "to"], rows))
    say("Contestants: tokens/s (and attention's share of the step). ms: the best of ours.")
    for text in report.remarks(document):
        say(text)


def run(
    cases: Sequence[StepCase],
    peers: Sequence[str] | None,
    settings: Settings,
    on_case: Callable[[dict[str, Any]], None] = lambda record: None,
) -> tuple[dict[str, Any], Path | None]:
    """Run the cases; the document, and the file that it is in."""
    entrants = named(peers)
    return records(
        cases, lambda case, bench: run_case(case, entrants, settings, bench), settings, "alternating",
        versions(entrants, settings.device), on_case,
    )  # fmt: skip
