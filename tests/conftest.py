"""What holds for the whole suite: fresh memory holds NaN, one thread per worker, and the backends to test.

``pytest --backend triton --backend cpu`` runs the tests that take a `target` once for each backend named; the default
is cpu. Triton runs on the GPU where there is one and else in its interpreter, which needs ``TRITON_INTERPRET=1`` in the
environment before Python starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

from targets import Target, target
from tilewise import dispatch, errors

_POISONED = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
    (torch._C._dynamo.guards, "_empty_strided_cpu"),
    (torch._C._dynamo.guards, "_empty_strided_cuda"),
]


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, with NaN in what the package gets of it: an element that nobody writes then shows."""

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # Fake tensors (a subclass) have no memory to poison.
        if caller.partition(".")[0] == "tilewise" and type(x) is torch.Tensor and x.is_floating_point():
            x.fill_(float("nan"))
        return x

    return poisoned


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", action="append", default=[], metavar="NAME", help="a backend to test; repeatable; default: cpu"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: takes Triton's interpreter long, or adds little there; deselected there")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    for owner, name in _POISONED:
        setattr(owner, name, _poisoned(getattr(owner, name)))
    # How fast examples run, or are drawn, says something of the machine and nothing of the package.
    common = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, **common)
    hypothesis.settings.register_profile("explore", **common)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def _targets(config: pytest.Config) -> list[Target]:
    names = config.getoption("--backend") or ["cpu"]
    unknown = set(names) - set(dispatch.BACKENDS)
    if unknown:
        raise pytest.UsageError(f"--backend {', '.join(sorted(unknown))}: there are {', '.join(dispatch.BACKENDS)}")
    try:
        return [target(name) for name in names]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", _targets(metafunc.config), ids=str, scope="session")


def _declined(error: BaseException | None, here: Target) -> str | None:
    """What `here` is known to decline, if that is behind an error."""
    while error is not None:
        if isinstance(error, errors.UnsupportedError) and here.may_refuse(str(error)):
            return f"{here} declines: {error}"
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test of more than a backend serves is skipped with the reason that the backend states."""
    try:
        return (yield)
    except Exception as error:
        here = pyfuncitem.funcargs.get("target")
        reason = _declined(error, here) if isinstance(here, Target) else None
        if reason is None:
            raise
        pytest.skip(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            return False
        parameters = getattr(item, "callspec", None)
        here = parameters.params.get("target") if parameters else None
        return not (here and here.interpreted and here.name == "triton" and item.get_closest_marker("large"))

    deselected = [item for item in items if not runs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs(item)]
