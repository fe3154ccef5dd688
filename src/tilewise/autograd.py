"""From a checked call to a backend: `torch.library` operators, their fakes, and the autograd function around them.

An operator takes only tensors, numbers and strings, so what a call asks for travels as one string (`Options.encode`)
that is evaluated once per distinct value. The autograd function lies outside the operators, which is the cheapest
arrangement per call and traces under `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from . import batching, checks, dispatch, problem, served, sharding
from .errors import UnsupportedError, fail
from .interning import at_compile_time
from .problem import DIFFERENTIABLE, LENGTHS, Inputs, Options, Problem, placed

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? dropout_seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor[] extras, str options, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_N_INPUTS = len(Inputs._fields)

library = torch.library.Library("tilewise", "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make a function an operator: `run` is called on every device, `fake` by compilers, for shapes alone."""
    name, _, _ = schema.partition("(")
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{name}", fake, lib=library)


def _problem(arguments: tuple[Any, ...]) -> tuple[Problem, Inputs]:
    """The problem that an operator's arguments describe."""
    inputs = Inputs(*arguments[:_N_INPUTS])
    extras, spec, max_seqlen_q, max_seqlen_k = arguments[_N_INPUTS:]
    options = problem.decode(spec, tuple(extras))
    return Problem.of(inputs, options, max_seqlen_q, max_seqlen_k), inputs


def _key(arguments: tuple[Any, ...]) -> served.Key | None:
    """What a call of an operator is remembered by."""
    return served.key_of(arguments[:_N_INPUTS], arguments[_N_INPUTS], arguments[_N_INPUTS + 1 :])


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    key = _key(arguments)
    if (known := served.known(key)) is not None:
        out, lse = known.forward(known.ready(arguments[:_N_INPUTS]))
        return out, lse
    this, inputs = _problem(arguments)
    checks.metadata(this, inputs)
    backend = dispatch.module(dispatch.choose(this))
    with dispatch.plain_numerics(this.device):
        results = backend.forward(this, placed(inputs, LENGTHS))
    served.remember(key, this, inputs)
    return results


def _backward(
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    needs: str,
    *arguments: Any,
) -> list[torch.Tensor]:
    known = served.known(_key(arguments))
    if known is not None and not torch._C._is_any_autocast_enabled():
        return list(known.backward(needs, (*known.ready(arguments[:_N_INPUTS]), out, lse, do, dlse)))
    this, inputs = _problem(arguments)
    names = tuple(needs.split())
    this = this.for_gradients(names)
    backend = dispatch.module(dispatch.choose(this, "backward"))
    with dispatch.plain_numerics(this.device):
        grads = backend.backward(this, placed(inputs, LENGTHS), out, lse, do, dlse, names)
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


def _forward_vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
    tensors, static = (*arguments[:_N_INPUTS], *arguments[_N_INPUTS]), arguments[_N_INPUTS + 1 :]

    def run(*xs: Any) -> Any:
        return torch.ops.tilewise.forward(*xs[:_N_INPUTS], list(xs[_N_INPUTS:]), *static)

    return batching.mapped(run, static[0], None, tensors, (*dims[:_N_INPUTS], *dims[_N_INPUTS]), info.batch_size)


def _backward_vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
    stats, needs, (*inputs, extras, spec, max_seqlen_q, max_seqlen_k) = arguments[:4], arguments[4], arguments[5:]
    where = (*dims[:4], *dims[5 : 5 + _N_INPUTS], *dims[5 + _N_INPUTS])

    def run(*xs: Any) -> Any:
        return _gradients(needs, (spec, max_seqlen_q, max_seqlen_k), *xs)

    results, dim = batching.mapped(run, spec, needs, (*stats, *inputs, *extras), where, info.batch_size)
    return list(results), dim


