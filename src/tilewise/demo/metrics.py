"""What the demo found, as plain data: `Metrics.to_json` writes all of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

SCHEMA = 1


@dataclass(frozen=True)
class Environment:
    """Where the figures come from."""

    tilewise: str
    torch: str
    python: str
    device: str
    threads: int
    dtype: str


@dataclass(frozen=True)
class Setup:
    """What was trained on what."""

    seed: int
    parameters: int
    model: dict[str, int | float]
    recipe: dict[str, int | float]
    corpus_files: int
    corpus_bytes: int
    corpus_sha256: str


@dataclass(frozen=True)
class Training:
    """The main run: `loss` per step in nats per byte, `validation` as (steps done, loss)."""

    loss: list[float]
    validation: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float

    @property
    def bits_per_byte(self) -> float:
        """Of the last validation loss."""
        return self.validation[-1][1] / math.log(2)


@dataclass(frozen=True)
class Comparison:
    """Loss curves of runs that differ only in their attention; `oracle` is the run in fp64."""

    tilewise: list[float]
    sdpa: list[float]
    oracle: list[float]
    rounding: float
    bound: float
    difference: float

    @property
    def agree(self) -> bool:
        """False also where a loss is not a number."""
        return self.difference <= self.bound


@dataclass(frozen=True)
class Sample:
    """Text that the trained model wrote after `prompt`; bytes that are no UTF-8 are replaced."""

    prompt: str
    temperature: float
    text: str


@dataclass(frozen=True)
class Errors:
    """Largest absolute differences from the oracle; None where the implementation has no such result."""

    out: float | None
    lse: float | None
    dq: float | None
    dk: float | None
    dv: float | None


@dataclass(frozen=True)
class Exactness:
    """One kind of layer on its own trained q, k and v; `sdpa` is None where SDPA cannot express the layer."""

    layer: str
    backend: str
    tilewise: Errors
    sdpa: Errors | None
    plain: Errors


@dataclass(frozen=True)
class Traffic:
    """One pass of one layer: `score_bytes` is what standard attention holds in memory for S and P."""

    layer: str
    direction: str
    batch: int
    seqlen: int
    score_bytes: int
    standard_hbm_bytes: int
    tiled_hbm_bytes: int
    flops: int
    floor_us: float
    device: str


@dataclass(frozen=True)
class Metrics:
    """Everything that one run of the demo measured."""

    environment: Environment
    setup: Setup
    training: Training
    comparison: Comparison
    sample: Sample
    exactness: list[Exactness]
    traffic: list[Traffic]
    seconds: float

    def to_json(self) -> str:
        """All fields, the derived `bits_per_byte` and `agree`, and the schema's number."""
        fields = {"schema": SCHEMA, **asdict(self)}
        fields["training"]["bits_per_byte"] = self.training.bits_per_byte
        fields["comparison"]["agree"] = self.comparison.agree
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
