"""Sharded tensors (DTensor, FSDP2): two processes compute what one does, and meshes of more dimensions are cut well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import guards
import tilewise
from sharded import CASES, WORLD

PROCESS = "import sys, sharded; sharded.run(int(sys.argv[1]), sys.argv[2])"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each process wrote of each case: nothing, or its traceback."""
    folder = tmp_path_factory.mktemp("sharded")
    paths = ":".join([str(Path(__file__).parent), *sys.path])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
        )
        for rank in range(WORLD)
    ]
    try:
        for process in started:
            # Both do every case, so one that fails in one of them may leave the other waiting.
            _, errors = process.communicate(timeout=guards.SECONDS)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in started:
            process.kill()
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_processes(case: Callable[..., None], outcomes: Path) -> None:
    for rank in range(WORLD):
        error = (outcomes / f"{case.__name__}.{rank}").read_text()
        assert not error, error


@pytest.fixture
def eight() -> Iterator[None]:
    """A process that is one of eight, of which the others are not there: placements are chosen all the same."""
    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    "heads_kv, placements, expected",
    [
        (8, (Shard(0), Shard(2)), (Shard(0), Shard(2))),
        (4, (Shard(0), Shard(2)), (Shard(0), Shard(2))),
        (8, (Shard(2), Shard(2)), (Shard(2), Shard(2))),
        # Four ways do not divide two heads, nor eight ways four.
        (2, (Shard(0), Shard(2)), (Shard(0), Replicate())),
        (1, (Shard(0), Shard(2)), (Shard(0), Replicate())),
        (4, (Shard(0), Shard(1)), (Shard(0), Replicate())),
    ],
)
def test_meshes_of_two_dimensions(heads_kv: int, placements: Any, expected: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    q, k = (
        distribute_tensor(torch.randn(8, 4, heads, 8), mesh, placements, src_data_rank=None).requires_grad_()
        for heads in (8, heads_kv)
    )
    out = tilewise.attention(q, k, k, causal=True)
    assert out.placements == expected
    assert all(grad.placements == expected for grad in torch.autograd.grad(out.sum(), (q, k)))
