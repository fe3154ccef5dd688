"""Triton's CPU interpreter, mended: it runs beside NumPy 2.4, without NumPy's warnings, and several times faster.

Triton 3.6 keeps every scalar as an array of one element, and patches its own language anew at each call of a device
function. Here a language is patched once per launch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_splat = interpreter.InterpreterBuilder.create_splat
_launch = interpreter.GridExecutor.__call__
_patched: set[int] = set()


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    # NumPy 2.4 turns no array of one element into a Python integer, as the bounds of a loop need.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_once(fn: Any) -> Any:
    seen = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
    if seen and seen <= _patched:
        return interpreter._LangPatchScope()
    _patched.update(seen)
    return _patch_language(fn)


def _splat_truth(self: Any, wanted: Any, scalar: Any) -> Any:
    made = _splat(self, wanted, scalar)
    if scalar.data.dtype == bool:
        # The outcome of a comparison carries the type of what was compared; a mask of Triton 3.9 must be of booleans.
        made.data = made.data.astype(bool)
    return made


def _launch_quietly(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    # A GPU warns of no NaN either.
    with np.errstate(all="ignore"):
        return _launch(self, *args, **kwargs)


def mend() -> None:
    """Replace the parts of the interpreter that need it."""
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    interpreter._patch_lang = _patch_once
    interpreter.InterpreterBuilder.create_splat = _splat_truth
    interpreter.GridExecutor.__call__ = _launch_quietly
