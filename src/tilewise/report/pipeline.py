"""Timelines of FlashAttention-3's pipeline for the page: the textbook's, as spans on five lanes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..textbook.pipeline import COPY, PRODUCER, SOFTMAX, TENSOR, Interval, Schedule, Timeline, hopper, simulate

LANES = ("producer", "consumer A", "consumer B", "tensor cores", "exp units")
_UNITS = {COPY: 0, TENSOR: 3, SOFTMAX: 4}
_KINDS = {"K": "load", "V": "load", "S": "scores", "P": "softmax", "O": "values"}

BLOCK_Q = 128
TILES = 4
HEAD_DIMS = (64, 128, 256)
SCHEDULES = {
    "no producer": Schedule(pingpong=False, overlap=False, specialised=False),
    "producer, consumers in step": Schedule(pingpong=False, overlap=False),
    "producer, ping-pong": Schedule(overlap=False),
    "producer, overlap inside a consumer": Schedule(pingpong=False),
    "producer, ping-pong and overlap": Schedule(),
}


class Span(NamedTuple):
    """Work on a lane, in cycles; `who`: 0 the producer, else the consumer."""

    lane: int
    who: int
    kind: str
    start: float
    end: float
    label: str


def figures() -> dict[str, Any]:
    """What the page needs: lanes, and each head dim's schedules."""
    return {"lanes": LANES, "runs": {d: [_run(name, d) for name in SCHEDULES] for d in HEAD_DIMS}}


def timeline(name: str, head_dim: int) -> Timeline:
    """The textbook's timeline of one thread block: 128 rows, 128 keys a tile, 64 above head dim 128."""
    costs = hopper(BLOCK_Q, 128 if head_dim <= 128 else 64, head_dim)
    return simulate(TILES, costs, SCHEDULES[name])


def spans(interval: Interval) -> list[Span]:
    """An interval on the lane of its unit, and on its consumer's.

    >>> for span in spans(Interval(TENSOR, "warpgroup 1", "S", 0, 0.0, 512.0)):
    ...     print(*span)
    3 2 scores 0.0 512.0 1
    2 2 scores 0.0 512.0 1
    """
    who = 0 if interval.role == PRODUCER else 1 + int(interval.role.rsplit(" ", 1)[1])
    number = str(interval.tile + 1)
    rest = (_KINDS[interval.what], interval.start, interval.end, number if who else interval.what + number)
    lanes = [_UNITS[interval.unit], who] if who else [_UNITS[interval.unit]]
    return [Span(lane, who, *rest) for lane in lanes]


def _run(name: str, head_dim: int) -> dict[str, Any]:
    line = timeline(name, head_dim)
    return {
        "name": name,
        "spans": [span._asdict() for interval in line.intervals for span in spans(interval)],
        "cycles": line.cycles,
        "tensor": line.utilisation(TENSOR),
        "exp": line.utilisation(SOFTMAX),
    }
