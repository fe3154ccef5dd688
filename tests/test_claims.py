"""The claims page: it is what its tool writes, and the rules that decide a claim decide it so."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import guards

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def claims() -> Any:
    """The tool as a module; its own imports are beside it."""
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("claims")
    finally:
        sys.path.remove(str(TOOLS))


def test_the_page_is_what_the_tool_writes() -> None:
    command = [sys.executable, str(TOOLS / "claims.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=guards.SECONDS)
    assert done.returncode == 0, done.stderr


def test_the_tools_examples(claims: Any) -> None:
    assert doctest.testmod(claims).failed == 0


@pytest.mark.parametrize(
    ("rule", "published", "ours", "verdict"),
    [
        ("rounds", "11.7", "11.72", "agrees"),
        ("rounds", "11.7", "11.78", "differs"),
        ("about", "50", "46.0", "agrees"),
        ("about", "50", "44.0", "differs"),
        ("order", "1e-6", "4e-7", "agrees"),
        ("order", "1e-6", "2e-7", "differs"),
        ("floor", "7.3", "3.1", "consistent"),
        ("floor", "7.3", "7.4", "differs"),
        ("ceiling", "40", "55", "consistent"),
        ("ceiling", "40", "39", "differs"),
        ("true", "yes", "1 < 2", "agrees"),
        ("true", "yes", "1", "differs"),
    ],
)
def test_rules(claims: Any, rule: str, published: str, ours: str, verdict: str) -> None:
    claim = claims.Claim("text", "source", published, ours, "why", rule=rule)
    assert claims.decide(claim, {}).verdict == verdict


def test_another_reading_counts_where_the_claim_can_be_meant_so(claims: Any) -> None:
    types = importlib.import_module("claims_types")
    meant, slip = types.Reading("2", "per pair"), types.Reading("2", "by a slip", legitimate=False)
    for reading, verdict in ((meant, "agrees, so read"), (slip, "differs")):
        claim = claims.Claim("text", "source", "2", "1", "«1 + 2» in all", unit=" GB", readings=(reading,))
        found = claims.decide(claim, {})
        assert (found.verdict, found.ours, found.why) == (verdict, f"1 GB; 2 GB {reading.words}", "3 in all")
        assert found.code == [("1", 1), ("2", 2), ("1 + 2", 3)]


def test_every_line_is_decided(claims: Any) -> None:
    rows = [line for line in claims.PAGE.read_text().splitlines() if line.startswith("| ") and "claim |" not in line]
    assert len(rows) == sum(len(section.claims) for section in claims.SECTIONS)
    verdicts = ("**agrees**", "**agrees, so read**", "**consistent**", "**differs**")
    for number, row in enumerate(rows, 1):
        assert row.startswith(f"| {number} |")
        assert sum(verdict in row for verdict in verdicts) == 1
        assert "«" not in row
