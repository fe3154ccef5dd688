"""`tools/flash_attn_tests.py` over a file that stands for flash-attn's own: it samples, and holds reasons to it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import guards

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "flash_attn_tests.py"

TESTS = """
import pytest
import torch
from flash_attn_interface import flash_attn_func
from test_util import draw


@pytest.mark.parametrize("has_qv", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("seqlen", range(1, 51))
def test_flash_attn_output(seqlen, dtype, has_qv):
    q = draw(seqlen).to(dtype)
    assert flash_attn_func(q, q, q, qv=q if has_qv else None).shape == q.shape


def test_flash3_bw_compatibility():
    {body}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like flash-attn's, whose own package must not be the one that is imported."""
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "test_util.py").write_text(
        "import torch\n\n\ndef draw(n):\n    return torch.randn(1, n, 2, 16)\n"
    )
    write(tmp_path, "torch.ops.flash_attn_3.fwd.default")
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('not built')")
    return tmp_path


def write(folder: Path, body: str) -> None:
    (folder / "hopper" / "test_flash_attn.py").write_text(TESTS.replace("{body}", body))


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the suite for flash-attn 3, without the check for a GPU."""
    code = f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(TOOL.parent)!r})\n"
    code += "import flash_attn_tests as t\n"
    code += f"sys.exit(t.run(Path({str(folder)!r}), '3', {list(arguments)!r}))"
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=guards.SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_a_sample_runs_and_reasons_are_given(checkout: Path) -> None:
    status, said = run(checkout, "--sample", "40", "-rs")
    assert status == 0, said
    assert "160 deselected" in said
    assert "tilewise.attention_fp8" in said and "torch.cat([q, qv], -1)" in said and "C++ operators" in said


def test_a_case_that_passes_after_all_fails(checkout: Path) -> None:
    write(checkout, "pass")
    status, said = run(checkout, "-k", "bw_compatibility")
    assert status == 1 and "take it off the list" in said


def test_another_error_fails(checkout: Path) -> None:
    write(checkout, "assert False")
    status, said = run(checkout, "-k", "bw_compatibility")
    assert status == 1 and "1 failed" in said


@pytest.mark.parametrize("gradient, status", [(0.0, 0), (1.0, 1)])
def test_a_tolerance_of_zero_excuses_only_zero_gradients(checkout: Path, gradient: float, status: int) -> None:
    (checkout / "hopper" / "test_flash_attn.py").write_text(
        "import torch\n\n\ndef test_flash_attn_output():\n"
        f"    dq_ref = dk_ref = dq_pt = dk_pt = torch.full((3,), {gradient})\n"
        "    assert (dq_ref + 1e-6 - dq_ref).abs().max() <= 0\n"
    )
    assert run(checkout)[0] == status


def test_a_path_that_is_no_checkout(tmp_path: Path) -> None:
    status, said = run(tmp_path)
    assert status == 1 and "pass the root of a checkout" in said


def test_every_reason_is_on_the_page() -> None:
    """docs/flash_attn.md names the cases that cannot pass."""
    spec = importlib.util.spec_from_file_location("flash_attn_tests", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = " ".join((ROOT / "docs" / "flash_attn.md").read_text().split())
    assert all(case.reason in page for case in tool.CANNOT)
