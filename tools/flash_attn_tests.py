"""Run flash-attn's own tests over this package, on a GPU.

``python tools/flash_attn_tests.py PATH`` takes a checkout of flash-attention, or its unpacked source archive; without
PATH pip downloads the archive of the release that `tilewise.compat` stands in for. The files are run as they are, from
where they lie, and need einops. They hold half a million cases, days of a GPU, so a sample of each test is run;
``--sample 0`` runs all. Cases that cannot pass are listed in `CANNOT` with the reason; they run too, and have to fail
with the error that says so.

As a pytest plugin this file installs the stand-in before the tests import it, takes the sample and marks those cases.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
RELEASE = "flash-attn==2.8.3.post2"
SUITES = {"2": "tests/test_flash_attn.py", "rotary": "tests/test_rotary.py", "3": "hopper/test_flash_attn.py"}
FP8 = "torch.float8_e4m3fn"


class Cannot(NamedTuple):
    """Cases that cannot pass: of a file, whose name holds `test`, and whose parameters `applies` accepts.

    They raise an error of these names. Those with an `excuse` may pass as well, and may raise it only where the test's
    variables are so that the excuse holds.
    """

    file: str
    test: str
    applies: Callable[[dict[str, Any]], bool]
    raises: tuple[str, ...]
    reason: str
    excuse: Callable[[dict[str, Any]], bool] | None = None


def _one_key(names: dict[str, Any]) -> bool:
    """Whether the exact gradients of queries and keys are 0, and the test's own computation found exactly that."""
    return all(name in names and not names[name].any() for name in ("dq_ref", "dk_ref", "dq_pt", "dk_pt"))


CANNOT = (
    Cannot("hopper", "_output", lambda p: str(p.get("dtype")) == FP8, ("UnsupportedError",),
           "fp8 tensors have an entry of their own, tilewise.attention_fp8, with scales of its own"),
    Cannot("hopper", "", lambda p: bool(p.get("has_qv")), ("UnsupportedError",),
           "qv: pass torch.cat([q, qv], -1) and torch.cat([k, v], -1) instead"),
    Cannot("hopper", "bw_compatibility", lambda p: True, ("AttributeError",),
           "it reads the schemas of flash-attn's C++ operators, which a stand-in without any does not have"),
    Cannot("test_rotary", "compilation_count", lambda p: True, ("ImportError",),
           "it counts compilations of flash-attn's own Triton kernel, which is not here"),
    Cannot("", "", lambda p: True, ("AssertionError",),
           "where rows see one key, the exact dq and dk are 0, and so is the tolerance, which fp32 rounding misses",
           excuse=_one_key),
)  # fmt: skip


_CANNOT = pytest.StashKey[Cannot]()


def download(folder: Path) -> Path:
    """The source archive of the release, unpacked in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("flash_attn-*.tar.gz")):
        # pip asks the archive for its metadata, and that imports PyTorch; nothing is compiled.
        env = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--no-binary", ":all:", "-d", folder, RELEASE], check=True, env=env)
    (archive,) = folder.glob("flash_attn-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(source: Path, suite: str, arguments: list[str]) -> int:
    """pytest's exit status for one suite of the tests in `source`."""
    path = source / SUITES[suite]
    if not path.exists():
        sys.exit(f"{path} is missing: pass the root of a checkout of flash-attention, or nothing to download {RELEASE}")
    # The tests' own folder has helpers that they import; the checkout's packages must not hide the stand-in.
    paths = [str(path.parent), str(Path(__file__).parent), str(ROOT / "src")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "flash_attn_tests",
        "-c",
        os.devnull,
    ]
    return subprocess.run([*command, f"--rootdir={path.parent}", path, *arguments], env=env).returncode


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, default=100, help="cases of each test; 0 for all")
    parser.addoption("--seed", type=int, default=0, help="which ones")


def pytest_configure(config: pytest.Config) -> None:
    import tilewise.compat

    tilewise.compat.install("flash_attn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the sample, and mark what cannot pass."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(getattr(item, "originalname", item.name), []).append(item)
    most, draw = config.getoption("--sample"), random.Random(config.getoption("--seed"))
    chosen = [x for group in by_test.values() for x in (draw.sample(group, most) if 0 < most < len(group) else group)]
    left = set(items) - set(chosen)
    config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
    items[:] = chosen
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for case in CANNOT:
            if case.file in str(item.path) and case.test in item.name and case.applies(parameters):
                item.stash[_CANNOT] = case
                break


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A case that cannot pass is skipped with its reason if it fails as it should, and fails if it does not."""
    cannot = item.stash.get(_CANNOT, None)
    try:
        found = yield
    except Exception as error:
        expected = cannot is not None and type(error).__name__ in cannot.raises
        if cannot is None or not expected or (cannot.excuse is not None and not cannot.excuse(_variables(error))):
            raise
        pytest.skip(cannot.reason)
    if cannot is not None and cannot.excuse is None:
        pytest.fail(f"passes, although {cannot.reason}: take it off the list")
    return found


def _variables(error: Exception) -> dict[str, Any]:
    """Those of the function that raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_locals


def main() -> None:
    parser = argparse.ArgumentParser(description="Other options go to pytest: --sample N, --seed N, -k EXPRESSION ...")
    parser.add_argument("path", type=Path, nargs="?", help="a checkout of flash-attention; default: download")
    parser.add_argument("--suite", choices=SUITES, action="append", help="repeatable; default: all")
    given, others = parser.parse_known_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("flash-attn's tests put their tensors on a GPU, and there is none")
    source = given.path or download(ROOT / "build" / "flash-attn")
    failed = [suite for suite in given.suite or SUITES if run(source.resolve(), suite, others)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
