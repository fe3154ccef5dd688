"""Calls on a stream of their own: every kernel waits for what came before on that stream, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from subjects import BACKENDS, CALLS

import tilewise
from conformance.calls import Draw, cotangents, run
from conformance.verify import compare

BUSY = 200_000_000  # clock cycles, about 0.1 s


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_side_stream(name: str, backend: str | None) -> None:
    call = CALLS[name](Draw("cuda"))
    wanted = cotangents(call, Draw("cuda", seed=1))
    # Compiled by a first call, for compiling takes longer than the stream stays busy.
    run(lambda c: c.attend(tilewise, backend=backend), call, wanted)
    late = {name: torch.full_like(x, float("nan")) for name, x in call.tensors().items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # The inputs arrive late: a kernel on another stream would read NaN.
        torch.cuda._sleep(BUSY)
        for name, x in call.tensors().items():
            late[name].copy_(x)
        got = run(lambda c: c.attend(tilewise, backend=backend), call.with_tensors(**late), wanted)
        done = side.record_event()
    assert not done.query(), "the host waited for the stream, or it was not busy long enough"
    done.synchronize()
    compare(call, got, wanted)
