"""Sizes that closed forms take: positive integers, or an error that says which was not."""

from __future__ import annotations

from .. import errors


def check(**sizes: int) -> None:
    """Refuse sizes that are no positive integers.

    Raises:
        tilewise.errors.ArgumentError: one of them is not.

    >>> check(n=0)
    Traceback (most recent call last):
        ...
    tilewise.errors.ArgumentError: n: got 0; supported: a positive integer. Fix: pass the number of rows or elements.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            fix = "pass the number of rows or elements"
            errors.fail(errors.ArgumentError, name, repr(size), "a positive integer", fix)
