"""Every Python block of README, CONTRIBUTING and docs runs, top to bottom, and shows what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

import pytest
import torch
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import guards

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# These tell about the work, not about calls.
WITHOUT_EXAMPLES = {"docs/tuning.md"}

LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)(#[^)\s]*)?\)")


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_examples_run(page: Path) -> None:
    parser = PythonCodeBlockParser(doctest_optionflags=NORMALIZE_WHITESPACE | ELLIPSIS)
    torch.manual_seed(0)
    # One namespace for the page: a reader goes through it from the top.
    examples = list(Document.parse(str(page), parser).examples())
    assert examples or label(page) in WITHOUT_EXAMPLES, "the page shows nothing that runs"
    for example in examples:
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    targets = {match[1] for match in LINK.finditer(page.read_text())}
    missing = {target for target in targets if not (page.parent / target).exists()}
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {match[1] for match in LINK.finditer(index)}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= linked


def test_support_table_is_what_the_backends_say() -> None:
    check_tool("support_table.py")


def test_which_backend_is_what_dispatch_says() -> None:
    check_tool("which.py")


def check_tool(name: str) -> None:
    """A tool finds the page that it writes as it would write it."""
    command = [sys.executable, str(ROOT / "tools" / name), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=guards.SECONDS)
    assert done.returncode == 0, done.stderr
