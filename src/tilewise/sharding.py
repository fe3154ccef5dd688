"""Tensors that are sharded over a mesh of devices (DTensor): by batch or by heads every device attends on its own.

A rule says of each operator which placements its tensors may have; DTensor takes the one that moves the least. Whatever
the placements were, the result is that of the call on whole tensors. So whatever looks across a cut is gathered first:
sequences, and with dropout or user functions, which count batch entries and heads, these too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import axes
from .errors import UnsupportedError, fail
from .interning import at_compile_time
from .problem import DIFFERENTIABLE, Inputs

# What a mesh dimension may divide.
BATCH, HEADS = "batch", "heads"
_registered: list[bool] = []


def is_sharded(inputs: Inputs) -> bool:
    """Whether one of the tensors is a DTensor, whose module costs seconds to load and is loaded if it is."""
    return any(type(x).__name__ == "DTensor" for x in inputs if x is not None)


def on_mesh(inputs: Inputs, extras: Sequence[torch.Tensor]) -> tuple[Inputs, list[torch.Tensor]]:
    """The tensors of a call, all on its mesh: lengths and masks that are plain tensors are the same everywhere.

    Raises:
        tilewise.errors.UnsupportedError: plain tensors that may have a gradient beside DTensors.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    register()
    mesh = next(x.device_mesh for x in inputs if isinstance(x, DTensor))
    for name, x in zip(inputs._fields, inputs, strict=True):
        if name in DIFFERENTIABLE and x is not None and not isinstance(x, DTensor):
            fix = f"distribute_tensor({name}, mesh, placements); [Replicate()] where every process has all of it"
            fail(UnsupportedError, name, "a plain tensor beside a DTensor", "DTensors of one mesh", fix)

    def shared(x: Any, placement: Any) -> Any:
        if x is None or isinstance(x, DTensor):
            return x
        return DTensor.from_local(x, mesh, [placement] * mesh.ndim, run_check=False)

    # Processes may have drawn different seeds; all take the largest.
    inputs = inputs._replace(dropout_seed=shared(inputs.dropout_seed, Partial("max")))
    return Inputs(*(shared(x, Replicate()) for x in inputs)), [shared(x, Replicate()) for x in extras]


@at_compile_time
def register() -> None:
    """Tell DTensor the rules, once."""
    if _registered:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    # Every argument that is no tensor belongs to the key of DTensor's cache: options and names of gradients decide.
    info = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(torch.ops.tilewise.forward.default, _forward_rule, info)
    propagator.register_op_strategy(torch.ops.tilewise.backward.default, _backward_rule, info)
    _registered.append(True)


def _forward_rule(schema: Any) -> Any:
    return _strategies(schema, (), ("out", "lse"), schema.args_schema)


def _backward_rule(schema: Any) -> Any:
    stats, needs, arguments = schema.args_schema[:4], schema.args_schema[4], schema.args_schema[5:]
    named = [(name, x) for name, x in zip(axes.STATS, stats, strict=True) if x is not None]
    return _strategies(schema, named, needs.split(), arguments)


def _strategies(schema: Any, stats: Sequence[Any], results: Sequence[str], arguments: Sequence[Any]) -> Any:
    """Every way to cut the call over the mesh, with what it would cost to bring the tensors there."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    inputs, (extras, spec, *_) = arguments[: len(Inputs._fields)], arguments[len(Inputs._fields) :]
    packed = inputs[Inputs._fields.index("cu_seqlens_q")] is not None
    given = [*stats, *((name, x) for name, x in zip(Inputs._fields, inputs, strict=True) if x is not None)]
    dims = {name: axes.of_tensor(name, x.shape, packed) for name, x in given}
    dims |= {name: axes.of_tensor(name, (), packed) for name in ("out", "lse")}
    listed = list(getattr(extras, "children", extras))
    spread = axes.of_extras(spec, [x.shape for x in listed])
    whole = spread is None or "dropout_seed" in dims
    cuts: list[str | None] = [None] if whole else [None, HEADS] if packed else [None, BATCH, HEADS]
    tensors = [*(x for _, x in given), *listed]
    wanted = [*(dims[name] for name, _ in given), *(spread or [(None, None)] * len(listed))]
    mesh, found = schema.get_mesh_from_args(), OpStrategy([])
    heads_kv = inputs[1].shape[-2]
    for combination in _combinations(cuts, mesh.shape, heads_kv):
        ins = [
            DTensorSpec(mesh, tuple(_place(cut, where) for cut in combination), tensor_meta=x.tensor_meta)
            for where, x in zip(wanted, tensors, strict=True)
        ]
        gradients = results != ("out", "lse")
        outs = tuple(
            DTensorSpec(mesh, tuple(_place(cut, dims[name], gradients) for cut in combination)) for name in results
        )
        costs = [generate_redistribute_costs(x, to) for x, to in zip(tensors, ins, strict=True)]
        found.strategies.append(OpSpec(output_specs=outs, input_specs=ins, redistribute_cost=costs))
    return found


def _combinations(cuts: list[str | None], mesh: tuple[int, ...], heads_kv: int) -> Iterator[tuple[str | None, ...]]:
    """A cut for each dimension of the mesh; query heads stay with their key/value head, so these must divide evenly."""
    for combination in itertools.product(cuts, repeat=len(mesh)):
        parts = 1
        for cut, size in zip(combination, mesh, strict=True):
            parts *= size if cut == HEADS else 1
        if heads_kv % parts == 0:
            yield combination


def _place(cut: str | None, where: axes.Axes, gradient: bool = False) -> Any:
    """The placement of a tensor whose batch and head dimensions are `where`; a gradient of what all share is summed."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if cut is None:
        return Replicate()
    dim = where[cut == HEADS]
    if dim is not None:
        return Shard(dim)
    return Partial() if gradient else Replicate()
