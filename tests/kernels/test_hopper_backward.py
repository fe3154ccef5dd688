"""The Hopper backward without a GPU: what the compiler makes of it, and that every pair of tiles is visited once."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import budgets
import loops
import pytest
import torch
import triton
from offline import SHARED, Compiled, catching

from tilewise import BlockMask, ScoreMod, dispatch, hopper
from tilewise.arguments import prepare
from tilewise.problem import Problem

ALL = os.environ.get("TILEWISE_ALL_TILES") == "1"
# Matrix instructions of a tile, of each warpgroup: five products, of 16 columns or rows each.
PRODUCTS = 32


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's answers where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def compiled(
    head_dim: int, packed: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> list[Compiled]:
    """The kernels for a call of 4 query heads over 2; a packed one has three members."""
    rows = (1280,) if packed else (2, 640)
    q, out = (torch.empty(*rows, 4, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.empty(*rows, 2, head_dim, dtype=dtype) for _ in range(2))
    if packed:
        cu = torch.tensor([0, 300, 300, 1280], dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 980, "max_seqlen_k": 980}
    problem, inputs, _ = prepare(q, k, v, **options)
    lse = torch.empty(problem.lse_shape(q))
    with catching(90) as caught:
        hopper.backward(problem, inputs, out, lse, out, None, ("q", "k", "v"))
    kernels = [item for item in caught if item.kernel in ("backward_kernel", "apart_kernel")]
    for kernel in kernels:
        assert kernel.shared <= SHARED[90]
        assert "setmaxnreg" in kernel.ptx
        assert "C75" not in kernel.log, "ptxas serialises the matrix products"
    return kernels


def check(kernel: Compiled, products: int, budget: budgets.Budget) -> list[list[str]]:
    """What holds for a kernel whose speed counts, with so many matrix instructions a tile; returns its loops."""
    found = loops.hot_loops(kernel.cubin, products)
    assert len(found) == (1 if kernel.kernel == "apart_kernel" else 2)
    assert max(map(len, found)) <= budget.instructions
    assert max(map(loops.spills, found)) <= budget.spills
    assert kernel.spilled <= budget.spilled
    return found


BANDS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (100, 0)}]
SHIPPED = [(d, band) for d in (64, 128) for band in BANDS if ALL or "window" not in band]


@pytest.mark.parametrize("head_dim, options", SHIPPED, ids=str)
def test_shipped_tile(head_dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For many keys, which add to dq in any order."""
    monkeypatch.setattr(hopper.gradients, "FEW_KEYS", 0)
    (kernel,) = compiled(head_dim, **options)
    found = check(kernel, PRODUCTS, budgets.of((budgets.BACKWARD_BAND if options else budgets.BACKWARD)[head_dim]))
    assert not re.search(r"ld\.acquire|red\.release", kernel.ptx)
    if not options and triton.__version__ == "3.6.0":
        known = budgets.BACKWARD_LOOPS[head_dim]
        assert all(loops.digest(loop) in digests for loop, digests in zip(found, known, strict=True))


@pytest.mark.parametrize("options", BANDS if ALL else BANDS[1:2], ids=str)
def test_a_gradient_at_a_time(options: dict[str, Any]) -> None:
    kernels = compiled(256, **options)
    for kernel, products, budget in zip(kernels, (36, 36, 20), budgets.APART, strict=True):
        check(kernel, products, budgets.of(budget))


# What the adding warp says, wherever the compiler put it: wait for the turn; write, if it is first, or else add; wait
# until it is in memory, count on.
IN_TURN = (
    r"ld\.acquire\.gpu.*?fence\.proxy\.async",
    r"cp\.async\.bulk\.tensor\.4d\.global\.shared.*?commit_group",
    r"cp\.reduce\.async\.bulk.*?commit_group",
    r"cp\.\S*async\.bulk.*?commit_group.*?wait_group 0;.*?fence\.proxy\.async.*?bar\.warp\.sync.*?red\.release",
)


REPEATABLE: list[tuple[int, dict[str, Any]]] = [(64, {"causal": True}), (128, {})]


