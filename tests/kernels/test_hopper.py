"""The Hopper forward without a GPU: what the compiler makes of every shipped tile, and how tiles are dealt."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offline import SHARED, Compiled, catching

from tilewise import hopper
from tilewise.arguments import prepare
from tilewise.hopper import launch
from tilewise.hopper.schedule import Bounds, deal
from tilewise.mask_algebra import Frame, interval
from tilewise.problem import Problem
from tilewise.tiles import lookup

# Instructions of one whole key tile in the loop of a call without a mask, and what the kernel may grow to unnoticed.
LOOP_BUDGET = {64: 440, 128: 480, 256: 450}
HOPPER = {"multi_processor_count": 132}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's answers where there is none; plans made from them are forgotten afterwards."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**HOPPER))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launch.plan.cache_clear()
    yield
    launch.plan.cache_clear()


def compiled(head_dim: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Compiled:
    """The kernel for a call with this head dim."""
    q = torch.empty(1, 640, 4, head_dim, dtype=dtype)
    k = torch.empty(1, 640, 2, head_dim, dtype=dtype)
    problem, inputs, _ = prepare(q, k, k, **options)
    with catching(90) as caught:
        launch.forward(problem, inputs)
    (kernel,) = caught
    return kernel


def hot_loops(sass: str, products: int) -> list[int]:
    """Instructions of the consumers' loops over key tiles: the shortest two with so many matrix instructions."""
    labels, body = {}, []
    for line in sass.splitlines():
        if re.match(r"^LBB\d+:", line):
            labels[line.strip()[:-1]] = len(body)
        elif "\t" in line:
            body.append(line)
    lengths = []
    for last, line in enumerate(body):
        target = re.search(r"BRA(?:\.U)? (LBB\d+)", line)
        first = labels.get(target.group(1), last + 1) if target else last + 1
        if sum("HGMMA" in inside for inside in body[first : last + 1]) == products:
            lengths.append(last - first + 1)
    return sorted(lengths)[:2]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}], ids=str)
def test_shipped_tile(elsewhere: None, head_dim: int, options: dict[str, Any]) -> None:
    kernel = compiled(head_dim, **options)
    assert kernel.spilled == 0
    assert kernel.shared <= SHARED[90]
    assert "C75" not in kernel.log, "ptxas serialises the matrix products"
    # Dropped without a word where the roles ask for more registers than there are.
    assert "setmaxnreg" in kernel.ptx
    assert "HGMMA" in kernel.sass()
    if not options:
        block_n = lookup("hopper", "forward", torch.bfloat16, head_dim).block_n
        loops = hot_loops(kernel.sass(), head_dim // 16 + block_n // 16)
        assert len(loops) == 2
        assert max(loops) <= LOOP_BUDGET[head_dim]


def test_head_dims_between_are_filled_with_zeros() -> None:
    assert [launch.block(d) for d in (8, 64, 72, 96, 128, 136, 192, 256)] == [64, 64, 128, 128, 128, 256, 256, 256]


@pytest.mark.parametrize("dims", [(192, 128), (16, 160), (256, 64)], ids=str)
def test_values_of_another_head_dim(elsewhere: None, dims: tuple[int, int]) -> None:
    q, v = (torch.empty(1, 128, 2, d, dtype=torch.float16) for d in dims)
    problem, inputs, _ = prepare(q, q, v)
    with catching(90) as caught:
        launch.forward(problem, inputs)
    assert caught[0].spilled == 0
    assert caught[0].shared <= SHARED[90]


def posed(problem: Problem) -> Problem:
    """The problem on a Hopper GPU."""
    return replace(problem, device=torch.device("cuda"), assumed_capability=(9, 0))


def test_what_it_declines_is_said() -> None:
    x, odd = torch.empty(1, 16, 2, 64, dtype=torch.float16), torch.empty(1, 16, 2, 63, dtype=torch.float16)
    assert hopper.unsupported_reasons(posed(prepare(x, x, x, causal=True, window=(3, 0))[0])) == []
    assert hopper.unsupported_reasons(posed(prepare(x, x, x)[0]), "backward") == ["the backward pass"]
    reasons = hopper.unsupported_reasons(posed(prepare(odd, odd, odd, softcap=3.0, mask=lambda b, h, q, k: q > k)[0]))
    assert reasons == ["a head dim that is no multiple of 8", "masks beyond causal and window", "softcap"]
    (here,) = hopper.unsupported_reasons(prepare(x, x, x)[0])
    assert "compute capability 9.0" in here


BANDS = [
    Bounds(1000, 1000, 0, None, None),
    Bounds(1000, 1000, 0, None, 0),
    Bounds(300, 1111, 811, None, 0),
    Bounds(1111, 300, -811, None, 0),
    Bounds(1000, 1000, 0, 100, 30),
]


@pytest.mark.parametrize("bounds", BANDS, ids=str)
def test_every_tile_is_dealt_once_and_no_program_waits_long(bounds: Bounds) -> None:
    pairs, programs = 12, 7
    dealt = deal(bounds, 128, 64, pairs, programs, torch.device("cpu"))
    tiles_m = -(-bounds.len_q // 128)
    numbers = dealt.table[dealt.table >= 0]
    assert sorted(numbers.tolist()) == list(range(pairs * tiles_m))
    assert dealt.table.shape == (dealt.rounds, programs)
    lengths = torch.tensor([bounds.key_tiles(m * 128, 128, 64) + 1.5 for m in range(tiles_m)])
    loads = torch.where(dealt.table >= 0, lengths[dealt.table.clamp(min=0) % tiles_m], 0.0).sum(0)
    # Graham's bound for the longest-first rule, against the lower bounds of any schedule.
    best = max(float(loads.sum()) / programs, float(lengths.max()))
    assert float(loads.max()) <= 4 / 3 * best + 1e-6


@pytest.mark.parametrize("bounds", BANDS, ids=str)
def test_the_key_tiles_of_a_row_tile_cover_what_its_rows_see(bounds: Bounds) -> None:
    x = torch.empty(1, bounds.len_q, 1, 8)
    k = torch.empty(1, bounds.len_k, 1, 8)
    window = (bounds.left, bounds.right)
    problem, _, _ = prepare(x, k, k, window=None if window == (None, None) else window)
    frame = Frame(0, 1, bounds.len_q, bounds.len_k, bounds.off, x.device)
    lo, hi = interval(problem.options.mask.lower(frame), frame)
    for m0 in range(0, bounds.len_q, 128):
        first, last = int(lo[0, m0 : m0 + 128].min()), int(hi[0, m0 : m0 + 128].max())
        wanted = max(1, -(-last // 64) - min(first, bounds.len_k - 1) // 64)
        assert bounds.key_tiles(m0, 128, 64) == wanted


def test_keys_that_nobody_sees_are_cut_off() -> None:
    q, k = torch.empty(1, 10, 1, 64), torch.empty(1, 30, 1, 64)
    band, first, last = launch.bounds(prepare(q, k, k, window=(4, 2))[0])
    assert (first, last) == (16, 30)
    assert band == Bounds(10, 14, 4, 4, 2)
    assert launch.bounds(prepare(q, k, k, causal="top_left")[0])[1:] == (0, 10)
