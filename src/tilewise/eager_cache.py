"""Calls with a cache that were seen before: `eager` for `attention_with_kvcache`.

The key of a call is all that its checks and choices look at; lengths and tables are looked at anew where they are on
the CPU, or as the call asks for it. A backend with `bind_cache(problem)` may keep what it has worked out for a problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from . import cache_checks, dispatch, eager, served
from .kvcache import CacheInputs, CacheProblem, Rotary, is_latent
from .problem import moves, placed

Key: TypeAlias = tuple[Any, ...]
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# Names of arguments, in the order of `CacheInputs`; of the rest, those that have a place in the key.
_NEW = ("k_new", "v_new", "page_table", "cache_batch_idx", "cache_leftpad")
_OFFSETS = ("cu_seqlens_q",)
_SCALES = ("k_scale", "v_scale", "alibi_slopes", "sinks")
_OPTIONS = (
    "window", "causal", "softcap", "softmax_scale", "softmax_max", "num_splits", "split_size", "max_seqlen_q",
    "dropout_p", "return_lse", "out_dtype", "backend", "validate",
)  # fmt: skip
_calls: dict[Key, Call] = {}
_served: dict[Key, Call] = {}


class _NoRotary(NamedTuple):
    """The fields of a `Rotary` that was not given."""

    cos: None = None
    sin: None = None
    interleaved: bool = False
    positions: None = None


_NO_ROTARY = _NoRotary()


class Call:
    """A call that has been served, ready for the next one like it."""

    def __init__(self, problem: CacheProblem, inputs: CacheInputs) -> None:
        found = [x for name in cache_checks.METADATA if (x := getattr(inputs, name)) is not None]
        self._problem = problem
        # What is to be moved, or looked at, is so again in each call.
        self._moves = any(moves(x, problem.device) for x in found)
        self._reads = problem.options.validate or all(x.device.type == "cpu" for x in found)
        self._serve = _bound(problem)

    def __call__(self, tensors: Key) -> Results:
        """Output and LSE, for the tensors of `CacheInputs`."""
        inputs = CacheInputs(*tensors)
        if self._reads:
            cache_checks.metadata(self._problem, inputs)
        return self._serve(placed(inputs, cache_checks.METADATA) if self._moves else inputs)


def _bound(problem: CacheProblem) -> Callable[[CacheInputs], Results]:
    """The backend's function of the tensors."""
    backend = dispatch.module(dispatch.choose_cache(problem))
    if hasattr(backend, "bind_cache"):
        return backend.bind_cache(problem)

    def serve(inputs: CacheInputs) -> Results:
        with dispatch.plain_numerics(problem.device):
            return backend.attend_cache(problem, inputs)

    return serve


def find(tensors: Key, given: dict[str, Any]) -> tuple[Key | None, Call | None, Key]:
    """The key of a call, None if it must take the long way; the call itself, if one like it is known; its tensors.

    Args:
        tensors: q, k_cache, v_cache, cache_seqlens.
        given: all other arguments by name.
    """
    mask, rotary, window = given["mask"], given["rotary"], given["window"]
    tree = mask if isinstance(mask, torch.Tensor) else None
    turn = rotary if isinstance(rotary, Rotary) else _NO_ROTARY
    value = mask is None or tree is not None or served.is_value(mask)
    if eager.watched() or not value or given["score_mod"] is not None or given["bias"] is not None:
        return None, None, ()
    new, offsets, scales = ([given[name] for name in names] for names in (_NEW, _OFFSETS, _SCALES))
    tensors = (*tensors, *new, turn.cos, turn.sin, turn.positions, *offsets, tree, *scales)
    asked = (*[given[name] for name in _OPTIONS], None if tree is not None else mask, turn.interleaved)
    # What only looks like a Rotary, or like a flag, is no call that was served.
    odd = (rotary is None or turn is rotary, tuple(map(type, window)) if type(window) is tuple else None)
    try:
        traits = tuple([None if x is None else (*served.traits(x), x.requires_grad) for x in tensors])
        key = (traits, is_latent(*tensors[1:3]), torch.is_grad_enabled(), asked, tuple(map(type, asked)), odd)
        return key, _calls.get(key), tensors
    except (AttributeError, RuntimeError, TypeError):
        # No dense tensor, or an option that is no value: what is wrong, if anything, is said on the long way.
        return None, None, ()


def known(key: Key | None) -> Call | None:
    """What has served an operator's calls with this key (`served.key_of`)."""
    return None if key is None else _served.get(key)


def remember(key: Key, problem: CacheProblem, inputs: CacheInputs) -> None:
    """Remember a call that has just been served, for the next one with this key."""
    if problem.device.type in ("cpu", "cuda") and not any(x is not None and x.is_neg() for x in inputs):
        served.keep(_calls, key, Call(problem, inputs))


def remember_served(key: Key | None, problem: CacheProblem, inputs: CacheInputs) -> None:
    """The same of an operator's call."""
    if key is not None and served.lasting(problem.options, problem.device):
        served.keep(_served, key, Call(problem, inputs))


def forget() -> None:
    """Forget every call."""
    _calls.clear()
    _served.clear()
