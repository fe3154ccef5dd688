"""The Hopper backend: kernels in Gluon, Triton's low-level dialect, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import errors
from ..kernels import compiled
from ..kernels.replay import Repeated
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import launch, variants

NAME = "hopper"
MAX_HEAD_DIM = 256


def _launch(problem: Problem) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return variants.forward if variants.needed(problem) else launch.forward


def unsupported_reasons(problem: Problem, pass_: str = "forward") -> list[str]:
    """Why this backend cannot serve a pass of the problem; empty if it can."""
    if problem.capability != (9, 0):
        where = f"compute capability {problem.capability}" if problem.capability else str(problem.device)
        return [f"tensors on {where}; it needs compute capability 9.0 (H100, H200)"]
    if pass_ != "forward":
        return ["the backward pass"]
    dims = (problem.head_dim, problem.head_dim_v)
    refused = {
        f"{problem.dtype} inputs; it takes float16 and bfloat16": problem.dtype not in (torch.float16, torch.bfloat16),
        f"a head dim above {MAX_HEAD_DIM}": max(dims) > MAX_HEAD_DIM,
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    try:
        compiled.check(problem.options)
    except errors.UnsupportedError as error:
        reasons.append(str(error))
    return reasons


def tile(problem: Problem, pass_: str) -> TileConfig:
    """Tile of the forward, the only pass."""
    return launch.tile_of(problem) if variants.needed(problem) else launch.plain_tile(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` in q's dtype and ``lse`` fp32, -inf for rows that see nothing."""
    return _launch(problem)(problem, inputs)


def bind(problem: Problem) -> Repeated:
    """`forward` for calls that are alike: all of this problem, with tensors of the same strides."""
    return Repeated(partial(_launch(problem), problem))
