"""Does training with tilewise give the losses that training with torch gives?

Three runs from the same weights on the same batches, dropout off (torch can draw a mask, but not ours): tilewise in
fp32, torch SDPA in fp32, and the oracle in fp64. Two runs in fp32 cannot agree better than fp32 rounding allows, and
training amplifies rounding, so the bound is measured: torch's own distance from fp64 on these very steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .attend import Attend, attend_oracle, attend_sdpa, attend_tilewise
from .config import Plan
from .data import Corpus, random_batches
from .metrics import Comparison
from .model import Decoder
from .train import training

# Two runs in fp32 are two draws of the same rounding noise; the largest excursions of such draws are seen to differ up
# to threefold, where a window that is off by one differs a hundredfold.
DRAWS = 4.0
# A loss in fp32 is itself rounded, in the forward pass of either run.
ULPS = 4


class Disagreement(RuntimeError):
    """The two implementations do not train alike."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(
            f"training with tilewise and with torch SDPA gave losses {comparison.difference:.2e} apart, and fp32 "
            f"rounding explains {comparison.bound:.2e}. One of the two computes something else: run the tests."
        )
        self.comparison = comparison


def compare(plan: Plan, corpus: Corpus, on_step: Callable[[], None], attend: Attend = attend_tilewise) -> Comparison:
    """Train with `attend`, with torch SDPA and with the oracle; `on_step` is called after each step of each."""
    runs = {"tilewise": (attend, torch.float32), "sdpa": (attend_sdpa, torch.float32)}
    runs["oracle"] = (attend_oracle, torch.float64)
    curves: dict[str, list[float]] = {}
    for name, (function, dtype) in runs.items():
        curves[name] = []
        for loss in curve(plan, corpus, function, dtype):
            curves[name].append(loss)
            on_step()
    rounding = distance(curves["sdpa"], curves["oracle"])
    ulp = torch.finfo(torch.float32).eps * max(curves["oracle"])
    return Comparison(
        **curves,
        rounding=rounding,
        bound=DRAWS * rounding + ULPS * ulp,
        difference=distance(curves["tilewise"], curves["sdpa"]),
    )


def curve(plan: Plan, corpus: Corpus, attend: Attend, dtype: torch.dtype) -> Iterator[float]:
    """Losses of one run of the comparison."""
    model = Decoder(plan.model, attend, plan.config.seed).to(plan.device, dtype)
    recipe = plan.comparison
    batches = random_batches(corpus.train, recipe.batch, plan.model.seqlen, plan.config.seed)
    return training(model, batches, recipe, autocast=None, dropout_seed=None)


def distance(a: list[float], b: list[float]) -> float:
    """Largest absolute difference of two curves; NaN if any loss is."""
    return float((torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max())
