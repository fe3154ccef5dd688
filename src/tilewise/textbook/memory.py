"""A two-level memory that counts: HBM without limit, SRAM of M elements, every element moved between them.

An algorithm of the textbook is written on a `Machine`. It names its tensors in HBM, opens a scope on chip, reads tiles
into it, computes with plain torch, and writes tiles back::

    machine.put(name, tensor)         an input, placed in HBM before the algorithm starts: nothing is counted
    machine.new(name, *shape)         space in HBM for a result; holds NaN until written
    with machine.on_chip() as chip:   a scope of SRAM; what it reserves is given back at its end (scopes nest)
        chip.read(x, rows)            a copy of x[rows] in SRAM: counted as read, its elements are reserved
        chip.new(*shape, fill=0.0)    an accumulator: its elements are reserved
        chip.keep(value)              a computed value that must exist as a whole (a tile of scores)
        chip.write(x, value, rows)    x[rows] = value in HBM: counted as written
    machine.counts                    `Counts`, so far

Everything is in elements, whatever their dtype. Floating-point operations are counted by watching torch while a scope
is open: 2 m n k for a product, one for each element of other arithmetic (of the input for sums and maxima, of the
output otherwise), exponentials and logarithms apart. Comparisons, masks, copies and integers cost nothing.

**SRAM and registers.** Tiles and accumulators with more than one dimension take SRAM. Kept values (S, P) and vectors
(m, l, lse) take registers, which have no limit here, as in the papers' rule 4 B d <= M; on a ``Machine(sram,
strict=True)`` they take SRAM like everything else. Temporaries inside an expression are free. An accumulator is
reserved once: binding its name to its updated value takes no more. A tile whose scope has ended holds NaN, so that no
result can depend on memory that was given back.

Source: FlashAttention (Dao et al., 2022), section 2.1 and Theorem 2; Aggarwal and Vitter, "The input/output complexity
of sorting and related problems" (1988).

Example:
    >>> import torch
    >>> machine = Machine(sram=8)
    >>> x, y = machine.put("x", torch.ones(6, 1)), machine.new("y", 6, 1)
    >>> for rows in (slice(0, 4), slice(4, 6)):
    ...     with machine.on_chip() as chip:
    ...         chip.write(y, torch.exp(2 * chip.read(x, rows)), rows)
    >>> machine.counts.reads, machine.counts.writes, machine.counts.traffic
    (mappingproxy({'x': 6}), mappingproxy({'y': 6}), 12)
    >>> machine.counts.flops, machine.counts.peak_sram, machine.counts.peak_hbm
    (Flops(matmul=0, elementwise=6, exp=6), 4, 12)
    >>> with machine.on_chip() as chip:
    ...     tile, acc = chip.read(x, slice(0, 6)), chip.new(1, 3)
    Traceback (most recent call last):
        ...
    tilewise.textbook.memory.SramError: accumulator: got 3 elements beside 6 in use; supported: 8 elements of SRAM in
    all. Fix: use smaller tiles, or a Machine with more sram.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import errors

Index: TypeAlias = "slice | int | torch.Tensor"


class SramError(errors.ArgumentError):
    """An algorithm asked for more SRAM than the machine has."""


class Flops(NamedTuple):
    """Floating-point operations: of products (2 per multiply-add), of other arithmetic, exponentials and logarithms."""

    matmul: int = 0
    elementwise: int = 0
    exp: int = 0

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Counts:
    """What an algorithm moved, computed and held; all in elements and operations.

    Args:
        reads: elements read from HBM, by tensor.
        writes: elements written to HBM, by tensor.
        flops: operations by kind.
        peak_sram: most elements of SRAM in use at once.
        peak_registers: most elements of kept values and vectors at once (0 on a strict machine: they are in SRAM).
        peak_hbm: most elements of HBM in use at once.
    """

    reads: Mapping[str, int]
    writes: Mapping[str, int]
    flops: Flops
    peak_sram: int
    peak_registers: int
    peak_hbm: int

    @property
    def read(self) -> int:
        """Elements read, of all tensors."""
        return sum(self.reads.values())

    @property
    def written(self) -> int:
        """Elements written, of all tensors."""
        return sum(self.writes.values())

    @property
    def traffic(self) -> int:
        """Elements moved over HBM in either direction."""
        return self.read + self.written

    def of(self, name: str) -> int:
        """Elements of one tensor moved in either direction."""
        return self.reads.get(name, 0) + self.writes.get(name, 0)


class Event(NamedTuple):
    """One tile moved: `action` read or write, the tensor's name, the rows (first, last), elements, SRAM in use then."""

    action: str
    name: str
    rows: tuple[int, int]
    elements: int
    sram: int


