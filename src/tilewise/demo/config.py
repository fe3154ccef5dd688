"""What the demo is asked to do, and what that means on the device at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..errors import ArgumentError, fail


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder; odd layers see a window of `window` bytes, even ones all `seqlen`."""

    layers: int = 4
    width: int = 128
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    hidden: int = 352
    seqlen: int = 128
    window: int = 32
    dropout_p: float = 0.1


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    steps: int = 400
    batch: int = 8
    learning_rate: float = 4e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 4
    evaluation_batches: int = 4


@dataclass(frozen=True)
class Scale:
    """What suits one kind of device."""

    model: ModelConfig
    recipe: Recipe
    autocast: torch.dtype | None


SCALES = {
    "cpu": Scale(ModelConfig(), Recipe(), None),
    "cuda": Scale(
        ModelConfig(layers=8, width=512, heads_q=8, heads_kv=2, head_dim=64, hidden=1408, seqlen=1024, window=256),
        Recipe(steps=1500, batch=16, learning_rate=1e-3, warmup=100, evaluations=10, evaluation_batches=16),
        torch.bfloat16,
    ),
}


@dataclass(frozen=True)
class DemoConfig:
    """One run of the demo. None means "what suits the device".

    Args:
        steps: optimiser steps of the main run; default 400 on a CPU, 1500 on a GPU.
        seed: decides weights, batches, dropout and sampling, `0 <= seed < 2**31`; default 0.
        out: folder for `loss.svg`, `loss.png` and `metrics.json`; default: write nothing.
        device: "cpu" or "cuda"; default: the GPU if there is one that a backend serves.
        model: sizes of the decoder.
        recipe: batch, learning rate and the like; `steps` takes precedence over its own.
        compare_steps: steps of each run in the comparison with torch, at most those of the main run.
        compare_batch: sequences per step of the comparison.
        check_seqlen: bytes of context on which the trained model's attention is held against the oracle.
        generate_bytes: length of the text to write after training.
        corpus_bytes: how much of the standard library's source to read.

    Example:
        >>> DemoConfig(steps=100).seed
        0
        >>> DemoConfig(steps=0)
        Traceback (most recent call last):
            ...
        tilewise.errors.ArgumentError: steps: got 0; supported: an integer >= 1. Fix: pass 1 or more.
    """

    steps: int | None = None
    seed: int = 0
    out: Path | None = None
    device: str | None = None
    model: ModelConfig | None = None
    recipe: Recipe | None = None
    compare_steps: int = 50
    compare_batch: int = 4
    check_seqlen: int = 1024
    generate_bytes: int = 400
    corpus_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        counts = ("steps", "compare_steps", "compare_batch", "check_seqlen", "generate_bytes", "corpus_bytes")
        for name in counts:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                fail(ArgumentError, name, repr(value), "an integer >= 1", "pass 1 or more")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            fail(ArgumentError, "seed", repr(self.seed), "an integer from 0 to 2**31 - 1", "pass a smaller number")
        if self.device not in (None, *SCALES):
            fail(ArgumentError, "device", repr(self.device), f"one of {', '.join(SCALES)}", "leave it out to choose")


@dataclass(frozen=True)
class Plan:
    """A `DemoConfig` with every choice made."""

    config: DemoConfig
    device: torch.device
    model: ModelConfig
    recipe: Recipe
    autocast: torch.dtype | None

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v in the main run."""
        return self.autocast or torch.float32

    @property
    def comparison(self) -> Recipe:
        """The recipe of each run in the comparison, which warms up to its end: haste would amplify rounding."""
        steps = min(self.config.compare_steps, self.recipe.steps)
        return replace(self.recipe, steps=steps, warmup=steps, batch=self.config.compare_batch)


def plan(config: DemoConfig, device: str) -> Plan:
    """The plan for `config` on `device`."""
    scale = SCALES[device]
    recipe = config.recipe or scale.recipe
    if config.steps is not None:
        recipe = replace(recipe, steps=config.steps)
    return Plan(config, torch.device(device), config.model or scale.model, recipe, scale.autocast)
