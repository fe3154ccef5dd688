"""The oracle itself, against what it shares nothing with: PyTorch's attention, loops over positions, closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise import masks, reference

B, SQ, SK, HQ, HKV, D = 2, 7, 11, 4, 2, 8
OFF = SK - SQ
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (
    torch.randn(B, s, h, D, generator=GENERATOR, dtype=torch.float64) for s, h in ((SQ, HQ), (SK, HKV), (SK, HKV))
)

Q_IDS = torch.tensor([[0, 0, 1, 1, 2, 2, 2], [3, 0, 3, 0, 1, 1, 9]])
K_IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 0, 3, 3, 2])
LO, HI = torch.tensor([[-4, 0, 1, 2, 5, 5, 9], [3, 3, 3, 8, 8, 12, 0]]), torch.tensor([0, 1, 40, 5, 5, 6, 11])
DENSE = torch.rand(B, 1, SQ, SK, generator=GENERATOR) > 0.4
TILES = torch.rand(1, HQ, 3, 3, generator=GENERATOR) > 0.4
PREFIX = torch.tensor([2, 6])

Rule = Callable[[int, int, int, int], Any]
# The contract's text, as loops read it: key j is visible to row i of head h of batch entry b.
RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "all": ({}, lambda b, h, i, j: True),
    "causal": ({"causal": True}, lambda b, h, i, j: j <= i + OFF),
    "top_left": ({"causal": "top_left"}, lambda b, h, i, j: j <= i),
    "window": ({"window": (2, 1)}, lambda b, h, i, j: i + OFF - 2 <= j <= i + OFF + 1),
    "window_zero": ({"window": (0, 0)}, lambda b, h, i, j: j == i + OFF),
    "window_left": ({"window": (3, None)}, lambda b, h, i, j: j >= i + OFF - 3),
    "window_top_left": (
        {"window": (2, 1), "causal": "top_left"},
        lambda b, h, i, j: i - 2 <= j <= i + 1 and j <= i,
    ),
    "document": ({"mask": masks.Document(Q_IDS, K_IDS)}, lambda b, h, i, j: Q_IDS[b, i] == K_IDS[j]),
    "interval": ({"mask": tilewise.Interval(LO, HI)}, lambda b, h, i, j: LO[b, i] <= j < HI[i]),
    "interval_lo": ({"mask": tilewise.Interval(lo=HI - 2)}, lambda b, h, i, j: j >= HI[i] - 2),
    "prefix": ({"mask": tilewise.PrefixLM(3)}, lambda b, h, i, j: j < 3 or j <= i + OFF),
    "prefix_tensor": ({"mask": tilewise.PrefixLM(PREFIX)}, lambda b, h, i, j: j < PREFIX[b] or j <= i + OFF),
    "predicate": ({"mask": lambda b, h, q, k: (b + h + q) % 2 == k % 2}, lambda b, h, i, j: (b + h + i) % 2 == j % 2),
    "dense": ({"mask": DENSE}, lambda b, h, i, j: DENSE[b, 0, i, j]),
    "blocks": ({"mask": tilewise.BlockMask(TILES, 3, 4)}, lambda b, h, i, j: TILES[0, h, i // 3, j // 4]),
    "and": (
        {"mask": masks.Dense(DENSE) & tilewise.BlockMask(TILES, 3, 4), "window": (5, None)},
        lambda b, h, i, j: DENSE[b, 0, i, j] and TILES[0, h, i // 3, j // 4] and j >= i + OFF - 5,
    ),
    "or": (
        {"mask": tilewise.Window(1, 0) | masks.Document(Q_IDS, K_IDS), "causal": True},
        lambda b, h, i, j: (i + OFF - 1 <= j <= i + OFF or Q_IDS[b, i] == K_IDS[j]) and j <= i + OFF,
    ),
}


def table(rule: Rule) -> torch.Tensor:
    """A rule's answers, [B, Hq, Sq, Sk]."""
    rows = [[[[bool(rule(b, h, i, j)) for j in range(SK)] for i in range(SQ)] for h in range(HQ)] for b in range(B)]
    return torch.tensor(rows)


