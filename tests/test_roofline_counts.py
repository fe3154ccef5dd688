"""The closed forms of `tilewise.roofline` against what the textbook's algorithms count on their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.roofline import BACKWARD, forms, tile_rules
from tilewise.roofline.forms import Traffic
from tilewise.textbook import backward, flash_v1, flash_v2, standard
from tilewise.textbook.memory import Machine, SramError
from tilewise.textbook.tiling import Blocks

SHAPES = [(1, 1), (7, 3), (16, 4), (40, 8)]
BLOCKS = [(3, 2), (4, 16), (16, 5), (64, 64)]


def inputs(n: int, d: int, how_many: int = 3) -> tuple[torch.Tensor, ...]:
    return torch.randn(how_many, n, d, dtype=torch.float64).unbind()


def moved(machine: Machine) -> Traffic:
    return Traffic(machine.counts.read, machine.counts.written)


@pytest.mark.parametrize("n, d", SHAPES)
def test_standard_attention(n: int, d: int) -> None:
    q, k, v, do = inputs(n, d, 4)
    one, tiled, back = Machine(), Machine(), Machine()
    saved = standard.forward(one, q, k, v)
    assert moved(one) == forms.standard_forward(n, d)
    assert one.counts.peak_hbm == forms.standard_memory(n, d)
    assert one.counts.flops.matmul == forms.matmul_flops(n, d)
    standard.forward(tiled, q, k, v, Blocks(5, 3))
    assert moved(tiled) == forms.standard_forward(n, d, block_q=5)
    standard.backward(back, (q, k, v), saved, do)
    assert moved(back) == forms.standard_backward(n, d)
    assert back.counts.flops.matmul == forms.matmul_flops(n, d, BACKWARD, recompute=False)


@pytest.mark.parametrize("n, d", SHAPES)
@pytest.mark.parametrize("block_q, block_k", BLOCKS)
def test_version_1(n: int, d: int, block_q: int, block_k: int) -> None:
    q, k, v, do = inputs(n, d, 4)
    forward, back, blocks = Machine(), Machine(), Blocks(block_q, block_k)
    out = flash_v1.forward(forward, q, k, v, blocks)
    assert moved(forward) == forms.flash_v1_forward(n, d, block_k)
    assert forward.counts.peak_hbm == forms.flash_memory(n, d) + n
    flash_v1.backward(back, (q, k, v), out, do, blocks)
    assert moved(back) == forms.flash_v1_backward(n, d, block_k)
    assert back.counts.flops.matmul == forms.matmul_flops(n, d, BACKWARD)


@pytest.mark.parametrize("n, d", SHAPES)
@pytest.mark.parametrize("block_q, block_k", BLOCKS)
def test_version_2(n: int, d: int, block_q: int, block_k: int) -> None:
    q, k, v, do = inputs(n, d, 4)
    forward, blocks = Machine(), Blocks(block_q, block_k)
    out = flash_v2.forward(forward, q, k, v, blocks)
    assert moved(forward) == forms.flash_v2_forward(n, d, block_q)
    assert forward.counts.peak_hbm == forms.flash_memory(n, d)
    assert forward.counts.flops.matmul == forms.matmul_flops(n, d)
    for loop in backward.LOOPS:
        back = Machine()
        backward.backward(back, (q, k, v), out, do, blocks, loop=loop)
        assert moved(back) == forms.flash_v2_backward(n, d, block_q, block_k, loop)


@pytest.mark.parametrize("block", [2, 8, 16])
def test_version_2_reads_keys_of_visited_tiles_alone(block: int) -> None:
    n, d, machine = 48, 4, Machine()
    t = n // block
    flash_v2.forward(machine, *inputs(n, d), Blocks(block, block, causal=True))
    assert moved(machine) == forms.flash_v2_visited(n, d, block, t * (t + 1) // 2)
    assert forms.flash_v2_visited(n, d, block, t * t) == forms.flash_v2_forward(n, d, block)


@pytest.mark.parametrize("algorithm", [flash_v1, flash_v2])
@pytest.mark.parametrize("d", [1, 4, 16])
@pytest.mark.parametrize("m", [64, 100, 1000])
def test_the_quarter_rule_runs_and_rounded_up_it_does_not(algorithm: Any, d: int, m: int) -> None:
    """Four tiles of ⌊M/4d⌋ rows run on a memory of M elements; of ⌈M/4d⌉ rows they do where 4d divides M."""
    n = m // d + 1  # long enough for full tiles
    q, k, v = inputs(n, d)
    down, up = tile_rules.quarter_tile(m, d).block_k, tile_rules.quarter_tile_rounded_up(m, d).block_k
    machine = Machine(m)
    algorithm.forward(machine, q, k, v, Blocks(down, down))
    assert m - 4 * d < machine.counts.peak_sram <= m
    if up > down:
        with pytest.raises(SramError, match=f"supported: {m} elements of SRAM in all"):
            algorithm.forward(Machine(m), q, k, v, Blocks(up, up))


def test_a_memory_that_holds_the_scores_too_refuses_the_quarter_rule() -> None:
    m, d = 1024, 8
    block = tile_rules.quarter_tile(m, d).block_k
    with pytest.raises(SramError):
        flash_v2.forward(Machine(m, strict=True), *inputs(64, d), Blocks(block, block))
    tile = tile_rules.Tile(16, 16)
    machine = Machine(tile.resident(d), strict=True)
    flash_v2.forward(machine, *inputs(64, d), Blocks(*tile))
    assert machine.counts.peak_sram == tile.resident(d)


@pytest.mark.parametrize("n", [32, 64])
@pytest.mark.parametrize("d", [2, 8])
@pytest.mark.parametrize("m", [256, 2048])
def test_leading_terms_bound_the_counts(n: int, d: int, m: int) -> None:
    """8N²d²/M + 2Nd: from below exactly, and from above but for one pass of K and V and L."""
    block = tile_rules.quarter_tile(m, d).block_k
    machine = Machine(m)
    flash_v2.forward(machine, *inputs(n, d), Blocks(block, block))
    rounded = 4 * d * block  # the M that the rule makes use of
    leading = forms.flash_v2_leading(n, d, rounded)
    assert leading <= machine.counts.traffic <= leading + 2 * n * d + n
    assert forms.flash_order(n, d, m) <= machine.counts.traffic <= 8 * forms.flash_order(n, d, rounded) + 4 * n * d + n


@pytest.mark.parametrize("n, d, m", [(24, 2, 16), (24, 1, 8), (12, 2, 40)])
def test_no_tile_shape_moves_less_than_the_lower_bound(n: int, d: int, m: int) -> None:
    """Every shape that fits a memory which counts scores too, in both loop orders."""
    bound, tried = forms.lower_bound(n, d, m), 0
    assert bound >= 4 * n * d
    q, k, v = inputs(n, d)
    for block_q in range(1, n + 1):
        for block_k in range(1, n + 1):
            for algorithm in (flash_v1, flash_v2):
                if tile_rules.Tile(block_q, block_k).resident(d) <= m:
                    machine = Machine(m, strict=True)
                    algorithm.forward(machine, q, k, v, Blocks(block_q, block_k))
                    assert machine.counts.traffic >= bound
                    tried += 1
    assert tried
