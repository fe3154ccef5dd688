"""Gradients of what is asked for, through which output, beside finite differences; and the operators behind them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

import tilewise
from targets import Target
from tilewise.arguments import prepare
from tilewise.problem import DIFFERENTIABLE

from .calls import Call, Draw, Shape, cotangents, dense, packed
from .features import FEATURES
from .verify import assert_same, attend, compute, declines, verify

SHAPE = Shape(2, 19, 27, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=8)
SUBSETS = [subset for n in range(1, 7) for subset in combinations(DIFFERENTIABLE, n)]
# One alone, and all together, are the corners; the others follow where a kernel decides for each by itself.
MARKED = [subset if len(subset) in (1, 6) else pytest.param(subset, marks=pytest.mark.large) for subset in SUBSETS]


def _call(target: Target, shape: Shape = SHAPE, dtype: torch.dtype | None = None, **options: Any) -> Call:
    draw = Draw(target.device)
    tensors = {
        "bias": draw.normal(shape.heads_q, shape.seqlen_q, shape.seqlen_k),
        "alibi_slopes": draw.uniform(shape.heads_q),
        "sinks": draw.normal(shape.heads_q),
    }
    return dense(shape, dtype or target.dtype, draw, causal=True, **tensors, **options)


@pytest.mark.parametrize("needs", MARKED, ids=" ".join)
def test_only_what_is_asked_for(target: Target, needs: tuple[str, ...]) -> None:
    """Every subset gives the gradients that all of them together give, and no other input gets one."""
    call = _call(target, deterministic=True)
    wanted = cotangents(call, Draw(target.device, seed=1))
    whole = compute(target, call, wanted)
    leaves = {name: x.detach().requires_grad_(name in needs) for name, x in call.tensors().items()}
    out, lse = attend(target, call.with_tensors(**leaves))
    torch.autograd.backward([out, lse], wanted)
    for name, leaf in leaves.items():
        if name in needs:
            assert leaf.grad is not None and torch.equal(leaf.grad, whole.grads[name]), name
        else:
            assert leaf.grad is None, name


@pytest.mark.parametrize("needs", [s for s in SUBSETS if set(s) <= {"q", "k", "v"}], ids=" ".join)
@pytest.mark.parametrize("kind", ["out", "lse", "both"])
def test_of_plain_calls(target: Target, needs: tuple[str, ...], kind: str) -> None:
    """As above where a backend may have a shorter way."""
    verify(
        target, dense(Shape(2, 33, 33, 4, 4), target.dtype, Draw(target.device), causal=True), kind=kind, needs=needs
    )


def root(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Its derivative is infinite at 0."""
    return torch.sqrt(torch.abs(score))


def root_backward(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(score < 0, -0.5, 0.5) * grad / torch.sqrt(torch.abs(score))


ROOT = tilewise.ScoreMod(root, root_backward)


@pytest.mark.parametrize("head_dim", [16, pytest.param(200, marks=pytest.mark.large)])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_derivative_that_is_infinite_at_zero(target: Target, options: dict[str, Any], head_dim: int) -> None:
    """Zeros are what lies past the last row and the last key in a tile."""
    shape = Shape(1, 50, 70, head_dim=head_dim, head_dim_v=head_dim)
    verify(target, dense(shape, target.dtype, Draw(target.device), score_mod=ROOT, **options))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4750, 60)}], ids=str)
def test_many_keys(target: Target, options: dict[str, Any]) -> None:
    """Where a backend may add up dq in another way."""
    verify(target, dense(Shape(1, 150, 4800, 2, 1, 64, 64), target.dtype, Draw(target.device), **options))


@pytest.mark.parametrize("kind", ["out", "lse"])
@pytest.mark.parametrize("feature", ["plain", "softcap", "bias", "dropout", "sinks", "window_two_sided", "everything"])
def test_through_one_output(target: Target, feature: str, kind: str) -> None:
    draw = Draw(target.device)
    verify(target, dense(SHAPE, target.dtype, draw, **FEATURES[feature](SHAPE, target.dtype, draw)), kind=kind)


