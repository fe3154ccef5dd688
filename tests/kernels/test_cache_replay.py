"""Calls with a cache that are replayed: what reaches the driver is what Triton itself would have passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_replay import Machine, machine, named  # noqa: F401 - a fixture

import tilewise
from tilewise import _triton
from tilewise.cache_arguments import prepare
from tilewise.kvcache import FP8

Options = dict[str, Any]


def _new(dtype: torch.dtype = torch.bfloat16) -> Options:
    return {name: torch.randn(2, 3, 2, 64).to(dtype) for name in ("k_new", "v_new")}


def _paged() -> Options:
    return {"page_table": torch.zeros(2, 8, dtype=torch.int32), **_new()}


def _rotary() -> tilewise.Rotary:
    return tilewise.Rotary(torch.rand(200, 32), torch.rand(200, 32), positions=torch.zeros(2, dtype=torch.int64))


CALLS: dict[str, Any] = {
    "plain": dict,
    "append": _new,
    "paged": _paged,
    "modified": lambda: {"alibi_slopes": torch.rand(8), "sinks": torch.rand(8), "softcap": 3.0, "window": (9, 0)},
    "tree": lambda: {"mask": torch.rand(2, 3, 3) > 0.5},
    "rotated": lambda: {"rotary": _rotary(), "cache_leftpad": torch.zeros(2, dtype=torch.int32), **_new()},
    "indexed": lambda: {"cache_batch_idx": torch.tensor([1, 0]), "split_size": 128},
    "fp8": lambda: {"k_scale": torch.rand(2), "v_scale": torch.rand(2, 2), **_paged()},
}


def posed(name: str) -> Any:
    """The problem and the tensors of a call of 8 over 2 heads."""
    options = CALLS[name]()
    lead = (16, 32) if "page_table" in options else (2, 256)
    dtype = FP8 if name == "fp8" else torch.bfloat16
    k, v = (torch.randn(*lead, 2, 64).to(dtype) for _ in range(2))
    return prepare(torch.randn(2, 3, 8, 64).bfloat16(), k, v, torch.zeros(2, dtype=torch.int32), **options)


def assert_replayed(machine: Machine, backend: Any, name: str) -> None:  # noqa: F811 - no fixture
    """Fail unless a backend's second call, and every later one, reaches the driver as Triton would pass it on."""
    attend = backend.bind_cache(posed(name)[0])
    calls, launches = [], []
    for _ in range(3):
        _, inputs = posed(name)
        before = len(machine.usual), len(machine.replayed)
        calls.append([*inputs, *attend(inputs)])
        launches.append((machine.usual[before[0] :], machine.replayed[before[1] :]))
    (first, none), (usual, nothing), (past, replayed) = launches
    assert first and not none and not past
    # The second call is the first replay: Triton's own way is asked for beside it.
    own = backend.bind_cache(posed(name)[0])
    held = posed(name)[1]
    found = own(held)
    assert not usual and len(nothing) == len(replayed) == len(first)
    want = [named(x, [*held, *found]) for x in machine.usual[-len(first) :]]
    assert [named(x, calls[2]) for x in replayed] == want


@pytest.mark.parametrize("name", CALLS)
def test_a_replay_passes_what_triton_would(machine: Machine, name: str) -> None:  # noqa: F811 - a fixture
    assert_replayed(machine, _triton, name)


def test_values_inside_the_keys_have_a_kernel_of_their_own(machine: Machine) -> None:  # noqa: F811 - a fixture
    """Calls with equal shapes and strides, values apart from the keys or in them, do not share a replay."""
    latent = torch.randn(2, 64, 1, 96).bfloat16()
    apart = torch.randn(2, 64, 1, 96).bfloat16()
    q, seqlens = torch.randn(2, 1, 4, 96).bfloat16(), torch.zeros(2, dtype=torch.int32)
    calls = [prepare(q, latent, x[..., :64], seqlens) for x in (latent, apart)]
    attend = _triton.bind_cache(calls[0][0])
    for _, inputs in calls * 2:
        attend(inputs)
    # One launch of each kind by way of Triton, and one replay of each.
    assert len(machine.usual) == len(machine.replayed) == 2 * 2
