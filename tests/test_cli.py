"""The command line: what it prints, and that bad input is one line and not a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import guards
import tilewise
from tilewise import cli

RUN = [sys.executable, "-m", "tilewise.cli"]


def tilewise_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=guards.SECONDS, check=False)


def test_info_names_versions_devices_backends_and_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    cli.info()
    shown = capsys.readouterr().out
    assert all(text in shown for text in (tilewise.__version__, torch.__version__, "cpu", "gpu", "kernel cache"))
    assert "backend cpu" in shown
    assert "available" in shown
    if not torch.cuda.is_available():
        assert "backend hopper" in shown
        assert "it needs compute capability 9.0" in " ".join(shown.split())


def test_explain_of_the_readme() -> None:
    sizes = ("--q", "1,4096,32,128", "--kv-heads", "8", "--causal", "--dtype", "bf16", "--device", "h200")
    found = tilewise_command("explain", *sizes)
    assert found.returncode == 0, found.stderr
    assert "137 GFLOP" in found.stdout
    assert "0.139 ms on h200" in found.stdout
    assert "mask: causal" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--q", "1,4096,32"), "supported: batch,seqlen,heads,head_dim"),
        (("--q", "1,64,4,32", "--kv-heads", "3"), "heads_q a positive multiple of heads_kv"),
        (("--q", "1,64,4,32", "--device", "h300"), "device: got 'h300'"),
        (("--q", "1,64,4,32", "--dtype", "int8"), "fp16, bf16, fp32, fp64"),
        (("--q", "1,64,4,32", "--window", "left"), "supported: left,right"),
        (("--q", "1,64,4,32", "--window=-1,0"), "window left bound: got -1"),
        (("--q", "1,64,4,32", "--backend", "cuda"), "backend: got 'cuda'"),
    ],
)
def test_bad_input_is_said_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    found = tilewise_command("explain", *arguments)
    assert found.returncode == 2
    # The frame that typer draws wraps long lines.
    assert text in " ".join(found.stderr.replace("│", " ").split())
    assert "Traceback" not in found.stderr


def test_windows_may_be_open_on_a_side(capsys: pytest.CaptureFixture[str]) -> None:
    cli.explain(q="1,64,4,32", window="7,")
    assert "window (7, None)" in capsys.readouterr().out


def test_the_demo_takes_steps_seed_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(cli, "run_demo", seen.append)
    cli.demo(steps=3, seed=7, out=tmp_path)
    assert (seen[0].steps, seen[0].seed, seen[0].out) == (3, 7, tmp_path)


def test_a_report_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine")
    for arguments, text in ((("--device", "h300", "--force"), "device: got 'h300'"), ((), "Fix: pass --force")):
        found = tilewise_command("report", "--out", str(out), *arguments)
        assert found.returncode == 2
        assert text in found.stderr
        assert "Traceback" not in found.stderr
    assert out.read_text() == "mine"
