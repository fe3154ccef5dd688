"""The CPU backend: FlashAttention-2's loops over tiles in eager PyTorch, with every feature of the contract.

Where PyTorch's own fused CPU attention computes the same thing it is used (`fused`); everything else runs on tiles
(`forward`, `backward`) and holds O(seqlen * head_dim) memory, never a matrix of scores.
"""

from __future__ import annotations

import torch

from ..kvcache import CacheProblem
from ..mask_algebra import Frame
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import fused, groups
from .backward import backward as _tiled_backward
from .decode import attend_cache as attend_cache
from .forward import forward as _tiled_forward

NAME = "cpu"


def unsupported_reasons(problem: Problem, pass_: str = "forward") -> list[str]:
    """Why this backend cannot serve the problem; empty if it can."""
    if problem.device.type != "cpu":
        return [f"tensors are on {problem.device}, this backend runs on the CPU"]
    return []


def cache_unsupported_reasons(problem: CacheProblem) -> list[str]:
    """Why this backend cannot serve a call with a cache; empty if it can."""
    return unsupported_reasons(problem.attention)


def tile(problem: Problem, pass_: str = "forward") -> TileConfig:
    """The rows and keys that one step of the loops works on, the same in both passes."""
    frame = Frame(0, problem.batch, problem.seqlen_q, problem.seqlen_k, 0, problem.device)
    return groups.tile_config(problem, problem.options.mask.lower(frame).blocks)


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the problem."""
    usable = fused.usable(problem, inputs)
    if usable is not None:
        return fused.forward(problem, usable)
    return _tiled_forward(problem, inputs)


def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    needs: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Gradients of the inputs named in `needs`."""
    # The fused backward knows no gradient of the LSE, and none of anything but q, k, v.
    if do is not None and dlse is None and set(needs) <= {"q", "k", "v"}:
        usable = fused.usable(problem, inputs)
        if usable is not None:
            return fused.backward(problem, usable, out, lse, do, needs)
    return _tiled_backward(problem, inputs, out, lse, do, dlse, needs)
