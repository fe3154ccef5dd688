"""When the parts of a Hopper thread block work: a producer, two consumer warpgroups, tensor cores, exponential units.

A model that keeps the order of FlashAttention-3 and the rates of one SM, not a measurement: a consumer's product takes
its FLOPs at the tensor cores' rate, its softmax the exponentials at the special-function units' rate and the rest at
the rate of the fp32 units, a load its bytes at the rate of L2. Each unit serves one request after the other.

Source: FlashAttention-3 (Shah et al., 2024), sections 3.1 (producer and consumers, ping-pong) and 3.2 (two stages
inside a warpgroup); rates of an H100 SXM at 1.83 GHz: 989.4 TFLOP/s and 3.9 T exponentials/s over 132 SMs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LANES = ("producer", "consumer A", "consumer B", "tensor cores", "exp units")
PRODUCER, CONSUMERS, TENSOR, EXP = 0, (1, 2), 3, 4

TENSOR_FLOPS, EXPONENTIALS, FP32_OPS, LOAD_BYTES = 4096, 16, 128, 64  # a cycle, of one SM
ROWS = 64  # of one consumer
OTHER_OPS = 4  # for each score beside its exponential: maximum, subtract, sum, conversion
TILES = 4  # key tiles that are drawn
STAGES = 2  # tiles of K and of V that shared memory holds
HEAD_DIMS = (64, 128, 256)

ALONE, TOGETHER, PING_PONG, OVERLAPPED = (
    "one consumer, in turn",
    "two consumers, in step",
    "two consumers, ping-pong",
    "ping-pong, two stages in each consumer",
)
SCHEDULES = (ALONE, TOGETHER, PING_PONG, OVERLAPPED)


class Span(NamedTuple):
    """Work of `kind` (load, qk, softmax or pv) on a lane, in cycles; `who`: 0 the producer, else the consumer."""

    lane: int
    who: int
    kind: str
    start: float
    end: float
    label: str


class Durations(NamedTuple):
    """Cycles of one consumer's step over one key tile, and of loading K or V."""

    product: float
    exp: float
    other: float
    load: float

    @classmethod
    def of(cls, head_dim: int) -> Durations:
        """At this head dim; tiles of 128 keys, 64 above head dim 128.

        >>> Durations.of(128)
        Durations(product=512.0, exp=512.0, other=256.0, load=512.0)
        """
        keys = 128 if head_dim <= 128 else 64
        scores = ROWS * keys
        return cls(
            product=2 * scores * head_dim / TENSOR_FLOPS,
            exp=scores / EXPONENTIALS,
            other=scores * OTHER_OPS / FP32_OPS,
            load=2 * keys * head_dim / LOAD_BYTES,
        )


class _Block:
    """One thread block as its work is laid out; every unit serves requests in the order in which they are made."""

    def __init__(self, durations: Durations, together: bool) -> None:
        self.durations = durations
        # Two consumers that nobody orders may ask for the same unit at once: each then gets half of it.
        self.slow = 2.0 if together else 1.0
        self.together = together
        self.spans: list[Span] = []
        self.free = dict.fromkeys(range(len(LANES)), 0.0)
        self.loaded: dict[tuple[str, int], float] = {}
        self.used: dict[tuple[str, int], float] = {}
        self.ready: dict[tuple[str, int, int], float] = {}

    def load(self, name: str, j: int) -> float:
        """When tile j of K or V is in shared memory; it waits until a stage is free."""
        if (name, j) not in self.loaded:
            start = max(self.free[PRODUCER], self.used.get((name, j - STAGES), 0.0))
            self._take((PRODUCER, 0), "load", start, self.durations.load, f"{name}{j + 1}")
            self.loaded[name, j] = self.free[PRODUCER]
        return self.loaded[name, j]

    def product(self, kind: str, w: int, j: int) -> None:
        """QKᵀ or PV of consumer w and key tile j."""
        name = "K" if kind == "qk" else "V"
        needs = [self.load(name, j), self.ready.get(("softmax", w, j), 0.0) if kind == "pv" else 0.0]
        if not self.together:
            needs.append(self.free[TENSOR])
        elif kind == "qk":
            needs.append(self.ready.get(("pv", w, j - 1), 0.0))
        start = max(needs)
        length = self.durations.product * self.slow
        for lane in (CONSUMERS[w], TENSOR):
            self._take((lane, w + 1), kind, start, length, f"{j + 1}")
        self.ready[kind, w, j] = start + length
        self.used[name, j] = max(self.used.get((name, j), 0.0), start + length)

    def softmax(self, w: int, j: int) -> None:
        """Consumer w's softmax of key tile j: row maxima, exponentials, then sums and conversion."""
        before = self.durations.other / 2 * self.slow
        start = max(self.ready["qk", w, j], self.ready.get(("softmax", w, j - 1), 0.0))
        exp = start + before if self.together else max(start + before, self.free[EXP])
        length = self.durations.exp * self.slow
        end = exp + length + before
        self._take((CONSUMERS[w], w + 1), "softmax", start, end - start, f"{j + 1}")
        self._take((EXP, w + 1), "softmax", exp, length, f"{j + 1}")
        self.ready["softmax", w, j] = end

    def _take(self, where: tuple[int, int], kind: str, start: float, length: float, label: str) -> None:
        lane, who = where
        self.spans.append(Span(lane, who, kind, start, start + length, label))
        self.free[lane] = max(self.free[lane], start + length)


def simulate(schedule: str, head_dim: int) -> list[Span]:
    """The spans of a schedule over `TILES` key tiles."""
    block = _Block(Durations.of(head_dim), schedule == TOGETHER)
    consumers = range(1 if schedule == ALONE else 2)
    for w in consumers:
        block.product("qk", w, 0)
        block.softmax(w, 0)
    for j in range(TILES):
        for w in consumers:
            # Two stages: the next scores are asked for before these values, so their softmax runs beside PV.
            order = ("qk", "pv") if schedule == OVERLAPPED else ("pv", "qk")
            for kind in order:
                if kind == "pv":
                    block.product("pv", w, j)
                elif j + 1 < TILES:
                    block.product("qk", w, j + 1)
            if j + 1 < TILES:
                block.softmax(w, j + 1)
    return block.spans


def busy(spans: list[Span], lane: int) -> float:
    """Share of the whole time in which a lane has work.

    >>> busy([Span(3, 1, "qk", 0, 2, "1"), Span(3, 2, "qk", 1, 3, "1"), Span(0, 0, "load", 0, 4, "K1")], 3)
    0.75
    """
    total, until = 0.0, 0.0
    for span in sorted((span for span in spans if span.lane == lane), key=lambda span: span.start):
        total += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return total / max(span.end for span in spans)


def figures() -> dict[str, Any]:
    """What the page needs: lanes, and each head dim's schedules."""
    return {"lanes": LANES, "runs": {d: [_run(name, d) for name in SCHEDULES] for d in HEAD_DIMS}}


def _run(name: str, head_dim: int) -> dict[str, Any]:
    spans = simulate(name, head_dim)
    return {
        "name": name,
        "spans": [span._asdict() for span in spans],
        "cycles": max(span.end for span in spans),
        "tiles": TILES if name == ALONE else 2 * TILES,
        "tensor": busy(spans, TENSOR),
        "exp": busy(spans, EXP),
    }
