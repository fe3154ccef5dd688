"""The laws of the merge: associative, commutative, with the state of no keys as its identity."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from textbook.cases import close
from tilewise import softmax
from tilewise.textbook import monoid

ROWS, HIDDEN = 3, float("-inf")


@st.composite
def tiles(draw: Any) -> list[monoid.State]:
    """States of three to five tiles of scores, any of which may be hidden, far apart, or not there."""
    states = []
    for _ in range(draw(st.integers(3, 5))):
        n = draw(st.integers(0, 4))
        score = st.floats(-1e3, 1e3, width=32) | st.just(HIDDEN)
        rows = draw(st.lists(st.lists(score, min_size=n, max_size=n), min_size=ROWS, max_size=ROWS))
        values = draw(st.lists(st.floats(-4, 4, width=32), min_size=2 * n, max_size=2 * n))
        s = torch.tensor(rows, dtype=torch.float64).view(ROWS, n)
        states.append(monoid.of(s, torch.tensor(values, dtype=torch.float64).view(n, 2)))
    return states


def same(a: monoid.State, b: monoid.State) -> None:
    """As results: the output and the LSE. (The maximum is the same bit for bit.)"""
    assert torch.equal(a.m, b.m)
    close(softmax.finalize(a), softmax.finalize(b))


@given(tiles())
def test_associative(states: list[monoid.State]) -> None:
    a, b, c = states[:3]
    same(monoid.merge(monoid.merge(a, b), c), monoid.merge(a, monoid.merge(b, c)))


@given(tiles())
def test_commutative_bit_for_bit(states: list[monoid.State]) -> None:
    ab, ba = monoid.merge(states[0], states[1]), monoid.merge(states[1], states[0])
    assert all(torch.equal(x, y) for x, y in zip(ab, ba, strict=True))


@given(tiles())
def test_identity_changes_no_bit(states: list[monoid.State]) -> None:
    empty = monoid.identity(ROWS, 2)
    for merged in (monoid.merge(empty, states[0]), monoid.merge(states[0], empty)):
        assert all(torch.equal(x, y) for x, y in zip(merged, states[0], strict=True))


@given(tiles(), st.randoms())
def test_any_order_gives_one_result(states: list[monoid.State], random: Any) -> None:
    empty = monoid.identity(ROWS, 2)
    shuffled = random.sample(states, len(states))
    same(monoid.fold(shuffled, empty), monoid.fold(states, empty))


def test_rows_without_keys_are_empty_whatever_is_merged() -> None:
    empty = monoid.identity(ROWS, 2)
    hidden = monoid.of(torch.full((ROWS, 4), HIDDEN, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64))
    for a, b in itertools.product((empty, hidden), repeat=2):
        o, lse = softmax.finalize(monoid.merge(a, b))
        assert bool((o == 0).all()) and bool((lse == HIDDEN).all())


def test_agrees_with_the_merge_of_finished_states() -> None:
    generator = torch.Generator().manual_seed(0)
    s, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((ROWS, 9), (9, 2)))
    a, b = monoid.of(s[:, :4], v[:4]), monoid.of(s[:, 4:], v[4:])
    merged = softmax.merge(*softmax.finalize(a), *softmax.finalize(b))
    close(softmax.finalize(monoid.merge(a, b)), merged)
    close(merged, (s.softmax(dim=1) @ v, s.logsumexp(dim=1)))
