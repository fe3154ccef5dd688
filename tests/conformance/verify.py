"""Compare a backend with the oracle on one call, or hold it to its stated reason for declining."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

import tilewise
from targets import Target
from tilewise import dispatch, reference
from tilewise.arguments import prepare
from tolerance import assert_close, assert_zero

from .calls import Call, Cotangents, Draw, Result, cotangents, run

_MASK_OPTIONS = ("causal", "window", "mask", "max_seqlen_q", "max_seqlen_k", "seqused_k")


def attend(target: Target, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's output and LSE."""
    return call.attend(tilewise, backend=target.name)


def compute(target: Target, call: Call, wanted: Cotangents, needs: Iterable[str] | None = None) -> Result:
    """The backend's own results; where it has no backward pass there are no gradients."""
    if target.forward_only and not declines(target, call, needs):
        needs = _served(target, call, needs)
    return run(lambda c: attend(target, c), call, wanted, needs)


def _refusals(target: Target, call: Call, needs: Iterable[str] | None, pass_: str) -> list[str]:
    """Why the backend cannot serve a pass of the call; then it must say so, for reasons that it may have."""
    names = tuple(call.tensors()) if needs is None else tuple(needs)
    leaves = {name: x.detach().requires_grad_(name in names) for name, x in call.tensors().items()}
    posed = call.with_tensors(**leaves)
    cu_q, cu_k = posed.offsets or (None, None)
    asked = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "backend": target.name, **posed.options}
    problem, _, _ = prepare(*posed.arguments()[:3], **asked)
    if pass_ == "backward" and not problem.options.needs_grad:
        return []
    reasons = dispatch.reasons(target.name, problem, pass_)
    surprising = [reason for reason in reasons if not target.may_refuse(reason)]
    assert not surprising, f"{target} declines what it should serve: {surprising}"
    if reasons:
        with pytest.raises(tilewise.errors.UnsupportedError) as raised:
            attend(target, posed)
        assert all(reason in str(raised.value) for reason in reasons)
    return reasons


def _served(target: Target, call: Call, needs: Iterable[str] | None) -> tuple[str, ...]:
    """Of the gradients that are asked for, those that the backend makes itself."""
    names = tuple(call.tensors()) if needs is None else tuple(needs)
    for some in (names, tuple(name for name in names if name not in ("bias", "alibi_slopes"))):
        if not _refusals(target, call, some, "backward"):
            return some
    return ()


def declines(target: Target, call: Call, needs: Iterable[str] | None = None) -> bool:
    """Whether the backend cannot serve the call at all."""
    return bool(_refusals(target, call, needs, "forward"))


def _seen(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows see a key, in q's shape without its last dimension, and which keys are seen, in k's."""
    # Without scores all visible keys weigh the same, so with v = 1 the output is 1 or 0, and dv says who was seen.
    options = {name: call.options[name] for name in _MASK_OPTIONS if name in call.options}
    zero_q, zero_k = (torch.zeros_like(x[..., :1]) for x in (call.q, call.k))
    ones = torch.ones_like(zero_k).requires_grad_()
    out, _ = Call(zero_q, zero_k, ones, options, call.offsets).attend(reference)
    # (The second term for calls without members, whose output hangs on nothing.)
    (dv,) = torch.autograd.grad(out.sum() + 0.0 * ones.sum(), ones)
    return out[..., 0] > 0, dv[..., 0] > 0


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _scale(call: Call, name: str, x: torch.Tensor, out: torch.Tensor, do: torch.Tensor | None) -> float:
    """The size of the terms that a result sums up, times the root of how many rows' errors add up in it."""
    values = _largest(call.v)
    if name in ("out", "lse", "dv"):
        return values
    # dS = P (dP - delta): the errors of delta = rowsum(dO O), from an output that is rounded, are in all the others.
    delta = values if do is None else max(values, _largest((do.double() * out).norm(dim=-1)))
    softmax_scale = call.options.get("softmax_scale") or call.q.shape[-1] ** -0.5
    rows = math.prod(call.q.shape[:-1])
    distinct = {
        "dq": rows,
        "dk": math.prod(call.k.shape[:-1]) // max(1, call.k.shape[-3]),
        "dbias": math.prod(x.shape[:-1]),
    }.get(name, x.numel())
    factor = {
        "dq": _largest(call.k) * softmax_scale,
        "dk": _largest(call.q) * softmax_scale,
        "dalibi_slopes": max(call.q.shape[-3], call.k.shape[-3]),
    }.get(name, 1.0)
    return delta * max(1.0, factor * math.sqrt(max(1.0, rows / max(1, distinct))))


def compare(call: Call, got: Result, wanted: Cotangents) -> None:
    """Hold results against the oracle: values within the tolerance, zeros and infinities exactly."""
    names, dtype = tuple(got.grads), call.q.dtype
    ref = run(lambda c: c.attend(reference), call, wanted, names)
    plain = run(lambda c: c.attend(reference, dtype=dtype), call, wanted, names)
    for (name, x), (_, y), (_, z) in zip(got.items(), ref.items(), plain.items(), strict=True):
        # Scores are summed in fp32 whatever the inputs are: an LSE never was in a shorter dtype.
        assert_close(name, x, y, z, _scale(call, name, x, ref.out, wanted[0]), x.dtype if name == "lse" else dtype)

    assert got.out.is_contiguous() and got.out.dtype == (call.options.get("out_dtype") or dtype)
    assert got.lse.is_contiguous() and got.lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert all(got.grads[name].dtype == call.tensors()[name].dtype for name in names)

    rows, keys = _seen(call)
    blind = {"out": ~rows, "dq": ~rows, "dk": ~keys, "dv": ~keys}
    for name, x in got.items():
        if name in blind:
            assert_zero(name, x, blind[name])


def verify(
    target: Target,
    call: Call,
    *,
    kind: str = "both",
    needs: Iterable[str] | None = None,
    wanted: Cotangents | None = None,
) -> None:
    """The whole comparison: forward, and backward from random (or the `wanted`) cotangents."""
    if declines(target, call, needs):
        return
    served = _served(target, call, needs)
    if not served:
        wanted = (None, None)
    wanted = cotangents(call, Draw(target.device, seed=1), kind) if wanted is None else wanted
    compare(call, compute(target, call, wanted, served), wanted)


def assert_same(got: Result, expected: Result) -> None:
    """Fail unless two results are equal bit for bit."""
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        assert torch.equal(x, y), f"{name} differs by {float((x.double() - y.double()).abs().nan_to_num().max()):.3g}"
