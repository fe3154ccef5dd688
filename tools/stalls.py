"""Where the warps of a kernel wait: its hot instructions in segments, each with its samples and their reasons.

    ncu --clock-control none --section SourceCounters -k regex:backward_kernel -s 1 -c 1 -o report python program.py
    ncu -i report.ncu-rep --page source --csv > source.csv
    python tools/stalls.py source.csv

A segment ends with what warps wait at: a barrier, a fence, a matrix product, a wait for one, a store to shared memory.
Samples are in proportion to time: those of a segment over all of its warpgroup's loop say what part of a step it takes.
(Instructions of roles that mostly wait, such as a loading warp's, are sampled as often as they wait.)
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ENDS = re.compile(r"BAR\.SYNC|DEPBAR|PHASECHK|FENCE|SYNCS\.ARRIVE|STSM|HGMMA|UTMA|MEMBAR")


class Instruction(NamedTuple):
    """One of the kernel's: its place and text, how often it was executed, and samples by reason."""

    place: int
    text: str
    executed: int
    stalls: Counter[str]


def read(path: Path) -> list[Instruction]:
    """Nsight Compute's page of sources as CSV, whose second row names the columns."""
    with path.open(newline="") as file:
        _, names, *rows = csv.reader(file)
    reasons = [name for name in names if name.startswith("stall_") and "Not Issued" not in name]
    records = (dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names))
    return [
        Instruction(
            place,
            record["Source"].strip(),
            int(record["Instructions Executed"] or 0),
            Counter({reason.removeprefix("stall_"): int(record[reason] or 0) for reason in reasons}),
        )
        for place, record in enumerate(records)
    ]


def segments(instructions: list[Instruction]) -> Iterator[list[Instruction]]:
    """What follows each other, up to and with an instruction that warps wait at."""
    found: list[Instruction] = []
    for instruction in instructions:
        found.append(instruction)
        if ENDS.search(instruction.text):
            yield found
            found = []
    if found:
        yield found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("source", type=Path, help="CSV of ncu's page 'source'")
    options.add_argument("--least", type=float, default=0.1, help="of the most executed, in shares (%(default)s)")
    chosen = options.parse_args()
    instructions = read(chosen.source)
    most = max(instruction.executed for instruction in instructions)
    hot = [instruction for instruction in instructions if instruction.executed >= chosen.least * most]
    total = sum(sum(instruction.stalls.values()) for instruction in instructions)
    for segment in segments(hot):
        stalls = sum((instruction.stalls for instruction in segment), Counter[str]())
        reasons = ", ".join(f"{reason} {samples}" for reason, samples in stalls.most_common(4))
        share = sum(stalls.values()) / max(1, total)
        print(f"{segment[0].place:6}-{segment[-1].place:<6} {share:6.2%}  {segment[-1].text[:64]:64}  {reasons}")


if __name__ == "__main__":
    main()
