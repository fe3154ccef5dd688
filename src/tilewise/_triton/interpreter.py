"""Triton's CPU interpreter beside NumPy 2.4, which no longer turns an array of one element into a Python integer.

Triton 3.6 keeps every scalar as such an array, and converts it so for the bounds of a loop.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def mend() -> None:
    """Let the interpreter convert its scalars."""
    interpreter._patch_lang_tensor = _patch_tensor_and_index