@pytest.mark.parametrize("head_dim, options", SHIPPED if ALL else REPEATABLE, ids=str)
def test_a_repeatable_call_takes_turns(head_dim: int, options: dict[str, Any]) -> None:
    (kernel,) = compiled(head_dim, deterministic=True, **options)
    check(kernel, PRODUCTS, budgets.of(budgets.BACKWARD_IN_TURN[head_dim]))
    assert all(re.search(said, kernel.ptx, re.DOTALL) for said in IN_TURN)
    assert len(re.findall(r"red\.release", kernel.ptx)) == 1


REPEATABLE_APART: list[dict[str, Any]] = [
    {"head_dim": 256},
    {"packed": True},
    {"mask": BlockMask(torch.ones(1, 1, 5, 5, dtype=torch.bool), 128, 128)},
]


@pytest.mark.parametrize("options", REPEATABLE_APART if ALL else REPEATABLE_APART[1:2], ids=str)
def test_where_turns_are_not_known_nothing_is_added_up(options: dict[str, Any]) -> None:
    kernels = compiled(**{"head_dim": 64, "deterministic": True, **options})
    assert [kernel.kernel for kernel in kernels] == ["apart_kernel"] * 3


def half(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * 0.5


def half_gradient(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return ds * 0.5


VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True, "causal": True},
    "blocks": {"mask": BlockMask(torch.ones(1, 1, 5, 5, dtype=torch.bool), 128, 128)},
    "softcap": {"softcap": 30.0},
    "score_mod": {"score_mod": ScoreMod(half, half_gradient)},
    "bias": {"bias": torch.zeros(4, 640, 640, dtype=torch.bfloat16)},
    "alibi of both sides": {"alibi_slopes": torch.ones(4)},
    "fp16": {"dtype": torch.float16},
}


RECOMPUTED: dict[str, dict[str, Any]] = {
    "alibi": {"alibi_slopes": torch.ones(4), "causal": True},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    "softcap": {"softcap": 50.0, "causal": True},
}


@pytest.mark.parametrize("head_dim", [64, 128] if ALL else [128])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_computed_anew_is_cheap(name: str, head_dim: int) -> None:
    (kernel,) = compiled(head_dim, **RECOMPUTED[name])
    check(kernel, PRODUCTS, budgets.of(budgets.BACKWARD_VARIANTS[name][head_dim]))


@pytest.mark.parametrize("name", VARIANTS if ALL else ["packed"])
def test_variants_compile(name: str) -> None:
    compiled(128, **VARIANTS[name])


def on_hopper(
    rows: int = 256, head_dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.float16, **options: Any
) -> Problem:
    """A problem on a Hopper GPU."""
    q = torch.empty(batch, rows, 2, head_dim, dtype=dtype, device="meta")
    problem, _, _ = prepare(q, q, q, **options)
    return replace(problem, device=torch.device("cuda"), assumed_capability=(9, 0))


def declined(**options: Any) -> list[str]:
    """Why the backward pass of such a problem is left to others."""
    return hopper.unsupported_reasons(on_hopper(**options), "backward")


def test_what_is_left_to_others_is_said() -> None:
    assert declined() == declined(causal=True) == declined(window=(100, 3)) == declined(head_dim=120) == []
    assert declined(rows=250) == declined(head_dim=256) == declined(deterministic=True) == declined(softcap=30.0) == []
    (reason,) = declined(batch=1 << 22)
    assert reason.startswith("a backward pass of 2**31 rows")


def test_what_others_do_better_is_left_to_them() -> None:
    drops: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 1}
    slow = drops | {"causal": True}
    assert declined(**slow) == []
    assert dispatch.choose(on_hopper(**slow), "backward") == "triton"
    for better in (on_hopper(**slow, backend="hopper"), on_hopper(**slow, head_dim=72), on_hopper(**drops)):
        assert dispatch.choose(better, "backward") == "hopper"
    assert dispatch.choose(on_hopper(**slow)) == "hopper"
    # Where nobody else can, a drawback is no reason to refuse.
    assert dispatch.best(["hopper"], on_hopper(**slow), "backward") == "hopper"


def test_statistics_are_counted_with_what_fills_their_tiles() -> None:
    for rows, batch, packed in [(256, 1 << 22, False), (1, 1 << 23, False), (252, 1 << 22, True)]:
        for entries in (batch, batch - 1):
            q = torch.empty(entries, rows, 2, 8, dtype=torch.float16, device="meta")
            problem = replace(prepare(q, q, q)[0], packed=packed)
            assert bool(hopper.gradients.unsupported_reasons(problem)) == (entries == batch)
