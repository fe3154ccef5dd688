"""tilewise.flex on a GPU gives what it gives on the CPU, with functions that capture tensors of their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import tilewise
from tolerance import assert_close

ROWS, KEYS = 300, 333
NAMES = ("out", "lse", "dq", "dk", "dv")


def captured(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "slopes": torch.rand(4, generator=generator),
        "table": torch.randn(4, 9, generator=generator),
        "documents": torch.arange(KEYS) // 70,
        "offset": torch.tensor(0.3),
    }
    return {name: x.to(device) for name, x in tensors.items()}


def scores(t: dict[str, torch.Tensor]) -> dict[str, Callable[..., Any] | None]:
    return {
        "none": None,
        "alibi": lambda s, b, h, q, k: s - t["slopes"][h] * (q - k).abs().float(),
        "relative": lambda s, b, h, q, k: 2 * torch.tanh((s + t["table"][h, (q - k) % 9]) / 2) + t["offset"],
        "masked": lambda s, b, h, q, k: torch.where(q - k < 50, s * s, -float("inf")),
    }


def masks(t: dict[str, torch.Tensor]) -> dict[str, Callable[..., Any] | None]:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return t["documents"][q] == t["documents"][k]

    return {
        "none": None,
        "causal": causal,
        "documents": and_masks(causal, same),
        "prefix": or_masks(causal, lambda b, h, q, k: k < 40),
        "heads": lambda b, h, q, k: ~(q < k) & ((h % 2 == 0) | (q - k < 64)),
    }


def attend(device: str, score: str, mask: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Output, LSE and gradients, on the CPU; the tensors are the same on every device."""
    t, generator = captured(device), torch.Generator().manual_seed(1)
    shapes = ((2, 4, ROWS, 64), (2, 2, KEYS, 64), (2, 2, KEYS, 32))
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    mask_mod = masks(t)[mask]
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, 4, ROWS, KEYS, device=device)
    out, lse = tilewise.flex(*inputs, scores(t)[score], block_mask, enable_gqa=True, return_lse=True)
    loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()
    return [x.detach().cpu() for x in (out, lse, *torch.autograd.grad(loss, inputs))]


@pytest.mark.parametrize("mask", list(masks({})))
@pytest.mark.parametrize("score", list(scores({})))
def test_as_on_the_cpu(score: str, mask: str) -> None:
    exact = attend("cpu", score, mask, torch.float64)
    named = zip(NAMES, attend("cuda", score, mask), exact, attend("cpu", score, mask), strict=True)
    for name, got, truth, plain in named:
        assert_close(name, got, truth, plain, 1.0, torch.float32)
