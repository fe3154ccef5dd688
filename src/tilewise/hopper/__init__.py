"""The Hopper backend: kernels in Gluon, Triton's low-level dialect, for compute capability 9.0."""

from __future__ import annotations

from functools import partial

import torch

from ..kernels.replay import Repeated
from ..mask_algebra import And, Mask
from ..masks import Causal, Full, Window
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import launch

NAME = "hopper"
MAX_HEAD_DIM = 256


def _is_band(mask: Mask) -> bool:
    if isinstance(mask, And):
        return _is_band(mask.a) and _is_band(mask.b)
    return isinstance(mask, (Full, Causal, Window))


def unsupported_reasons(problem: Problem, pass_: str = "forward") -> list[str]:
    """Why this backend cannot serve a pass of the problem; empty if it can."""
    if problem.capability != (9, 0):
        where = f"compute capability {problem.capability}" if problem.capability else str(problem.device)
        return [f"tensors on {where}; it needs compute capability 9.0 (H100, H200)"]
    if pass_ != "forward":
        return ["the backward pass"]
    options, dims = problem.options, (problem.head_dim, problem.head_dim_v)
    refused = {
        f"{problem.dtype} inputs; it takes float16 and bfloat16": problem.dtype not in (torch.float16, torch.bfloat16),
        f"a head dim above {MAX_HEAD_DIM}": max(dims) > MAX_HEAD_DIM,
        "a head dim that is no multiple of 8": any(d % 8 for d in dims),
        "packed sequences": problem.packed,
        "masks beyond causal and window": not _is_band(options.mask),
        "softcap": options.softcap is not None,
        "score_mod": options.score_mod is not None,
        "ALiBi": problem.has_alibi,
        "bias": problem.has_bias,
        "sinks": problem.has_sinks,
        "dropout": problem.has_dropout,
        "out_dtype other than q's": problem.out_dtype != problem.dtype,
    }
    return [reason for reason, holds in refused.items() if holds]


def tile(problem: Problem, pass_: str) -> TileConfig:
    """Tile of the forward, the only pass."""
    return launch.tile_of(problem)


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` in q's dtype and ``lse`` fp32, -inf for rows that see nothing."""
    return launch.forward(problem, inputs)


def bind(problem: Problem) -> Repeated:
    """`forward` for calls that are alike: all of this problem, with tensors of the same strides."""
    return Repeated(partial(launch.forward, problem))
