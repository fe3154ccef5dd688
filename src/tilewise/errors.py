"""Errors: what was passed, what is supported, and how to fix it. All are raised before any work is done."""

from __future__ import annotations

from typing import NoReturn


class TilewiseError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(TilewiseError, ValueError):
    """An argument has a value outside its domain."""


class ShapeError(ArgumentError):
    """A tensor has the wrong rank, size or stride."""


class DtypeError(ArgumentError):
    """A tensor has the wrong dtype, or dtypes do not go together."""


class DeviceError(ArgumentError):
    """Tensors live on different devices, or on one that the argument does not allow."""


class UnsupportedError(TilewiseError, NotImplementedError):
    """The call is legal, but no backend (or not the one asked for) can serve it."""


class OutOfPagesError(ArgumentError):
    """A `PagedKVCache` has too few free pages for what is asked; it is as it was before."""


def fail(kind: type[TilewiseError], argument: str, passed: object, supported: str, fix: str) -> NoReturn:
    """Raise `kind` with the one message format of the package.

    >>> fail(ArgumentError, "softcap", -1.0, "a number > 0, or None", "pass None for no cap")
    Traceback (most recent call last):
        ...
    tilewise.errors.ArgumentError: softcap: got -1.0; supported: a number > 0, or None. Fix: pass None for no cap.
    """
    raise kind(f"{argument}: got {passed}; supported: {supported}. Fix: {fix}.")