def test_none_where_none_is_needed(target: Target) -> None:
    call = _call(target)
    out, lse = attend(target, call)
    assert not out.requires_grad and not lse.requires_grad
    with torch.no_grad():
        out, _ = attend(target, call.with_tensors(q=call.q.detach().requires_grad_()))
    assert not out.requires_grad


def test_forward_is_the_same_with_and_without_gradient(target: Target) -> None:
    for options in ({}, {"causal": True}, {"softcap": 3.0}):
        call = dense(SHAPE, target.dtype, Draw(target.device), **options)
        with_gradient = compute(target, call, (None, None))
        out, lse = attend(target, call)
        assert torch.equal(out, with_gradient.out) and torch.equal(lse, with_gradient.lse)


@pytest.mark.parametrize("feature", FEATURES)
def test_finite_differences(target: Target, feature: str) -> None:
    shape, draw = Shape(2, 5, 7, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2), Draw(target.device)
    call = dense(shape, torch.float64, draw, **FEATURES[feature](shape, torch.float64, draw))
    if declines(target, call):
        return
    # A lower precision of its own would drown the differences.
    tensors = {name: x.double() for name, x in call.tensors().items()}
    names = tuple(tensors)

    def of_leaves(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(target, call.with_tensors(**dict(zip(names, leaves, strict=True))))
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(of_leaves, [x.requires_grad_() for x in tensors.values()], fast_mode=True)


@pytest.mark.parametrize("feature", ["plain", "causal", "everything", "documents_unsorted", "blocks_odd", "or_of_ands"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.large)], ids=str)
def test_bitwise_repeatable(target: Target, feature: str, dtype: torch.dtype) -> None:
    shape, draw = Shape(1, 67, 71, heads_q=2, heads_kv=1), Draw(target.device)
    options = {**FEATURES[feature](shape, dtype, draw), "deterministic": True}
    call = dense(shape, dtype, draw, **options)
    wanted = cotangents(call, Draw(target.device, seed=1))
    first = compute(target, call, wanted)
    for _ in range(1 if target.interpreted else 5):
        assert_same(compute(target, call, wanted), first)


def _operator_arguments(call: Call, target: Target, needs_grad: bool) -> tuple[Any, ...]:
    leaves = {name: x.detach().requires_grad_(needs_grad) for name, x in call.tensors().items()}
    posed = call.with_tensors(**leaves)
    cu_q, cu_k = posed.offsets or (None, None)
    qkv = posed.arguments()[:3]
    problem, inputs, _ = prepare(*qkv, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=target.name, **posed.options)
    extras: list[torch.Tensor] = []
    spec = problem.options.encode(extras)
    plain = (x.detach() if x is not None else None for x in inputs)
    return (*plain, extras, spec, problem.seqlen_q, problem.seqlen_k)


OPERATOR_CALLS = ("plain", "documents_unsorted", "score_mod_aux", "blocks_odd", "everything")


def _operator_call(target: Target, feature: str) -> Call:
    draw = Draw(target.device)
    if feature == "packed":
        used = torch.tensor([2, 6], dtype=torch.int32, device=target.device)
        return packed([3, 4], [5, 6], draw, causal=True, seqused_k=used, sinks=draw.normal(4))
    return dense(SHAPE, torch.float32, draw, **FEATURES[feature](SHAPE, torch.float32, draw))


@pytest.mark.parametrize("feature", [*OPERATOR_CALLS, "packed"])
def test_forward_operator(target: Target, feature: str) -> None:
    torch.library.opcheck(
        torch.ops.tilewise.forward, _operator_arguments(_operator_call(target, feature), target, needs_grad=False)
    )


@pytest.mark.parametrize("feature", [*OPERATOR_CALLS, "packed"])
@pytest.mark.parametrize("kind", ["out", "both"])
def test_backward_operator(target: Target, feature: str, kind: str) -> None:
    call = _operator_call(target, feature)
    arguments = _operator_arguments(call, target, needs_grad=True)
    out, lse = torch.ops.tilewise.forward(*arguments)
    do, dlse = cotangents(call, Draw(target.device, seed=1), kind)
    needs = " ".join(call.tensors())
    torch.library.opcheck(torch.ops.tilewise.backward, (out, lse, do, dlse, needs, *arguments))
