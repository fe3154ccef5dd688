"""What becomes of each operation that a function of FlexAttention may use: its source, and that of its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .flex_writer import Operand, Rule, Table, Value, Writer, refuse

# Larger powers are better written as exp and log by those who mean them.
_MOST_FACTORS = 8

# By the operation's name in ATen.
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule("add")
def _add(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    x, y = w.value(a), _scaled(w, node, b)
    return Value(w.put(f"{x.text} + {y.text}"), w.plus(x.d, y.d))


@_rule("sub")
def _sub(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    x, y = w.value(a), _scaled(w, node, b)
    return Value(w.put(f"{x.text} - {y.text}"), w.minus(x.d, y.d))


@_rule("rsub")
def _rsub(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    return _sub(w, node, b, a)


def _scaled(w: Writer, node: Any, b: Any) -> Value:
    """The second operand of a sum, times `alpha`."""
    y, alpha = w.value(b), node.kwargs.get("alpha", 1)
    return y if alpha == 1 else Value(w.put(f"{y.text} * {alpha!r}"), w.times(repr(alpha), y.d))


@_rule("mul")
def _mul(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    x, y = w.value(a), w.value(b)
    return Value(w.put(f"{x.text} * {y.text}"), w.plus(w.times(y.text, x.d), w.times(x.text, y.d)))


@_rule("div")
def _div(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return _floor_divide(w, node, a, b)
    if mode is not None:
        refuse(w.function, f"a division with rounding_mode={mode!r}", "use / or //")
    x, y = w.floating(a), w.floating(b)
    quotient = w.put(f"{x.text} / {y.text}")
    d = None if x.d is None else w.put(f"{x.d} / {y.text}")
    slope = None if y.d is None else w.times(w.put(f"{quotient} / {y.text}"), y.d)
    return Value(quotient, w.minus(d, slope))


@_rule("floor_divide")
def _floor_divide(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    x, y = w.value(a), w.value(b)
    if w.kind(a).is_floating_point or w.kind(b).is_floating_point:
        return Value(w.put(f"torch.floor({w.put(f'{x.text} / {y.text}')})"))
    return Value(w.put(f"{x.text} // {y.text}"))


@_rule("remainder")
def _remainder(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    x, y = w.value(a), w.value(b)
    if y.d is not None:
        refuse(w.function, "a remainder of the score's", "divide by positions and numbers")
    return Value(w.put(f"{x.text} % {y.text}"), x.d)


@_rule("neg")
def _neg(w: Writer, node: Any, a: Any) -> Operand:
    x = w.value(a)
    return Value(w.put(f"-{x.text}"), w.minus(None, x.d))


@_rule("abs")
def _abs(w: Writer, node: Any, a: Any) -> Operand:
    x = w.value(a)
    sign = "" if x.d is None else _sign_of(w, x.text)
    return Value(w.put(f"abs({x.text})"), w.times(sign, x.d))


@_rule("sign", "sgn")
def _sign(w: Writer, node: Any, a: Any) -> Operand:
    return Value(_sign_of(w, w.floating(a).text))


def _sign_of(w: Writer, x: str) -> str:
    negative = w.put(f"torch.where({x} < 0, -1.0, 0.0)")
    return w.put(f"torch.where({x} > 0, 1.0, {negative})")


@_rule("pow")
def _pow(w: Writer, node: Any, a: Any, n: Any) -> Operand:
    if n in (0.5, -0.5):
        root = _elementary(w, node, a, "sqrt")
        return root if n > 0 else _inverse(w, root)
    if isinstance(n, torch.fx.Node) or n != int(n) or not 1 <= abs(n) <= _MOST_FACTORS:
        shown = "a value" if isinstance(n, torch.fx.Node) else n
        refuse(w.function, f"a power of {shown}", f"powers are ±0.5 and ±1 to ±{_MOST_FACTORS}; else exp and log")
    x = w.floating(a) if n < 0 else w.value(a)
    powers = [x.text]
    for _ in range(int(abs(n)) - 1):
        powers.append(w.put(f"{powers[-1]} * {x.text}"))
    slope = "1.0" if len(powers) == 1 else w.put(f"{float(abs(n))!r} * {powers[-2]}")
    result = Value(powers[-1], x.d if slope == "1.0" else w.times(slope, x.d))
    return result if n > 0 else _inverse(w, result)


@_rule("square")
def _square(w: Writer, node: Any, a: Any) -> Operand:
    return _pow(w, node, a, 2)


def _inverse(w: Writer, x: Value) -> Value:
    y = w.put(f"1.0 / {x.text}")
    return Value(y, w.minus(None, w.times(w.put(f"{y} * {y}"), x.d) if x.d is not None else None))


@_rule("reciprocal")
def _reciprocal(w: Writer, node: Any, a: Any) -> Operand:
    return _inverse(w, w.floating(a))


@_rule("rsqrt")
def _rsqrt(w: Writer, node: Any, a: Any) -> Operand:
    return _inverse(w, _elementary(w, node, a, "sqrt"))


# The derivative of each at x, where its value is y.
_SLOPES = {
    "exp": "{y}",
    "exp2": "{y} * 0.6931471805599453",
    "log": "1.0 / {x}",
    "log2": "1.4426950408889634 / {x}",
    "sqrt": "0.5 / {y}",
    "sin": "torch.cos({x})",
    "cos": "-torch.sin({x})",
    "tanh": "1.0 - {y} * {y}",
    "sigmoid": "{y} * (1.0 - {y})",
}


def _elementary(w: Writer, node: Any, a: Any, name: str | None = None) -> Value:
    name = name or node.target._schema.name.partition("::")[2]
    x = w.floating(a)
    y = w.put(f"torch.{name}({x.text})")
    slope = None if x.d is None else w.put(_SLOPES[name].format(x=x.text, y=y))
    return Value(y, None if slope is None else w.times(slope, x.d))


_rule(*_SLOPES)(_elementary)


@_rule("floor", "ceil")
def _rounded(w: Writer, node: Any, a: Any) -> Operand:
    name = node.target._schema.name.partition("::")[2]
    return Value(w.put(f"torch.{name}({w.floating(a).text})")) if w.kind(a).is_floating_point else w.value(a)


@_rule("relu")
def _relu(w: Writer, node: Any, a: Any) -> Operand:
    x = w.value(a)
    return w.chosen(w.put(f"{x.text} > 0"), x, w.value(0.0 if w.kind(a).is_floating_point else 0))


@_rule("maximum")
def _maximum(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    return _larger(w, w.value(a), w.value(b), ">")


@_rule("minimum")
def _minimum(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    return _larger(w, w.value(a), w.value(b), "<")


def _larger(w: Writer, x: Value, y: Value, sign: str) -> Value:
    """The larger (or with "<" the smaller) of two values; where they are equal, each has half of the derivative."""
    result = w.chosen(w.put(f"{x.text} {sign} {y.text}"), x, y)
    if x.d is None or y.d is None:
        # One of them is no score, which is equal to the other at single points.
        return result
    half = w.put(f"0.5 * ({x.d} + {y.d})")
    return Value(result.text, w.put(f"torch.where({w.put(f'{x.text} == {y.text}')}, {half}, {result.d})"))


@_rule("clamp")
def _clamp(w: Writer, node: Any, a: Any, low: Any = None, high: Any = None) -> Operand:
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    x = w.value(a)
    for bound, sign in ((low, "<"), (high, ">")):
        if bound is not None:
            # At a bound PyTorch lets the gradient through.
            x = w.chosen(w.put(f"{x.text} {sign} {w.value(bound).text}"), w.value(bound), x)
    return x


@_rule("clamp_min")
def _clamp_min(w: Writer, node: Any, a: Any, low: Any) -> Operand:
    return _clamp(w, node, a, low)


@_rule("clamp_max")
def _clamp_max(w: Writer, node: Any, a: Any, high: Any) -> Operand:
    return _clamp(w, node, a, None, high)


@_rule("where")
def _where(w: Writer, node: Any, condition: Any, a: Any, b: Any) -> Operand:
    return w.chosen(w.value(condition).text, w.value(a), w.value(b))


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "__and__": "&", "__or__": "|"}
_BITS |= {"__rshift__": ">>", "__lshift__": "<<", "bitwise_right_shift": ">>", "bitwise_left_shift": "<<"}


@_rule(*_COMPARISONS, *_BITS)
def _compared(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    sign = {**_COMPARISONS, **_BITS}[node.target._schema.name.partition("::")[2]]
    return _joined(w, sign, w.value(a).text, w.value(b).text)


def _joined(w: Writer, sign: str, a: str, b: str) -> Value:
    """``a sign b``, where what functions that join masks begin with (True, False) is left out."""
    neutral = {"&": "True", "|": "False"}.get(sign)
    for x, other in ((a, b), (b, a)):
        if neutral is not None and x in ("True", "False"):
            return Value(other if x == neutral else x)
    return Value(w.put(f"{a} {sign} {b}"))


def _true(w: Writer, a: Any) -> str:
    """An operand as a condition."""
    x = w.value(a).text
    return x if w.kind(a) == torch.bool else w.put(f"{x} != 0")


@_rule("logical_and", "logical_or", "logical_xor")
def _logical(w: Writer, node: Any, a: Any, b: Any) -> Operand:
    sign = {"and": "&", "or": "|", "xor": "^"}[node.target._schema.name.rpartition("_")[2]]
    return _joined(w, sign, _true(w, a), _true(w, b))


@_rule("logical_not")
def _logical_not(w: Writer, node: Any, a: Any) -> Operand:
    return Value(w.put(f"{_true(w, a)} ^ True"))


@_rule("bitwise_not")
def _bitwise_not(w: Writer, node: Any, a: Any) -> Operand:
    return _logical_not(w, node, a) if w.kind(a) == torch.bool else Value(w.put(f"-1 - {w.value(a).text}"))


@_rule("index")
def _index(w: Writer, node: Any, a: Any, index: Any) -> Operand:
    table = w.values[a]
    if not isinstance(table, Table) or any(i is None or w.kind(i).is_floating_point for i in index):
        got = "an index that is no integer, or into something else than a captured tensor"
        refuse(w.function, got, "index captured tensors with positions, one for each dimension")
    if any(w.kind(i) == torch.bool for i in index):
        refuse(w.function, "a boolean index", "use torch.where")
    return table._replace(at=(*table.at, *(w.value(i).text for i in index)))


@_rule("alias", "clone", "detach", "expand", "view")
def _same(w: Writer, node: Any, a: Any, *_: Any) -> Operand:
    if node.meta["val"].ndim and not isinstance(w.values[a], Table):
        refuse(w.function, "a value that is no scalar", "compute elementwise, without new dimensions")
    x = w.values[a]
    detached = node.target._schema.name == "aten::detach"
    return Value(x.text) if detached and isinstance(x, Value) else x


@_rule("lift_fresh_copy")
def _constant(w: Writer, node: Any, a: Any) -> Operand:
    """A tensor that the function makes of a number: that number."""
    table = w.values[a]
    if not isinstance(table, Table) or table.tensor.ndim or table.tensor.device.type != "cpu":
        return table
    w.tables = [other for other in w.tables if other is not table]
    number: float = table.tensor.item()
    return number


@_rule("scalar_tensor")
def _scalar(w: Writer, node: Any, number: Any) -> Operand:
    return number


@_rule("full", "new_full", "full_like")
def _full(w: Writer, node: Any, *arguments: Any) -> Operand:
    if node.meta["val"].ndim:
        refuse(w.function, "a new tensor that is no scalar", "make it outside and capture it")
    number: float = arguments[-1]
    return number


@_rule("ones", "new_ones", "ones_like", "zeros", "new_zeros", "zeros_like")
def _filled(w: Writer, node: Any, *_: Any) -> Operand:
    one = "ones" in node.target._schema.name
    dtype = node.meta["val"].dtype
    return _full(w, node, one if dtype == torch.bool else float(one) if dtype.is_floating_point else int(one))


@_rule("_to_copy", "to")
def _converted(w: Writer, node: Any, a: Any) -> Operand:
    to, kind, x = node.meta["val"].dtype, w.kind(a), w.values[a]
    if isinstance(x, Table) and len(x.at) < x.tensor.ndim:
        refuse(w.function, "a captured tensor that is converted whole", "convert it outside")
    if to in (torch.float32, torch.float64):
        return w.floating(a)
    if to == torch.bool:
        return Value(_true(w, a))
    if to.is_floating_point or kind.is_floating_point:
        fix = "compute in the score's dtype" if to.is_floating_point else "make the integers outside, as a table"
        refuse(w.function, f"a conversion of {kind} to {to}, which rounds", fix)
    return Value(w.put(f"{w.value(a).text} * 1")) if kind == torch.bool else w.value(a)
