"""Training: AdamW, linear warm-up and cosine decay, gradient clipping, loss on held-out text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from .attend import attend_tilewise
from .config import Plan, Recipe
from .data import Corpus, even_batches, random_batches
from .metrics import Training
from .model import Decoder

FINAL_RATE = 0.02  # of the peak learning rate


def rate(step: int, recipe: Recipe) -> float:
    """Learning rate of `step`: linear up over `warmup` steps, then half a cosine down to 2 % of the peak.

    >>> recipe = Recipe(steps=100, warmup=10, learning_rate=1.0)
    >>> [round(rate(step, recipe), 2) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.51, 0.02]
    """
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


def optimiser(model: Decoder, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019); matrices decay, gains do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def mixed_precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Autocast to `dtype`, or nothing."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def fit(plan: Plan, corpus: Corpus, on_step: Callable[[float, float], None]) -> tuple[Decoder, Training]:
    """The main run, with tilewise and dropout; `on_step(loss, tokens per second)` is called after each step."""
    recipe, seed, seqlen = plan.recipe, plan.config.seed, plan.model.seqlen
    model = Decoder(plan.model, attend_tilewise, seed).to(plan.device)
    batches = random_batches(corpus.train, recipe.batch, seqlen, seed)
    held_out = even_batches(corpus.validation, recipe.batch, seqlen, recipe.evaluation_batches)
    every = -(-recipe.steps // recipe.evaluations)
    loss: list[float] = []
    validation = [(0, evaluate(model, held_out, plan.autocast))]
    seconds, started = 0.0, time.perf_counter()
    for value in training(model, batches, recipe, plan.autocast, dropout_seed=seed << 32):
        seconds += time.perf_counter() - started
        loss.append(value)
        on_step(value, len(loss) * recipe.batch * seqlen / seconds)
        if len(loss) % every == 0 or len(loss) == recipe.steps:
            validation.append((len(loss), evaluate(model, held_out, plan.autocast)))
        started = time.perf_counter()
    return model, Training(loss, validation, seconds, len(loss) * recipe.batch * seqlen / seconds)


def training(
    model: Decoder, batches: Iterator[Tensor], recipe: Recipe, autocast: torch.dtype | None, dropout_seed: int | None
) -> Iterator[float]:
    """Train `model` in place; yields the loss of each step (nats per byte, before its update).

    With a `dropout_seed`, step `t` draws its masks from the seeds `dropout_seed + t·layers + layer`.
    """
    device = next(model.parameters()).device
    adamw = optimiser(model, recipe)
    model.train()
    for step, batch in zip(range(recipe.steps), batches, strict=False):
        for group in adamw.param_groups:
            group["lr"] = rate(step, recipe)
        seed = None if dropout_seed is None else dropout_seed + step * model.config.layers
        with mixed_precision(device, autocast):
            loss = model.loss(batch.to(device), seed)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), recipe.clip)
        adamw.step()
        yield loss.item()


@torch.no_grad()
def evaluate(model: Decoder, batches: Iterable[Tensor], autocast: torch.dtype | None) -> float:
    """Mean loss in nats per byte, dropout off."""
    device = next(model.parameters()).device
    model.eval()
    with mixed_precision(device, autocast):
        losses = [model.loss(batch.to(device)).item() for batch in batches]
    model.train()
    return math.fsum(losses) / len(losses)
