"""FlashAttention-3's pipeline on a timeline: who works when, and how busy the tensor cores are.

One thread block attends one row tile to n key tiles. A **producer** warp copies K and V tiles into a ring of `stages`
slots each; **consumer** warpgroups, with the rows between them, take every tile through three phases,

    S = Q K^T (tensor cores)      softmax (exponentials)      O += P V (tensor cores)

The exponentials are the trouble: an H100 has 989 TFLOP/s of products and 3.9 T/s of exponentials, so that at head dim
128, with 512 FLOPs of products for each exponential, softmax takes half as long as both products together. Two ways to
hide it:

- **Ping-pong**: of two warpgroups, one does its products while the other does its softmax, in strict turns: O of its
  tile j and S of tile j + 1, then it hands over. Without turns both reach each phase together and share its unit, and
  nothing overlaps (`lockstep`).
- **Intra-warpgroup overlap**: S of tile j + 1 is issued before O of tile j, so that the softmax of tile j + 1 runs
  while the tensor cores work on O. It takes one more tile of scores in registers.

The model: units do one thing at a time; starts wait for the operands, the slot and the turn; nothing else costs time.
In it either way alone hides softmax at head dim 128. Real kernels also pay for barriers, for the rest of softmax
(maxima, sums, conversions) and for registers that spill, and gain from both.

Source: FlashAttention-3 (Shah et al., 2024), section 3.1 (warp specialisation, ping-pong, Algorithm 1), section 3.2
(two-stage pipeline, Algorithm 2); table 2 for what they brought: 661 TFLOP/s with all, 582 and 570 without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .. import errors

COPY, TENSOR, SOFTMAX = "copy", "tensor", "softmax"
PRODUCER = "producer"

# H100 SXM: 989.4 TFLOP/s and 3.9 T exponentials/s over 132 multiprocessors at 1.83 GHz (section 3.1 of the paper).
FLOPS_PER_CYCLE = 4096
EXPONENTIALS_PER_CYCLE = 16
# L2 to one multiprocessor: 5120 bytes per cycle (NVIDIA A100 whitepaper) over the 132 of an H100.
BYTES_PER_CYCLE = 5120 / 132


class Costs(NamedTuple):
    """Cycles of each step: a copy of one K or V tile; S, softmax and O of one warpgroup and one tile."""

    copy: float
    scores: float
    softmax: float
    values: float


def hopper(block_q: int, block_k: int, head_dim: int, *, warpgroups: int = 2, itemsize: int = 2) -> Costs:
    """The steps of an H100, from its rates alone.

    Args:
        block_q: rows of the thread block, divided among its warpgroups.
        block_k: keys of a tile.
        head_dim: d, of keys and values.
        warpgroups: consumers.
        itemsize: bytes of an element; 1 doubles the rate of products.

    Example:
        >>> costs = hopper(128, 128, 128)
        >>> costs.scores, costs.softmax, costs.values, round(costs.copy)
        (512.0, 512.0, 512.0, 845)
    """
    scores = block_q / warpgroups * block_k
    product = 2 * scores * head_dim / (FLOPS_PER_CYCLE * 2 / itemsize)
    return Costs(block_k * head_dim * itemsize / BYTES_PER_CYCLE, product, scores / EXPONENTIALS_PER_CYCLE, product)


@dataclass(frozen=True)
class Schedule:
    """How the work is arranged.

    Args:
        warpgroups: consumers, 1 or more.
        pingpong: whether they take turns; else they run in lockstep. Needs at least two.
        overlap: whether S of the next tile is issued before O of this one.
        specialised: whether a producer copies ahead; else the block copies a tile when it is done with the last one,
            which leaves nothing to take turns with or to issue early.
        stages: slots for K and for V tiles, >= 1.

    Raises:
        tilewise.errors.ArgumentError: a count below 1, turns of a single warpgroup, or turns or overlap without a
            producer.
    """

    warpgroups: int = 2
    pingpong: bool = True
    overlap: bool = True
    specialised: bool = True
    stages: int = 2

    def __post_init__(self) -> None:
        for name, number in (("warpgroups", self.warpgroups), ("stages", self.stages)):
            if number < 1:
                errors.fail(errors.ArgumentError, name, number, "an integer >= 1", "pass at least one")
        if self.pingpong and self.warpgroups < 2:
            errors.fail(
                errors.ArgumentError, "pingpong", "True with one warpgroup", "two warpgroups or more", "pass False"
            )
        if not self.specialised and (self.pingpong or self.overlap):
            got = "False with pingpong or overlap"
            errors.fail(errors.ArgumentError, "specialised", got, "True for tiles copied ahead", "pass True")


class Interval(NamedTuple):
    """A step on the timeline: `unit` (copy, tensor, softmax) works for `role` on `what` (K, V, S, P, O) of tile `tile`,
    from `start` to `end`, in cycles. In lockstep the warpgroups' intervals coincide: they share the unit."""

    unit: str
    role: str
    what: str
    tile: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Intervals in order of their start, and what they add up to."""

    intervals: tuple[Interval, ...]

    @property
    def cycles(self) -> float:
        """When the last step ends."""
        return max(interval.end for interval in self.intervals)

    def of(self, unit: str) -> list[Interval]:
        """The intervals of one unit: a row of the drawing."""
        return [interval for interval in self.intervals if interval.unit == unit]

    def busy(self, unit: str) -> float:
        """Cycles in which a unit works."""
        return sum(end - start for start, end in {(x.start, x.end) for x in self.of(unit)})

    def utilisation(self, unit: str = TENSOR) -> float:
        """The share of all cycles in which a unit works."""
        return self.busy(unit) / self.cycles


class _Key(NamedTuple):
    """A step's name: group -1 is the producer."""

    group: int
    what: str
    tile: int


