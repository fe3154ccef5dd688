"""Tensors on a device that is not the current one: kernels go where the tensors are, forward and backward."""

from __future__ import annotations

import pytest
import torch
from subjects import BACKENDS, CALLS

import tilewise
from conformance.calls import Draw, cotangents, run
from conformance.verify import compare

OTHER = "cuda:1"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_another_device(name: str, backend: str | None) -> None:
    call = CALLS[name](Draw(OTHER))
    wanted = cotangents(call, Draw(OTHER, seed=1))
    with torch.cuda.device(0):
        got = run(lambda c: c.attend(tilewise, backend=backend), call, wanted)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(OTHER)
    assert {x.device for _, x in got.items()} == {torch.device(OTHER)}
    compare(call, got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_call_after_the_other_on_two_devices(backend: str | None) -> None:
    for device in ("cuda:0", OTHER, "cuda:0"):
        call = CALLS["causal"](Draw(device))
        wanted = cotangents(call, Draw(device, seed=1))
        compare(call, run(lambda c: c.attend(tilewise, backend=backend), call, wanted), wanted)
