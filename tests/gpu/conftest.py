"""These tests need a GPU, test_devices two of them, some a Hopper: where there is none they are not collected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_CAN = torch.cuda.is_available()
_HOPPER = _CAN and torch.cuda.get_device_capability() == (9, 0)
_NEEDS = {
    "test_devices.py": torch.cuda.device_count() >= 2,
    "test_hopper_latent.py": _HOPPER,
    "test_hopper_memory.py": _HOPPER,
    "test_races.py": _HOPPER,
}
collect_ignore = [name for name, met in _NEEDS.items() if not met]
collect_ignore_glob = [] if _CAN else ["*.py"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels as they are compiled, or loaded from disk for the first time in this process."""
    import triton

    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    # For hooks Triton writes down what it compiles for as JSON, which knows no functions.
    monkeypatch.setattr(triton.runtime.jit, "serialize_specialization_data", lambda *_: "")
    return names
