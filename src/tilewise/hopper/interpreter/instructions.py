"""What the kernels say in PTX, as functions of arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from .memory import as_float, tensor


def _arrays(args: Sequence[Any]) -> list[np.ndarray]:
    return list(np.broadcast_arrays(*(x.handle.data for x in args)))


def _same(machine: Any, args: Sequence[Any], dtype: Any) -> Any:
    return args[0]


def _bits16(x: Any, dtype: Any) -> np.ndarray:
    return x.to(dtype).handle.data.view(np.uint16).astype(np.uint32)


def _pack(dtype: Any) -> Callable[..., Any]:
    def run(machine: Any, args: Sequence[Any], _: Any) -> Any:
        low, high = (_bits16(x, dtype) for x in args)
        return tensor((low | high << 16).view(np.int32), tl.int32)

    return run


def _sum_of_zeros(dtype: Any) -> Callable[..., Any]:
    def run(machine: Any, args: Sequence[Any], _: Any) -> Any:
        words = [np.ascontiguousarray(a).view(np.uint16) for a in _arrays(args)]
        total = sum(as_float(x.view(np.float16) if dtype == tl.float16 else x, dtype) * np.float32(0) for x in words)
        # NaN has every bit of the exponent, in either type.
        return tensor(np.where(np.isnan(total), 0x7FFF, 0).astype(np.uint16).view(np.int32), tl.int32)

    return run


def _counter(pointer: Any) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(int(pointer.handle.data.item()))


def _await(machine: Any, args: Sequence[Any], dtype: Any) -> Any:
    """Until the counter is the second."""
    counter, turn = _counter(args[0]), int(args[1].handle.data.item())
    machine.current.wait_until(lambda: counter.value == turn)
    return args[1]


def _pass_on(machine: Any, args: Sequence[Any], dtype: Any) -> Any:
    """Count on, once what TMA was asked for is in memory."""
    counter, stores = _counter(args[0]), tuple(machine.current.stores)
    machine.current.wait_until(lambda: all(store.written for store in stores))
    counter.value += 1
    return tensor(np.zeros(1, np.int32), tl.int32)


def _spread_signs(first: int) -> Callable[..., Any]:
    def run(machine: Any, args: Sequence[Any], _: Any) -> Any:
        words = _arrays(args)[0].astype(np.int32).view(np.uint32)
        low, high = ((words >> np.uint32(8 * byte + 7)) & np.uint32(1) for byte in (first, first + 2))
        return tensor((low * np.uint32(0xFFFF) + high * np.uint32(0xFFFF0000)).view(np.int32), tl.int32)

    return run


def _capped(machine: Any, args: Sequence[Any], dtype: Any) -> Any:
    """P and dS, as `recompute.capped` says it."""
    s, dp, lse2, delta, inverse, cap = _arrays(args)
    tanh = np.tanh(s * inverse)
    p = np.exp2(tanh * cap - lse2)
    return tuple(tensor(x, tl.float32) for x in (p, (dp - delta) * p * (1 - tanh * tanh)))


# By what a text has that no other has.
INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    r"^mov\.b32 \$0, \$1;$": _same,
    r"^cvt\.rn\.bf16x2": _pack(tl.bfloat16),
    r"^cvt\.rn\.f16x2": _pack(tl.float16),
    r"prmt\.b32 .* 0xAA88": _spread_signs(0),
    r"prmt\.b32 .* 0xBB99": _spread_signs(1),
    r"fma\.rn\.bf16x2": _sum_of_zeros(tl.bfloat16),
    r"fma\.rn\.f16x2": _sum_of_zeros(tl.float16),
    r"mul\.rn\.f32 \$1, d, t": _capped,
    r"ld\.acquire\.gpu": _await,
    r"red\.release\.gpu": _pass_on,
}
