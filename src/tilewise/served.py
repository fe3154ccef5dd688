"""Problems that were served before, bound to their launches: what known calls, and known operators' calls, replay.

Operators look their arguments up here, for compiled programs call them, where nothing else of the package runs. The key
is what eager calls are found by: shapes, strides, dtypes and devices of the tensors, and the options, here as one
string. *Not here*, and so served as if new: options that hold tensors or functions, and subclasses of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from . import checks, dispatch
from .mask_algebra import And
from .masks import Causal, Full, Window
from .problem import LENGTHS, Inputs, Options, Problem, moves, placed

Key: TypeAlias = tuple[Any, ...]
# Of `Inputs`, in their order.
Tensors: TypeAlias = tuple[Any, ...]
Record = TypeVar("Record")

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Shapes that vary without end must not fill memory: a call's record is some kilobytes.
MOST = 4096
# Gradients differ in which are asked for, and in the strides of what comes in.
_MOST_GRADIENTS = 16
_served: dict[Key, Served] = {}


class Served:
    """A problem that has been served, ready for the next tensors like these."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem = problem
        lengths = [x for name in LENGTHS if (x := getattr(inputs, name)) is not None]
        here = any(x.device.type == "cpu" for x in lengths)
        self._reads_values = here or (problem.packed and problem.options.validate)
        # What is to be moved is so again in each call.
        self._moves = any(moves(x, problem.device) for x in lengths)
        self._backwards: dict[Key, Callable[[Tensors], tuple[torch.Tensor, ...]]] = {}
        self.forward = dispatch.bind(problem)

    def ready(self, tensors: Tensors) -> Tensors:
        """The tensors as backends take them, their values checked as far as the call asks for that."""
        if self._reads_values:
            checks.metadata(self.problem, Inputs(*tensors))
        return placed(Inputs(*tensors), LENGTHS) if self._moves else tensors

    def backward(self, needs: str, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """The gradients that `needs` names, from the tensors of `Inputs`, then out, lse, do and dlse."""
        do, dlse = tensors[-2:]
        key = (needs, None if do is None else (do.stride(), do.dtype), None if dlse is None else dlse.stride())
        if key not in self._backwards:
            if len(self._backwards) >= _MOST_GRADIENTS:
                self._backwards.clear()
            self._backwards[key] = dispatch.bind_backward(self.problem, tuple(needs.split()))
        return self._backwards[key](tensors)


def traits(x: torch.Tensor) -> tuple[Any, ...]:
    """What a key holds of a tensor.

    Raises:
        TypeError: it is no plain one.
    """
    if type(x) not in PLAIN or torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise TypeError
    return x.shape, x.stride(), x.dtype, x.device


def is_value(mask: Any) -> bool:
    """Whether the mask is one of numbers alone, which compare by value."""
    if type(mask) is And:
        return is_value(mask.a) and is_value(mask.b)
    return type(mask) in (Full, Causal, Window)


def key_of(tensors: Sequence[Any], extras: Sequence[torch.Tensor], static: Key) -> Key | None:
    """The key of an operator's call, None if it must be served as if new.

    Args:
        tensors: of the record of its inputs.
        extras: those that options hold.
        static: its other arguments.
    """
    if extras:
        return None
    try:
        return (*[None if x is None else traits(x) for x in tensors], static)
    except (RuntimeError, TypeError):
        return None


def known(key: Key | None) -> Served | None:
    """What has served calls with this key."""
    return None if key is None else _served.get(key)


def lasting(options: Options, device: torch.device) -> bool:
    """Whether calls with these options are known by their keys."""
    return options.score_mod is None and is_value(options.mask) and device.type in ("cpu", "cuda")


def keep(calls: dict[Key, Record], key: Key, record: Record) -> None:
    """Put a record among others, of which there are `MOST` at most."""
    if len(calls) >= MOST:
        calls.clear()
    calls[key] = record


def remember(key: Key | None, problem: Problem, inputs: Inputs) -> None:
    """Remember what has just been served, for the next call with this key."""
    if key is None or not lasting(problem.options, problem.device):
        return
    keep(_served, key, Served(problem, inputs))


def forget() -> None:
    """Forget all of it."""
    _served.clear()
