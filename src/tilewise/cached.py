"""From a checked call with a cache to a backend, through the operators of `cache_operators`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from . import autograd, cache_checks, dispatch, eager_cache, served
from .errors import UnsupportedError, fail
from .kvcache import CacheInputs, CacheProblem, Static, is_latent
from .problem import Options, placed
from .problem import decode as decode_options

_N_INPUTS = len(CacheInputs._fields)


def _problem(arguments: Sequence[Any]) -> tuple[CacheProblem, CacheInputs]:
    """The problem that an operator's arguments describe."""
    inputs = CacheInputs(*arguments[:_N_INPUTS])
    extras, spec, static, max_seqlen_q = arguments[_N_INPUTS:]
    options = decode_options(spec, tuple(extras))
    return CacheProblem.of(inputs, options, _static(static), max_seqlen_q), inputs


@lru_cache(maxsize=1024)
def _static(spec: str) -> Static:
    return Static(*ast.literal_eval(spec))


def serve_operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What both operators do."""
    static = (*arguments[_N_INPUTS + 1 :], is_latent(*arguments[1:3]))
    key = served.key_of(arguments[:_N_INPUTS], arguments[_N_INPUTS], static)
    if (known := eager_cache.known(key)) is not None:
        return known(arguments[:_N_INPUTS])
    problem, inputs = _problem(arguments)
    cache_checks.metadata(problem, inputs)
    results = serve(problem, inputs)
    eager_cache.remember_served(key, problem, inputs)
    return results


def serve(problem: CacheProblem, inputs: CacheInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The call by the best backend, whatever lengths and tables hold."""
    backend = dispatch.module(dispatch.choose_cache(problem))
    with dispatch.plain_numerics(problem.device):
        return backend.attend_cache(problem, placed(inputs, cache_checks.METADATA))


def results(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of both operators, without values."""
    problem, inputs = _problem(arguments)
    call, q = problem.attention, inputs.q
    out = q.new_empty(call.out_shape(q), dtype=call.out_dtype)
    return out, q.new_empty(call.lse_shape(q), dtype=call.compute_dtype)


def _refuse_transforms(inputs: CacheInputs) -> None:
    """Raise if the call is mapped, or an input carries a tangent: a cache that is written has neither."""
    if forward_ad._current_level >= 0:
        names = ("q", "k_cache", "v_cache", "k_new", "v_new")
        autograd.refuse_tangents({name: getattr(inputs, name) for name in names})
    if torch._C._functorch.maybe_current_level() is not None:
        got, fix = "a call under torch.vmap or another transform", "fold the mapped dimension into the batch"
        fail(UnsupportedError, "attention_with_kvcache", got, "calls of plain tensors", fix)


def attend(problem: CacheProblem, inputs: CacheInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a checked call; its new keys and values are in the cache afterwards."""
    if not torch.compiler.is_compiling():
        _refuse_transforms(inputs)
    extras: list[torch.Tensor] = []
    options: Options = problem.options
    spec = options.encode(extras)
    ops = torch.ops.tilewise
    operator = ops.append_and_attend_cache if problem.appends else ops.attend_cache
    return operator(*inputs, extras, spec, repr(tuple(problem.static)), problem.attention.seqlen_q)
