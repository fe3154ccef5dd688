"""What can be compiled from a user's function, and the errors for what cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import errors, masks
from tilewise.kernels import compiled

CPU = torch.device("cpu")
LIMIT, TENSOR = 3, torch.ones(3)


def _source(fn: Any, aux: tuple[Any, ...] = ()) -> str:
    mask = masks.Predicate(fn, aux)
    composed, _ = compiled.predicate(mask, CPU)
    (user,) = (value for name, value in composed.fn.__globals__.items() if name.startswith("_user_"))
    return user._src


def test_numbers_become_literals_and_division_rounds_down() -> None:
    width = 5
    source = _source(lambda b, h, q, k: (q // width + k) % LIMIT == 0)
    assert "_floor_mod(_floor_div(q, 5) + k, 3) == 0" in source


def test_an_index_becomes_a_load() -> None:
    source = _source(lambda b, h, q, k, table: table[h, q - k] > 0, (torch.ones(2, 8),))
    assert "_at(extra[0], (extra[1] >> 2, extra[2] >> 2), (extra[3], extra[4]), (h, q - k)) > 0" in source


@pytest.mark.parametrize("number, read", [(-3, "extra[0] >> 2"), (2**40, "extra[0]"), (0.5, "extra[0]")])
def test_numbers_are_read_as_they_were(number: float, read: str) -> None:
    """Small integers are sealed: see `compiled._sealed`."""
    assert f"reach = {read}\n" in _source(lambda b, h, q, k, reach: q - k < reach, (number,))
    _, (passed,) = compiled.predicate(masks.Predicate(lambda b, h, q, k, reach: q - k < reach, (number,)), CPU)
    assert (passed >> 2 if ">>" in read else passed) == number


def test_two_lambdas_on_one_line() -> None:
    a, b = (lambda b, h, q, k: k > 1), (lambda b, h, q, k: k > 2)
    assert "k > 1" in _source(a)
    assert "k > 2" in _source(b)


def test_equal_functions_are_one() -> None:
    made = [compiled.predicate(masks.Predicate(fn), CPU)[0] for fn in (_limited(4), _limited(4), _limited(5))]
    assert made[0] is made[1] is not made[2]


def _limited(n: int) -> Any:
    return lambda b, h, q, k: k < n


@pytest.mark.parametrize(
    "fn, aux, message",
    [
        (lambda b, h, q, k: TENSOR[k] > 0, (), "a Tensor"),
        (lambda b, h, q, k, t: t > 0, (torch.ones(3),), "without an index"),
        (lambda b, h, q, k, t: t[k] > 0, (torch.ones(3, 3),), "1 indices into the 2-dimensional"),
        (lambda b, h, q, k: torch.cumsum(k, 0) > 3, (), "torch.cumsum"),
        (eval("lambda b, h, q, k: k > 1"), (), "without readable source"),
        (lambda b, h, q, k, *rest: k > 1, (), "default parameters"),
    ],
)
def test_refusals(fn: Any, aux: tuple[Any, ...], message: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=message):
        compiled.predicate(masks.Predicate(fn, aux), CPU)
