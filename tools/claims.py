"""Write docs/claims.md: published figures about attention, each computed again and decided, with the code for it."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from claims_counts import COUNTS
from claims_devices import DEVICES
from claims_types import Claim, Section

SECTIONS = [*COUNTS, *DEVICES]
PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
# Measured figures, which a count can only bound.
BOUNDS = {"floor", "ceiling"}
INLINE = re.compile("«(.+?)»")

INTRODUCTION = """# Claims

Published and folklore figures about attention, {count} of them, each computed again. Verdicts: {tally}.

Every number under *ours* is the value of an expression in the block below its table, which the tests run; the page is
written by `python tools/claims.py` from those values, and so are the verdicts.

- **agrees**: our value rounds to the published digits; where the claim says ≈, it is within 10 %; where it gives a
  power of ten, it is that one;
- **agrees, so read**: the plain reading gives another number, and the one named last, which may be meant, gives the
  published one;
- **consistent**: something measured, which no count can give, is on the right side of the bound that we compute;
- **differs**: no reading gives the figure. Where more numbers stand there, they are the nearest reading, or the slip or
  fit by which the figure comes about.

Units: traffic is counted in elements, of one head; bytes are two per element (fp16). M is the SRAM of **one** SM. 1 GB
is 10⁹ bytes, 1 GiB 2³⁰.
"""


class Decided(NamedTuple):
    """A claim's value, what came of it and why, and the code to show, as (expression, value) pairs."""

    ours: str
    verdict: str
    why: str
    code: list[tuple[str, Any]]


def rounds_to(value: float, published: str) -> bool:
    """Whether the value, rounded to the digits that were published, is the published figure.

    >>> rounds_to(11.72, "11.7"), rounds_to(48, "50"), rounds_to(-0.891, "-0.89")
    (True, False, True)
    """
    decimals = len(published.partition(".")[2])
    return abs(value - float(published)) <= 0.5 * 10.0**-decimals + 1e-12


def holds(claim: Claim, value: Any) -> bool:
    """Whether a value bears the claim out, by the claim's rule."""
    if claim.rule == "true":
        return value is True
    target = float(claim.published)
    if claim.rule == "about":
        return abs(value - target) <= 0.1 * abs(target)
    if claim.rule == "order":
        return floor(log10(value) + 0.5) == floor(log10(target) + 0.5)
    if claim.rule in BOUNDS:
        return value <= target if claim.rule == "floor" else value >= target
    return rounds_to(value, claim.published)


def decide(claim: Claim, names: dict[str, Any]) -> Decided:
    """Evaluate the plain reading and, where it does not bear the claim out, the others in turn."""
    code: list[tuple[str, Any]] = []

    def evaluate(expression: str) -> Any:
        code.append((expression, eval(expression, names)))
        return code[-1][1]

    plain = evaluate(claim.ours)
    shown, verdict = _show(plain, claim), "differs"
    if holds(claim, plain):
        verdict = "consistent" if claim.rule in BOUNDS else "agrees"
    else:
        for reading in claim.readings:
            value = evaluate(reading.ours)
            shown += f"; {_show(value, claim)} {reading.words}"
            if reading.legitimate and holds(claim, value):
                verdict = "agrees, so read"
                break
    why = INLINE.sub(lambda match: _show(evaluate(match[1]), claim._replace(unit="")), claim.why)
    return Decided(shown, verdict, why, code)


def _show(value: Any, claim: Claim) -> str:
    if value is True or value is False:
        return "yes" if value else "no"
    return f"{value:,}{claim.unit}" if isinstance(value, (int, float)) else str(value)


def doctest_lines(code: str) -> list[str]:
    """Statements as an interactive session shows them.

    >>> doctest_lines("x = 1\\n\\nif x:\\n    y = 2")
    ['>>> x = 1', '>>> if x:', '...     y = 2']
    """
    lines = [line for line in code.split("\n") if line]
    starts = {statement.lineno for statement in ast.parse("\n".join(lines)).body}
    return [(">>> " if number in starts else "... ") + line for number, line in enumerate(lines, 1)]


def section(part: Section, number: int, names: dict[str, Any]) -> tuple[list[str], list[str]]:
    """A section's lines, and the verdicts of its claims; claims are numbered from `number`."""
    exec(part.setup, names)
    lines = [f"## {part.title}", "", *([part.text, ""] if part.text else [])]
    lines += ["| | claim | published | ours | verdict | why |", "|---|---|---|---|---|---|"]
    code, verdicts = doctest_lines(part.setup), []
    for offset, claim in enumerate(part.claims):
        found = decide(claim, names)
        verdicts.append(found.verdict)
        published = claim.says or claim.published + claim.unit
        cells = [str(number + offset), f"{claim.text} ({claim.source})", published, found.ours]
        lines.append(f"| {' | '.join([*cells, f'**{found.verdict}**', found.why])} |")
        code.append(f">>> # {number + offset}")
        for expression, value in found.code:
            code += doctest_lines(expression)
            if value is not None:  # of which a session shows nothing
                code.append(repr(value))
    return [*lines, "", "```python", *code, "```", ""], verdicts


def page() -> str:
    """The whole page."""
    names: dict[str, Any] = {}
    body: list[str] = []
    verdicts: list[str] = []
    for part in SECTIONS:
        lines, found = section(part, len(verdicts) + 1, names)
        body += lines
        verdicts += found
    tally = " · ".join(f"*{verdict}* {verdicts.count(verdict)}" for verdict in dict.fromkeys(verdicts))
    head = INTRODUCTION.format(count=len(verdicts), tally=tally)
    return head + "\n" + "\n".join(body).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    new = page()
    if not parser.parse_args().check:
        PAGE.write_text(new)
    elif not PAGE.exists() or PAGE.read_text() != new:
        sys.exit("docs/claims.md is out of date: python tools/claims.py")


if __name__ == "__main__":
    main()
