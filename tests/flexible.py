"""Functions as users of FlexAttention write them, made of everything that can be lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

HEADS, ROWS, KEYS = 2, 37, 45

_generator = torch.Generator().manual_seed(0)
SLOPES = torch.rand(HEADS, generator=_generator)
TABLE = torch.randn(HEADS, 7, generator=_generator)
BY_ROW = torch.randn(1, HEADS, ROWS, generator=_generator)
DOCUMENTS = torch.tensor([0] * 9 + [3] * 20 + [1] * 16)
BIG = torch.tensor(1.5)
WIDTH = 11


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * (q_idx - kv_idx).abs().float()


def softcap(cap: float) -> Callable[..., Any]:
    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return capped


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h][(q_idx - kv_idx) % 7] * BIG + TABLE[0, -1]


def composed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return softcap(2.0)(alibi(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)


SCORES: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": alibi,
    "softcap": softcap(1.5),
    "relative": relative,
    "composed": composed,
    "by_row": lambda s, b, h, q, k: s * BY_ROW[b, h, q] + b,
    "masked": lambda s, b, h, q, k: torch.where(q - k < WIDTH, s, -float("inf")),
    "constant": lambda s, b, h, q, k: (h + 1) * 0.25 + (q // 3) * 0.1,
    "exponential": lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.exp2(s * 0.1) - 2 * torch.sigmoid(s),
    "roots": lambda s, b, h, q, k: torch.sqrt(s * s + 1) + torch.rsqrt(s.square() + 2) + (s**2 + 1) ** 0.5,
    "logarithms": lambda s, b, h, q, k: torch.log(s.relu() + 1.5) + torch.log2(3 + s**4) - (1 + s**2) ** -2,
    "waves": lambda s, b, h, q, k: torch.sin(s) * torch.cos(s * 2) + torch.sin(q.float()),
    "quotients": lambda s, b, h, q, k: s / (1 + s * s) + (q - k) / (h + 1) + 1 / (2 + torch.cos(s)),
    "clamped": lambda s, b, h, q, k: s.clamp(-0.5, 0.7) + torch.clamp(s, min=0.1) - torch.clamp_max(s, 0.3),
    "larger": lambda s, b, h, q, k: torch.maximum(s, SLOPES[h]) - torch.minimum(s * 2, s + 1),
    "chosen": lambda s, b, h, q, k: torch.where((q == k) | (k % 4 == 0), s * 3, torch.where(s > 0, s * s, 0.5)),
    "converted": lambda s, b, h, q, k: s + (q == k).to(s.dtype) * 2.0 + (k > q).float() * -0.5 + (q > 3).int() * 0.1,
    "rounded": lambda s, b, h, q, k: s * torch.floor(q / 4) - torch.ceil(k / 3) * 0.1 + torch.sign(q - k) * s,
    "filled": lambda s, b, h, q, k: s + torch.zeros_like(s) + torch.full((), 0.5) - torch.tensor(2.0) * s,
    "no_gradient": lambda s, b, h, q, k: s + s.detach() * 0.5,
}


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def within(width: int) -> Callable[..., Any]:
    return lambda b, h, q, k: q - k <= width


MASKS: dict[str, Callable[..., Any]] = {
    "everything": noop_mask,
    "causal": causal,
    "mirrored": lambda b, h, q, k: k <= q,
    "window": and_masks(causal, within(9)),
    "band": lambda b, h, q, k: (q - k < 9) & (k - q < 4) & (k - q >= -6),
    "documents": and_masks(causal, same_document),
    "prefix": or_masks(causal, lambda b, h, q, k: k < 8),
    "negated": lambda b, h, q, k: ~(q < k) & torch.logical_not(k == 5) & ((k ^ 1) != 2),
    "logical": lambda b, h, q, k: torch.logical_or(q == k, torch.logical_and(q > 2, h != 1)) | (k % 2 == 1),
    "striped": lambda b, h, q, k: ((q - k) // 3) % 2 == 0,
    "by_head": lambda b, h, q, k: (q >= k) & ((h == 0) | (q - k < 6)),
    "strict": lambda b, h, q, k: q > k,
    "nothing": lambda b, h, q, k: (q >= k) & (q < 0),
}
