"""The counting memory: what it counts, what it refuses, and that tiles do not outlive their scope."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tilewise import errors
from tilewise.textbook.memory import Event, Flops, Machine, SramError


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(float(rows * columns), dtype=torch.float64).reshape(rows, columns)


def test_reads_and_writes_count_elements_by_tensor() -> None:
    machine = Machine()
    x, y = machine.put("x", matrix(6, 4)), machine.new("y", 6, 4)
    with machine.on_chip() as chip:
        chip.write(y, chip.read(x, slice(0, 2)), slice(4, 6))
        chip.read(x)
        chip.read(x, torch.tensor([5, 0, 5]), slice(1, 3))
        chip.read(x, 3)
    counts = machine.counts
    assert counts.reads == {"x": 8 + 24 + 6 + 4}
    assert counts.writes == {"y": 8}
    assert (counts.read, counts.written, counts.traffic, counts.of("x"), counts.of("z")) == (42, 8, 50, 42, 0)
    assert torch.equal(y.result()[4:], matrix(6, 4)[:2])
    assert bool(y.result()[:4].isnan().all()), "space that nobody wrote holds NaN"


def test_scopes_nest_and_give_back() -> None:
    machine = Machine(sram=12)
    x = machine.put("x", matrix(4, 2))
    with machine.on_chip() as outer:
        outer.read(x)
        for _ in range(3):
            with machine.on_chip() as inner:
                inner.new(2, 2)
    with machine.on_chip() as chip:
        chip.new(3, 4)
    assert machine.counts.peak_sram == 12


@pytest.mark.parametrize("strict", [False, True])
def test_kept_values_and_vectors_take_registers_or_sram(strict: bool) -> None:
    machine = Machine(sram=10, strict=strict)
    with machine.on_chip() as chip:
        chip.new(2, 2)
        chip.new(1)
        chip.keep(torch.ones(1, 2, dtype=torch.float64))
    assert (machine.counts.peak_sram, machine.counts.peak_registers) == ((7, 0) if strict else (4, 3))


def test_refuses_what_does_not_fit() -> None:
    machine = Machine(sram=10, strict=True)
    x = machine.put("x", matrix(4, 3))
    with machine.on_chip() as chip, pytest.raises(SramError, match="tile of x: got 12 elements beside 0 in use"):
        chip.read(x)
    assert machine.counts.traffic == 0, "what was refused was not read"
    with machine.on_chip() as chip:
        chip.read(x, slice(0, 3))
        with pytest.raises(SramError, match="kept value: got 2 elements beside 9 in use; supported: 10 elements"):
            chip.keep(torch.ones(2))


@pytest.mark.parametrize("sram", [0, -1, 2.5])
def test_refuses_an_sram_of_no_size(sram: int) -> None:
    with pytest.raises(errors.ArgumentError, match=r"sram: got .* positive number of elements"):
        Machine(sram)


def test_refuses_a_tile_of_another_shape() -> None:
    machine = Machine()
    y = machine.new("y", 4, 2)
    with machine.on_chip() as chip, pytest.raises(errors.ShapeError, match=r"tile of y: got \[4\]"):
        chip.write(y, torch.ones(4), slice(0, 2))


def test_a_tile_is_a_copy_and_dies_with_its_scope() -> None:
    machine = Machine()
    x = machine.put("x", matrix(2, 2))
    with machine.on_chip() as chip:
        tile = chip.read(x)
        tile += 1
    assert bool(tile.isnan().all())
    assert torch.equal(x.result(), matrix(2, 2))


def test_flops_by_kind() -> None:
    machine = Machine()
    a, b = matrix(3, 5), matrix(5, 2)
    a.mm(b)  # outside a scope nothing is counted
    with machine.on_chip():
        s = (a @ b) * 0.5  # 2 * 3 * 2 * 5, 6
        p = torch.exp(s - s.amax(dim=1, keepdim=True))  # 6 + 6 + 6 exponentials
        p = p.masked_fill(p < 0.5, 0.0)
        torch.log(p.sum(dim=1))  # 6, 3 logarithms
        torch.arange(4) * 3  # whole numbers are addresses
    assert machine.counts.flops == Flops(matmul=60, elementwise=24, exp=9)
    assert machine.counts.flops.total == 93


def test_refuses_operations_that_it_cannot_count() -> None:
    with Machine().on_chip(), pytest.raises(errors.UnsupportedError, match="operation: got sin"):
        torch.sin(torch.ones(3))


def test_hbm_in_use() -> None:
    machine = Machine()
    machine.put("x", matrix(4, 2))
    s = machine.new("s", 5)
    machine.free(s)
    machine.new("y", 3)
    machine.put("x", matrix(2, 2))
    assert machine.counts.peak_hbm == 13


def test_counts_compare_and_do_not_change() -> None:
    def run() -> Machine:
        machine = Machine()
        x = machine.put("x", matrix(4, 2))
        with machine.on_chip() as chip:
            chip.read(x)
        return machine

    machine = run()
    counts = machine.counts
    assert counts == run().counts
    with machine.on_chip() as chip:
        chip.new(1)
        chip.read(machine.put("x", matrix(1, 1)))
    assert counts.read == 8 and counts != machine.counts
    with pytest.raises(dataclasses.FrozenInstanceError):
        counts.peak_sram = 0  # type: ignore[misc]  # the assignment is what is tested
    with pytest.raises(TypeError):
        counts.reads["x"] = 0  # type: ignore[index]  # as above


def test_events_tell_the_order() -> None:
    machine = Machine(record=True)
    x, y = machine.put("x", matrix(4, 2)), machine.new("y", 4, 2)
    with machine.on_chip() as chip:
        chip.write(y, chip.read(x, slice(2, 4)), slice(2, 4))
    assert machine.events == [Event("read", "x", (2, 4), 4, 4), Event("write", "y", (2, 4), 4, 4)]
    assert Machine().events is None
