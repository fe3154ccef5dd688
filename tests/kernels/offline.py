"""Compile kernels for a GPU that is not there, from the calls that the backend itself makes.

Every launch is caught and compiled for the target instead, as Triton itself does it; what its ptxas says tells
registers, spills and shared memory.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.compiler.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature
from uniform import unwritten

# Shared memory that one program may use, in bytes.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
CLASSES = {80: "large", 89: "small", 90: "hopper"}


@dataclass(frozen=True)
class Compiled:
    """One kernel as ptxas made it."""

    kernel: str
    shared: int
    registers: int
    spilled: int
    log: str
    ttir: str
    ptx: str
    cubin: bytes


def _compiled(source: ASTSource, target: GPUTarget, options: Any) -> tuple[Any, str]:
    """The kernel, and what ptxas says of it: of this run, for what a cache holds comes without."""
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        result = compile_source(source, target=target, options=options.__dict__)
    return result, said.getvalue()


def compile_launch(kernel: JITFunction, arch: int, *args: Any, **options: Any) -> Compiled:
    """The kernel for the arguments of a launch."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = {"debug": False, "sanitize_overflow": False, **options}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    dialect = GluonASTSource if kernel.is_gluon() else ASTSource
    source = dialect(kernel, signature, constants, attributes)
    result, log = _compiled(source, target, options)
    (registers,) = re.findall(r"Used (\d+) registers", log)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    if "wgmma" in result.asm["ptx"]:
        assert not unwritten(result.asm["cubin"]), "ptxas reads registers that it never writes"
    return Compiled(
        kernel.__name__,
        result.metadata.shared,
        int(registers),
        spilled,
        log,
        result.asm.get("ttir", ""),
        result.asm["ptx"],
        result.asm["cubin"],
    )


@contextmanager
def catching(arch: int) -> Iterator[list[Compiled]]:
    """Within, kernels are compiled for `arch` where they would be launched; the list fills as they are."""
    with _instead_of_launching(lambda kernel, *args, **options: compile_launch(kernel, arch, *args, **options)) as made:
        yield made


class Key(NamedTuple):
    """What decides whether a launch compiles: equal keys share a kernel."""

    kernel: str
    arguments: dict[str, Any]
    options: str


def launch_key(kernel: JITFunction, *args: Any, **options: Any) -> Key:
    """The key that Triton itself would look up, by parameter, so that a test can name the one that differs."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    _, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    parts = [compute_cache_key({}, [value], {}) for value in specialization]
    return Key(kernel.__name__, dict(zip(kernel.arg_names, parts, strict=True)), str(options))


@contextmanager
def keys() -> Iterator[list[Key]]:
    """Within, nothing is launched or compiled; the list fills with the keys of what would be."""
    with _instead_of_launching(launch_key) as caught:
        yield caught


@contextmanager
def _instead_of_launching(act: Callable[..., Any]) -> Iterator[list[Any]]:
    """Within, ``act(kernel, *arguments, **options)`` is done in place of each launch; the list holds its results."""
    caught: list[Any] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        caught.append(act(self, *args, **options))

    original, JITFunction.run = JITFunction.run, run
    try:
        yield caught
    finally:
        JITFunction.run = original