class _Step(NamedTuple):
    unit: str
    cycles: float
    after: tuple[_Key, ...]


def simulate(tiles: int, costs: Costs, schedule: Schedule) -> Timeline:
    """The timeline of one row tile over `tiles` key tiles.

    Every step starts as soon as what it waits for has ended and its unit is free; of several, the one that can start
    first, then the one listed first.

    Args:
        tiles: n, key tiles, >= 1.
        costs: cycles of the steps, from `hopper` or measured.
        schedule: the arrangement.

    Raises:
        tilewise.errors.ArgumentError: no tile.

    Source:
        FlashAttention-3 (2024), Algorithms 1 and 2, figures 1 and 2.

    Example:
        >>> costs = hopper(128, 128, 128)
        >>> both = simulate(16, costs, Schedule())
        >>> neither = simulate(16, costs, Schedule(pingpong=False, overlap=False))
        >>> round(both.utilisation(), 2), round(neither.utilisation(), 2)
        (0.97, 0.66)
    """
    if tiles < 1:
        errors.fail(errors.ArgumentError, "tiles", tiles, "an integer >= 1", "pass the key tiles of a row tile")
    steps = _steps(tiles, costs, schedule)
    ends: dict[_Key, float] = {}
    free = dict.fromkeys((COPY, TENSOR, SOFTMAX), 0.0)
    waiting, intervals = list(steps), []
    while waiting:
        ready = [key for key in waiting if all(other in ends for other in steps[key].after)]
        starts = {key: max([free[steps[key].unit], *(ends[other] for other in steps[key].after)]) for key in ready}
        key = min(ready, key=starts.__getitem__)
        unit, end = steps[key].unit, starts[key] + steps[key].cycles
        ends[key] = free[unit] = end
        waiting.remove(key)
        intervals += [Interval(unit, role, key.what, key.tile, starts[key], end) for role in _roles(key, schedule)]
    return Timeline(tuple(sorted(intervals, key=lambda interval: interval.start)))


def _roles(key: _Key, schedule: Schedule) -> list[str]:
    if key.group < 0:
        return [PRODUCER]
    groups = [key.group] if schedule.pingpong else range(schedule.warpgroups)
    return [f"warpgroup {group}" for group in groups]


def _steps(tiles: int, costs: Costs, schedule: Schedule) -> dict[_Key, _Step]:
    """All steps with what each waits for. Warpgroups in lockstep are one group that takes as long as all."""
    groups = schedule.warpgroups if schedule.pingpong else 1
    factor = schedule.warpgroups // groups
    steps: dict[_Key, _Step] = {}
    order = _copies(tiles, schedule.overlap)
    for index, (what, tile) in enumerate(order):
        after = [_Key(-1, *order[index - 1])] if index else []
        # A slot is free once every group has used what was in it: K for S, V for O.
        user, before = ("S" if what == "K" else "O"), tile - schedule.stages
        if not schedule.specialised:
            user, before = "O", tile - 1
        if before >= 0:
            after += [_Key(group, user, before) for group in range(groups)]
        steps[_Key(-1, what, tile)] = _Step(COPY, costs.copy, tuple(after))
    for group in range(groups):
        for tile in range(tiles):
            s, p, o = (_Key(group, what, tile) for what in "SPO")
            steps[s] = _Step(TENSOR, factor * costs.scores, (_Key(-1, "K", tile), *_issued(group, tile, schedule)))
            steps[p] = _Step(SOFTMAX, factor * costs.softmax, (s,))
            early = schedule.overlap and tile + 1 < tiles
            first = (_Key(group, "S", tile + 1),) if early else ()
            steps[o] = _Step(TENSOR, factor * costs.values, (_Key(-1, "V", tile), p, *first))
    if schedule.pingpong:
        _take_turns(steps, tiles, schedule)
    return steps


def _copies(tiles: int, overlap: bool) -> list[tuple[str, int]]:
    """The producer's order: as the consumers ask, which is K one tile ahead of V where S is issued early."""
    if not overlap:
        return [(what, tile) for tile in range(tiles) for what in "KV"]
    order = [("K", 0)]
    for tile in range(1, tiles):
        order += [("K", tile), ("V", tile - 1)]
    return [*order, ("V", tiles - 1)]


def _issued(group: int, tile: int, schedule: Schedule) -> list[_Key]:
    """What a warpgroup has waited for when it issues S of a tile."""
    if not schedule.overlap:
        return [_Key(group, "O", tile - 1)] if tile else []
    softmax = [_Key(group, "P", tile - 1)] if tile else []
    return softmax + ([_Key(group, "O", tile - 2)] if tile > 1 else [])


def _take_turns(steps: dict[_Key, _Step], tiles: int, schedule: Schedule) -> None:
    """Let the products of each group wait for those of the group before it: one turn is S of a tile and O beside it."""
    order: list[_Key] = []
    for turn in range(tiles + 1):
        for group in range(schedule.warpgroups):
            s = [_Key(group, "S", turn)] if turn < tiles else []
            o = [_Key(group, "O", turn - 1)] if turn else []
            order += s + o if schedule.overlap else o + s
    for before, key in pairwise(order):
        steps[key] = steps[key]._replace(after=(*steps[key].after, before))
