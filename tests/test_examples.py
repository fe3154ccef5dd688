"""The examples run, and what they show holds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("pages", [28, 64], ids=["requests_wait", "all_at_once"])
def test_generate(pages: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text is what the model writes without a cache, whether or not requests had to wait for pages."""
    worst = load("generate").main(["--steps", "3", "--count", "24", "--pages", str(pages)])
    said = capsys.readouterr().out
    assert worst < 1e-4
    assert "9 texts" in said and f"{pages} free at the end" in said and "the same bytes" in said


def test_generate_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="too small for one request"):
        load("generate").main(["--steps", "1", "--count", "24", "--pages", "3"])
    with pytest.raises(SystemExit):
        load("generate").main(["--count", "200"])
    assert "--count 200 makes texts of 278 bytes; the model has read 160 at most" in capsys.readouterr().err


def test_convert_mha(capsys: pytest.CaptureFixture[str]) -> None:
    """A converted module gives what PyTorch's gives, gradients included."""
    assert load("convert_mha").main(["--seqlen", "200"]) < 1e-5
    said = capsys.readouterr().out
    assert "with a zero key" in said and "200 tokens, causal" in said
