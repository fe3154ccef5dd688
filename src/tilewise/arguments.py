"""From the public signature to a validated `Problem`: defaults, shorthands, checks. The one place that knows both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import checks, dropout
from .errors import ArgumentError, DtypeError, UnsupportedError, fail
from .interning import constant
from .mask_algebra import BOTTOM_RIGHT, TOP_LEFT, Mask
from .masks import Causal, Full, Window, as_mask
from .problem import Inputs, Options, Problem
from .score_mods import ScoreMod


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: Any = None,
    mask: Any = None,
    score_mod: ScoreMod | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    validate: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[Problem, Inputs, bool]:
    """The problem that these arguments pose, its tensors, and whether the LSE was asked for.

    Raises:
        tilewise.errors.TilewiseError: see `tilewise.attention`.
    """
    inputs = Inputs(q, k, v, bias, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k, seqused_k)
    packed = any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    checks.tensors(inputs, packed)
    if packed:
        checks.offsets(inputs, max_seqlen_q, max_seqlen_k)
    checks.flags(deterministic=deterministic, return_lse=return_lse, validate=validate)
    needs = (_need_gradients(inputs[:6]), _need_gradients((bias, alibi_slopes)))
    options = options_of(
        q.dtype, needs, causal=causal, window=window, mask=mask, score_mod=score_mod, softcap=softcap,
        softmax_scale=softmax_scale, dropout_p=dropout_p, deterministic=deterministic, out_dtype=out_dtype,
        backend=backend, validate=validate,
    )  # fmt: skip
    problem = Problem.of(inputs, options, max_seqlen_q or 0, max_seqlen_k or 0)
    checks.modifiers(problem, inputs)
    if problem.has_dropout or dropout_seed is not None:
        seed = seed_tensor(dropout_seed, q.device)
        inputs = inputs._replace(dropout_seed=seed if problem.has_dropout else None)
    return problem, inputs, return_lse


def _need_gradients(tensors: Iterable[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def options_of(dtype: torch.dtype, needs: tuple[bool, bool], **asked: Any) -> Options:
    """The options of a call whose q has this dtype, checked, shorthands resolved; what is missing was not asked for.

    `needs` are `needs_grad` and `needs_scores_grad`.
    """
    total = _mask(asked.get("causal", False), asked.get("window"), asked.get("mask"))
    return Options(
        mask=total,
        align=total.alignment() or BOTTOM_RIGHT,
        score_mod=_score_mod(asked.get("score_mod"), needs[0]),
        softcap=_positive("softcap", asked.get("softcap"), dtype),
        softmax_scale=_positive("softmax_scale", asked.get("softmax_scale"), dtype),
        dropout_keep=_dropout_keep(asked.get("dropout_p", 0.0)),
        deterministic=asked.get("deterministic", False),
        out_dtype=_out_dtype(asked.get("out_dtype"), dtype),
        backend=asked.get("backend"),
        needs_grad=needs[0],
        needs_scores_grad=needs[1],
        validate=asked.get("validate", False),
    )


def _mask(causal: bool | str, window: Any, mask: Any) -> Mask:
    total: Mask = Full() if mask is None else as_mask(mask)
    for part in (_causal(causal), _window(window)):
        if part is not None:
            total = part if isinstance(total, Full) else total & part
    return total


def _causal(causal: Any) -> Mask | None:
    if causal is False:
        return None
    if causal is True:
        return Causal(BOTTOM_RIGHT)
    if not isinstance(causal, str) or causal not in (BOTTOM_RIGHT, TOP_LEFT):
        fix = "True is bottom-right: the last query sees the last key"
        fail(ArgumentError, "causal", shown(causal), "False, True, 'bottom_right' or 'top_left'", fix)
    return Causal(causal)


def _window(window: Any) -> Mask | None:
    if window is None or isinstance(window, Window):
        return window
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fix = "one-sided windows are (left, 0) or (left, None)"
        fail(ArgumentError, "window", shown(window), "a pair (left, right), a Window, or None", fix)
    return Window(*window)


def _score_mod(score_mod: Any, needs_grad: bool) -> ScoreMod | None:
    if score_mod is None:
        return None
    if not isinstance(score_mod, ScoreMod):
        fail(ArgumentError, "score_mod", type(score_mod).__name__, "a tilewise.ScoreMod", "wrap it: ScoreMod(fn, dfn)")
    if needs_grad and score_mod.dfn is None:
        got = "a ScoreMod without dfn, in a call that needs gradients"
        fix = "pass dfn(ds, s, b, h, q, k, *aux), or call under torch.no_grad()"
        fail(UnsupportedError, "score_mod", got, "ScoreMod(fn, dfn) where gradients are needed", fix)
    return score_mod


def shown(value: Any) -> str:
    """A refused value, short: tensors by their type, for their values may live on a GPU."""
    return type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)[:60]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _positive(name: str, value: Any, dtype: torch.dtype) -> float | None:
    """A scale or cap as a float that the compute dtype can hold: what it would round to 0 or infinity is refused."""
    if value is None:
        return None
    value = constant(value) if is_number(value) else value
    held = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    if not is_number(value) or not held.tiny <= value <= held.max:
        want = f"a Python number in [{held.tiny:.1e}, {held.max:.1e}], or None"
        fail(ArgumentError, name, shown(value), want, "pass None for the default, float(x) for numbers of NumPy")
    return float(value)


def _dropout_keep(dropout_p: Any) -> int:
    if not is_number(dropout_p) or not 0.0 <= dropout_p < 1.0:
        want = "a probability of dropping in [0, 1), a Python number"
        fail(ArgumentError, "dropout_p", shown(dropout_p), want, "pass 0.0 for no dropout")
    return dropout.keep_threshold(constant(dropout_p))


def _out_dtype(out_dtype: Any, dtype: torch.dtype) -> torch.dtype | None:
    if out_dtype is None or out_dtype == dtype:
        return None
    if out_dtype is not torch.float32 or dtype == torch.float64:
        fix = "float32 gives unrounded partial results for merge_states"
        fail(DtypeError, "out_dtype", repr(out_dtype), f"q's dtype {dtype}, or float32 for 16-bit inputs", fix)
    return torch.float32


def seed_tensor(seed: Any, device: torch.device) -> torch.Tensor:
    """The dropout seed as a scalar int64 tensor; drawn from torch's generator of the device where none is given."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        return checks.seed(seed, device)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        want = "a Python int that fits int64, a scalar int64 tensor, or None"
        fail(
            ArgumentError, "dropout_seed", shown(seed), want, "pass int(seed); seed a generator with torch.manual_seed"
        )
    return torch.full((), seed, dtype=torch.int64, device=device)
