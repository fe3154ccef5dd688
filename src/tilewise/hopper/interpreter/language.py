"""Gluon's language as Python functions, put where the kernels' modules find it."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime import interpreter

from ...kernels import interpreter as shared
from .instructions import INSTRUCTIONS
from .machine import Barrier, Machine, Store
from .memory import Descriptor, Shared, plain, tensor

_machine: Machine | None = None
_grid = 1
# Each launch draws its own order; the same in every run.
seeds = itertools.count()


def machine() -> Machine:
    """The one that runs."""
    assert _machine is not None, "no kernel runs"
    return _machine


class Interpreted:
    """A jitted function: called by kernels, or launched as ``fn[grid](...)``."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__name__, self.__doc__ = fn.__name__, fn.__doc__
        self.arg_names = list(inspect.signature(fn).parameters)

    def __call__(self, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return self.fn(*map(_known, args), **{name: _known(x) for name, x in kwargs.items()})

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(_launch, self, grid[0])


def _known(x: Any) -> Any:
    """What is known when a kernel is compiled, as a plain number: Python's have no remainder by others."""
    return x.value if isinstance(x, tl.constexpr) else x


def jit(fn: Any = None, **_: Any) -> Any:
    """`gluon.jit`."""
    return jit if fn is None else Interpreted(fn)


def builtin(fn: Any) -> Any:
    """`gluon`'s decorator of functions that have the compiler's state: there is none."""
    return fn


def _launch(kernel: Interpreted, programs: int, *args: Any, **options: Any) -> None:
    global _machine, _grid
    given = inspect.getcallargs(kernel.fn, *args, **{k: v for k, v in options.items() if k in kernel.arg_names})
    shared.begin()
    scope = interpreter._patch_lang(_launch)
    _machine, _grid = Machine(next(seeds)), programs
    try:
        values = {name: _argument(value) for name, value in given.items()}
        for program in range(programs):
            _machine.start(program, partial(kernel.fn, **values))
        _machine.run()
    finally:
        _machine = None
        scope.restore()


def _argument(value: Any) -> Any:
    """An argument of a launch as kernels see it."""
    if isinstance(value, tl.constexpr):
        return _known(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, tuple):
        return type(value)(*map(_argument, value)) if hasattr(value, "_fields") else tuple(map(_argument, value))
    if isinstance(value, float):
        return _value(value)
    return interpreter._implicit_cvt(value) if isinstance(value, (int, torch.Tensor)) else value


# Where a layout comes among the arguments.
_LAYOUT_AT = {"arange": 2, "full": 3, "zeros": 2}


def _like_triton(name: str) -> Callable[..., Any]:
    """Triton's function of that name, for Gluon's call of it: found at each call, for the interpreter replaces it."""
    place = _LAYOUT_AT.get(name)

    def call(*args: Any, layout: Any = None, volatile: Any = False, sem: Any = None, **kwargs: Any) -> Any:
        if plain(volatile) or sem is not None:
            # Who waits for another program lets it run.
            machine().current.wait_until(lambda: True)
        return getattr(tl, name)(*args[:place], **{k: v for k, v in kwargs.items() if not k.startswith("_")})

    return call


def _value(x: Any, **_: Any) -> Any:
    return interpreter.interpreter_semantic.to_tensor(x)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _nothing(*_: Any, **__: Any) -> None:
    """What orders threads of a partition, which here is one."""


def _reduce_or(x: Any, axis: Any = None, **_: Any) -> Any:
    return tensor(np.bitwise_or.reduce(x.handle.data, axis=plain(axis)), x.dtype)


def _assembly(text: Any, constraints: Any, args: Sequence[Any], dtype: Any, **_: Any) -> Any:
    words = plain(text)
    for pattern, function in INSTRUCTIONS.items():
        if re.search(pattern, words):
            return function(machine(), [_value(x) for x in args], dtype)
    raise NotImplementedError(f"the interpreter knows no {words!r}")


def _range(start: Any, stop: Any = None, step: Any = 1, **_: Any) -> range:
    first, last = (0, plain(start)) if stop is None else (plain(start), plain(stop))
    return range(first, last, plain(step))


def _allocate(dtype: Any, shape: Any, layout: Any, value: Any = None, **_: Any) -> Shared:
    made = Shared.allocate(dtype, shape, layout, machine())
    if value is not None:
        made.store(value)
    return made


def _specialize(roles: Any, warps: Any, registers: Any, **_: Any) -> None:
    now = machine()
    first, *others = roles
    tasks = [now.start(now.current.program, partial(fn, *args)) for fn, args in others]
    first[0](*first[1])
    now.current.wait_until(lambda: all(task.done for task in tasks))


def _barrier_of(place: Shared) -> Barrier:
    return machine().barriers[place.data.__array_interface__["data"][0]]


def _init(place: Shared, count: Any, **_: Any) -> None:
    machine().barriers[place.data.__array_interface__["data"][0]] = Barrier(plain(count))
    machine().kept.append(place)


def _expect(place: Shared, size: Any, pred: Any = True, **_: Any) -> None:
    if plain(pred):
        _barrier_of(place).expect(plain(size))


def _arrive(place: Shared, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
    if plain(pred):
        _barrier_of(place).arrive(plain(count))


def _wait(place: Shared, phase: Any, pred: Any = True, deps: Any = (), **_: Any) -> None:
    if plain(pred):
        barrier, parity = _barrier_of(place), plain(phase)
        machine().current.wait_until(lambda: barrier.passed(parity))


def _tma_load(desc: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: Any = True, **_: Any) -> None:
    """Some time later the box is there, and the barrier knows."""
    if not plain(pred):
        return
    where, waiting = plain(list(coord)), _barrier_of(barrier)

    def land() -> None:
        result.land(desc.load(where))
        waiting.landed(desc.block_type.nbytes)

    machine().transfers.append(land)


def _tma_store(desc: Descriptor, coord: Any, source: Shared, add: bool = False, **_: Any) -> None:
    """Some time later the box has been read, and still later it is in memory."""
    now, where, store = machine(), plain(list(coord)), Store()
    now.current.stores.append(store)

    def read() -> None:
        bits = source.seen().copy()
        store.read = True
        now.transfers.append(partial(write, bits))

    def write(bits: np.ndarray) -> None:
        desc.store(where, bits, add)
        store.written = True

    now.transfers.append(read)


def _store_wait(pendings: Any, **_: Any) -> None:
    """All but the last so many stores have read shared memory."""
    task = machine().current
    earlier = task.stores[: max(0, len(task.stores) - plain(pendings))]
    task.wait_until(lambda: all(store.read for store in earlier))


def _multiply(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: Any = False, **_: Any) -> Any:
    now = machine()
    products = now.current.products
    token = products.ask(a, b, acc if plain(use_acc) else None, now.random.random() < 0.5)
    return token if plain(is_async) else products.wait(0, (token,))


def _products_wait(num_outstanding: Any = 0, deps: Any = None, **_: Any) -> Any:
    return machine().current.products.wait(plain(num_outstanding), deps)


def _fence(*_: Any, **__: Any) -> None:
    task = machine().current
    for marks in task.unfenced:
        marks[...] = 0
    task.unfenced.clear()


# What is Triton's but for the layout.
_COMMON = (
    "abs", "arange", "atomic_add", "cast", "cdiv", "exp", "exp2", "expand_dims", "fma", "full", "join", "load", "log",
    "log2", "max", "maximum", "min", "minimum", "permute", "reshape", "split", "sqrt", "store", "sum", "where", "zeros",
)  # fmt: skip
_LANGUAGE: tuple[tuple[Any, dict[str, Any]], ...] = (
    (
        gl,
        {
            "allocate_shared_memory": _allocate,
            "barrier": _nothing,
            "convert_layout": _same,
            "inline_asm_elementwise": _assembly,
            "num_programs": lambda axis, **_: _grid,
            "program_id": lambda axis, **_: machine().current.program,
            "reduce_or": _reduce_or,
            "static_assert": _nothing,
            "static_range": _range,
            "thread_barrier": _nothing,
            "to_tensor": _value,
            "warp_specialize": _specialize,
        },
    ),
    (hopper, {"fence_async_shared": _fence, "warpgroup_mma": _multiply, "warpgroup_mma_wait": _products_wait}),
    (hopper.mbarrier, {"init": _init, "expect": _expect, "arrive": _arrive, "wait": _wait}),
    (
        hopper.tma,
        {
            "async_copy_global_to_shared": _tma_load,
            "async_load": _tma_load,
            "async_copy_shared_to_global": _tma_store,
            "async_store": _tma_store,
            "async_atomic_add": partial(_tma_store, add=True),
            "store_wait": _store_wait,
        },
    ),
)


def mend() -> None:
    """Make Gluon's language this one, for the rest of the process; before kernels are defined."""
    shared.mend()
    gluon.jit = jit
    _core.builtin = builtin
    tl.block_type.layout = None
    for name in _COMMON:
        setattr(gl, name, _like_triton(name))
    for module, names in _LANGUAGE:
        for name, function in names.items():
            setattr(module, name, function)
