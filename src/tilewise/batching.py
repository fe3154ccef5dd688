"""`torch.vmap`: the mapped dimension joins the batch where no element can tell, and else elements are called in turn.

An element can tell by its batch index, which dropout, user functions and tensors with a batch dimension of their own go
by; and gradients of what the batch shares are wanted for each element apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from . import axes
from .problem import DIFFERENTIABLE, Inputs

Run: TypeAlias = Callable[..., Sequence[torch.Tensor]]

# What has a batch dimension in every dense call.
_BATCHED = {"q", "k", "v", "out", "lse", "do", "dlse"}


def mapped(
    run: Run, spec: str, needs: str | None, tensors: Sequence[Any], dims: Sequence[Any], size: int
) -> tuple[tuple[torch.Tensor, ...], int]:
    """What `run` returns for each element of a mapped dimension, stacked in front; and where that is: 0.

    Args:
        run: the pass, as a function of `tensors`.
        spec: the call's options (`Options.encode`).
        needs: of the backward pass, the names of the gradients that it returns; of the forward pass None.
        tensors: `Inputs` and then what masks hold; of the backward pass after the four of `axes.STATS`. May be None.
        dims: for each tensor the mapped dimension, or None.
        size: of the mapped dimension.
    """
    names = [*(() if needs is None else axes.STATS), *Inputs._fields]
    names += ["extra"] * (len(tensors) - len(names))
    if not _foldable(spec, needs, names, tensors, dims):
        turns = [run(*map(lambda x, d: _element(x, d, turn), tensors, dims)) for turn in range(size)]
        return tuple(torch.stack(results) for results in zip(*turns, strict=True)), 0
    folded = [_folded(x, d, size) if name in _BATCHED else x for name, x, d in zip(names, tensors, dims, strict=True)]
    return tuple(x.unflatten(0, (size, -1)) for x in run(*folded)), 0


def _foldable(spec: str, needs: str | None, names: list[str], tensors: Sequence[Any], dims: Sequence[Any]) -> bool:
    given = dict(zip(names, tensors, strict=True))
    if given["cu_seqlens_q"] is not None or given["dropout_seed"] is not None:
        return False
    if any(dim is not None and name not in _BATCHED for name, dim in zip(names, dims, strict=True)):
        return False
    if needs is not None and not set(needs.split()) <= set(DIFFERENTIABLE[:3]):
        return False
    spread = axes.of_extras(spec, [x.shape for name, x in zip(names, tensors, strict=True) if name == "extra"])
    modifiers = [name for name in DIFFERENTIABLE[3:] if given[name] is not None]
    own = [axes.of_tensor(name, given[name].shape, False) for name in modifiers]
    return spread is not None and all(batch is None for batch, _ in (*own, *spread))


def _folded(x: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    """``[size · batch, ...]`` of a tensor with a mapped dimension; one without is repeated."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _element(x: Any, dim: int | None, turn: int) -> Any:
    return x if dim is None else x.select(dim, turn)
