"""User functions as integers, so that a static description of a call is plain data.

Predicates and score modifications are Python functions, while a `torch.library` operator takes only tensors,
numbers and strings. `intern` gives equal functions (same code, same captured constants) one number, so a lambda
written inline in a training loop is one entry and one compiled kernel, however often the loop runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from . import errors

_functions: list[Callable[..., Any]] = []
_numbers: dict[Any, int] = {}


def _captured(fn: FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in fn.__closure__ or ())
    for name, value in zip(fn.__code__.co_freevars, cells, strict=True):
        if isinstance(value, torch.Tensor):
            errors.fail(
                errors.ArgumentError,
                getattr(fn, "__qualname__", "function"),
                f"a function that captures the tensor {name!r}",
                "functions of their arguments and of captured constants",
                "take the tensor as an extra parameter and pass it through aux=",
            )
    return cells


def _key(fn: Callable[..., Any]) -> Any:
    if not isinstance(fn, FunctionType):
        return fn
    key = (fn.__code__, fn.__defaults__, _captured(fn), id(fn.__globals__))
    try:
        hash(key)
    except TypeError:
        return fn
    return key


@torch.compiler.assume_constant_result
def intern(fn: Callable[..., Any]) -> int:
    """The number of `fn`; equal functions share one."""
    key = _key(fn)
    if key not in _numbers:
        _numbers[key] = len(_functions)
        _functions.append(fn)
    return _numbers[key]


def lookup(number: int) -> Callable[..., Any]:
    """The function that `intern` gave this number."""
    return _functions[number]


def check_aux(argument: str, aux: Any) -> None:
    """Raise unless `aux` is a tuple of numbers and tensors."""
    if not isinstance(aux, tuple) or not all(isinstance(value, (int, float, torch.Tensor)) for value in aux):
        errors.fail(
            errors.ArgumentError, argument, repr(aux)[:60], "a tuple of numbers and tensors", "pass aux=(value, ...)"
        )


def encode_aux(aux: tuple[Any, ...], tensors: list[torch.Tensor]) -> str:
    """Extra arguments of a user function as a Python literal; tensors are appended to `tensors`."""
    text = ""
    for value in aux:
        if isinstance(value, torch.Tensor):
            text += f"('tensor',{len(tensors)}),"
            tensors.append(value)
        else:
            text += f"('number',{value!r}),"
    return f"({text})"


def decode_aux(spec: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """The inverse of `encode_aux`, on its evaluated literal."""
    return tuple(tensors[value] if kind == "tensor" else value for kind, value in spec)
