"""From a checked call to a backend: `torch.library` operators, their fakes, and the autograd function around them.

An operator takes only tensors, numbers and strings, so what a call asks for travels as one string (`Options.encode`)
that is evaluated once per distinct value. The autograd function lies outside the operators, which is the cheapest
arrangement per call and traces under `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import checks, dispatch, problem
from .errors import UnsupportedError, fail
from .problem import DIFFERENTIABLE, Inputs, Options, Problem

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? dropout_seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor[] extras, str options, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_N_INPUTS = len(Inputs._fields)

_library = torch.library.Library("tilewise", "DEF")
_library.define(f"forward({_INPUTS}) -> (Tensor, Tensor)")
_library.define(f"backward(Tensor out, Tensor lse, Tensor? do, Tensor? dlse, str needs, {_INPUTS}) -> Tensor[]")


@contextmanager
def _plain_numerics(device: torch.device) -> Iterator[None]:
    """Autocast would reach into a backend's own products and lower them; the surface has cast already."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


def _problem(arguments: tuple[Any, ...]) -> tuple[Problem, Inputs]:
    """The problem that an operator's arguments describe."""
    inputs = Inputs(*arguments[:_N_INPUTS])
    extras, spec, max_seqlen_q, max_seqlen_k = arguments[_N_INPUTS:]
    options = problem.decode(spec, tuple(extras))
    return Problem.of(inputs, options, max_seqlen_q, max_seqlen_k), inputs


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    this, inputs = _problem(arguments)
    checks.metadata(this, inputs)
    backend = dispatch.module(dispatch.choose(this))
    with _plain_numerics(this.device):
        return backend.forward(this, inputs)


def _backward(
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    needs: str,
    *arguments: Any,
) -> list[torch.Tensor]:
    this, inputs = _problem(arguments)
    backend = dispatch.module(dispatch.choose(this))
    names = tuple(needs.split())
    with _plain_numerics(this.device):
        grads = backend.backward(this, inputs, out, lse, do, dlse, names)
    return [grads[name] for name in names]


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    this, inputs = _problem(arguments)
    out = inputs.q.new_empty(this.out_shape(inputs.q), dtype=this.out_dtype)
    return out, inputs.q.new_empty(this.lse_shape(inputs.q), dtype=this.compute_dtype)


def _backward_fake(
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    needs: str,
    *arguments: Any,
) -> list[torch.Tensor]:
    inputs = Inputs(*arguments[:_N_INPUTS])
    return [getattr(inputs, name).new_empty(getattr(inputs, name).shape) for name in needs.split()]


for _name, _impl, _fake in (("forward", _forward, _forward_fake), ("backward", _backward, _backward_fake)):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_library)


class _Attention(torch.autograd.Function):
    """Attention with gradients of q, k, v, bias, ALiBi slopes and sinks, through the output and the LSE."""

    @staticmethod
    def forward(ctx: Any, options: str, max_seqlen_q: int, max_seqlen_k: int, *tensors: Any) -> Any:
        inputs, extras = tensors[:_N_INPUTS], list(tensors[_N_INPUTS:])
        out, lse = torch.ops.tilewise.forward(*inputs, extras, options, max_seqlen_q, max_seqlen_k)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.static = (options, max_seqlen_q, max_seqlen_k)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3 : 3 + len(DIFFERENTIABLE)]
        if do is None and dlse is None:
            return (None,) * (3 + len(tensors))
        needs = " ".join(name for name, want in zip(DIFFERENTIABLE, wanted, strict=True) if want)
        grads = iter(_FirstOrder.apply(needs, ctx.static, out, lse, do, dlse, *tensors))
        named = [next(grads) if want else None for want in wanted]
        return (None, None, None, *named, *(None,) * (len(tensors) - len(named)))


class _FirstOrder(torch.autograd.Function):
    """The backward pass, with a backward of its own that says that there is none."""

    @staticmethod
    def forward(ctx: Any, needs: str, static: tuple[str, int, int], *tensors: Any) -> Any:
        stats, inputs, extras = tensors[:4], tensors[4 : 4 + _N_INPUTS], list(tensors[4 + _N_INPUTS :])
        return tuple(torch.ops.tilewise.backward(*stats, needs, *inputs, extras, *static))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        got = "a second derivative (create_graph=True, then backward through a gradient)"
        fix = "use torch's math attention, F.scaled_dot_product_attention under SDPBackend.MATH, for this term"
        fail(UnsupportedError, "backward", got, "first derivatives", fix)


def attend(options: Options, inputs: Inputs, max_seqlen_q: int, max_seqlen_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a checked call, differentiable where its inputs ask for it."""
    extras: list[torch.Tensor] = []
    spec = options.encode(extras)
    if torch.compiler.is_compiling():
        inputs = _unshared(inputs)
    if options.needs_grad:
        return _Attention.apply(spec, max_seqlen_q, max_seqlen_k, *inputs, *extras)
    return torch.ops.tilewise.forward(*inputs, extras, spec, max_seqlen_q, max_seqlen_k)


def _unshared(inputs: Inputs) -> Inputs:
    """Views in place of repeated tensors: Dynamo refuses one tensor as two arguments of an autograd function."""
    q, k, v = inputs[:3]
    k = k.view_as(k) if k is q else k
    v = v.view_as(v) if v is q or v is k or v is inputs.k else v
    cu_k = inputs.cu_seqlens_k
    if cu_k is not None and cu_k is inputs.cu_seqlens_q:
        cu_k = cu_k.view_as(cu_k)
    return inputs._replace(k=k, v=v, cu_seqlens_k=cu_k)
