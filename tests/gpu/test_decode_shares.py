"""Shares of keys that end anywhere inside an item: every row of every head, not only the first and the last."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tilewise import _triton, hopper
from tilewise.cache_arguments import prepare
from tilewise.tiles import TileConfig

TILES = {
    "three_stages": TileConfig(16, 64, 4, 3, programs=2),
    "two_stages": TileConfig(16, 64, 4, 2, programs=2),
    "one_stage": TileConfig(16, 64, 4, 1, programs=1),
    "narrow": TileConfig(16, 32, 4, 3, programs=3),
    "many_rows": TileConfig(64, 64, 4, 3, programs=2),
}
KERNELS: dict[str, Any] = {name: partial(_triton.attend_cache, tile=tile) for name, tile in TILES.items()}
if torch.cuda.get_device_capability() == (9, 0):
    KERNELS["hopper"] = hopper.attend_cache


@pytest.mark.parametrize("splits", [{}, {"split_size": 512}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seqlen, heads", [(8192, 32), (8192, 64), (4096, 32), (1000, 32), (200, 32)])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_every_head(batch: int, seqlen: int, heads: int, kernel: str, splits: dict[str, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(batch, 1, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(batch, seqlen, 8, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    used = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")
    problem, inputs = prepare(q, k, v, used, **splits)
    out, _ = KERNELS[kernel](problem, inputs)
    rows, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, enable_gqa=True).transpose(1, 2)
    error = (out.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    wrong = (~(error < 0.02)).nonzero().tolist()
    assert not wrong, f"{len(wrong)} of {error.numel()} rows (sequence, row, head) are wrong: {wrong[:24]}"
