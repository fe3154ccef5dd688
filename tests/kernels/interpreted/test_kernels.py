"""Every part that a kernel composes, once, on a ragged shape smaller than two tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import assert_agrees, draw, operands

from tilewise import BlockMask, ScoreMod, masks, tiles
from tilewise.tiles import TileConfig


def curve(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, factor: Any) -> Any:
    """A quadratic in the score with a relative table, whose index is negative for late keys."""
    return s * s * factor + table[h, (q - k) % 7] + table[0, -1]


def curve_gradient(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, factor: Any) -> Any:
    return ds * 2 * s * factor


def striped(b: Any, h: Any, q: Any, k: Any, width: Any) -> Any:
    return ((q - k) // width) % 2 == 0


IDS = torch.tensor([0] * 9 + [3] * 20 + [1] * 16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (9, 5)},
    "softcap_dropout": {"softcap": 2.0, "causal": True, "dropout_p": 0.3, "dropout_seed": 2**40 + 1},
    "alibi": {"alibi_slopes": draw(1, 2).abs()},
    "sinks": {"sinks": draw(2), "window": (3, 0)},
    "bias_rows": {"bias": draw(37, 1), "causal": True},
    "bias_keys": {"bias": draw(1, 2, 1, 45)},
    "bias_full": {"bias": draw(1, 1, 37, 45)},
    "score_mod": {"score_mod": ScoreMod(curve, curve_gradient, (draw(2, 7), 0.5))},
    "predicate": {"mask": masks.Predicate(striped, (3,))},
    "lambda": {"mask": masks.Predicate(lambda b, h, q, k: k % 3 != 1)},
    "dense": {"mask": draw(1, 2, 37, 45) > 0},
    "documents": {"mask": masks.Document(IDS[:37], IDS)},
    "interval": {"mask": masks.Interval(IDS[:37] * 7 - 3, IDS[None, :37].int() * 20 + 9), "window": (40, 9)},
    "prefix": {"mask": masks.PrefixLM(torch.tensor([11])), "window": (None, 30)},
    "either": {"mask": (masks.Causal() & masks.Window(3, None)) | masks.PrefixLM(4) | masks.Document(IDS[:37], IDS)},
    "either_interval": {"mask": masks.Interval(hi=IDS[:37]) | masks.Interval(IDS[:37] + 20, IDS[:37] * 20)},
    "blocks": {"mask": BlockMask(torch.tensor([[[[True, False], [True, True]]]]), 32, 32)},
    "blocks_odd": {"mask": BlockMask(draw(1, 2, 2, 7) > -0.5, 20, 7), "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str) -> None:
    assert_agrees(*operands(), **OPTIONS[name])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=["fp16", "bf16"])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    assert_agrees(*operands(dtype=dtype), tolerance=tolerance, causal=True)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (64, 32)], ids=str)
def test_shape(shape: tuple[int, int]) -> None:
    assert_agrees(*operands(*shape), causal=True)


def test_large_head_dim() -> None:
    assert_agrees(*operands(19, 23, head_dims=(144, 24)))


def test_packed() -> None:
    cu_q, cu_k = torch.tensor([0, 3, 3, 34, 45]), torch.tensor([0, 10, 20, 20, 45])
    q, k, v = (x[0] for x in operands(47, 50, (4, 2)))
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 31, "max_seqlen_k": 25}
    used = torch.tensor([4, 0, 0, 25], dtype=torch.int32)
    assert_agrees(q, k, v, **options, causal=True, seqused_k=used, sinks=draw(4), alibi_slopes=draw(4, 4).abs())


def test_tiles_narrower_than_a_dropout_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in tiles.TABLE if key[0] == "triton" and key[2] == "interpreter"]:
        monkeypatch.setitem(tiles.TABLE, key, TileConfig(16, 16, 4, 1))
    assert_agrees(*operands(19, 23), dropout_p=0.4, dropout_seed=3)
