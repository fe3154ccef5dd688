"""Write README's figures from the committed results: for each case, the newest run that has it.

README needs the two marker lines `BEGIN` and `END`; what stands between them is replaced.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.bench import results

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN = "<!-- figures: written by benchmarks/readme_table.py -->\n"
END = "<!-- end of figures -->\n"
NOTHING = "–"


class Figure(NamedTuple):
    """One case of one run."""

    record: dict[str, Any]
    document: dict[str, Any]

    @property
    def case(self) -> dict[str, Any]:
        return self.record["case"]

    @property
    def tflops(self) -> float | None:
        """Of the best of ours."""
        return self.record["peers"][self.record["ours"]]["tflops"] if self.record["ours"] else None

    @property
    def variant(self) -> bool:
        """Whether it is one call of attention, and ours without the variant was timed beside it."""
        return self.record["speed_of_plain"] is not None and self.case["pass"] in ("forward", "backward")


def committed() -> list[Path]:
    """The results that git knows."""
    command = ["git", "ls-files", ":(glob)benchmarks/results/**/*.json"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / path for path in listing.split()]


def newest(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, Figure]]:
    """By device and name of the case: the newest figure in which ours was timed.

    One of the portable kernels alone stands where there is no other: they are not what serves a call on such a device.
    """
    found: dict[str, dict[str, Figure]] = {}
    for document in sorted(documents, key=lambda document: document["date"]):
        figures = found.setdefault(document["machine"]["device"], {})
        for record in document["cases"]:
            other = figures.get(record["name"])
            worth = other is None or _portable_alone(other.record) or not _portable_alone(record)
            if record["ours"] is not None and worth:
                figures[record["name"]] = Figure(record, document)
    return found


def _portable_alone(record: dict[str, Any]) -> bool:
    return [name for name, peer in record["peers"].items() if peer.get("ours")] == ["tilewise.triton"]


def _cell(figure: Figure | None) -> str:
    if figure is None or figure.tflops is None:
        return NOTHING
    return f"{figure.tflops:.0f}{_against(figure.record)}"


def grid(figures: Iterable[Figure], pass_: str) -> list[str]:
    """Head dim and mask by sequence length: our TFLOP/s, and how many times faster ours is than the best of others."""
    cells: dict[tuple[int, bool], dict[int, Figure]] = {}
    for figure in figures:
        if figure.case["pass"] == pass_ and not figure.variant and not figure.case["lengths"]:
            cells.setdefault((figure.case["head_dim"], figure.case["causal"]), {})[figure.case["seqlen"]] = figure
    if not cells:
        return []
    seqlens = sorted({seqlen for row in cells.values() for seqlen in row})
    lines = [
        f"| {pass_} | " + " | ".join(f"S {seqlen:,}" for seqlen in seqlens) + " |",
        "|---" * (1 + len(seqlens)) + "|",
    ]
    for (head_dim, causal), row in sorted(cells.items()):
        label = f"D {head_dim}, {'causal' if causal else 'full'}"
        lines.append(f"| {label} | " + " | ".join(_cell(row.get(seqlen)) for seqlen in seqlens) + " |")
    return [*lines, ""]


def variants(figures: Iterable[Figure]) -> list[str]:
    """What a variant costs, against our own plain call of the same run."""
    chosen = [figure for figure in figures if figure.variant]
    if not chosen:
        return []
    lines = ["| variant | TFLOP/s | of the plain call's | time saved or lost |", "|---|---|---|---|"]
    for figure in chosen:
        speed, faster = figure.record["speed_of_plain"], figure.record["time_of_plain"]
        lines.append(f"| {figure.record['name']} | {_cell(figure)} | {speed:.0%} | {faster:.2f}× as fast |")
    return [*lines, ""]


def _against(record: dict[str, Any]) -> str:
    """How many times faster ours is than the best of the others, behind our rate."""
    return "" if record["ratio"] is None else f" · {record['ratio']:.2f}× {record['best_peer']}"


def caches(figures: Iterable[Figure]) -> list[str]:
    """Calls with a cache: the rate of reading it, and what pages and parts of one size cost."""
    chosen = [figure for figure in figures if figure.case["pass"] == "decode"]
    if not chosen:
        return []
    lines = ["| cache | keys and values, GB/s | of a copy's rate | of the plain call's |", "|---|---|---|---|"]
    for figure in chosen:
        record = figure.record
        mine, plain = record["peers"][record["ours"]], record["time_of_plain"]
        beside = NOTHING if plain is None else f"{plain:.0%}"
        lines.append(f"| {record['name']} | {mine['gb_s']:,.0f}{_against(record)} | {mine['of_copy']:.0%} | {beside} |")
    return [*lines, ""]


def steps(figures: Iterable[Figure]) -> list[str]:
    """Training steps: our tokens per second, and how many times faster ours is than the best of others."""
    chosen = [figure for figure in figures if figure.case["pass"] == "step"]
    if not chosen:
        return []
    lines = ["| training step of a decoder | tokens/s | attention's share of the step |", "|---|---|---|"]
    for figure in chosen:
        record = figure.record
        mine = record["peers"][record["ours"]]
        lines.append(
            f"| {record['name']} | {mine['tokens_s']:,.0f}{_against(record)} | {mine['attention_share']:.0%} |"
        )
    return [*lines, ""]


def _origin(device: str, figures: Iterable[Figure]) -> list[str]:
    documents = {document["date"]: document for _, document in figures}
    dates = sorted({date[:10] for date in documents})
    commits = list(dict.fromkeys(str(document["commit"]) for _, document in sorted(documents.items())))
    versions = {peer: version for document in documents.values() for peer, version in document["versions"].items()}
    others = ", ".join(f"{peer} ({text})" for peer, text in versions.items() if not peer.startswith("tilewise"))
    text = (
        f"{device}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, commit {', '.join(commits)}. TFLOP/s of the "
        f"visible pairs' products; behind it how many times faster ours is than the fastest of the others, the median "
        f"over interleaved rounds. The others: {others or 'none'}."
    )
    return [text, ""]


def table(documents: Iterable[dict[str, Any]]) -> str:
    """The figures of each GPU in Markdown."""
    lines: list[str] = []
    for device, by_name in newest(documents).items():
        figures = list(by_name.values())
        if device != "cpu" and figures:
            grids = [line for pass_ in ("forward", "backward") for line in grid(figures, pass_)]
            lines += [*_origin(device, figures), *grids, *variants(figures), *caches(figures), *steps(figures)]
    return "\n".join(lines).rstrip("\n") + "\n" if lines else "No results are committed yet.\n"


def rewritten(text: str, figures: str) -> str:
    """README's text with these figures.

    Raises:
        SystemExit: README lacks the marker lines.
    """
    if BEGIN not in text or END not in text.split(BEGIN)[1]:
        sys.exit(f"README has no place for the figures. Put these two lines into it:\n{BEGIN}{END}")
    head, rest = text.split(BEGIN)
    return head + BEGIN + figures + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if README is out of date")
    parser.add_argument("--print", action="store_true", help="print the figures and change nothing")
    chosen = parser.parse_args()
    figures = table(results.load(path) for path in committed())
    if chosen.print:
        print(figures, end="")
        return
    old = README.read_text(encoding="utf-8")
    new = rewritten(old, figures)
    if chosen.check and new != old:
        sys.exit("README's figures are out of date: python benchmarks/readme_table.py")
    if not chosen.check:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