class Hbm:
    """A tensor in HBM. Only a scope on chip reads or writes it; its shape is known without reading."""

    def __init__(self, name: str, data: torch.Tensor) -> None:
        self.name = name
        self._data = data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    def result(self) -> torch.Tensor:
        """The values, for the caller of the algorithm: not counted."""
        return self._data.clone()


class Machine:
    """HBM, SRAM of `sram` elements, and their counters.

    Args:
        sram: M, elements of SRAM; None for as many as are asked for.
        strict: whether kept values and vectors take SRAM too, instead of registers without limit.
        record: whether `events` lists every tile moved, in order.

    Raises:
        tilewise.errors.ArgumentError: `sram` is no positive integer.
    """

    def __init__(self, sram: int | None = None, *, strict: bool = False, record: bool = False) -> None:
        if sram is not None and (not isinstance(sram, int) or sram <= 0):
            errors.fail(errors.ArgumentError, "sram", repr(sram), "a positive number of elements, or None", "pass M")
        self.sram = sram
        self.strict = strict
        self.events: list[Event] | None = [] if record else None
        self._hbm: dict[str, int] = {}
        self._reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._ops = _CountFlops()
        self._depth = 0

    def put(self, name: str, tensor: torch.Tensor) -> Hbm:
        """A copy of `tensor` in HBM, as an input that was there before; replaces what had that name."""
        self._hold(name, tensor.numel())
        return Hbm(name, tensor.detach().clone())

    def new(self, name: str, *shape: int) -> Hbm:
        """Space in HBM for an fp64 result; NaN until written. Replaces what had that name."""
        self._hold(name, prod(shape))
        return Hbm(name, torch.full(shape, float("nan"), dtype=torch.float64))

    def free(self, x: Hbm) -> None:
        """Give the HBM of a tensor back."""
        del self._hbm[x.name]

    @contextmanager
    def on_chip(self) -> Iterator[Chip]:
        """A scope of SRAM. What it reserves is given back when it ends; operations inside it are counted."""
        chip = Chip(self)
        self._depth += 1
        with ExitStack() as stack:
            if self._depth == 1:
                stack.enter_context(self._ops)
            try:
                yield chip
            finally:
                self._depth -= 1
                chip.close()

    @property
    def counts(self) -> Counts:
        """What was counted so far."""
        return Counts(
            reads=MappingProxyType(dict(self._reads)),
            writes=MappingProxyType(dict(self._writes)),
            flops=Flops(*(self._ops.flops[kind] for kind in Flops._fields)),
            peak_sram=self._peak["sram"],
            peak_registers=self._peak["registers"],
            peak_hbm=self._peak["hbm"],
        )

    def _hold(self, name: str, elements: int) -> None:
        self._hbm[name] = elements
        self._peak["hbm"] = max(self._peak["hbm"], sum(self._hbm.values()))

    def _reserve(self, what: str, elements: int, where: str) -> None:
        used = self._used[where]
        if where == "sram" and self.sram is not None and used + elements > self.sram:
            errors.fail(
                SramError,
                what,
                f"{elements} elements beside {used} in use",
                f"{self.sram} elements of SRAM in all",
                "use smaller tiles, or a Machine with more sram",
            )
        self._used[where] = used + elements
        self._peak[where] = max(self._peak[where], used + elements)

    def _moved(self, action: str, x: Hbm, rows: Index, elements: int) -> None:
        (self._reads if action == "read" else self._writes)[x.name] += elements
        if self.events is not None:
            self.events.append(Event(action, x.name, _bounds(rows, x.shape[0]), elements, self._used["sram"]))


