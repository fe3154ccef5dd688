"""Shared memory and TMA as numbers: raw bits in NumPy arrays, poisoned until written, and what moves them.

Layouts are ignored: a tile is where its indices say. What a partition writes itself is marked until it fences, and TMA
and matrix products refuse to read what is marked. TMA fills with zeros what lies outside a tensor, and leaves it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_BITS = {2: torch.int16, 4: torch.int32}
# TMA moves 16 bytes at a time, and where a box begins inside a row must be one of those.
_UNIT = 16
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int32: tl.int32}


def plain(x: Any) -> Any:
    """A compile-time value, or a tensor of one element, as Python's; lists and tuples of them as lists."""
    if isinstance(x, (list, tuple)) and not hasattr(x, "handle"):
        return [plain(item) for item in x]
    if isinstance(x, tl.constexpr):
        return plain(x.value)
    return x.handle.data.item() if isinstance(x, tl.tensor) else x


def numpy_type(dtype: Any) -> np.dtype[Any]:
    """What an element is kept as: bits for what NumPy does not know."""
    return np.dtype(
        {"bf16": "uint16", "fp16": "float16", "fp32": "float32", "int1": "bool"}.get(str(dtype), str(dtype))
    )


def as_float(data: np.ndarray, dtype: Any) -> np.ndarray:
    """16-bit numbers as fp32."""
    if dtype == tl.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def tensor(data: np.ndarray, dtype: Any) -> Any:
    """An array as a value of the interpreter."""
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), dtype), tl.block_type(dtype, list(data.shape)))


class BlockType:
    """Of a descriptor's box."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape = list(shape)
        self.nbytes = int(np.prod(self.shape)) * dtype.primitive_bitwidth // 8


class Descriptor:
    """A tensor map: a box at any coordinates of a strided tensor."""

    def __init__(self, given: Any) -> None:
        base: torch.Tensor = given.base
        self.dtype, self.layout = TYPES[base.dtype], given.layout
        self.block_shape = [int(n) for n in given.block_shape]
        self.block_type = BlockType(self.block_shape, self.dtype)
        self.shape = [int(n) for n in given.shape]
        view = torch.as_strided(base, self.shape, [int(n) for n in given.strides])
        self._size = base.element_size()
        self._memory = view.view(_TORCH_BITS[self._size]).numpy().view(_BITS[self._size])

    def _inside(self, coord: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of a box, which part lies inside, in the tensor and in the box."""
        starts = plain(list(coord))
        if len(starts) != len(self.shape):
            raise RuntimeError(f"{len(starts)} coordinates for a tensor map of rank {len(self.shape)}")
        if starts[-1] * self._size % _UNIT:
            raise RuntimeError(f"a box begins at element {starts[-1]} of a row, which is no multiple of {_UNIT} bytes")
        there, here = [], []
        for start, box, length in zip(starts, self.block_shape, self.shape, strict=True):
            first, last = max(start, 0), max(min(start + box, length), max(start, 0))
            there.append(slice(first, last))
            here.append(slice(first - start, last - start))
        return tuple(there), tuple(here)

    def load(self, coord: Sequence[Any]) -> np.ndarray:
        """The box, as bits."""
        box = np.zeros(self.block_shape, _BITS[self._size])
        there, here = self._inside(coord)
        box[here] = self._memory[there]
        return box

    def store(self, coord: Sequence[Any], bits: np.ndarray, add: bool) -> None:
        """Write the box, or add it, where it lies inside."""
        there, here = self._inside(coord)
        bits = bits.reshape(self.block_shape).view(self._memory.dtype)
        if add:
            self._memory.view(np.float32)[there] += bits.view(np.float32)[here]
        else:
            self._memory[there] = bits[here]


class Shared:
    """Part of shared memory: `data` are its elements, as bits where NumPy lacks the type; of `marks` 1 is unfenced."""

    def __init__(self, dtype: Any, data: np.ndarray, marks: np.ndarray, layout: Any, machine: Any) -> None:
        self.dtype, self.layout = dtype, layout
        self.data, self.marks = data, marks
        self._machine = machine

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[Any], layout: Any, machine: Any) -> Shared:
        """Memory that holds NaN."""
        sizes, kind = plain(list(shape)), numpy_type(dtype)
        raw = np.full(int(np.prod(sizes)) * kind.itemsize, 0xFF, np.uint8)
        marks = np.zeros_like(raw).view(_BITS[kind.itemsize])
        return cls(dtype, raw.view(kind).reshape(sizes), marks.reshape(sizes), layout, machine)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Shared:
        return self

    def _part(self, view: Any) -> Shared:
        data, marks = view(self.data), view(self.marks)
        if data.size and not np.shares_memory(data, self.data):
            raise RuntimeError(f"a view {data.shape} of shared memory {self.data.shape} would be a copy")
        return Shared(self.dtype, data, marks, self.layout, self._machine)

    def index(self, at: Any, **_: Any) -> Shared:
        place = plain(at)
        if not 0 <= place < self.data.shape[0]:
            raise IndexError(f"part {place} of {self.data.shape[0]} in shared memory")
        return self._part(lambda x: x[place])

    def slice(self, start: Any, length: Any, dim: Any = 0, **_: Any) -> Shared:
        first, count, axis = plain(start), plain(length), plain(dim)
        if first < 0 or first + count > self.data.shape[axis]:
            raise IndexError(f"elements {first} to {first + count} of {self.data.shape[axis]} in shared memory")
        return self._part(lambda x: x[(slice(None),) * axis + (slice(first, first + count),)])

    def permute(self, order: Any, **_: Any) -> Shared:
        axes = plain(list(order))
        return self._part(lambda x: x.transpose(axes))

    def reshape(self, shape: Any, **_: Any) -> Shared:
        sizes = plain(list(shape))
        return self._part(lambda x: x.reshape(sizes))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any, **_: Any) -> Shared:
        kind, sizes = numpy_type(dtype), plain(list(shape))
        data, marks = self.data.view(kind).reshape(sizes), self.marks.view(_BITS[kind.itemsize]).reshape(sizes)
        return Shared(dtype, data, marks, layout, self._machine)

    _reinterpret = reinterpret

    def load(self, layout: Any = None, **_: Any) -> Any:
        return tensor(self.data.copy(), self.dtype)

    def store(self, value: Any, **_: Any) -> None:
        if list(value.shape) != self.shape:
            raise RuntimeError(f"a value of shape {list(value.shape)} for shared memory of shape {self.shape}")
        if value.dtype != self.dtype:
            raise RuntimeError(f"a value of {value.dtype} for shared memory of {self.dtype}")
        self.data[...] = value.handle.data
        self.marks[...] = 1
        self._machine.current.unfenced.append(self.marks)

    def land(self, bits: np.ndarray) -> None:
        """What TMA brings."""
        self.data.reshape(bits.shape).view(bits.dtype)[...] = bits

    def seen(self) -> np.ndarray:
        """The elements, as TMA and matrix products see them."""
        if self.marks.any():
            raise RuntimeError("shared memory is read by TMA or a matrix product without a fence after it was written")
        return self.data
