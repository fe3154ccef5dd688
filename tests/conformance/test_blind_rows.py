"""A row that sees no key: output exactly 0, LSE -inf (or the sink), nothing added to any gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from targets import Target

from .calls import Draw, Shape, cotangents, dense
from .verify import attend, compare, compute, verify

SHAPE = Shape(2, 45, 21, heads_q=4, heads_kv=2)


def never(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Nothing is visible."""
    return k < 0


NOTHING: dict[str, Any] = {
    "predicate": lambda d: never,
    "boolean": lambda d: torch.zeros(45, 21, dtype=torch.bool, device=d),
    "tiles": lambda d: tilewise.BlockMask(torch.zeros(1, 1, 3, 2, dtype=torch.bool, device=d), 16, 16),
    "documents": lambda d: tilewise.Document(torch.zeros(45, device=d).int(), torch.ones(21, device=d).int()),
    "disjoint": lambda d: tilewise.Window(2, None) & tilewise.Predicate(far_behind),
}


def far_behind(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keys that lie more than two before the diagonal of 45 rows and 21 keys."""
    return k < q - 24 - 2


@pytest.mark.parametrize("modifier", [{}, {"softcap": 1.0}, {"dropout_p": 0.5, "dropout_seed": 0}], ids=str)
@pytest.mark.parametrize("mask", NOTHING)
def test_nothing_is_visible(target: Target, mask: str, modifier: dict[str, Any]) -> None:
    call = dense(SHAPE, target.dtype, Draw(target.device), mask=NOTHING[mask](target.device), **modifier)
    got = compute(target, call, cotangents(call, Draw(target.device, seed=1)))
    assert bool((got.lse == float("-inf")).all())
    for name, x in got.items():
        assert name == "lse" or not x.count_nonzero(), name


@pytest.mark.parametrize("mask", NOTHING)
def test_nothing_but_the_sink(target: Target, mask: str) -> None:
    draw = Draw(target.device)
    call = dense(SHAPE, target.dtype, draw, mask=NOTHING[mask](target.device), sinks=draw.normal(4))
    do, dlse = cotangents(call, Draw(target.device, seed=1))
    got = compute(target, call, (do, dlse))
    assert dlse is not None
    torch.testing.assert_close(got.lse, call.options["sinks"][:, None].expand(got.lse.shape))
    if not target.forward_only:
        torch.testing.assert_close(got.grads["sinks"], dlse.sum((0, 2)))
    for name, x in got.items():
        assert name in ("lse", "dsinks") or not x.count_nonzero(), name


@pytest.mark.parametrize("kind", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_some_rows_are_blind(target: Target, dtype: torch.dtype, kind: str) -> None:
    draw = Draw(target.device)
    verify(target, dense(SHAPE, dtype, draw, causal=True, sinks=draw.normal(4)), kind=kind)
    verify(target, dense(SHAPE, dtype, draw, causal=True, alibi_slopes=draw.uniform(4)), kind=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_beyond_what_a_softcap_leaves(target: Target, dtype: torch.dtype) -> None:
    """Scores between -cap and cap, beside sinks whose weight relative to them is nothing, or all."""
    draw = Draw(target.device)
    sinks = torch.tensor([-300.0, 300.0, -40.0, 0.0], device=target.device)
    for cap in (2.0, 60.0):
        verify(target, dense(SHAPE, dtype, draw, causal=True, softcap=cap, softmax_scale=8.0, sinks=sinks))


def test_infinite_gradient_of_an_infinite_lse_counts_for_nothing(target: Target) -> None:
    """``exp(lse)`` and the like send 0 or NaN back to rows whose LSE is -inf."""
    call = dense(SHAPE, torch.float32, Draw(target.device), causal=True)
    _, dlse = cotangents(call, Draw(target.device, seed=1))
    assert dlse is not None
    results = []
    for value in (float("nan"), float("inf"), 0.0):
        filled = dlse.clone()
        filled[..., : 45 - 21] = value
        results.append(compute(target, call, (None, filled)))
    for name, x in results[2].items():
        assert all(torch.equal(dict(other.items())[name], x) for other in results[:2]), name


@pytest.mark.parametrize("logit", [-120.0, 120.0, -3e4, 3e4])
def test_equal_logits_of_any_size_weigh_the_same(target: Target, logit: float) -> None:
    """A guard of the running maximum must not stand in for it: exp(-120) is 0 in fp32."""
    shape = Shape(1, 40, 140, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=16)
    call = dense(shape, torch.float32, Draw(target.device), causal=True, window=(60, None), softmax_scale=1.0)
    root = (abs(logit) / 16) ** 0.5
    q, k = torch.full_like(call.q, root), torch.full_like(call.k, root if logit > 0 else -root)
    got = compute(target, call.with_tensors(q=q, k=k), (torch.ones_like(call.q), None))
    v = call.v.double()[0, :, 0]
    visible = torch.arange(40)[:, None] + 100 - torch.arange(140)
    weight = ((visible >= 0) & (visible <= 60)).double().to(target.device)
    mean = weight @ v / weight.sum(-1, keepdim=True)
    torch.testing.assert_close(got.out[0, :, 0].double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), (logit + weight.sum(-1).log()).expand(1, 2, 40), rtol=1e-6, atol=1e-4)
    # P = exp(s - lse) is off by the last bit of the LSE, which for the largest logits here is 0.002.
    if abs(logit) < 1e3:
        compare(call.with_tensors(q=q, k=k), got, (torch.ones_like(call.q), None))


def test_huge_logits_of_one_key(target: Target) -> None:
    """Scale times score rounds one way: the weight of the only key is 1.

    In the backward pass too on the CPU. GPU kernels recompute it from an fp32 LSE by a fused multiply-subtract, which
    at 1e11 leaves a rounding of thousands in the exponent (docs/numerics.md).
    """
    call = dense(Shape(1, 1, 1, 1, 1, 64, 64), torch.bfloat16, Draw(target.device))
    huge = torch.full_like(call.q, 133120.0)
    exact = target.name == "cpu"
    wanted = (torch.ones_like(huge) if exact else None, None)
    got = compute(target, call.with_tensors(q=huge, k=huge, v=huge), wanted, None if exact else ())
    assert torch.equal(got.out, huge)
    assert float(got.lse) == pytest.approx(141767475200.0, rel=2**-23)
    if exact:
        assert torch.equal(got.grads["v"], torch.ones_like(huge))
        assert not got.grads["q"].count_nonzero() and not got.grads["k"].count_nonzero()


def test_huge_equal_logits(target: Target) -> None:
    for sign in (1.0, -1.0):
        call = dense(Shape(1, 5, 5, 1, 1, 64, 64), torch.bfloat16, Draw(target.device))
        huge = torch.full_like(call.q, 133120.0)
        out, _ = attend(target, call.with_tensors(q=huge, k=sign * huge, v=huge))
        assert torch.equal(out, huge)


def test_softcap_of_huge_scores_saturates(target: Target) -> None:
    """cap tanh(s / cap) is +-cap there, and its derivative 0: no overflow of exponentials."""
    scores = torch.tensor([1e3, 3e3, 4.4e3, 5e3, 1e4, -1e4], device=target.device)
    q = torch.ones(1, 1, 1, 1, device=target.device)
    k = scores.view(1, 6, 1, 1)
    call = dense(Shape(1, 1, 6, 1, 1, 1, 1), torch.float32, Draw(target.device), softcap=50.0, softmax_scale=1.0)
    got = compute(target, call.with_tensors(q=q, k=k), (torch.ones(1, 1, 1, 1, device=target.device), None))
    torch.testing.assert_close(got.lse.flatten().cpu(), torch.tensor([50.0 + 1.6094379]), rtol=1e-6, atol=0)
    assert all(bool(torch.isfinite(x).all()) for _, x in got.items())
    torch.testing.assert_close(got.grads["k"], torch.zeros_like(k))
