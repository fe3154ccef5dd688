"""User functions as integers, so that a static description of a call is plain data.

Predicates and score modifications are Python functions, while a `torch.library` operator takes only tensors,
numbers and strings. `intern` gives equal functions (same code, same captured constants) one number, so a lambda
written inline in a training loop is one entry and one compiled kernel, however often the loop runs. The number is a
checksum: in another process, where a saved graph may bring it, it means the same function or none.
"""

from __future__ import annotations

import hashlib
import marshal
import math
from collections.abc import Callable
from inspect import CO_VARARGS
from types import FunctionType
from typing import Any

import torch

from . import errors

_functions: dict[int, Callable[..., Any]] = {}
_numbers: dict[Any, int] = {}


def at_compile_time(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which would import the whole compiler: seconds, for every user."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the mark that the compiler looks for
    return fn


def outside_compilation(fn: Any, why: str) -> None:
    """Have `torch.compile` leave calls of `fn` alone: `torch.compiler.disable`, likewise without the compiler."""
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = why


def constant(value: Any) -> Any:
    """`value`, which `torch.compile` takes for a constant from here on: what is hashed cannot stay symbolic.

    >>> constant(3)
    3
    """
    (known,) = {value}
    return known


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


def _key(value: Any) -> Any:
    """What makes two functions one: their code and all that they captured. Of other values, type and value."""
    if not isinstance(value, FunctionType):
        # Types too, for 1 == 1.0 == True.
        return tuple(_key(item) for item in value) if type(value) is tuple else (type(value), value)
    named = sorted((value.__kwdefaults__ or {}).items())
    constants = (value.__defaults__ or (), tuple(named), _captured(value))
    return (value.__code__, id(value.__globals__), value.__module__, *(_key(part) for part in constants))


def _watch(value: Any) -> None:
    """Make `torch.compile` notice when what a function captured is another value the next time.

    It sees a function as its code, and reads of it inside `_number` are hidden from it. So all of it is read here.
    """
    if isinstance(value, FunctionType):
        try:
            cells = value.__closure__ or ()
        except AttributeError:
            # A function of the very frame that is being compiled: its constants are part of the graph anyway.
            return
        for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            _watch(part)
        for cell in cells:
            _watch(cell.cell_contents)
    elif isinstance(value, tuple):
        for item in value:
            _watch(item)
    elif value is None or isinstance(value, (int, float, str)):
        constant(value)
    else:
        id(value)


@at_compile_time
def _number(fn: Callable[..., Any]) -> int:
    key = _key(fn)
    try:
        known = key in _numbers
    except TypeError:
        # It captured something that cannot be compared by value, such as a list: each such function is its own.
        key = (FunctionType, id(fn))
        known = key in _numbers
    if not known:
        number = _checksum(fn)
        while number in _functions:
            number += 1
        _numbers[key] = number
        _functions[number] = fn
    return _numbers[key]


def _checksum(fn: Callable[..., Any]) -> int:
    text = repr(fn)
    if isinstance(fn, FunctionType):
        constants = (fn.__defaults__, fn.__kwdefaults__, _captured(fn))
        text = f"{fn.__module__}.{fn.__qualname__}{constants}"
        text += hashlib.sha256(marshal.dumps(fn.__code__, 2)).hexdigest()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def intern(fn: Callable[..., Any]) -> int:
    """The number of `fn`; equal functions share one."""
    if torch.compiler.is_compiling():
        _watch(fn)
    return _number(fn)


def lookup(number: int) -> Callable[..., Any]:
    """The function that `intern` gave this number."""
    if number not in _functions:
        errors.fail(
            errors.ArgumentError,
            "mask or score_mod",
            f"a saved graph with the function number {number}, which this process has not seen",
            "graphs that run in the process that made them, wherever they hold predicates or score modifications",
            "make the graph anew, or use masks without Python functions",
        )
    return _functions[number]


def check_function(argument: str, fn: Any, count: int) -> None:
    """Raise unless `fn` is a function that takes `count` positional arguments."""
    if not callable(fn) or isinstance(fn, type):
        got = f"the class {fn.__name__}" if isinstance(fn, type) else repr(fn)[:60]
        errors.fail(errors.ArgumentError, argument, got, "a Python function", "pass a function, or an instance")
    if torch.compiler.is_compiling() or not isinstance(fn, FunctionType):
        return
    most = fn.__code__.co_argcount
    least = most - len(fn.__defaults__ or ())
    if not (least <= count <= most or (least <= count and fn.__code__.co_flags & CO_VARARGS)):
        errors.fail(
            errors.ArgumentError,
            argument,
            f"{fn.__qualname__} with {most} parameters",
            f"a function of {count} positional arguments, aux included",
            "see the class's signature; constants may be captured or given in aux=",
        )


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
            continue
        number = constant(value)
        finite = isinstance(number, int) or math.isfinite(number)
        text += f"('number',{number!r})," if finite else f"('float','{number}'),"
    return f"({text})"


def decode_aux(spec: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """The inverse of `encode_aux`, on its evaluated literal."""
    return tuple(
        tensors[value] if kind == "tensor" else float(value) if kind == "float" else value for kind, value in spec
    )
