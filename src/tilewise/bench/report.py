"""The document as tables on the terminal: rich's where it is installed, plain ones elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .results import TIMED, UNAVAILABLE

NOTHING = "–"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _rate(value: float | None) -> str:
    """Small rates keep their digits."""
    return _number(value, 0 if value is None or value >= 100 else 1 if value >= 10 else 3)


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def contestants(document: Mapping[str, Any]) -> list[str]:
    """Those that were timed at least once, in the order of entry."""
    timed = dict.fromkeys(
        name for record in document["cases"] for name, entry in record["peers"].items() if entry["status"] == TIMED
    )
    return list(timed)


def columns(document: dict[str, Any]) -> list[str]:
    """Heads of the table."""
    return ["case", "ms", *contestants(document), "ratio", "to", "of matmul", "of plain", "MHz", "W"]


def row(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    """One case: every contestant's TFLOP/s, then what ours makes of it."""
    peers = record["peers"]
    mine = peers.get(record["ours"]) or {}
    return [
        record["name"],
        _number(mine.get("ms"), 3),
        *(_cell(peers.get(name)) for name in names),
        _number(record["ratio"], 3),
        record["best_peer"] or NOTHING,
        _share(mine.get("of_matmul")),
        _share(record["speed_of_plain"]),
        _number(mine.get("sm_mhz"), 0),
        _number(mine.get("watts"), 0),
    ]


def _cell(entry: dict[str, Any] | None) -> str:
    """TFLOP/s, and for others how many times faster ours is."""
    if entry is None or entry["tflops"] is None:
        return NOTHING
    against = entry["ours_over_it"]
    return _rate(entry["tflops"]) + (f" ({against[0]:.2f})" if against and not entry["ours"] else "")


def line(record: Mapping[str, Any], figure: str = "tflops", unit: str = "TFLOP/s") -> str:
    """A case in one line, for the time while the run goes on: a figure of every contestant's entry."""
    rates = [
        f"{name} {_rate(entry[figure])}" if entry["status"] == TIMED else f"{name} {entry['status']}"
        for name, entry in record["peers"].items()
        if entry["status"] != UNAVAILABLE
    ]
    ratio = "" if record["ratio"] is None else f"  ratio {record['ratio']:.3f} to {record['best_peer']}"
    return f"{record['name']}: {', '.join(rates)} {unit}{ratio}"


def remarks(document: Mapping[str, Any]) -> list[str]:
    """Who was not timed, and why, each reason once with how many cases it holds for; and what was not reached."""
    counts: dict[str, int] = {}
    for record in document["cases"]:
        for name, entry in [*record["peers"].items(), *((f"plain {n}", e) for n, e in record["plain"].items())]:
            if entry["status"] != TIMED:
                text = f"{name} {entry['status']}: {entry['reason']}"
                counts[text] = counts.get(text, 0) + 1
    total = len(document["cases"])
    said = [text if count == total else f"{text} ({count} of {total} cases)" for text, count in counts.items()]
    late = [f"not reached in time: {', '.join(document['not_reached'])}"] if document["not_reached"] else []
    return [f"not timed: {text}" for text in said] + late


def heading(document: Mapping[str, Any]) -> str:
    """Machine and ceilings, in a line."""
    where, top = document["machine"], document["ceilings"]
    return (
        f"{where['device']}, torch {where['torch']}, commit {document['commit'] or 'unknown'}; "
        f"matmul {top['matmul']} {_rate(top['matmul_tflops'])} TFLOP/s, copy {top['copy_gb_s']:,.0f} GB/s"
    )


LEGEND = (
    "Contestants: TFLOP/s (and how many times faster ours is). ratio: ours to the best of them, median over rounds. "
    "of matmul: share of this run's matrix product. of plain: our TFLOP/s over that of our call without the variant."
)


def show(document: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """Print the table, who was not timed, and what was not reached."""
    names = contestants(document)
    rows = [row(record, names) for record in document["cases"]]
    say(heading(document))
    _table(columns(document), rows, say)
    say(LEGEND)
    for text in remarks(document):
        say(text)


def _table(head: list[str], rows: list[list[str]], say: Callable[[str], None]) -> None:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        say(plain_table(head, rows))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(head):
        table.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    # A file or pipe has no width, and cut figures are of no use.
    width = None if sys.stdout.isatty() else 240
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    say(captured.get().rstrip())


def plain_table(head: list[str], rows: list[list[str]]) -> str:
    """Columns padded with spaces.

    >>> print(plain_table(["case", "ms"], [["a", "10.5"], ["bc", "1"]]))
    case    ms
    a     10.5
    bc       1
    """
    widths = [max(len(cells[i]) for cells in [head, *rows]) for i in range(len(head))]
    lines = []
    for first, *rest in [head, *rows]:
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)
