"""The order in which tiles of keys add to dq: that it ends, that it is the one that the device counts, what it costs.

Programs are simulated in Python, one addition after the other, with the kernel's own functions for who visits what and
whose turn it is; times are those of an H200.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise.hopper import key_tiles, turns
from tilewise.hopper.key_tiles import Shape
from tilewise.hopper.query_gradient import STAGES as HALVES
from tilewise.hopper.schedule import Bounds, InTurn, deal, deal_in_turn
from tilewise.hopper.work import Band, Work

PROCESSORS = 132
# Microseconds from the request to add a tile until it is in memory, and until another processor has heard of it.
ADDED, HEARD = 1.0, 0.7
# Of a step: what a tile of keys costs beside its steps, when dq of a step is told of, how far steps differ.
OVERHEAD, TOLD, JITTER = 1.5, 0.15, 0.1
# TFLOP/s of the kernel that adds in any order, by head dim.
SPEED = {64: 590, 128: 600}
TILE = {64: (128, 128), 128: (64, 128)}
# Tiles of dq on their way to memory.
STAGES = HALVES.value // 2


class Memory:
    """What a pointer to integers is to the kernel's functions."""

    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, steps: int) -> Memory:
        return Memory(self.values, self.at + steps)


@pytest.fixture(autouse=True)
def of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's functions take Python's numbers."""
    language = SimpleNamespace(
        where=lambda condition, a, b: a if condition else b,
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        load=lambda pointer: pointer.values[pointer.at],
    )
    used = {turns: ("wave_of", "turn_of"), key_tiles: ("first_visit", "span_of", "keys_of", "before", "row_tile")}
    for module, names in used.items():
        monkeypatch.setattr(module, "gl", language)
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).fn)


@dataclass(frozen=True)
class Case:
    """A call: lengths, the band (None: no bound), pairs of batch entry and key head, heads of a group."""

    len_q: int
    len_k: int
    right: int | None = None
    left: int | None = None
    pairs: int = 4
    group: int = 1
    head_dim: int = 128
    programs: int = PROCESSORS

    @property
    def off(self) -> int:
        return self.len_k - self.len_q

    @property
    def step(self) -> float:
        """Microseconds of a tile of scores."""
        block_m, block_n = TILE[self.head_dim]
        return 10 * block_m * block_n * self.head_dim * PROCESSORS / (SPEED[self.head_dim] * 1e6)

    def dealing(self) -> tuple[Any, ...]:
        """What the tables are made from."""
        block_m, block_n = TILE[self.head_dim]
        seen = Bounds(self.len_k, self.len_q, -self.off, self.right, self.left)
        bytes_of_pair = self.group * self.len_q * 10 * self.head_dim
        together = max(1, (32 << 20) // bytes_of_pair, -(-self.programs // -(-self.len_k // block_n)))
        return seen, block_n, block_m, self.pairs, self.programs, torch.device("cpu"), together

    def visits(self, made: InTurn) -> Callable[[int], Iterator[tuple[int, int]]]:
        """Of a tile's number, the counters that it comes by, in order, and its turn at each."""
        block_m, block_n = TILE[self.head_dim]
        shape: Any = Shape(block_m, block_n, 0, 0, 0, 0, 4, False, False, False, False)
        variant: Any = SimpleNamespace(plan=None, predicate=None, mod=None)
        band = Band(self.off, self.left, self.right, self.len_q, self.len_k)
        work = Work(None, None, -(-self.len_k // block_n), self.pairs, self.group)
        given: Any = turns.Turns(Memory(made.waves.flatten().tolist()), None)
        tiles_m = -(-self.len_q // block_m)

        def of(t: int) -> Iterator[tuple[int, int]]:
            seq, n0 = key_tiles.keys_of(t, band, work, shape)
            span = key_tiles.span_of(seq, n0, band, work, variant, shape, t, given)
            first, end = turns.wave_of(t, given)
            head, m = key_tiles.before(span)
            for j in range(span.count):
                head, m = key_tiles.row_tile(j, head, m, span, variant)
                turn = turns.turn_of(m, n0 // block_n, first, end, seq, band, shape)
                yield (seq.h * self.group + head) * tiles_m + m, turn

        return of


@dataclass
class Program:
    """One processor: its tiles, and when its two roles are free."""

    tiles: list[int]
    visits: Iterator[tuple[int, int]] = field(default_factory=lambda: iter(()))
    at: tuple[int, int] | None = None
    told: float | None = None
    computed: float = 0.0
    added: float = 0.0
    free: list[float] = field(default_factory=lambda: [0.0] * STAGES)
    steps: int = 0


class Deadlock(Exception):
    """Programs wait for additions that never come."""


def simulate(case: Case, table: torch.Tensor, visits: Callable[[int], Iterator[tuple[int, int]]], wait: bool) -> float:
    """Microseconds until the last addition; raises `Deadlock`."""
    rng, step = random.Random(1), case.step
    programs = [Program([t for t in column if t >= 0]) for column in table.T.tolist()]
    counters: dict[int, tuple[int, float]] = {}
    waiting: dict[tuple[int, int], Program] = {}
    ready = programs[:]
    while ready:
        program = ready.pop()
        while True:
            if program.at is None:
                program.at = next(program.visits, None)
                if program.at is None:
                    if not program.tiles:
                        break
                    program.visits = visits(program.tiles.pop(0))
                    program.computed += OVERHEAD * step
                    continue
            counter, turn = program.at
            slot = program.steps % STAGES
            if program.told is None:
                took = step * (1 + JITTER * (2 * rng.random() - 1))
                program.computed = max(program.computed + took, program.free[slot])
                program.told = program.computed + TOLD * step
            begin = max(program.told, program.added)
            if wait:
                count, heard = counters.get(counter, (0, 0.0))
                if count != turn:
                    waiting[counter, turn] = program
                    break
                begin = max(begin, heard)
                counters[counter] = count + 1, begin + ADDED + HEARD
                if (counter, count + 1) in waiting:
                    ready.append(waiting.pop((counter, count + 1)))
            program.added = program.free[slot] = begin + ADDED
            program.at, program.told = None, None
            program.steps += 1
    if waiting:
        raise Deadlock(f"{len(waiting)} of {len(programs)} programs wait")
    return max(program.added for program in programs)


def efficiency(case: Case) -> float:
    """The time of the kernel that adds in any order, as it is dealt, over that of the one that takes turns."""
    made = deal_in_turn(*case.dealing())
    visits = case.visits(made)
    other = deal(*case.dealing())
    return simulate(case, other.table, visits, wait=False) / simulate(case, made.dealt.table, visits, wait=True)


def check_turns(case: Case) -> None:
    """At every tile of rows the turns are 0, 1, 2 ...; and all ends, whoever is slow."""
    made = deal_in_turn(*case.dealing())
    numbers = made.dealt.table[made.dealt.table >= 0].tolist()
    assert sorted(numbers) == list(range(len(made.waves)))
    assert made.dealt.programs <= case.programs
    visits, found = case.visits(made), dict[int, list[int]]()
    for t in numbers:
        for counter, turn in visits(t):
            found.setdefault(counter, []).append(turn)
    assert all(sorted(took) == list(range(len(took))) for took in found.values())
    simulate(case, made.dealt.table, visits, wait=True)


CASES = [
    Case(1024, 1024),
    Case(1000, 1333, programs=7),
    Case(128, 5000, programs=9, pairs=3),
    Case(5000, 128, programs=9, pairs=3),
    Case(1024, 1024, group=3, programs=5, pairs=2, head_dim=64),
    Case(1024, 1024, right=0),
    Case(1111, 1111, right=0, programs=3, pairs=5),
    Case(1111, 1111, right=0, programs=300, pairs=1),
    Case(700, 1900, right=0, programs=6),
    Case(1900, 700, right=0, programs=6, group=2),
    Case(3000, 3000, right=0, pairs=9, programs=20),
    Case(3000, 3000, left=300, right=0, programs=13),
    Case(3000, 2000, left=200, right=500, programs=13, head_dim=64),
    Case(2000, 2000, left=-100, right=900, programs=13),
    Case(2000, 2000, left=900, right=-100, programs=13),
    Case(1000, 1000, left=5, programs=4),
    Case(1000, 1000, left=0, right=0, programs=4, head_dim=64),
    Case(1, 1, right=0),
    Case(1, 999, left=3, right=0, programs=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everyone_has_a_turn(case: Case) -> None:
    check_turns(case)


def test_a_wrong_order_is_noticed() -> None:
    """The simulation finds a deadlock where there is one: a wave whose lower numbers are dealt first."""
    case = Case(1024, 1024, right=0, pairs=1, programs=2)
    made = deal_in_turn(*case.dealing())
    with pytest.raises(Deadlock):
        simulate(case, made.dealt.table.flip(0), case.visits(made), wait=True)


# The least that the bound of 85 % leaves room for, at calls of 16k rows in all.
QUICK = [
    Case(1024, 1024, pairs=256),
    Case(1024, 1024, right=0, pairs=256),
    Case(4096, 4096, pairs=16, group=4),
    Case(4096, 4096, right=0, pairs=16, group=4),
    Case(4096, 4096, right=0, pairs=64, head_dim=64),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_turns_cost_little(case: Case) -> None:
    assert efficiency(case) >= 0.9
