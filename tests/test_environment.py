"""docs/environment.md names every variable that is read, and none that is not; docs/faq.md quotes what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewise import surroundings

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
# How a variable is read: os.environ["X"], .get("X"), "X" in os.environ, os.getenv("X").
READS = re.compile(r"""environ(?:\.get\(|\[)"([A-Z_]+)"(?!\]\s*=)|"([A-Z_]+)" in os\.environ|getenv\("([A-Z_]+)\"""")
# Triton's settings by attribute; each is the variable of the same meaning.
KNOBS = {"knobs.runtime.interpret": "TRITON_INTERPRET"}


def read_in(*folders: str) -> dict[str, list[str]]:
    """Variables that code reads, with the files that do."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__):
                continue
            text = path.read_text()
            names = {name for match in READS.findall(text) for name in match if name}
            names |= {variable for knob, variable in KNOBS.items() if knob in text}
            for name in names:
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def documented() -> tuple[set[str], set[str]]:
    """The variables of the page's two tables."""
    package, tests = (ROOT / "docs" / "environment.md").read_text().split("Those of the tests:")
    return tuple(set(re.findall(r"^\| `([A-Z_]+)`", table, re.MULTILINE)) for table in (package, tests))  # type: ignore[return-value]  # there are two


def test_every_variable_is_documented() -> None:
    package, tests = documented()
    assert set(surroundings.VARIABLES) == package
    everywhere = read_in(*FOLDERS)
    undocumented = {name: files for name, files in everywhere.items() if name not in package | tests}
    assert not undocumented
    assert set(read_in("src")) | set(surroundings.VARIABLES) == package
    assert tests <= set(everywhere)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('os.environ.get("SOME_NAME", "")', {"SOME_NAME"}),
        ('x = os.environ["SOME_NAME"]', {"SOME_NAME"}),
        ('if "SOME_NAME" in os.environ:', {"SOME_NAME"}),
        ('os.getenv("SOME_NAME")', {"SOME_NAME"}),
        ('os.environ["SOME_NAME"] = "set, not read"', set()),
    ],
)
def test_reads_are_seen(code: str, names: set[str]) -> None:
    assert {name for match in READS.findall(code) for name in match if name} == names


def test_texts_that_the_page_of_questions_quotes() -> None:
    """Errors that need another machine stand on the page as text; each is in the source. (The others are raised.)"""
    quoted = re.findall(r"```text\n(.+?)\n```", (ROOT / "docs" / "faq.md").read_text(), re.DOTALL)
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert quoted
    assert [text for text in quoted if text not in source] == []
