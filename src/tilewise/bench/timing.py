"""Interleaved rounds of short bursts.

Each round gives every contestant one burst, in an order that turns round to round, so that drift of clock and power
meets all alike and cancels in the ratio of two bursts of one round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

Call = Callable[[], object]
WARM_UP = 3
# Cycles that the GPU waits before a burst, about 1 ms, while the host makes its way to the first launches.
HEAD_START = 2_000_000
MOST_REPEATS = 1000


class Reading(NamedTuple):
    """What the GPU's sensors say: SM clock in MHz, board power in W (averaged by the driver over some 100 ms)."""

    sm_mhz: int
    watts: float


class Clock(Protocol):
    """How one burst is timed."""

    def burst(self, call: Call, repeats: int) -> tuple[float, Reading | None]:
        """Milliseconds of one call, the mean of `repeats` in a row, and the sensors meanwhile if there are any."""
        ...


class CpuClock:
    """The host's clock."""

    def burst(self, call: Call, repeats: int) -> tuple[float, Reading | None]:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return 1e3 * (time.perf_counter() - start) / repeats, None


class CudaClock:
    """Events around the burst. The launches queue up behind a wait, so that what the host takes for the first does not
    count.
    """

    def __init__(self, device: torch.device, sensors: Callable[[], Reading | None]) -> None:
        self._device, self._sensors = device, sensors

    def burst(self, call: Call, repeats: int) -> tuple[float, Reading | None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Nothing of an earlier burst may still run when this one begins.
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(HEAD_START)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        # The launches are queued and the GPU is at work: now its sensors tell about this burst.
        reading = self._sensors()
        end.synchronize()
        return start.elapsed_time(end) / repeats, reading


@dataclass
class Series:
    """One contestant's bursts, a value for each round."""

    ms: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def median_reading(self) -> Reading | None:
        if not self.readings:
            return None
        mhz, watts = (statistics.median(values) for values in zip(*self.readings, strict=True))
        return Reading(round(mhz), watts)


def interleave(clock: Clock, calls: Mapping[str, Call], rounds: int, burst_ms: float) -> dict[str, Series]:
    """Time all calls side by side.

    Args:
        clock: for the device that the calls run on.
        calls: what to time, by name; compiled already.
        rounds: how many count; one more goes before them.
        burst_ms: length to aim at, per call and round.
    """
    repeats = {name: _repeats(clock, call, burst_ms) for name, call in calls.items()}
    series = {name: Series() for name in calls}
    for turn in range(-1, rounds):
        for name in calls if turn % 2 == 0 else reversed(list(calls)):
            ms, reading = clock.burst(calls[name], repeats[name])
            if turn < 0:
                continue
            series[name].ms.append(ms)
            if reading is not None:
                series[name].readings.append(reading)
    return series


def _repeats(clock: Clock, call: Call, burst_ms: float) -> int:
    """Warm up, and find how many calls fill a burst."""
    clock.burst(call, WARM_UP)
    ms, _ = clock.burst(call, WARM_UP)
    return max(1, min(MOST_REPEATS, round(burst_ms / max(ms, 1e-3))))


class Ratio(NamedTuple):
    """Median over rounds, and the quartiles around it."""

    median: float
    low: float
    high: float


def ratio(ours: Sequence[float], other: Sequence[float]) -> Ratio:
    """How many times faster `ours` is than `other`, from times of the same rounds.

    >>> ratio([1.0, 2.0, 4.0], [1.1, 2.4, 4.0])
    Ratio(median=1.1, low=1.05, high=1.15)
    """
    per_round = sorted(b / a for a, b in zip(ours, other, strict=True))
    if len(per_round) == 1:
        return Ratio(*per_round * 3)
    low, median, high = statistics.quantiles(per_round, n=4, method="inclusive")
    return Ratio(*(round(x, 6) for x in (median, low, high)))
