"""Patterns of block-sparse attention: the oracle's result at the cost of their density."""

from __future__ import annotations

import itertools

import pytest
import torch

from textbook.cases import close, inputs, oracle
from tilewise import BlockMask
from tilewise.textbook import block_sparse
from tilewise.textbook.memory import Machine
from tilewise.textbook.tiling import Blocks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", ["longformer", "bigbird"])
def test_patterns(pattern: str, causal: bool) -> None:
    n, d, b = 64, 4, 8
    q, k, v, _ = inputs(n, n, d)
    mask = getattr(BlockMask, pattern)(n, block=b)
    o, lse = oracle(q, k, v, mask=mask, causal=causal)
    one, two = Machine(), Machine()
    v1 = block_sparse.forward(one, (q, k, v), mask.tiles[0, 0], Blocks(b, b, causal))
    v2 = block_sparse.forward_v2(two, (q, k, v), mask.tiles[0, 0], Blocks(b, b, causal))
    close((v1.o, *v2), (o, o, lse))
    tiles = mask.tiles[0, 0].tril() if causal else mask.tiles[0, 0]
    share, t = float(tiles.double().mean()), n // b
    assert one.counts.traffic == n * d + 2 * n + 2 * n * d + share * t * (3 * n * d + 4 * n)
    assert two.counts.traffic == 2 * n * d + n + 2 * n * d * share * t
    assert one.counts.flops.matmul == two.counts.flops.matmul == 4 * n * n * d * share


def test_traffic_is_a_line_in_the_density() -> None:
    n, d, b = 32, 4, 4
    q, k, v, _ = inputs(n, n, d)
    traffic = []
    for bands in range(1, 8):
        distance = (torch.arange(n // b)[:, None] - torch.arange(n // b)).abs()
        machine, tiles = Machine(), distance < bands
        block_sparse.forward_v2(machine, (q, k, v), tiles, Blocks(b, b))
        traffic.append((int(tiles.sum()), machine.counts.traffic))
    slopes = {(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in itertools.pairwise(traffic)}
    assert slopes == {2 * b * d}
