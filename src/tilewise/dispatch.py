"""Which backend serves a problem, and why the others do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata, util
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from . import errors
from .problem import Inputs, Problem

if TYPE_CHECKING:
    from .kvcache import CacheProblem

# Best first; imported only when a problem may be theirs.
_MODULES = {"cpu": "tilewise.cpu", "hopper": "tilewise.hopper", "triton": "tilewise._triton"}
BACKENDS = tuple(_MODULES)
OLDEST_TRITON = (3, 6)


@cache
def _missing(name: str) -> str | None:
    """Why a backend cannot be imported here, or None."""
    if name == "cpu":
        return None
    if util.find_spec("triton") is None:
        return "the package triton is not installed; it comes with PyTorch's GPU builds, or: pip install triton"
    version = _triton_version()
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TRITON:
        return f"triton {version} is too old; it needs {'.'.join(map(str, OLDEST_TRITON))}: pip install -U triton"
    return None


def _triton_version() -> str | None:
    """The version of Triton that is installed; None: it is here under another name, as forks of it are."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def module(name: str) -> ModuleType:
    """The backend's module: NAME, unsupported_reasons, forward, backward, tile; for some, drawback and bind."""
    return import_module(_MODULES[name])


def reasons(name: str, problem: Problem, pass_: str = "forward") -> list[str]:
    """Why this backend cannot serve a pass of the problem here; empty if it can."""
    missing = _missing(name)
    return [missing] if missing else module(name).unsupported_reasons(problem, pass_)


def drawback(name: str, problem: Problem, pass_: str = "forward") -> str | None:
    """Why another backend serves better what this one can serve, or None."""
    ask = getattr(module(name), "drawback", None)
    return None if ask is None else ask(problem, pass_)


def cache_reasons(name: str, problem: CacheProblem) -> list[str]:
    """Why this backend cannot serve a call with a cache here; empty if it can."""
    missing = _missing(name)
    if missing:
        return [missing]
    backend = module(name)
    if not hasattr(backend, "attend_cache"):
        return ["it has no kernel for key/value caches"]
    return backend.cache_unsupported_reasons(problem)


def bind(problem: Problem) -> Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]:
    """The forward pass for many calls of one problem, as a function of the tensors of `Inputs`."""
    backend = module(choose(problem))
    if hasattr(backend, "bind"):
        return backend.bind(problem)

    def forward(tensors: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        with plain_numerics(problem.device):
            return backend.forward(problem, Inputs(*tensors))

    return forward


def bind_backward(problem: Problem, needs: tuple[str, ...]) -> Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]:
    """The backward pass likewise: from the tensors of `Inputs`, out, lse, do and dlse to the gradients in `needs`."""
    problem = problem.for_gradients(needs)
    backend = module(choose(problem, "backward"))
    if hasattr(backend, "bind_backward"):
        return backend.bind_backward(problem, needs)

    def backward(tensors: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        grads = backend.backward(problem, Inputs._make(tensors[:-4]), *tensors[-4:], needs)
        return tuple(grads[name] for name in needs)

    return backward


@contextmanager
def plain_numerics(device: torch.device) -> Iterator[None]:
    """Autocast would reach into a backend's own products and lower them; the surface has cast already."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


def check_name(backend: str | None) -> None:
    """Raise unless `backend` names one of ours."""
    if backend is not None and backend not in BACKENDS:
        fix = "leave backend=None to use the best that fits"
        errors.fail(errors.ArgumentError, "backend", repr(backend), f"one of {', '.join(BACKENDS)}, or None", fix)


def choose(problem: Problem, pass_: str = "forward") -> str:
    """The name of the backend for a pass: the one asked for, or the first that can and has no drawback, or that can.

    Forward and backward need not agree: what passes between them (output and LSE) is the same for all.

    Raises:
        tilewise.errors.ArgumentError: unknown name.
        tilewise.errors.UnsupportedError: the one asked for, or all of them, cannot; with every reason.
    """
    wanted = problem.options.backend
    check_name(wanted)

    def why(name: str) -> list[str]:
        found = reasons(name, problem, pass_)
        if wanted is not None and problem.options.needs_grad and not found:
            # Said before the forward pass, not after it.
            found = reasons(name, problem, "backward")
        return found

    found = None if wanted else best((name for name in BACKENDS if not why(name)), problem, pass_)
    return found or _first(wanted, why, "what explain() lists", "see tilewise.explain(...) for each backend's reasons")


def best(able: Iterable[str], problem: Problem, pass_: str = "forward") -> str | None:
    """Of backends that can serve a pass, best first: the first that has no drawback, else the first; None if there is
    none.
    """
    first = None
    for name in able:
        if drawback(name, problem, pass_) is None:
            return name
        first = first or name
    return first


def choose_cache(problem: CacheProblem) -> str:
    """The name of the backend for a call with a cache, as `choose`."""
    wanted = problem.options.backend
    check_name(wanted)
    supported = "what the support table in README lists for caches"
    return _first(wanted, lambda name: cache_reasons(name, problem), supported, "change what they decline")


def _first(wanted: str | None, why: Callable[[str], list[str]], supported: str, fix: str) -> str:
    """The first backend, of all or of the one wanted, that has no reason to refuse."""
    refused = []
    for name in BACKENDS if wanted is None else (wanted,):
        found = why(name)
        if not found:
            return name
        refused.append(f"{name}: {'; '.join(found)}")
    got = f"a problem that {'no backend' if wanted is None else repr(wanted)} can serve ({' | '.join(refused)})"
    fix = fix if wanted is None else "leave backend=None"
    errors.fail(errors.UnsupportedError, "backend", got, supported, fix)
