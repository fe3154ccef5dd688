"""The gradient of attention sinks, from what every backward pass has at hand."""

from __future__ import annotations

import torch


def gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """``-sum over rows of exp(sink - lse) delta``: a sink is a key whose value is 0.

    Args:
        sinks: [Hq].
        lse, delta: fp32 [B, Hq, Sq] or packed [Hq, T]; delta is ``rowsum(do o) - dlse``.
    """
    heads_last = (0, 2, 1) if lse.ndim == 3 else (1, 0)
    lse, delta = lse.permute(heads_last).flatten(0, -2), delta.permute(heads_last).flatten(0, -2)
    p = torch.where(lse == float("-inf"), 0.0, (sinks.float() - lse).exp())
    return -(p * delta).sum(0).to(sinks.dtype)