def torch_attention(mask: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """PyTorch's own, with a boolean or an additive mask."""
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("name", RULES)
def test_masks_show_what_the_contract_says(name: str) -> None:
    """Counted with q = 0, where exp(lse) is the number of visible keys, and in place, by PyTorch's attention."""
    options, rule = RULES[name]
    visible = table(rule)
    _, lse = reference.attention(torch.zeros_like(Q), K, V, return_lse=True, **options)
    torch.testing.assert_close(lse.exp(), visible.sum(-1).double(), rtol=1e-12, atol=0)
    seen = visible.any(-1).transpose(1, 2)
    out = reference.attention(Q, K, V, **options)
    assert not out[~seen].count_nonzero()
    torch.testing.assert_close(out[seen], torch_attention(visible)[seen], rtol=1e-12, atol=1e-12)


def test_bias_and_scale_against_pytorch() -> None:
    bias = torch.randn(HQ, SQ, SK, generator=GENERATOR, dtype=torch.float64)
    out = reference.attention(Q, K, V, bias=bias, softmax_scale=0.3)
    torch.testing.assert_close(out, torch_attention(bias, scale=0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal, off", [(False, OFF), ("top_left", 0)])
def test_alibi_is_the_distance_from_the_diagonal(causal: Any, off: int) -> None:
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0], dtype=torch.float64)
    _, lse = reference.attention(torch.zeros_like(Q), K, V, alibi_slopes=slopes, causal=causal, return_lse=True)
    for h in range(HQ):
        for i in range(SQ):
            keys = range(i + 1) if causal else range(SK)
            expected = math.log(sum(math.exp(-float(slopes[h]) * abs(i + off - j)) for j in keys))
            assert float(lse[1, h, i]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_order_of_the_additive_part() -> None:
    """One key: its LSE is the score, softcapped, then modified, then with ALiBi and bias added."""
    q, k = torch.tensor([[[[3.0]]]], dtype=torch.float64), torch.tensor([[[[2.0]], [[9.0]]]], dtype=torch.float64)
    mod = tilewise.ScoreMod(lambda s, b, h, q, k: s * s)
    _, lse = reference.attention(
        q,
        k,
        k,
        mask=torch.tensor([True, False]),
        softcap=5.0,
        score_mod=mod,
        alibi_slopes=torch.tensor([0.25], dtype=torch.float64),
        bias=torch.tensor(0.125, dtype=torch.float64),
        softmax_scale=0.5,
        return_lse=True,
    )
    # The only row lies on key 1, so key 0 is one step away.
    assert float(lse) == pytest.approx((5.0 * math.tanh(3.0 / 5.0)) ** 2 - 0.25 + 0.125, rel=1e-12)


def test_sinks_are_one_more_key_of_value_zero() -> None:
    sinks = torch.randn(HQ, generator=GENERATOR, dtype=torch.float64)
    out, lse = reference.attention(Q, K, V, sinks=sinks, window=(1, 0), return_lse=True)
    plain, plain_lse = reference.attention(Q, K, V, window=(1, 0), return_lse=True)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None]))
    torch.testing.assert_close(out, plain * torch.exp(plain_lse - lse).transpose(1, 2)[..., None])


def test_dropout_takes_weights_away_after_the_softmax() -> None:
    eye = torch.eye(SK, dtype=torch.float64)[None, :, None].expand(B, SK, HKV, SK)
    weights = reference.attention(Q, K, eye, dropout_p=0.25, dropout_seed=4)
    exact, lse = reference.attention(Q, K, eye, return_lse=True)
    kept = weights != 0
    torch.testing.assert_close(weights, torch.where(kept, exact / 0.75, 0.0))
    assert 0.6 < float(kept.double().mean()) < 0.9
    dropped = reference.attention(Q, K, eye, dropout_p=0.25, dropout_seed=4, return_lse=True)[1]
    torch.testing.assert_close(dropped, lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rounding_is_that_of_plain_code(dtype: torch.dtype) -> None:
    """``dtype=`` errs as much as PyTorch's operators in that dtype do: not more than 3 times, not less than a third."""
    q, k, v = (torch.randn(1, 64, 2, 32, generator=GENERATOR, dtype=torch.float64).to(dtype) for _ in range(3))
    exact = reference.attention(q, k, v)
    rounded = reference.attention(q, k, v, dtype=dtype)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5
    plain = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, dim=-1), v)
    ours, theirs = (float((x.double() - exact).square().mean().sqrt()) for x in (rounded, plain))
    assert theirs / 3 < ours < 3 * theirs
