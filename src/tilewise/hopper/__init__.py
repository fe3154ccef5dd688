"""The Hopper backend: kernels in Gluon, Triton's low-level dialect, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from .. import errors
from ..kernels import compiled
from ..kernels.replay import Repeated, Tape
from ..kvcache import CacheInputs, CacheProblem
from ..masks import Full
from ..problem import Inputs, Problem
from ..tiles import TileConfig

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    from .interpreter import mend

    # Before kernels are defined.
    mend()

from . import cache, gradients, launch, variants  # noqa: E402 - kernels, see above

NAME = "hopper"
MAX_HEAD_DIM = 256


def _launch(problem: Problem) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return variants.forward if variants.needed(problem) else launch.forward


def _elsewhere(problem: Problem) -> list[str]:
    """The reason, if tensors are where its kernels do not run."""
    if problem.capability == (9, 0) or (INTERPRETED and problem.device.type == "cpu"):
        return []
    where = f"compute capability {problem.capability}" if problem.capability else str(problem.device)
    return [f"tensors on {where}; it needs compute capability 9.0 (H100, H200)"]


def unsupported_reasons(problem: Problem, pass_: str = "forward") -> list[str]:
    """Why this backend cannot serve a pass of the problem; empty if it can."""
    elsewhere = _elsewhere(problem)
    if elsewhere:
        return elsewhere
    dims = (problem.head_dim, problem.head_dim_v)
    refused = {
        f"{problem.dtype} inputs; it takes float16 and bfloat16": problem.dtype not in (torch.float16, torch.bfloat16),
        f"a head dim above {MAX_HEAD_DIM}": max(dims) > MAX_HEAD_DIM,
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    if pass_ != "forward":
        reasons += gradients.unsupported_reasons(problem)
    try:
        compiled.check(problem.options)
    except errors.UnsupportedError as error:
        reasons.append(str(error))
    return reasons


def drawback(problem: Problem, pass_: str = "forward") -> str | None:
    """Why a backend that comes later serves a pass better, or None."""
    narrow = max(problem.head_dim, problem.head_dim_v) <= 64
    masked = problem.packed or not isinstance(problem.options.mask, Full)
    if pass_ == "forward" or not (narrow and masked and problem.has_dropout):
        return None
    # Here is no room for Philox and masks beside all gradients.
    return "Triton's backward pass with dropout and a mask, or packed, is faster up to head dim 64"


def tile(problem: Problem, pass_: str) -> TileConfig:
    """Tile of a pass."""
    if pass_ != "forward":
        return gradients.tile_of(problem)
    return variants.tile_of(problem) if variants.needed(problem) else launch.plain_tile(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` in q's dtype and ``lse`` fp32, -inf for rows that see nothing."""
    return _launch(problem)(problem, inputs)


def bind(problem: Problem) -> Repeated:
    """`forward` for calls that are alike: all of this problem, with tensors of the same strides."""
    return Repeated(partial(_launch(problem), problem))


def backward(
    problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor | None,
    dlse: torch.Tensor | None, needs: tuple[str, ...],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients of the inputs named in `needs`; `do` or `dlse` may be None."""
    return gradients.backward(problem, inputs, (out, lse), (do, dlse), needs)


def bind_backward(problem: Problem, needs: tuple[str, ...]) -> Repeated:
    """`backward` for calls that are alike, of the tensors of `Inputs`, out, lse, do and dlse."""

    def run(tensors: tuple[Any, ...], tape: Tape) -> tuple[torch.Tensor, ...]:
        given, (out, lse, do, dlse) = Inputs._make(tensors[:-4]), tensors[-4:]
        grads = gradients.backward(problem, given, (out, lse), (do, dlse), needs, tape)
        return tuple(grads[name] for name in needs)

    return Repeated(run, tuple)


def cache_unsupported_reasons(problem: CacheProblem) -> list[str]:
    """Why this backend cannot serve a call with a cache; empty if it can."""
    return _elsewhere(problem.attention) or cache.unsupported_reasons(problem)


def attend_cache(
    problem: CacheProblem, inputs: CacheInputs, tile: TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` in `out_dtype` and ``lse`` fp32 of a call, after its new keys and values are in the cache."""
    return cache.attend_cache(problem, tile or cache.tile(problem), inputs, Tape())


def bind_cache(problem: CacheProblem) -> Repeated:
    """`attend_cache` for calls that are alike: all of this problem, with tensors of the same strides."""
    return Repeated(partial(cache.attend_cache, problem, cache.tile(problem)), CacheInputs._make)
