"""What a run leaves behind: one JSON document, complete enough to judge every figure in it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import errors
from .machine import slug
from .timing import Series, ratio

SCHEMA = 1

# How a contestant fared.
TIMED = "timed"
UNAVAILABLE = "unavailable"  # not on this machine
DECLINES = "declines"  # does not serve the case
WRONG = "wrong"  # computes something else than the oracle: not timed
FAILS = "fails"  # raised an error: not timed
REFUSALS = (UNAVAILABLE, DECLINES, WRONG, FAILS)


@dataclass
class Entry:
    """One contestant on one case.

    Args:
        ours: whether it is one of tilewise's backends.
        status: TIMED, or why not.
        reason: of a refusal, in words.
        error: largest relative error against the oracle.
        ms: median over rounds.
        tflops: visible pairs' products over `ms`, TFLOP/s.
        gb_s: each tensor over HBM once, over `ms`, GB/s.
        of_matmul: `tflops` as a share of this run's matrix product.
        of_copy: `gb_s` as a share of this run's copy.
        sm_mhz: median SM clock during its bursts.
        watts: median board power during its bursts.
        ours_over_it: how many times faster the best of ours is, per round: median and quartiles; of ours: itself.
        rounds_ms: every round.
    """

    ours: bool
    status: str
    reason: str | None = None
    error: float | None = None
    ms: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    of_matmul: float | None = None
    of_copy: float | None = None
    sm_mhz: int | None = None
    watts: float | None = None
    ours_over_it: tuple[float, float, float] | None = None
    rounds_ms: list[float] = field(default_factory=list)


def what_failed(error: Exception) -> str:
    """An error in a line: its kind and the first line of what it says, or of the code that raised it without a word.

    >>> try:
    ...     raise ValueError("too long\\nmuch too long")
    ... except ValueError as error:
    ...     print(what_failed(error))
    ValueError: too long
    """
    said = str(error).strip()
    if not said:
        frames = traceback.extract_tb(error.__traceback__)
        said = f"no message, at {frames[-1].line or frames[-1].name}" if frames else "no message"
    return f"{type(error).__name__}: {said.splitlines()[0][:300]}"


@dataclass(frozen=True)
class Work:
    """What a case takes at least: operations, and bytes if every tensor crosses HBM once."""

    flops: int
    hbm_bytes: int


def measure(entry: Entry, series: Series, work: Work, ceilings: Mapping[str, Any]) -> None:
    """Fill an entry with what its series says."""
    entry.status, entry.ms = TIMED, series.median_ms
    if (reading := series.median_reading) is not None:
        entry.sm_mhz, entry.watts = reading
    entry.rounds_ms = [round(ms, 6) for ms in series.ms]
    entry.tflops = work.flops / entry.ms / 1e9
    entry.gb_s = work.hbm_bytes / entry.ms / 1e6
    entry.of_matmul = entry.tflops / ceilings["matmul_tflops"]
    entry.of_copy = entry.gb_s / ceilings["copy_gb_s"]


def _fastest(entries: Mapping[str, Entry], ours: bool) -> str | None:
    times = {name: e.ms for name, e in entries.items() if e.ours == ours and e.ms is not None}
    return min(times, key=lambda name: times[name]) if times else None


def compare(entries: Mapping[str, Entry], plain: Mapping[str, Entry]) -> dict[str, Any]:
    """The figures that count: ours against the best of the others, and against our own plain call.

    Args:
        entries: by contestant, on the case itself.
        plain: ours by contestant, on the case without its variants.

    Returns:
        `ours`, `best_peer`, `ratio` (how many times faster ours is, median over rounds) with `ratio_quartiles`;
        `speed_of_plain`: ours' TFLOP/s over that of the plain call, so work that a mask saves does not count;
        `time_of_plain`: how many times faster than the plain call.
    """
    best, peer = _fastest(entries, True), _fastest(entries, False)
    found: dict[str, Any] = {"ours": best, "best_peer": peer, "ratio": None, "ratio_quartiles": None}
    found |= {"speed_of_plain": None, "time_of_plain": None}
    if best is None:
        return found
    mine = entries[best]
    for entry in entries.values():
        if entry.ms is not None:
            entry.ours_over_it = ratio(mine.rounds_ms, entry.rounds_ms)
    if peer is not None and (against := entries[peer].ours_over_it) is not None:
        found["ratio"], found["ratio_quartiles"] = against[0], list(against[1:])
    base = plain.get(best)
    if base is not None and base.ms and base.tflops and mine.ms and mine.tflops:
        faster = ratio(mine.rounds_ms, base.rounds_ms).median
        # TFLOP/s of both, without the drift between rounds: the ratio of work is a constant.
        work = (mine.tflops * mine.ms) / (base.tflops * base.ms)
        found["time_of_plain"], found["speed_of_plain"] = faster, faster * work
    return found


def record(
    name: str, case: dict[str, Any], work: Work, entries: Mapping[str, Entry], plain: Mapping[str, Entry] | None = None
) -> dict[str, Any]:
    """What the document says of a case of any kind."""
    plain = plain or {}
    return {
        "name": name,
        "case": case,
        "flops": work.flops,
        "hbm_bytes": work.hbm_bytes,
        **compare(entries, plain),
        "peers": {name: asdict(entry) for name, entry in entries.items()},
        "plain": {name: asdict(entry) for name, entry in plain.items()},
    }


def now() -> str:
    """The time of the run, ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def file_for(folder: Path, device: str, date: str, what: str) -> Path:
    """``<folder>/<device>/<date>-<what>.json``; numbered where a run of that day has the name already."""
    home = folder / slug(device)
    stem = f"{date[:10]}-{slug(what)}"
    path, number = home / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = home / f"{stem}-{number}.json"
    return path


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write the document; a reader never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


_KEYS = {"schema", "what", "date", "commit", "machine", "method", "ceilings", "versions", "cases", "not_reached"}


def load(path: Path) -> dict[str, Any]:
    """A document that `save` wrote.

    Raises:
        tilewise.errors.ArgumentError: it is none, or of another version.
    """
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA or set(document) != _KEYS:
        got = f"schema {document.get('schema')!r} with keys {sorted(document)}"
        errors.fail(errors.ArgumentError, str(path), got, f"schema {SCHEMA}", "write it with tilewise bench")
    return document
