"""The portable backend: kernels in Triton, for any GPU that Triton serves and for its CPU interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from .. import errors, tiles
from ..kernels import compiled
from ..kernels.replay import Repeated, Tape
from ..kvcache import CacheInputs, CacheProblem
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from .cache_launch import attend_cache as _attend_cache
from .cache_launch import shared
from .forward import forward as _forward
from .gradients import backward as _backward

NAME = "triton"

if triton.knobs.runtime.interpret:
    from ..kernels import interpreter

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
    key = (problem.dtype, max(problem.head_dim, problem.head_dim_v), _architecture(problem))
    special = "dropout" if problem.has_dropout else "softcap" if problem.options.softcap is not None else None
    found = tiles.find(NAME, f"{pass_} {special}", *key) if special else None
    return found or tiles.lookup(NAME, pass_, *key)


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


# Packed rows (query rows times heads of a group) up to which there is a tile of its own.
_FEW = (16, 64)


def cache_unsupported_reasons(problem: CacheProblem) -> list[str]:
    """Why this backend cannot serve a call with a cache; empty if it can."""
    within = replace(problem.attention, head_dim=min(problem.attention.head_dim, _MAX_HEAD_DIM))
    reasons = unsupported_reasons(within)
    capability = problem.attention.capability
    if problem.quantized and capability is not None and capability < (8, 9):
        reasons.append(f"a float8_e4m3fn cache on compute capability {capability[0]}.{capability[1]}, before 8.9")
    return reasons


def cache_tile(problem: CacheProblem, shared: bool = False) -> TileConfig:
    """Tile of a call with a cache, by the packed rows of its longest sequence.

    Args:
        problem: the call.
        shared: whether its values are the first dims of its keys, which leaves room for larger tiles.
    """
    call = problem.attention
    rows = call.seqlen_q * call.group_size
    size = next((few for few in _FEW if rows <= few), 128)
    # What is loaded decides, unless it becomes twice as large as other caches are.
    dtype = call.dtype if call.dtype == torch.float32 else problem.cache_dtype
    key = (dtype, max(call.head_dim, call.head_dim_v), _architecture(call))
    found = tiles.find(NAME, f"latent {size}", *key) if shared else None
    return found or tiles.lookup(NAME, f"decode {size}", *key)


def attend_cache(
    problem: CacheProblem, inputs: CacheInputs, tile: TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` in `out_dtype` and ``lse`` fp32 of a call, after its new keys and values are in the cache."""
    return _attend_cache(problem, tile or cache_tile(problem, shared(inputs)), inputs, Tape())


def bind_cache(problem: CacheProblem) -> Callable[[CacheInputs], tuple[torch.Tensor, ...]]:
    """`attend_cache` for calls that are alike: all of this problem, with tensors of the same strides."""
    bound = {
        one: Repeated(partial(_attend_cache, problem, cache_tile(problem, one)), CacheInputs._make)
        for one in (False, True)
    }
    return lambda inputs: bound[shared(inputs)](inputs)
