"""A recorded graph of scalar operations as lines of source, with a line for the derivative of each value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from ..errors import UnsupportedError, fail


class Value(NamedTuple):
    """One recorded value: its text, and that of its derivative with respect to the score; None: it has none."""

    text: str
    d: str | None = None


class Table(NamedTuple):
    """A captured tensor, indexed so far."""

    tensor: torch.Tensor
    name: str
    at: tuple[str, ...] = ()


Operand: TypeAlias = "Value | Table | int | float | bool"
# ``rule(writer, node, *arguments)`` writes what one operation computes.
Rule: TypeAlias = Callable[..., Operand]


def refuse(function: Any, got: str, fix: str) -> NoReturn:
    """Raise for a function that cannot be lowered."""
    name = getattr(function, "__qualname__", type(function).__name__)
    fail(UnsupportedError, name, got, "functions of scores, positions and captured tensors, elementwise", fix)


class Writer:
    """Goes through a recorded graph and writes a line for each value and for each derivative."""

    def __init__(self, function: Any, graph: Any, parameters: tuple[str, ...], rules: Mapping[str, Rule]) -> None:
        self.function, self.graph, self.rules = function, graph, rules
        self.parameters = iter(parameters)
        self.lines: list[tuple[str, str]] = []
        self.tables: list[Table] = []
        self.table_numbers = itertools.count()
        self.values: dict[Any, Operand] = {}

    def run(self) -> Value:
        """Write every line; the result."""
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                name = next(self.parameters)
                self.values[node] = Value(name, "1.0" if name == "s" else None)
            elif node.op == "get_attr":
                self.values[node] = self.table(getattr(self.graph, node.target))
            elif node.op == "call_function":
                self.values[node] = self.operation(node)
            else:
                (result,) = node.args
                return self.value(result)
        raise AssertionError("a graph ends with its output")

    def table(self, tensor: torch.Tensor) -> Table:
        if tensor.requires_grad:
            fix = "learned biases go to bias= or alibi_slopes= of tilewise.attention, else capture its .detach()"
            refuse(self.function, "a captured tensor that requires a gradient, and would get none", fix)
        for known in self.tables:
            if known.tensor is tensor:
                return known
        self.tables.append(Table(tensor, f"t{next(self.table_numbers)}"))
        return self.tables[-1]

    def put(self, text: str) -> str:
        """A name for the value of `text`."""
        for name, known in self.lines:
            if known == text:
                return name
        self.lines.append((f"x{len(self.lines)}", text))
        return self.lines[-1][0]

    def value(self, operand: Any) -> Value:
        """An operand as text."""
        operand = self.values.get(operand, operand) if isinstance(operand, torch.fx.Node) else operand
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Table):
            if len(operand.at) != operand.tensor.ndim:
                got = f"a captured tensor of {operand.tensor.ndim} dimensions with {len(operand.at)} indices"
                refuse(self.function, got, "index every dimension with positions")
            return Value(f"{operand.name}[{', '.join(operand.at)}]" if operand.at else operand.name)
        if isinstance(operand, (bool, int)) or (isinstance(operand, float) and math.isfinite(operand)):
            return Value(repr(operand) if operand >= 0 else f"({operand!r})")
        if isinstance(operand, float):
            return Value("math.nan" if operand != operand else f"({'-' if operand < 0 else ''}math.inf)")
        refuse(self.function, f"a result of {type(operand).__name__}", "return a tensor of the positions' shape")

    def operation(self, node: Any) -> Operand:
        """The value of one recorded operation."""
        namespace, _, name = node.target._schema.name.partition("::")
        rule = self.rules.get(name) if namespace == "aten" else None
        if rule is None:
            have = ", ".join(sorted(known for known in self.rules if not known.startswith("_")))
            fix = f"compute it outside and capture a table; there are {have}"
            refuse(self.function, f"the operation {node.target}", fix)
        return rule(self, node, *node.args)

    def kind(self, operand: Any) -> torch.dtype:
        """The dtype of an operand."""
        if isinstance(operand, torch.fx.Node):
            dtype: torch.dtype = operand.meta["val"].dtype
            return dtype
        return torch.bool if isinstance(operand, bool) else torch.int64 if isinstance(operand, int) else torch.float32

    def floating(self, operand: Any) -> Value:
        """An operand as a floating value."""
        x = self.value(operand)
        return x if self.kind(operand).is_floating_point else Value(self.put(f"{x.text} * 1.0"))

    def times(self, factor: str, d: str | None) -> str | None:
        """The derivative `d`, scaled."""
        return None if d is None else factor if d == "1.0" else self.put(f"{factor} * {d}")

    def plus(self, a: str | None, b: str | None) -> str | None:
        return b if a is None else a if b is None else self.put(f"{a} + {b}")

    def minus(self, a: str | None, b: str | None) -> str | None:
        return a if b is None else self.put(f"-{b}" if a is None else f"{a} - {b}")

    def chosen(self, condition: str, a: Value, b: Value) -> Value:
        """``a if condition else b``, elementwise."""
        if condition in ("True", "False"):
            return a if condition == "True" else b
        d = None
        if a.d is not None or b.d is not None:
            d = self.put(f"torch.where({condition}, {a.d or '0.0'}, {b.d or '0.0'})")
        return Value(self.put(f"torch.where({condition}, {a.text}, {b.text})"), d)
