"""From the public signature of `attention_with_kvcache` to a validated `CacheProblem` and its tensors."""

from __future__ import annotations

from typing import Any

import torch

from . import cache_checks, checks
from .arguments import is_number, options_of, shown
from .errors import ArgumentError, UnsupportedError, fail
from .interning import constant
from .kvcache import SPLIT_UNIT, CacheInputs, CacheProblem, Rotary, Static, servable
from .masks import parts
from .problem import Inputs, Options

_TENSORS = (
    "k_new", "v_new", "page_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "k_scale", "v_scale",
    "alibi_slopes", "sinks",
)  # fmt: skip
# As softmax_max: scores beyond it differ by more than fp32 shows.
_LARGEST = 1e6
_OPTIONS = ("causal", "window", "score_mod", "softcap", "softmax_scale", "out_dtype", "backend", "validate")


def prepare(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor, **asked: Any
) -> tuple[CacheProblem, CacheInputs]:
    """The problem that a call poses, and its tensors.

    Args:
        q, k_cache, v_cache, cache_seqlens: as in `attention_with_kvcache`.
        asked: its other arguments, by name; those left out were not asked for.

    Raises:
        tilewise.errors.TilewiseError: see `attention_with_kvcache`.
    """
    _refuse(asked)
    cos, sin, interleaved, positions = _rotary(asked.get("rotary"))
    mask = asked.get("mask")
    tree = mask if isinstance(mask, torch.Tensor) else None
    inputs = CacheInputs(
        q, k_cache, v_cache, cache_seqlens, rotary_cos=cos, rotary_sin=sin, rotary_positions=positions, tree=tree,
        **{name: asked.get(name) for name in _TENSORS},
    )  # fmt: skip
    cache_checks.tensors(inputs, asked.get("max_seqlen_q"))
    checks.flags(validate=asked.get("validate", False), return_lse=asked.get("return_lse", False))
    _no_gradients(inputs)
    given = {name: asked[name] for name in _OPTIONS if name in asked}
    options = options_of(q.dtype, (False, False), mask=None if tree is not None else mask, **given)
    _servable(options)
    problem = CacheProblem.of(inputs, options, _static(asked, interleaved, inputs), asked.get("max_seqlen_q") or 0)
    if tree is not None:
        cache_checks.tree(tree, problem.attention.batch, problem.attention.seqlen_q)
    like = Inputs(q, k_cache, v_cache, alibi_slopes=inputs.alibi_slopes, sinks=inputs.sinks)
    checks.modifiers(problem.attention, like)
    return problem, inputs


def _refuse(asked: dict[str, Any]) -> None:
    """Arguments of `attention` that a cache has no meaning, or no kernel, for."""
    if asked.get("bias") is not None:
        fix = "use alibi_slopes=, score_mod= or a predicate, which know positions and not columns"
        fail(UnsupportedError, "bias", "a tensor of columns, beside a cache that grows", "no bias", fix)
    if asked.get("dropout_p"):
        fail(UnsupportedError, "dropout_p", shown(asked["dropout_p"]), "0.0: a cache is for inference", "leave it out")


def _rotary(rotary: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, bool, torch.Tensor | None]:
    """The fields of a `Rotary`."""
    if rotary is None:
        return None, None, False, None
    if not isinstance(rotary, Rotary):
        fail(ArgumentError, "rotary", type(rotary).__name__, "a tilewise.Rotary", "wrap the tables: Rotary(cos, sin)")
    checks.flags(**{"rotary.interleaved": rotary.interleaved})
    for name in ("cos", "sin"):
        checks.plain(f"rotary.{name}", getattr(rotary, name))
    return rotary.cos, rotary.sin, rotary.interleaved, rotary.positions


def _no_gradients(inputs: CacheInputs) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None and x.requires_grad:
            want = "tensors that need no gradient: a cache is for inference"
            fail(UnsupportedError, name, "a tensor that requires a gradient", want, "call under torch.no_grad()")


def _servable(options: Options) -> None:
    if not servable(options.mask):
        odd = [type(part).__name__ for part in parts(options.mask) if not servable(part)]
        want = "causal, window, PrefixLM, predicates, and a boolean tree [B, Sq, Sq]"
        fix = "lists of keys grow stale with the cache: look them up in a predicate, Predicate(fn, aux=(ids,))"
        fail(UnsupportedError, "mask", " and ".join(odd), want, fix)


def _static(asked: dict[str, Any], interleaved: bool, inputs: CacheInputs) -> Static:
    num_splits, split_size = (_count(name, asked.get(name)) for name in ("num_splits", "split_size"))
    if num_splits is not None and split_size is not None:
        fix = "num_splits cuts each row into that many parts, split_size into parts of that many keys"
        fail(ArgumentError, "num_splits, split_size", "both", "one of them, or neither", fix)
    if split_size is not None and split_size % SPLIT_UNIT:
        want = f"a multiple of {SPLIT_UNIT}"
        fix = f"round it to {-(-split_size // SPLIT_UNIT) * SPLIT_UNIT}"
        fail(ArgumentError, "split_size", split_size, want, fix)
    return Static(
        rotary_interleaved=interleaved,
        k_scale=cache_checks.scale("k_scale", inputs.k_scale, inputs),
        v_scale=cache_checks.scale("v_scale", inputs.v_scale, inputs),
        num_splits=num_splits,
        split_size=split_size,
        softmax_max=_finite("softmax_max", asked.get("softmax_max")),
    )


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        fail(ArgumentError, name, shown(value), "a Python int >= 1, or None", "leave it out: the backend decides")
    return constant(value)


def _finite(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value) or not abs(value) <= _LARGEST:
        want = f"a Python number within ±{_LARGEST:g}, or None"
        fail(ArgumentError, name, shown(value), want, "pass a typical largest score of the model")
    return float(constant(value))
