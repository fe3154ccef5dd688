"""The pipeline on a timeline: what may not overlap does not, and arrangements gain what arithmetic says."""

from __future__ import annotations

import itertools

import pytest

from tilewise import errors
from tilewise.textbook.pipeline import COPY, PRODUCER, SOFTMAX, TENSOR, Costs, Schedule, Timeline, hopper, simulate

ARRANGEMENTS = [
    Schedule(warpgroups, pingpong, overlap, specialised, stages)
    for warpgroups, pingpong, overlap, specialised, stages in itertools.product(
        (1, 2, 3), (False, True), (False, True), (False, True), (1, 2, 3)
    )
    if (warpgroups > 1 or not pingpong) and (specialised or not (pingpong or overlap))
]


def ends(timeline: Timeline) -> dict[tuple[str, str, int], tuple[float, float]]:
    return {(x.role, x.what, x.tile): (x.start, x.end) for x in timeline.intervals}


@pytest.mark.parametrize("schedule", ARRANGEMENTS, ids=str)
def test_a_timeline_is_possible(schedule: Schedule) -> None:
    tiles = 6
    timeline = simulate(tiles, hopper(128, 128, 64, warpgroups=schedule.warpgroups), schedule)
    at = ends(timeline)
    assert len(timeline.intervals) == 2 * tiles + 3 * tiles * schedule.warpgroups
    for unit in (COPY, TENSOR, SOFTMAX):
        spans = sorted({(x.start, x.end) for x in timeline.of(unit)})
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "one thing at a time"
        assert 0 < timeline.utilisation(unit) <= 1
    for group in range(schedule.warpgroups):
        role = f"warpgroup {group}"
        for tile in range(tiles):
            s, p, o = (at[role, what, tile] for what in "SPO")
            assert at[PRODUCER, "K", tile][1] <= s[0] and at[PRODUCER, "V", tile][1] <= o[0], "operands are there"
            assert s[1] <= p[0] and p[1] <= o[0], "a tile's phases follow each other"
            if tile >= schedule.stages:
                assert at[role, "S", tile - schedule.stages][1] <= at[PRODUCER, "K", tile][0], "K's slot is free"
                assert at[role, "O", tile - schedule.stages][1] <= at[PRODUCER, "V", tile][0], "V's slot is free"


def test_rates_are_the_papers() -> None:
    costs = hopper(128, 128, 128)
    cycles_per_second, processors = 1.83e9, 132
    flops = 2 * 64 * 128 * 128 / costs.scores * cycles_per_second * processors
    exponentials = 64 * 128 / costs.softmax * cycles_per_second * processors
    assert flops == pytest.approx(989.4e12, rel=0.01)
    assert exponentials == pytest.approx(3.9e12, rel=0.01)
    assert costs.softmax / (costs.scores + costs.values) == 0.5, "50 % of the products' cycles at head dim 128"
    assert hopper(128, 128, 128, itemsize=1).scores == costs.scores / 2


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("tiles", [1, 2, 16])
def test_lockstep_adds_everything_up(tiles: int, warpgroups: int) -> None:
    costs = Costs(copy=100.0, scores=300.0, softmax=200.0, values=250.0)
    timeline = simulate(tiles, costs, Schedule(warpgroups, pingpong=False, overlap=False))
    assert timeline.cycles == 100 + tiles * warpgroups * 750
    assert timeline.busy(TENSOR) == tiles * warpgroups * 550


@pytest.mark.parametrize("softmax", [50.0, 200.0, 250.0, 600.0])
@pytest.mark.parametrize("tiles", [1, 2, 16])
def test_overlap_hides_the_shorter_of_softmax_and_values(tiles: int, softmax: float) -> None:
    costs = Costs(copy=100.0, scores=300.0, softmax=softmax, values=250.0)
    timeline = simulate(tiles, costs, Schedule(1, pingpong=False, overlap=True))
    assert timeline.cycles == 100 + 300 + softmax + (tiles - 1) * (300 + max(softmax, 250)) + 250


@pytest.mark.parametrize("overlap", [False, True])
def test_pingpong_keeps_the_tensor_cores_busy(overlap: bool) -> None:
    for tiles, least in ((16, 0.95), (64, 0.98)):
        timeline = simulate(tiles, hopper(128, 128, 128), Schedule(overlap=overlap))
        assert timeline.utilisation() > least
    lockstep = simulate(64, hopper(128, 128, 128), Schedule(pingpong=False, overlap=False))
    assert lockstep.utilisation() == pytest.approx(2 / 3, abs=0.01)


def test_in_turns_one_does_softmax_while_the_other_multiplies() -> None:
    timeline = simulate(8, hopper(128, 128, 128), Schedule(overlap=False))
    at = ends(timeline)
    for tile in range(1, 7):
        start, end = at["warpgroup 0", "P", tile]
        others = [x for x in timeline.of(TENSOR) if x.role == "warpgroup 1" and x.start < end and start < x.end]
        assert others, "the other warpgroup is on the tensor cores meanwhile"


def test_copies_bound_what_they_outlast() -> None:
    slow = Costs(copy=2000.0, scores=300.0, softmax=200.0, values=250.0)
    timeline = simulate(16, slow, Schedule())
    assert timeline.utilisation(COPY) > 0.95 and timeline.cycles >= 2 * 16 * 2000


def test_a_producer_and_a_second_slot_hide_copies() -> None:
    costs = hopper(128, 128, 128)
    ahead, one_slot, alone = (
        simulate(32, costs, schedule).cycles
        for schedule in (
            Schedule(pingpong=False, overlap=False),
            Schedule(pingpong=False, overlap=False, stages=1),
            Schedule(pingpong=False, overlap=False, specialised=False),
        )
    )
    assert ahead == pytest.approx(costs.copy + 32 * 2 * 3 * 512)
    assert alone == pytest.approx(32 * (costs.copy + 2 * 3 * 512))
    assert ahead <= one_slot < alone
    assert simulate(32, costs, Schedule()).cycles < simulate(32, costs, Schedule(stages=1)).cycles


def test_where_softmax_is_longest_it_is_what_is_kept_busy() -> None:
    timeline = simulate(32, hopper(128, 128, 32), Schedule())
    assert timeline.utilisation(SOFTMAX) > 0.95 > 0.6 > timeline.utilisation(TENSOR)


def test_bad_input_is_refused() -> None:
    costs = hopper(64, 64, 64)
    with pytest.raises(errors.ArgumentError, match="tiles: got 0"):
        simulate(0, costs, Schedule())
    with pytest.raises(errors.ArgumentError, match="stages: got 0"):
        Schedule(stages=0)
    with pytest.raises(errors.ArgumentError, match="pingpong: got True with one warpgroup"):
        Schedule(warpgroups=1)
    with pytest.raises(errors.ArgumentError, match="specialised: got False with pingpong or overlap"):
        Schedule(specialised=False)
