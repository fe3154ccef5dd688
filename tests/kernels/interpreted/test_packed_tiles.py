"""Packed calls with a long member at head dim 64: three warpgroups share a tile of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.arguments import prepare
from tilewise.hopper import launch, variants
from tolerance import assert_close

MEMBERS = (200, 0, 77, 300)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 20)}], ids=str)
def test_wide_tiles(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LONG", 100)
    generator = torch.Generator().manual_seed(0)
    heads = (2, 1, 1)
    q, k, v = (torch.randn(sum(MEMBERS), h, 64, generator=generator).half() for h in heads)
    cu = torch.tensor([0, *MEMBERS]).cumsum(0).int()
    asked = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300, **options}
    assert variants.tile_of(prepare(q, k, v, **asked)[0]).block_m == 192
    out = tilewise.attention_varlen(q, k, v, **asked, backend="hopper")
    exact = reference.attention_varlen(q.double(), k.double(), v.double(), **asked)
    plain = tilewise.attention_varlen(q, k, v, **asked, backend="cpu")
    assert_close("out", out, exact, plain, scale=1.0, dtype=torch.float16)


def test_more_than_a_band_takes_the_tile_of_short_rows() -> None:
    q = torch.empty(20000, 4, 64, dtype=torch.float16)
    cu = torch.tensor([0, 20000]).int()
    asked = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 20000, "max_seqlen_k": 20000}
    others = ({"softcap": 3.0}, {"alibi_slopes": torch.ones(4)}, {"dropout_p": 0.1, "dropout_seed": 1})
    rows = [variants.tile_of(prepare(q, q, q, **asked, **more)[0]).block_m for more in ({}, *others)]
    assert rows == [192, 128, 128, 128]
