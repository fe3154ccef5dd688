"""tilewise info: what is here, what is not, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import dispatch, surroundings


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dispatch._missing.cache_clear()
    yield
    dispatch._missing.cache_clear()


def said() -> dict[str, str]:
    return dict(surroundings.rows())


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these were not installed."""
    for owner in (dispatch.util, surroundings.util):
        find = owner.find_spec
        monkeypatch.setattr(owner, "find_spec", lambda name, find=find: None if name in modules else find(name))


def test_every_backend_says_what_it_serves_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = said()
    assert rows["backend cpu"] == "available: forward, backward, caches"
    assert {f"backend {name}" for name in dispatch.BACKENDS} <= set(rows)
    if not torch.cuda.is_available():
        assert rows["backend hopper"].startswith("not available: tensors on cpu; it needs compute capability 9.0")
    monkeypatch.setattr(dispatch, "cache_reasons", lambda *_: ["it has no kernel for that"])
    assert said()["backend cpu"] == "available: forward, backward; not caches: it has no kernel for that"


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton")
    rows = said()
    for name in ("hopper", "triton"):
        assert rows[f"backend {name}"].startswith("not available: the package triton is not installed; it comes with")
    assert "triton (no triton): pip install 'tilewise[triton]'" in rows["extras"]


@pytest.mark.parametrize(
    ("version", "old"), [("3.5.1", True), ("2.9.0", True), ("3.6.0", False), ("3.10.0+git12", False), (None, False)]
)
def test_an_old_triton(monkeypatch: pytest.MonkeyPatch, version: str | None, old: bool) -> None:
    monkeypatch.setattr(dispatch, "_triton_version", lambda: version)
    text = f"not available: triton {version} is too old; it needs 3.6: pip install -U triton"
    assert (said()["backend triton"] == text) is old


@pytest.mark.parametrize(
    ("cuda", "text"),
    [
        (None, "none: this torch is built without CUDA; pytorch.org names the command for a GPU build"),
        ("13.0", "none: no driver or device found for CUDA 13.0; check nvidia-smi, and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, text: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    assert said()["gpu"] == text


def test_extras_and_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, "matplotlib")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows: dict[str, Any] = said()
    assert "demo (no matplotlib): pip install 'tilewise[demo]'" in rows["extras"]
    assert f"TRITON_CACHE_DIR={tmp_path}" in rows["environment"]
    assert rows["kernel cache"] == str(tmp_path)
