"""Races show as bits that change: Hopper's kernels a thousand times over, undisturbed, and shifted in time by others.

The forward pass and the repeatable backward pass give the same bits always. Where dq is added up by whoever comes
first, dk and dv still do, and dq varies by the rounding of its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from disturbance import Disturbance

import tilewise
from conformance.calls import offsets
from tilewise import _triton, hopper
from tilewise.arguments import prepare
from tilewise.cache_arguments import prepare as prepare_cache

REPEATS = 1000
HEADS, LENGTH = 8, 1000
MEMBERS = [1000, 0, 77, 512, 411]
Tensors = tuple[torch.Tensor, ...]


class Kind(NamedTuple):
    """What a class of calls has beside its head dim."""

    options: dict[str, Any]
    heads_kv: int = HEADS
    packed: bool = False


KINDS = {
    "full": Kind({}),
    "causal": Kind({"causal": True}),
    "window": Kind({"window": (300, 50)}),
    "packed": Kind({"causal": True}, packed=True),
    "grouped": Kind({"causal": True}, heads_kv=2),
    "dropout": Kind({"dropout_p": 0.1}),
    "softcap": Kind({"causal": True, "softcap": 30.0}),
}
# Head dims at which Hopper has all gradients from one kernel, and all that have a tile of their own.
TOGETHER, HEAD_DIMS = (64, 128), (64, 128, 256)
DISTURBED = pytest.mark.parametrize("disturbed", [False, True], ids=["alone", "disturbed"])


def drawn(head_dim: int, kind: Kind) -> tuple[Tensors, dict[str, Any]]:
    """q, k, v, and the options of a call."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, options = (2, LENGTH), dict(kind.options)
    if kind.packed:
        rows, cu = (sum(MEMBERS),), offsets(MEMBERS, "cuda")
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH}
    if "dropout_p" in options:
        options["dropout_seed"] = torch.full((), 7, device="cuda")
    shapes = [(*rows, heads, head_dim) for heads in (HEADS, kind.heads_kv, kind.heads_kv)]
    return tuple(torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes), options


def differing(call: Callable[[], Tensors], disturbed: bool, repeats: int = REPEATS) -> int:
    """How many of so many calls give other bits than the first; the host waits once."""
    disturb = Disturbance() if disturbed else lambda: None
    first = call()
    assert all(bool(x.isfinite().all()) for x in first)
    wrong = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(repeats):
        disturb()
        wrong += torch.stack([(bits(x) != bits(y)).any() for x, y in zip(call(), first, strict=True)]).any()
    return int(wrong)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@DISTURBED
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_forward(name: str, head_dim: int, disturbed: bool) -> None:
    kind = KINDS[name]
    tensors, options = drawn(head_dim, kind)
    attend = tilewise.attention_varlen if kind.packed else tilewise.attention
    assert differing(partial(attend, *tensors, **options, backend="hopper", return_lse=True), disturbed) == 0


def gradients(backend: Any, head_dim: int, kind: Kind, deterministic: bool) -> Callable[[], Tensors]:
    """The backward pass of a backend, asked directly: which calls are given to it does not matter here."""
    tensors, options = drawn(head_dim, kind)
    problem, inputs, _ = prepare(*tensors, **options, deterministic=deterministic)
    out, lse = hopper.forward(problem, inputs)
    do = torch.randn_like(out)

    def call() -> Tensors:
        found = backend.backward(problem, inputs, out, lse, do, None, ("q", "k", "v"))
        return tuple(found[name] for name in ("q", "k", "v"))

    return call


@DISTURBED
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", KINDS)
def test_repeatable_backward(name: str, head_dim: int, disturbed: bool) -> None:
    assert differing(gradients(hopper, head_dim, KINDS[name], deterministic=True), disturbed) == 0


@DISTURBED
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_backward_of_triton(head_dim: int, disturbed: bool) -> None:
    """It always repeats."""
    call = gradients(_triton, head_dim, KINDS["dropout"], deterministic=False)
    assert differing(call, disturbed) == 0


@DISTURBED
@pytest.mark.parametrize("head_dim", TOGETHER)
@pytest.mark.parametrize("name", KINDS)
def test_backward(name: str, head_dim: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, which calls of so few keys do not take by themselves."""
    monkeypatch.setattr(hopper.gradients, "FEW_KEYS", 0)
    call = gradients(hopper, head_dim, KINDS[name], deterministic=False)
    first, spread = call()[0], torch.zeros((), device="cuda")

    def keys() -> Tensors:
        dq, dk, dv = call()
        torch.maximum(spread, (dq.float() - first.float()).abs().max(), out=spread)
        return dk, dv

    assert differing(keys, disturbed) == 0
    # fp32 sums in another order may round to the next bf16 number, which is 2⁻⁷ of the largest away at most.
    assert float(spread) <= float(first.float().abs().max()) * 2**-7


@DISTURBED
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("rows", [1, 24], ids=["one_warpgroup", "two_warpgroups"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_caches(head_dim: int, rows: int, page_size: int | None, disturbed: bool) -> None:
    """Sequences of all lengths, NaN behind the last key: what one program writes another merges."""
    generator = torch.Generator("cuda").manual_seed(0)
    used = torch.tensor([4000, 0, 77, 2048, 3333], dtype=torch.int32, device="cuda")
    q = torch.randn(5, rows, HEADS, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(5, 4096, 2, head_dim, generator=generator, device="cuda").bfloat16() for _ in range(2))
    behind = torch.arange(4096, device="cuda") >= used[:, None]
    for x in (k, v):
        x.masked_fill_(behind[..., None, None], float("nan"))
    options: dict[str, Any] = {"causal": True}
    if page_size is not None:
        k, v = (x.view(-1, page_size, 2, head_dim) for x in (k, v))
        options["page_table"] = torch.arange(len(k), device="cuda", dtype=torch.int32).view(5, -1)
    problem, inputs = prepare_cache(q, k, v, used, **options)

    def call() -> Tensors:
        # A sequence without keys has an LSE of -inf.
        out, lse = hopper.attend_cache(problem, inputs)
        return out, lse.exp()

    assert differing(call, disturbed) == 0