class Chip:
    """A scope of SRAM, from `Machine.on_chip`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._reserved: Counter[str] = Counter()
        self._tiles: list[torch.Tensor] = []

    def read(self, x: Hbm, *index: Index) -> torch.Tensor:
        """A copy of ``x[index]`` in SRAM; all of x without an index.

        Raises:
            SramError: it does not fit beside what is in use.
        """
        tile = x._data[index].clone()
        self._reserve(f"tile of {x.name}", tile.shape)
        self._tiles.append(tile)
        self._machine._moved("read", x, index[0] if index else slice(None), tile.numel())
        return tile

    def write(self, x: Hbm, value: torch.Tensor, *index: Index) -> None:
        """``x[index] = value`` in HBM.

        Raises:
            tilewise.errors.ShapeError: `value` has another shape than ``x[index]``.
        """
        target = x._data[index]
        if target.shape != value.shape:
            errors.fail(
                errors.ShapeError, f"tile of {x.name}", list(value.shape), str(list(target.shape)), "write whole tiles"
            )
        x._data[index] = value
        self._machine._moved("write", x, index[0] if index else slice(None), value.numel())

    def new(self, *shape: int, fill: float = 0.0) -> torch.Tensor:
        """An fp64 accumulator in SRAM.

        Raises:
            SramError: it does not fit beside what is in use.
        """
        self._reserve("accumulator", shape)
        tile = torch.full(shape, fill, dtype=torch.float64)
        self._tiles.append(tile)
        return tile

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """`value` itself, held until the scope ends: in registers, or in SRAM on a strict machine.

        Raises:
            SramError: the machine is strict, and it does not fit beside what is in use.
        """
        self._reserve("kept value", (value.numel(),))
        return value

    def close(self) -> None:
        """Give everything back; the tiles hold NaN from now on."""
        self._machine._used.subtract(self._reserved)
        for tile in self._tiles:
            if tile.is_floating_point():
                tile.fill_(float("nan"))

    def _reserve(self, what: str, shape: tuple[int, ...]) -> None:
        elements, where = prod(shape), "sram" if self._machine.strict or len(shape) > 1 else "registers"
        self._machine._reserve(what, elements, where)
        self._reserved[where] += elements


def _bounds(rows: Index, length: int) -> tuple[int, int]:
    """The range of rows that an index spans."""
    if isinstance(rows, slice):
        first, last, _ = rows.indices(length)
        return first, last
    if isinstance(rows, int):
        return rows, rows + 1
    return (int(rows.min()), int(rows.max()) + 1) if rows.numel() else (0, 0)


# By what one call costs: products; operations on each element of the result; of the argument; exponentials.
_PRODUCTS = {"mm", "bmm", "mv", "dot"}
_MAPS = {"add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "maximum", "minimum", "abs", "sqrt", "clamp"}
_REDUCTIONS = {"sum", "amax", "mean"}
_EXPONENTIALS = {"exp", "log"}
# What moves or chooses values and computes none; anything else is refused, so that nothing goes uncounted.
_FREE = """arange view _unsafe_view t transpose permute expand slice select unsqueeze squeeze alias detach clone copy
    _to_copy empty empty_like empty_strided new_empty zeros zeros_like new_zeros ones ones_like full full_like new_full
    fill zero lift_fresh scalar_tensor masked_fill where cat stack split unbind index index_put index_select diagonal"""


class _CountFlops(TorchDispatchMode):
    """Counts the floating-point operations of every torch call made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            name = func._schema.name.removeprefix("aten::").removesuffix("_")
            if name in _PRODUCTS:
                self.flops["matmul"] += 2 * out.numel() * args[0].shape[-1]
            elif name in _MAPS:
                self.flops["elementwise"] += out.numel()
            elif name in _REDUCTIONS:
                self.flops["elementwise"] += args[0].numel()
            elif name in _EXPONENTIALS:
                self.flops["exp"] += out.numel()
            elif name not in _FREE.split():
                counted = ", ".join(sorted(_PRODUCTS | _MAPS | _REDUCTIONS | _EXPONENTIALS))
                errors.fail(errors.UnsupportedError, "operation", name, counted, "write it with these")
        return out
