"""Triton's CPU interpreter, mended: it runs beside NumPy 2.4, without NumPy's warnings, and several times faster.

Triton 3.6 keeps every scalar as an array of one element, and patches its own language anew at each call of a device
function. Here a language is patched once per launch, what a type says of itself is worked out once, and sums are not
computed again in 64 bits to see whether they overflow.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_splat = interpreter.InterpreterBuilder.create_splat
_launch = interpreter.GridExecutor.__call__
_convert = interpreter._convert_float
_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype[Any]] = {}
_FLOATS = {
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp32": torch.float32,
}  # fmt: skip
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


def _convert_as_torch(x: Any, before: Any, after: Any, rounding: Any) -> Any:
    """Conversions from and to 8 bits: Triton's forgets the carry where rounding ends in the next power of two."""
    if not (before.is_fp8() or after.is_fp8()) or not {str(before), str(after)} <= _FLOATS.keys():
        return _convert(x, before, after, rounding)
    raw = torch.from_numpy(np.ascontiguousarray(x).view(getattr(np, f"int{before.primitive_bitwidth}")))
    made = raw.view(_FLOATS[str(before)]).float().to(_FLOATS[str(after)])
    bits = after.primitive_bitwidth
    return made.view(getattr(torch, f"int{bits}")).numpy().view(getattr(np, f"uint{bits}")).reshape(x.shape)


def _numpy_dtype_of(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.scalar
    if scalar.name not in _numpy_dtypes:
        _numpy_dtypes[scalar.name] = _numpy_dtype(scalar)
    return _numpy_dtypes[scalar.name]


@cache
def _facts(sizes: tuple[int, ...]) -> tuple[Any, int, str, Any, Any]:
    """Of a shape: itself and its size as a type has them, its name, and both as a tensor has them."""
    shape = tl.core.tuple(sizes)
    of_tensor = tl.core.tuple([tl.constexpr(size) for size in sizes])
    return shape, tl.core.validate_block_shape(sizes), str(shape), of_tensor, tl.constexpr(math.prod(sizes))


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    if not len(shape):
        raise TypeError("a block has a dimension at least")
    self.element_ty = element_ty
    self.shape, self.numel, name, _, _ = _facts(_sizes(shape))
    self.name = f"<{name}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, of: Any) -> None:
    self.handle, self.type, self.dtype = handle, of, of.scalar
    _, _, _, self.shape, self.numel = _facts(tuple(of.shape) if of.is_block() else ())


def begin() -> None:
    """A launch begins: the last one's patches are gone."""
    _patched.clear()


def _launch_quietly(self: Any, *args: Any, **kwargs: Any) -> Any:
    begin()
    # A GPU warns of no NaN either.
    with np.errstate(all="ignore"):
        return _launch(self, *args, **kwargs)


def mend() -> None:
    """Replace the parts of the interpreter that need it."""
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    interpreter._patch_lang = _patch_once
    interpreter.InterpreterBuilder.create_splat = _splat_truth
    interpreter.GridExecutor.__call__ = _launch_quietly
    interpreter._convert_float = _convert_as_torch
    interpreter._get_np_dtype = _numpy_dtype_of
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
