"""FlexAttention's functions, written in what kernels compile (docs/score_mods.md), with their derivatives.

A function is called once on scalars while PyTorch records what it computes, so it may capture tensors and be made of
other functions. What was recorded becomes the source of a new function of operators alone, whose extra arguments are
the captured tensors; and, rule by rule, the source of its derivative with respect to the score.
"""

from __future__ import annotations

import itertools
import linecache
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .flex_rules import RULES
from .flex_writer import Writer, refuse

POSITIONS = ("b", "h", "q", "k")


class Lowered(NamedTuple):
    """A function of operators, its derivative (None: of a predicate), and the tensors that both take after the rest."""

    fn: Callable[..., Any]
    dfn: Callable[..., Any] | None
    tensors: tuple[torch.Tensor, ...]


def record(function: Callable[..., Any], with_score: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """The graph of what `function` computes from scalars, as `torch.fx` has it.

    Raises:
        tilewise.errors.UnsupportedError: it branches on values, or fails on scalars.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        # What is recorded is kept, so the modes of this call stay out of it. The last as FlexAttention does: an index
        # is a tensor and not a number, which would be fixed here.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            TransformGetItemToIndex(),
        ):
            scalars = [torch.zeros((), dtype=torch.int32, device=device) for _ in POSITIONS]
            score = [torch.zeros((), dtype=dtype, device=device)] if with_score else []
            return make_fx(function)(*score, *scalars)
    except RuntimeError as error:
        if "data-dependent control flow" in str(error):
            refuse(function, "a function that branches on a value", "write torch.where(condition, a, b)")
        raise


def lower(function: Callable[..., Any], graph: Any, with_score: bool) -> Lowered:
    """The recorded `graph` of `function` in source, and as functions.

    Raises:
        tilewise.errors.UnsupportedError: an operation that kernels do not have.
    """
    writer = Writer(function, graph, ("s", *POSITIONS) if with_score else POSITIONS, RULES)
    result = writer.run()
    taken = [table.name for table in writer.tables]
    tensors = tuple(table.tensor for table in writer.tables)
    head = ["s", *POSITIONS] if with_score else list(POSITIONS)
    if not with_score:
        return Lowered(_function([*head, *taken], writer.lines, result.text), None, tensors)
    # Kernels want a whole tile, also of what depends on rows or on keys alone.
    text = result.text if result.d else writer.put(f"torch.where({writer.put('q + k >= 0')}, {result.text}, 0.0)")
    fn = _function([*head, *taken], writer.lines, text)
    derivative = "ds * 0.0" if result.d is None else "ds" if result.d == "1.0" else f"ds * {result.d}"
    return Lowered(fn, _function(["ds", *head, *taken], writer.lines, derivative), tensors)


_namespace: dict[str, Any] = {"torch": torch, "math": math, "__name__": __name__}
_functions: dict[str, Callable[..., Any]] = {}
_serial = itertools.count()


def _function(parameters: list[str], lines: list[tuple[str, str]], result: str) -> Callable[..., Any]:
    """The function of these lines, of which only what `result` needs is kept; equal texts are one function."""
    kept: list[str] = []
    needed = result
    for name, text in reversed(lines):
        if re.search(rf"\b{name}\b", needed):
            kept.append(f"    {name} = {text}\n")
            needed += f" {text}"
    text = f"def lowered({', '.join(parameters)}):\n{''.join(reversed(kept))}    return {result}\n"
    if text not in _functions:
        # Kernels are compiled from source, so the text becomes a file in `linecache`.
        file = f"<tilewise flex {next(_serial)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), _namespace)
        _functions[text] = _namespace.pop("lowered")
    return _functions[text]
