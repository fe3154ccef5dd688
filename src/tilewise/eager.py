"""Calls seen before: in eager mode, a call like an earlier one skips every check and choice that the earlier one took.

The key of a call is all that they look at: shapes, strides, dtypes and devices of its tensors, whether it needs a
gradient, of bias or slopes too, and the options with their types (1 == True). What is looked up is the problem, the
backend chosen for it and its launch. Only values are looked at anew: lengths on the CPU, the seed of dropout.

*Not here*, and so on the long way through the operator: options that hold tensors or functions, subclasses of tensors,
and everything that watches or rewrites operators (compilation, transforms, modes, tracing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from . import arguments, autograd, served
from .problem import Inputs, Problem
from .served import PLAIN, Key, Served, Tensors, is_value, traits

_calls: dict[Key, Call] = {}


class Call(Served):
    """A call that has been served, ready for the next one like it."""

    def __init__(self, problem: Problem, inputs: Inputs, return_lse: bool) -> None:
        super().__init__(problem, inputs)
        self._return_lse = return_lse
        self._needs_grad, self._seeded = problem.options.needs_grad, problem.has_dropout
        given = len(inputs) if any(x is not None for x in inputs[3:]) else 3
        # Autograd takes its time for each argument, None included.
        self.absent = (None,) * (len(inputs) - given)
        self._given = given
        self.static = (problem.options.encode([]), problem.seqlen_q, problem.seqlen_k)

    def __call__(self, tensors: Tensors, seed: Any) -> Any:
        """What the entry point returns, for the tensors of `Inputs` (the seed apart)."""
        if self._seeded or seed is not None:
            device = self.problem.device
            drawn = arguments.seed_tensor(seed, device).to(device)
            if self._seeded:
                tensors = (*tensors[:6], drawn, *tensors[7:])
        tensors = self.ready(tensors)
        if self._needs_grad:
            out, lse = autograd.apply_eager(self, *tensors[: self._given])
        else:
            out, lse = self.forward(tensors)
        return (out, lse) if self._return_lse else out

    def gradients(self, needs: str, tensors: Tensors) -> tuple[torch.Tensor, ...] | None:
        """`backward`, or None if its operator must be called."""
        if torch.compiler.is_compiling() or watched() or torch._C._is_any_autocast_enabled():
            return None
        out, _, do, dlse = tensors[-4:]
        kind = torch._C._dispatch_keys(out)
        for x in (do, dlse):
            if x is not None and (type(x) not in PLAIN or torch._C._dispatch_keys(x) != kind):
                return None
        return self.backward(needs, tensors)


def watched() -> bool:
    """Whether anything watches or rewrites operators."""
    c = torch._C
    return (
        c._len_torch_dispatch_stack() > 0
        or c._len_torch_function_stack() > 0
        or c._functorch.maybe_current_level() is not None
        or c._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def find(tensors: Tensors, asked: tuple[Any, ...]) -> tuple[Key | None, Call | None]:
    """The key of a call, None if it must take the long way; and the call itself, if one like it was remembered.

    Args:
        tensors: of `Inputs`, the seed apart.
        asked: everything else that was passed; mask, window and score_mod first.
    """
    if watched():
        return None, None
    q, k, v, bias, slopes, sinks, _, cu_seqlens_q, *_ = tensors
    mask, window, score_mod = asked[:3]
    # A tensor that has outlived its transform is still wrapped.
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    plain = type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    if not plain or wrapped(q) or wrapped(k) or wrapped(v):
        return None, None
    if score_mod is not None or not (mask is None or is_value(mask)):
        return None, None
    try:
        others, learned, scores = None, False, False
        if bias is not None or slopes is not None or sinks is not None or cu_seqlens_q is not None:
            others = tuple([None if x is None else traits(x) for x in tensors[3:]])
            scores = any(x is not None and x.requires_grad for x in (bias, slopes))
            learned = scores or (sinks is not None and sinks.requires_grad)
        key = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device, others,
            torch._C.is_grad_enabled() and (learned or q.requires_grad or k.requires_grad or v.requires_grad),
            scores, asked, tuple(map(type, asked)), tuple(map(type, window)) if type(window) is tuple else None,
        )  # fmt: skip
        return key, _calls.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # No dense tensor, or an option that is no value: what is wrong, if anything, is said on the long way.
        return None, None


def remember(key: Key, problem: Problem, inputs: Inputs, return_lse: bool) -> None:
    """Remember a call that has just been served, for the next one with this key."""
    present = [x for x in inputs if x is not None]
    # Values that are to be negated when read are met as operators alone meet them. From public functions they come with
    # a stride of 2, which only a head dim of 1 hides.
    lazy = any(x.is_neg() for x in present) or 1 in (problem.head_dim, problem.head_dim_v)
    if lazy or problem.device.type not in ("cpu", "cuda"):
        return
    served.keep(_calls, key, Call(problem, inputs, return_lse))


def forget() -> None:
    """Forget every call, those of operators too."""
    _calls.clear()
    served.forget()
