"""Launching again without asking again: of two calls alike in all but their tensors, the second changes pointers alone.

``kernel[grid](...)`` inspects every argument to find the compiled kernel, which for the many arguments of attention
takes longer than a small kernel runs. A `Tape` does a call's work and writes down what it took: memory, launches. If it
saw all of it, a `Replay` does the same for other tensors of the same shapes, strides and dtypes: allocate, put pointers
into place, hand the kernel to the driver.

*Not here*: what a call computes with PyTorch. A launch that reads a tensor which the tape did not see come is never
replayed, so whoever uses a tape need not say what is safe to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import getclosurevars
from typing import Any, NamedTuple, TypeAlias

import torch
import triton

from ..problem import Inputs
from . import counters

# What depends on addresses is kept for this many: an allocator hands out the same ones again and again.
_ADDRESSES = 64


class _Memory(NamedTuple):
    """Memory that a call takes; `fill`: what it must hold before kernels run, None for anything.

    `counts`: it is what `counters` has for a call.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: float | None
    counts: bool = False


class _Part(NamedTuple):
    """Where an argument lies: so many bytes after the start of a tensor of the call.

    `misaligned`: address bits that must be 0, because the kernel was compiled for that.
    """

    tensor: int
    offset: int
    misaligned: int


Find: TypeAlias = Callable[[torch.Tensor], "_Part | None"]


class _Change(NamedTuple):
    """An argument that differs from call to call: in a record (a tuple of arguments) if `inside` is not None."""

    place: int
    inside: int | None
    part: _Part
    encode: Callable[[int], Any] | None


class _Descriptors:
    """TMA descriptors of one tensor, by its address."""

    def __init__(self, given: Any, meta: Any) -> None:
        if meta is None or meta["fp4_padded"] or meta.get("is_im2col") or getattr(given, "round_f32_to_tf32", False):
            raise _Unknown
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as HOST

        utils = triton.runtime.driver.active.utils
        self._fill = getattr(utils, "fill_tma_descriptor", None) or utils.fill_tma_descriptor_tiled
        kind = (meta["swizzle"], meta["elem_size"], HOST[meta["elem_type"]], meta["block_size"])
        self._layout = (*kind, list(given.shape), list(given.strides), int(given.padding == "nan"))
        self._made: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        made = self._made.get(address)
        if made is None:
            if len(self._made) >= _ADDRESSES:
                self._made.clear()
            made = self._made[address] = self._fill(address, *self._layout)
        return made


class _Unknown(Exception):
    """A launch reads what the tape has not seen come, or this Triton launches in a way that is not known here."""