register(f"forward({_INPUTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
register(
    f"backward(Tensor out, Tensor lse, Tensor? do, Tensor? dlse, str needs, {_INPUTS}) -> Tensor[]",
    _backward,
    _backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.static = inputs[:3]
    ctx.save_for_backward(*output, *inputs[3:])
    ctx.set_materialize_grads(False)


def _backward_of(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    wanted = ctx.needs_input_grad[3:]
    if do is None and dlse is None:
        return (None,) * (3 + len(wanted))
    needs = _names(wanted)
    # A compiled backward pass is never differentiated again: the compiler refuses that itself.
    first_order = _gradients if torch.compiler.is_compiling() else _FirstOrder.apply
    # Asked for once: under checkpointing, the first time computes them again and the second is an error.
    out, lse, *tensors = ctx.saved_tensors
    grads = first_order(needs, ctx.static, out, lse, do, dlse, *tensors)
    return (None, None, None, *_placed(grads, wanted))


class _Attention(torch.autograd.Function):
    """Attention with gradients of q, k, v, bias, ALiBi slopes and sinks, through the output and the LSE."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        static, inputs, extras = arguments[:3], arguments[3 : 3 + _N_INPUTS], list(arguments[3 + _N_INPUTS :])
        return torch.ops.tilewise.forward(*inputs, extras, *static)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        """Each element's result, differentiable by what lies outside of the map."""

        def run(*tensors: Any) -> Any:
            return _Attention.apply(*arguments[:3], *tensors)

        return batching.mapped(run, arguments[0], None, arguments[3:], dims[3:], info.batch_size)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        return _backward_of(ctx, do, dlse)


class _OutputAlone(_Attention):
    """The same for a compiled call whose LSE nobody sees: the compiler would pass a gradient of zeros for it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        _keep(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, _: Any) -> Any:
        return _backward_of(ctx, do, None)


def _names(wanted: Sequence[bool]) -> str:
    """The inputs that want a gradient, by name."""
    return " ".join(name for name, want in zip(DIFFERENTIABLE, wanted, strict=False) if want)


def _placed(grads: Sequence[torch.Tensor], wanted: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Gradients in the places of their inputs."""
    left = iter(grads)
    return tuple([next(left) if want else None for want in wanted])


def _gradients(needs: str, static: tuple[str, int, int], *tensors: Any) -> tuple[torch.Tensor, ...]:
    stats, inputs, extras = tensors[:4], tensors[4 : 4 + _N_INPUTS], list(tensors[4 + _N_INPUTS :])
    return tuple(torch.ops.tilewise.backward(*stats, needs, *inputs, extras, *static))


class _FirstOrder(torch.autograd.Function):
    """The backward pass, with a backward of its own that says that there is none."""

    forward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing to keep: there is no second derivative."""

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], needs: str, static: tuple[str, int, int], *tensors: Any) -> Any:
        """Each element's gradients."""

        def run(*xs: Any) -> Any:
            return _FirstOrder.apply(needs, static, *xs)

        return batching.mapped(run, static[0], needs, tensors, dims[2:], info.batch_size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        got = "a second derivative (create_graph=True, then backward through a gradient)"
        fix = "use torch's math attention, F.scaled_dot_product_attention under SDPBackend.MATH, for this term"
        fail(UnsupportedError, "backward", got, "first derivatives", fix)


class Eager(torch.autograd.Function):
    """`_Attention` for a call that was seen before (`eager.Call`), of plain tensors: no operator on the way.

    A function with `setup_context` costs as much per call as all the rest of a known one.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: torch.Tensor | None) -> Any:
        results = call.forward(tensors + call.absent)
        ctx.call = call
        ctx.save_for_backward(*results, *tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        wanted, call = ctx.needs_input_grad[1:], ctx.call
        if do is None and dlse is None:
            return (None,) * (1 + len(wanted))
        (out, lse, *tensors), needs, grads = ctx.saved_tensors, _names(wanted), None
        tensors += call.absent
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not again:
            grads = call.gradients(needs, (*tensors, out, lse, do, dlse))
        if grads is None:
            grads = (_FirstOrder.apply if again else _gradients)(needs, call.static, out, lse, do, dlse, *tensors)
        return (None, *_placed(grads, wanted))


# `Eager.apply` without what serves transforms, which known calls are never under.
apply_eager = super(torch.autograd.Function, Eager).apply


def attend(
    options: Options, inputs: Inputs, max_seqlen_q: int, max_seqlen_k: int, return_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a checked call, differentiable where its inputs ask for it; the LSE only if it is returned."""
    extras: list[torch.Tensor] = []
    spec = options.encode(extras)
    if sharding.is_sharded(inputs):
        inputs, extras = sharding.on_mesh(inputs, extras)
    tensors: Sequence[torch.Tensor | None] = (*inputs, *extras)
    if torch.compiler.is_compiling():
        _refuse_transforms()
        tensors = _unshared(tensors)
    elif forward_ad._current_level >= 0:
        refuse_tangents(dict(zip(DIFFERENTIABLE, inputs, strict=False)))
    # Under a transform, the function and not the operator: which tensors need a gradient is hidden there.
    if options.needs_grad or (not torch.compiler.is_compiling() and _in_transform()):
        function = _OutputAlone if torch.compiler.is_compiling() and not return_lse else _Attention
        return function.apply(spec, max_seqlen_q, max_seqlen_k, *tensors)
    return torch.ops.tilewise.forward(*tensors[:_N_INPUTS], tensors[_N_INPUTS:], spec, max_seqlen_q, max_seqlen_k)


def _unshared(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Views in place of repeated tensors: Dynamo refuses one tensor as two arguments of an autograd function."""
    distinct: list[torch.Tensor | None] = []
    for x in tensors:
        distinct.append(x.view_as(x) if x is not None and any(x is y for y in distinct) else x)
    return distinct


def _in_transform() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


@at_compile_time
def _refuse_transforms() -> None:
    """Raise if the compiler is inside a transform, where it hides which tensors need a gradient."""
    if _in_transform():
        fix = "transform the eager function, or compile one that calls torch.autograd.grad"
        got = "a torch.func transform (grad, vjp, vmap, jvp) inside torch.compile"
        fail(UnsupportedError, "attention", got, "torch.func outside torch.compile, except jvp", fix)


def refuse_tangents(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise if a tensor carries a tangent, which the operators would drop."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            fix = "use backward(), torch.func.grad or torch.func.vjp"
            fail(UnsupportedError, name, "a tensor with a tangent (forward-mode, jvp)", "reverse-mode derivatives", fix)
