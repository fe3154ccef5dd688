"""Nested tensors in jagged layout, ``[batch, j, heads, head_dim]``: their values are packed sequences already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import ArgumentError, ShapeError, UnsupportedError, fail


def is_nested(*tensors: Any) -> bool:
    """Whether one of the tensors is nested."""
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in tensors)


def attend(attention_varlen: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """`attention` of nested q, k, v: the same for each of their parts, as nested tensors of q's parts.

    Args:
        attention_varlen: the entry point that does it.
        q, k, v: jagged, [batch, j, heads, head_dim]; k and v of one ragged structure, which need not be q's.
        options: every other argument of `attention`.

    Returns:
        out jagged [batch, j, heads_q, head_dim_v], and if asked for lse jagged [batch, heads_q, j].

    Raises:
        tilewise.errors.ShapeError, UnsupportedError, ArgumentError: another layout, or parts that do not match.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x)
    if k.shape[1] != v.shape[1]:
        got = f"parts of k {k.shape[1]}, of v {v.shape[1]}"
        fix = "give both the same offsets: nested_tensor_from_jagged(values, k.offsets())"
        fail(ArgumentError, "k, v", got, "one ragged structure for keys and values", fix)
    if q.shape[0] != k.shape[0]:
        fail(
            ShapeError, "k", f"batch {k.shape[0]}, q's is {q.shape[0]}", "one batch size", "give q and k as many parts"
        )
    lengths = {"max_seqlen_q": _longest(q), "max_seqlen_k": _longest(k)}
    out = attention_varlen(q.values(), k.values(), v.values(), q.offsets(), k.offsets(), **lengths, **options)
    if options["return_lse"]:
        return _like(q, out[0], 1), _like(q, out[1], 2)
    return _like(q, out, 1)


def _check(name: str, x: Any) -> None:
    """Raise unless `x` is nested, jagged in dimension 1, and without holes between its parts."""
    if not isinstance(x, torch.Tensor) or not x.is_nested:
        got = f"a dense tensor {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        fix = "nest it too: torch.nested.nested_tensor_from_jagged(values, offsets)"
        fail(ShapeError, name, f"{got} beside nested ones", "q, k and v all nested, or none", fix)
    if x.layout is not torch.jagged:
        fix = "make it with torch.nested.nested_tensor(..., layout=torch.jagged)"
        fail(UnsupportedError, name, f"a nested tensor of layout {x.layout}", "layout torch.jagged", fix)
    nested: Any = x  # what its class adds to tensors, their annotations lack
    if x.ndim != 4 or nested._ragged_idx != 1:
        got = f"a nested tensor of shape {tuple(x.shape)}"
        fix = "nest [length, heads, head_dim] parts; .transpose(1, 2) where heads come first"
        fail(ShapeError, name, got, "[batch, j, heads, head_dim] with ragged lengths j", fix)
    if nested.lengths() is not None:
        fix = "call .contiguous(); for keys, attention_varlen has seqused_k"
        fail(UnsupportedError, name, "a nested tensor with holes (narrowed)", "parts one after the other", fix)


def _longest(x: Any) -> int:
    """The longest part; where the compiler cannot know it, all of them together, which is no shorter."""
    if torch.compiler.is_compiling():
        known = x._maybe_max_seqlen
        return x.values().shape[0] if known is None else known
    return x._get_max_seqlen()


def _like(q: Any, values: torch.Tensor, dim: int) -> torch.Tensor:
    """`values` nested as q is, with its ragged lengths in dimension `dim`."""
    return torch.nested.nested_tensor_from_jagged(
        values, q.offsets(), jagged_dim=dim, min_seqlen=q._maybe_min_seqlen, max_seqlen=q._maybe_max_seqlen
    )