class Replay:
    """A call's work, to be done again for other tensors."""

    def __init__(self, memory: Sequence[_Memory], launches: Sequence[_Launch], results: Sequence[int]) -> None:
        self._memory = [(_source(x), x.shape, x.strides, x.dtype, x.fill) for x in memory]
        self._launches, self._results = tuple(launches), tuple(results)
        self._runtime, driver = triton.knobs.runtime, triton.runtime.driver.active
        self._current_device = getattr(torch._C, "_cuda_getDevice", driver.get_current_device)
        self._current_stream = driver.get_current_stream
        self._index = memory[0].device.index or 0

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
        """The results for these tensors, in the tape's order; None, and nothing done that counts, if it must not."""
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return None
        if self._current_device() == self._index:
            return self._play(tensors)
        with torch.cuda.device(self._index):
            return self._play(tensors)

    def _play(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
        held: list[Any] = list(tensors)
        for allocate, shape, strides, dtype, fill in self._memory:
            x = allocate(shape, strides, dtype)
            held.append(x if fill is None else x.fill_(fill))
        stream = self._current_stream(self._index)
        for launch in self._launches:
            if not launch(held, stream):
                return None
        return tuple([held[i] for i in self._results])


def _source(memory: _Memory) -> Callable[..., torch.Tensor]:
    """``empty_strided(shape, strides, dtype)`` on the current device, past the dispatcher, as compiled graphs do."""
    if memory.counts:
        return partial(_counters, memory.device)
    direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{memory.device.type}", None)
    return direct or partial(_empty_strided, memory.device)


def _counters(device: torch.device, *_: Any) -> torch.Tensor:
    return counters.take(device)


def _empty_strided(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _Launch:
    """One launch; what does not change from call to call is in `values`."""

    def __init__(self, kernel: Any, programs: int, arguments: Sequence[Any], find: Find) -> None:
        self._start, self._fixed, self._spread = _convention(kernel)
        self._programs = programs
        if len(arguments) != len(kernel.src.fn.arg_names):
            raise _Unknown
        self._values: list[Any] = []
        self._changes: list[_Change] = []
        described = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
        # What the driver is given as an address must stay.
        self._kept: list[torch.Tensor] = []
        for argument in arguments:
            if hasattr(argument, "block_shape"):
                self._add(None, find(argument.base), _Descriptors(argument, next(described, None)))
                self._values += [None, *argument.shape, *argument.strides]
            elif isinstance(argument, torch.Tensor):
                self._values.append(self._address(None, argument, find))
            else:
                self._values.append(self._record(argument, find) if isinstance(argument, tuple) else argument)
        self._records = {change.place for change in self._changes if change.inside is not None}
        self._tensors = tuple(sorted({change.part.tensor for change in self._changes}))
        self._made: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def _record(self, given: tuple[Any, ...], find: Find) -> tuple[Any, ...]:
        if any(isinstance(value, tuple) for value in given):
            raise _Unknown
        return tuple([self._address(i, x, find) if isinstance(x, torch.Tensor) else x for i, x in enumerate(given)])

    def _address(self, inside: int | None, x: torch.Tensor, find: Find) -> int:
        """Where `x`, the next argument or part of it, is now, and will be in every call if it is a constant."""
        part = find(x)
        if part is None:
            self._kept.append(x)
        self._add(inside, part)
        return x.data_ptr()

    def _add(self, inside: int | None, part: _Part | None, encode: Callable[[int], Any] | None = None) -> None:
        """The next argument, or part of it, changes."""
        if part is not None:
            self._changes.append(_Change(len(self._values), inside, part, encode))
        elif encode is not None:
            raise _Unknown

    def __call__(self, held: Sequence[Any], stream: int) -> bool:
        """Launch for these tensors; False if the kernel was compiled for other addresses."""
        addresses = tuple([held[i].data_ptr() for i in self._tensors])
        arguments = self._made.get(addresses)
        if arguments is None:
            arguments = self._arguments(addresses)
            if arguments is None:
                return False
            if len(self._made) >= _ADDRESSES:
                self._made.clear()
            self._made[addresses] = arguments
        self._start(self._programs, 1, 1, stream, *arguments)
        return True

    def _arguments(self, addresses: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Everything from the stream on; None if an address is not as the compiler was told."""
        starts = dict(zip(self._tensors, addresses, strict=True))
        values = [list(x) if place in self._records else x for place, x in enumerate(self._values)]
        for place, inside, (tensor, offset, misaligned), encode in self._changes:
            address = starts[tensor] + offset
            if address & misaligned:
                return None
            if inside is not None:
                values[place][inside] = address
            else:
                values[place] = address if encode is None else encode(address)
        values = [tuple(x) if place in self._records else x for place, x in enumerate(values)]
        return (*self._fixed, *values) if self._spread else (*self._fixed, tuple(values))


def _convention(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...], bool]:
    """The C function that launches, what it takes between stream and arguments, and whether arguments are spread.

    It is what `CompiledKernel.run` calls. Triton 3.6 compiles one for each signature; from 3.7 on there is one for all,
    which takes the signature as an argument.
    """
    run: Any = getattr(kernel, "run", None)
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        raise _Unknown
    knobs = triton.knobs
    if knobs.runtime.debug or knobs.compilation.instrumentation_mode or getattr(run, "gsan_enabled", False):
        raise _Unknown
    start = run.launch
    if hasattr(start, "__closure__"):
        # Around it lies a function that makes descriptors anew in every call.
        start = getclosurevars(start).nonlocals.get("launcher")
    if start is None:
        raise _Unknown
    function = (kernel.function, run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "kernel_signature"):
        nothing = (None,) * 5  # metadata and hooks of the launch, scratch memory
        return start, (*function, kernel.packed_metadata, *nothing, run.arg_annotations, run.kernel_signature), False
    return start, (*function, None, None, kernel.packed_metadata, None, None, None), True


class Tape:
    """Does the work of one call, and writes it down.

    Args:
        tensors: of the call. To be told apart they must be distinct objects, though they may share memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None] = ()) -> None:
        self._given, self._held = len(tensors), list(tensors)
        self._memory: list[_Memory] = []
        self._launches: list[_Launch] = []
        self._places = {id(x): (i, 0) for i, x in enumerate(tensors) if x is not None}
        self._kept: list[torch.Tensor] = []
        self._constants: set[int] = set()
        self._known = bool(tensors) and len(self._places) == sum(x is not None for x in tensors)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = None
    ) -> torch.Tensor:
        """New contiguous memory for kernels to write; `fill`: what it holds before they do."""
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        if fill is not None:
            x.fill_(fill)
        return self._taken(x, _Memory(tuple(x.shape), x.stride(), dtype, x.device, fill))

    def counters(self, device: torch.device) -> torch.Tensor:
        """Counters of this call, of `counters`; each replay asks for its own."""
        x = counters.take(device)
        return self._taken(x, _Memory(tuple(x.shape), x.stride(), x.dtype, device, None, counts=True))

    def _taken(self, x: torch.Tensor, memory: _Memory) -> torch.Tensor:
        self._places[id(x)] = (len(self._held), 0)
        self._held.append(x)
        self._memory.append(memory)
        return x

    def part(self, x: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """`x`, which depends on `source` of the call and on no values: a view of it, if it is to be replayed."""
        known = self._places.get(id(source))
        if x is source or source is None or known is None:
            return x
        if x.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() and x.numel():
            self._kept.append(x)
            self._places[id(x)] = (known[0], known[1] + x.data_ptr() - source.data_ptr())
        return x

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which is the same for all calls that this one stands for; a replay keeps it alive."""
        self._kept.append(x)
        self._constants.add(id(x))
        return x

    def launch(self, kernel: Any, programs: int, arguments: Sequence[Any], **options: Any) -> None:
        """``kernel[(programs,)](*arguments, **options)``.

        Products are fused with sums, as the numerics count on: Triton 3.10 no longer does so unless asked.
        """
        compiled = kernel[(programs,)](*arguments, enable_fp_fusion=True, **options)
        if self._known:
            try:
                self._launches.append(_Launch(compiled, programs, arguments, self._find))
            except _Unknown:
                self._known = False

    def _find(self, x: torch.Tensor) -> _Part | None:
        """Where the argument `x` lies; None: it is a constant."""
        if id(x) in self._constants:
            return None
        if id(x) not in self._places:
            raise _Unknown
        index, offset = self._places[id(x)]
        return _Part(index, offset, 0 if x.data_ptr() % 16 else 15)

    def replay(self, results: Sequence[torch.Tensor]) -> Replay | None:
        """How to get such `results` for other tensors, or None where the tape did not see everything."""
        places = [self._places.get(id(x), (0, -1)) for x in results]
        if not self._known or not self._launches or any(i < self._given or offset for i, offset in places):
            return None
        return Replay(self._memory, self._launches, [i for i, _ in places])


class Repeated:
    """A pass for many calls that are alike: taped once, then replayed where that can be.

    Args:
        run: the pass, for a call's tensors and a tape.
        make: what `run` takes tensors as.
    """

    def __init__(
        self,
        run: Callable[[Any, Tape], tuple[torch.Tensor, ...]],
        make: Callable[[Iterable[Any]], Any] = Inputs._make,
    ) -> None:
        self._run, self._make = run, make
        self._replay: Replay | None = None
        self._taped = False

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """Results for the tensors of a call, always in the same order."""
        if self._replay is not None:
            results = self._replay(tensors)
            if results is not None:
                return results
        if self._taped:
            return self._run(self._make(tensors), Tape())
        # The call may pass one tensor three times, and the next one may not.
        own = [None if x is None else x.detach() for x in tensors]
        tape = Tape(own)
        results = self._run(self._make(own), tape)
        self._replay, self._taped = tape.replay(results), True
        return results
