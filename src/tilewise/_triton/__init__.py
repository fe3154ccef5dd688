"""The portable backend: kernels in Triton, for any GPU that Triton serves and for its CPU interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton

from .. import errors, tiles
from ..kernels import compiled
from ..kernels.replay import Repeated, Tape
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from .forward import forward as _forward
from .gradients import backward as _backward

NAME = "triton"

if triton.knobs.runtime.interpret:
    from . import interpreter

    interpreter.mend()

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 512


def unsupported_reasons(problem: Problem, pass_: str = "forward") -> list[str]:
    """Why this backend cannot serve a problem; empty if it can."""
    reasons = []
    if problem.device.type == "cpu" and not triton.knobs.runtime.interpret:
        reasons.append("tensors on cpu run only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts")
    if problem.dtype not in _DTYPES:
        reasons.append(f"{problem.dtype} inputs; it takes float16, bfloat16 and float32")
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        reasons.append(f"a head dim above {_MAX_HEAD_DIM}")
    try:
        compiled.check(problem.options)
    except errors.UnsupportedError as error:
        reasons.append(str(error))
    return reasons


def _architecture(problem: Problem) -> str:
    """The row class of `tiles.TABLE` for a problem's device: by instructions and shared memory."""
    if problem.device.type == "cpu":
        return "interpreter"
    capability = problem.capability
    if capability == (9, 0):
        return "hopper"
    return "large" if capability in ((8, 0), (10, 0), (10, 3)) else "small"


def tile(problem: Problem, pass_: str) -> TileConfig:
    """Tile of a pass: forward, delta, dq, dkv (or dk and dv, each with a kernel of its own), dbias."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return tiles.lookup(NAME, pass_, problem.dtype, head_dim, _architecture(problem))


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` in `problem.out_dtype` and ``lse`` fp32, -inf for rows that see nothing."""
    return _forward(problem, inputs, tile(problem, "forward"))


def bind(problem: Problem) -> Repeated:
    """`forward` for calls that are alike: all of this problem, with tensors of the same strides."""
    return Repeated(partial(_run, problem, tile(problem, "forward")))


def _run(problem: Problem, tile: TileConfig, inputs: Inputs, tape: Tape) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(problem, inputs, tile, tape)


def backward(
    problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor | None,
    dlse: torch.Tensor | None, needs: tuple[str, ...],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients of the inputs named in `needs`; `do` or `dlse` may be None. Repeatable bit for bit."""
    return _backward(problem, inputs, (out, lse), (do, dlse), needs, partial(tile, problem))


def bind_backward(problem: Problem, needs: tuple[str, ...]) -> Repeated:
    """`backward` for calls that are alike, of the tensors of `Inputs`, out, lse, do and dlse."""

    def run(tensors: tuple[Any, ...], tape: Tape) -> tuple[torch.Tensor, ...]:
        given, (out, lse, do, dlse) = Inputs._make(tensors[:-4]), tensors[-4:]
        return tuple(_backward(problem, given, (out, lse), (do, dlse), needs, partial(tile, problem), tape).values())

    return Repeated(run, tuple)
