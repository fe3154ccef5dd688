"""Which dimensions of a call's tensors are batch and heads: what `sharding` cuts along, and `batching` folds into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from .problem import literal

# The dimension of batch entries and that of heads; None where all of them share the tensor.
Axes: TypeAlias = "tuple[int | None, int | None]"
# The first tensors of the backward operator, before those of `Inputs`.
STATS = ("out", "lse", "do", "dlse")


def of_tensor(name: str, shape: Sequence[int], packed: bool) -> Axes:
    """The axes of an input or a result."""
    if name in ("q", "k", "v", "out", "do"):
        return (None, 1) if packed else (0, 2)
    if name in ("lse", "dlse"):
        return (None, 0) if packed else (0, 1)
    if name == "bias":
        return _of_grid(shape)
    if name == "alibi_slopes":
        return (0, 1) if len(shape) == 2 else (None, 0)
    return (None, 0) if name == "sinks" else (None, None)


def _of_grid(shape: Sequence[int]) -> Axes:
    """Of a tensor that broadcasts to [B, Hq, Sq, Sk]."""
    rank = len(shape)
    batch = 0 if rank == 4 and shape[0] > 1 else None
    heads = rank - 3 if rank >= 3 and shape[rank - 3] > 1 else None
    return batch, heads


def of_extras(spec: str, shapes: list[Sequence[int]]) -> list[Axes] | None:
    """The axes of the tensors that masks hold, in their order; None: a user function counts batch entries for itself.

    Args:
        spec: what `Options.encode` wrote.
        shapes: of those tensors.
    """
    mask, _, score_mod, *_ = literal(spec)
    if score_mod is not None:
        return None
    found: dict[int, Axes] = {}
    return [found[i] for i in range(len(shapes))] if _collect(mask, shapes, found) else None


def _collect(mask: Any, shapes: list[Sequence[int]], found: dict[int, Axes]) -> bool:
    """Fill in `found` for a mask's literal (`Mask.encode`); False if there is a user function in it."""
    tag, *parts = mask
    if tag in ("and", "or"):
        return all(_collect(part, shapes, found) for part in parts)
    if tag in ("dense", "blocks"):
        found[parts[0]] = _of_grid(shapes[parts[0]])
    elif tag == "prefix_tensor":
        found[parts[0]] = (0, None)
    elif tag in ("document", "interval"):
        rows = [i for i in parts[:2] if i is not None]
        found.update({i: (0 if len(shapes[i]) == 2 and shapes[i][0] > 1 else None, None) for i in rows})
    return tag != "predicate"
