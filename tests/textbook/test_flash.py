"""FlashAttention 1 and 2, forward and backward: the oracle's results, and exactly the traffic of the closed forms."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from textbook.cases import CUTS, close, inputs, oracle, oracle_gradients
from tilewise import BlockMask, errors
from tilewise.textbook import backward, flash_v1, flash_v2
from tilewise.textbook.dropout import Replayed, Stored
from tilewise.textbook.memory import Machine, SramError
from tilewise.textbook.tiling import Blocks

SIZES = [(8, 2, 2), (16, 4, 4), (24, 4, 8), (32, 8, 16), (64, 64, 64)]
LOOPS = list(backward.LOOPS)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_v1_is_exact(cut: tuple[int, int, int, int, bool]) -> None:
    n_q, n_k, b_q, b_k, causal = cut
    q, k, v, do = inputs(n_q, n_k, 4, 3)
    blocks = Blocks(b_q, b_k, causal)
    out = flash_v1.forward(Machine(), q, k, v, blocks)
    o, lse = oracle(q, k, v, causal=causal)
    close((out.o, out.m + out.l.log()), (o, lse))
    close(flash_v1.backward(Machine(), (q, k, v), out, do, blocks), oracle_gradients(q, k, v, do, causal=causal))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_v2_is_exact(cut: tuple[int, int, int, int, bool]) -> None:
    n_q, n_k, b_q, b_k, causal = cut
    q, k, v, do = inputs(n_q, n_k, 4, 3)
    blocks = Blocks(b_q, b_k, causal)
    out = flash_v2.forward(Machine(), q, k, v, blocks)
    close(out, oracle(q, k, v, causal=causal))
    expected = oracle_gradients(q, k, v, do, causal=causal)
    for loop in LOOPS:
        close(backward.backward(Machine(), (q, k, v), out, do, blocks, loop=loop), expected)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.booleans(), st.integers(0, 1 << 30)),
)
def test_any_cut_with_any_tiles_is_exact_and_costs_its_visits(
    sizes: tuple[int, int, int, int], how: tuple[bool, int]
) -> None:
    (n_q, n_k, b_q, b_k), (causal, seed), d = sizes, how, 3
    q, k, v, do = inputs(n_q, n_k, d, seed=seed)
    shape = (-(-n_q // b_q), -(-n_k // b_k))
    tiles = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    blocks = Blocks(b_q, b_k, causal, tiles)
    arguments = {"causal": causal, "mask": BlockMask(tiles[None, None], b_q, b_k)}
    one, two, back = Machine(), Machine(), Machine()
    v1 = flash_v1.forward(one, q, k, v, blocks)
    v2 = flash_v2.forward(two, q, k, v, blocks)
    o, lse = oracle(q, k, v, **arguments)
    close((v1.o, v1.m + v1.l.log(), *v2), (o, lse, o, lse))
    close(
        backward.backward(back, (q, k, v), v2, do, blocks, loop="separate"),
        oracle_gradients(q, k, v, do, **arguments),
    )

    grid = blocks.grid(n_q, n_k)
    height, width = ([r.stop - r.start for r in cuts] for cuts in (grid.rows, grid.columns))
    seen = [(height[i], width[j]) for i in range(shape[0]) for j in grid.keys_seen(i)]
    keys = sum(width[j] for j in range(shape[1]) if grid.rows_seeing(j))
    rows, columns = sum(r for r, _ in seen), sum(c for _, c in seen)
    assert one.counts.traffic == n_q * d + 2 * n_q + 2 * d * keys + rows * (3 * d + 4)
    assert two.counts.traffic == 2 * n_q * d + n_q + 2 * d * columns
    once = 2 * n_q * d + n_q + 4 * n_k * d + 3 * n_q * d + 2 * n_q
    assert back.counts.traffic == once + rows * (2 * d + 2) + 2 * d * columns
    pairs = sum(r * c for r, c in seen)
    assert one.counts.flops.matmul == two.counts.flops.matmul == 4 * d * pairs
    assert back.counts.flops.matmul == 14 * d * pairs


def test_scale_is_passed_on() -> None:
    q, k, v, do = inputs(8, 8)
    blocks, scale = Blocks(4, 4), 0.3
    v1 = flash_v1.forward(Machine(), q, k, v, blocks, softmax_scale=scale)
    v2 = flash_v2.forward(Machine(), q, k, v, blocks, softmax_scale=scale)
    close((v1.o, v2.o), (oracle(q, k, v, softmax_scale=scale)[0],) * 2)
    expected = oracle_gradients(q, k, v, do, softmax_scale=scale)
    close(flash_v1.backward(Machine(), (q, k, v), v1, do, blocks, softmax_scale=scale), expected)
    close(backward.backward(Machine(), (q, k, v), v2, do, blocks, softmax_scale=scale), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, b_r, b_c", SIZES)
def test_v1_counts_are_the_closed_forms(n: int, b_r: int, b_c: int, causal: bool) -> None:
    d = 4
    if causal and b_r != b_c:
        b_r = b_c
    q, k, v, do = inputs(n, n, d)
    blocks = Blocks(b_r, b_c, causal)
    t_r, t_c = n // b_r, n // b_c
    steps = (t_c + 1) / 2 if causal else t_c
    machine = Machine(sram=2 * d * (b_r + b_c))
    out = flash_v1.forward(machine, q, k, v, blocks)
    counts = machine.counts
    assert counts.traffic == 3 * n * d + 2 * n + steps * (3 * n * d + 4 * n)
    assert counts.of("k") + counts.of("v") == 2 * n * d
    assert counts.peak_sram == 2 * d * (b_r + b_c)
    assert counts.peak_registers == b_r * b_c + 2 * b_r
    assert counts.peak_hbm == 4 * n * d + 2 * n
    share = steps / t_c
    assert counts.flops.matmul == 4 * n * n * d * share
    assert counts.flops.exp == n * n * share + 2 * n * steps
    assert counts.flops.elementwise == 4 * n * n * share + 4 * n * d * steps + 7 * n * steps

    machine = Machine(sram=4 * d * (b_r + b_c))
    flash_v1.backward(machine, (q, k, v), out, do, blocks)
    counts = machine.counts
    assert counts.traffic == 5 * n * d + steps * (5 * n * d + 2 * n)
    assert counts.peak_sram == 4 * d * (b_r + b_c)
    assert counts.peak_registers == 2 * b_r * b_c + 2 * b_r
    assert counts.peak_hbm == 8 * n * d + 2 * n
    assert counts.flops.matmul == 10 * n * n * d * share
    assert counts.flops.exp == n * n * share
    others = 5 * n * n * share + 4 * n * d * steps + 3 * n * d * steps * t_r / t_c + n * steps
    assert counts.flops.elementwise == others


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, b_r, b_c", SIZES)
def test_v2_counts_are_the_closed_forms(n: int, b_r: int, b_c: int, causal: bool) -> None:
    d = 4
    if causal and b_r != b_c:
        b_r = b_c
    q, k, v, _ = inputs(n, n, d)
    t_r, t_c = n // b_r, n // b_c
    share = (t_c + 1) / 2 / t_c if causal else 1
    machine = Machine(sram=2 * d * (b_r + b_c))
    flash_v2.forward(machine, q, k, v, Blocks(b_r, b_c, causal))
    counts = machine.counts
    assert counts.traffic == 2 * n * d + n + 2 * n * d * t_r * share
    if causal:
        assert counts.traffic == 2 * n * d + n + (t_r + 1) * n * d
    assert counts.of("q") + counts.of("o") == 2 * n * d
    assert counts.peak_sram == 2 * d * (b_r + b_c)
    assert counts.peak_registers == b_r * b_c + 2 * b_r
    assert counts.peak_hbm == 4 * n * d + n
    assert counts.flops.matmul == 4 * n * n * d * share
    assert counts.flops.exp == n * n * share + n * t_c * share + n
    steps = t_c * share
    assert counts.flops.elementwise == 4 * n * n * share + 2 * n * d * steps + 4 * n * steps + n * d + n * 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, b_r, b_c", SIZES)
def test_backward_counts_are_the_closed_forms(n: int, b_r: int, b_c: int, causal: bool) -> None:
    d = 4
    if causal and b_r != b_c:
        b_r = b_c
    q, k, v, do = inputs(n, n, d)
    blocks = Blocks(b_r, b_c, causal)
    out = flash_v2.forward(Machine(), q, k, v, blocks)
    t_r, t_c = n // b_r, n // b_c
    share = (t_c + 1) / 2 / t_c if causal else 1
    t_r, t_c = t_r * share, t_c * share
    nd = n * d
    forms = {
        "outer_keys": (7 * nd + n + t_c * (4 * nd + 2 * n), 10, d * (4 * b_c + 3 * b_r)),
        "outer_rows": (7 * nd + 3 * n + 6 * nd * t_r, 10, d * (3 * b_r + 4 * b_c)),
        "separate": (
            9 * nd + 3 * n + t_c * (2 * nd + 2 * n) + 2 * nd * t_r,
            14,
            d * max(4 * b_c + 2 * b_r, 3 * b_r + 2 * b_c),
        ),
    }
    for loop, (traffic, products, sram) in forms.items():
        machine = Machine(sram=sram)
        backward.backward(machine, (q, k, v), out, do, blocks, loop=loop)
        counts = machine.counts
        assert counts.traffic == traffic, loop
        assert counts.flops.matmul == products * n * n * d * share
        assert counts.flops.exp == (2 if loop == "separate" else 1) * n * n * share
        assert (counts.peak_sram, counts.peak_registers) == (sram, 2 * b_r * b_c + 2 * b_r)
        assert counts.peak_hbm == 8 * nd + 2 * n


@pytest.mark.parametrize("n, d, m", [(48, 4, 64), (64, 8, 256), (12, 4, 16), (48, 4, 128)])
def test_the_papers_tile_fits_and_one_more_row_does_not(n: int, d: int, m: int) -> None:
    q, k, v, _ = inputs(n, n, d)
    b = m // (4 * d)
    for forward in (flash_v1.forward, flash_v2.forward):
        machine = Machine(sram=m)
        forward(machine, q, k, v, Blocks(b, b))
        assert machine.counts.peak_sram == 4 * b * d <= m
        with pytest.raises(SramError, match="elements of SRAM in all"):
            forward(Machine(sram=m), q, k, v, Blocks(b + 1, b + 1))


def test_scores_in_sram_too_need_smaller_tiles() -> None:
    q, k, v, _ = inputs(32, 32, 4)
    flash_v2.forward(Machine(sram=2 * 4 * 16 + 64 + 16, strict=True), q, k, v, Blocks(8, 8))
    with pytest.raises(SramError):
        flash_v2.forward(Machine(sram=2 * 4 * 16 + 64 + 15, strict=True), q, k, v, Blocks(8, 8))


def test_row_tiles_run_in_any_order_bit_for_bit() -> None:
    q, k, v, _ = inputs(37, 29)
    blocks = Blocks(4, 8, causal=True)
    machine = Machine()
    expected = flash_v2.forward(machine, q, k, v, blocks)
    for seed in range(5):
        order = random.Random(seed).sample(range(10), 10)
        other = Machine()
        got = flash_v2.forward(other, q, k, v, blocks, order=order)
        assert torch.equal(got.o, expected.o) and torch.equal(got.lse, expected.lse)
        assert other.counts == machine.counts


def test_a_row_tile_that_nobody_ran_stays_unwritten() -> None:
    q, k, v, _ = inputs(8, 8)
    out = flash_v2.forward(Machine(), q, k, v, Blocks(4, 4), order=[1])
    assert bool(out.o[:4].isnan().all()) and not bool(out.o[4:].isnan().any())


@pytest.mark.parametrize("seed", range(3))
def test_dropout_is_the_oracles_whether_stored_or_replayed(seed: int) -> None:
    n, d = 24, 4
    q, k, v, do = inputs(n, n, d)
    blocks, drawn = Blocks(8, 4, causal=seed == 1), Replayed(seed, 0.3)
    arguments = {"dropout_p": 0.3, "dropout_seed": seed, "causal": blocks.causal}
    o, lse = oracle(q, k, v, **arguments)
    expected = oracle_gradients(q, k, v, do, **arguments)
    plain, replayed, stored = Machine(), Machine(), Machine()
    flash_v2.forward(plain, q, k, v, blocks)
    out = flash_v2.forward(replayed, q, k, v, blocks, dropout=drawn)
    mask = Stored.written(stored, drawn, n, n)
    same = flash_v2.forward(stored, q, k, v, blocks, dropout=mask)
    close(out, (o, lse))
    assert torch.equal(out.o, same.o)
    v1 = flash_v1.forward(Machine(), q, k, v, blocks, dropout=drawn)
    close((v1.o,), (o,))

    visited = 8 * 4 * blocks.grid(n, n).visited
    assert replayed.counts.traffic == plain.counts.traffic
    assert stored.counts.traffic - plain.counts.traffic == stored.counts.writes["mask"] == visited
    assert stored.counts.peak_hbm - plain.counts.peak_hbm == n * n

    back, reading = Machine(), Machine()
    close(backward.backward(back, (q, k, v), out, do, blocks, dropout=drawn), expected)
    close(backward.backward(reading, (q, k, v), out, do, blocks, dropout=mask.read_by(reading)), expected)
    close(flash_v1.backward(Machine(), (q, k, v), v1, do, blocks, dropout=drawn), expected)
    assert reading.counts.traffic - back.counts.traffic == reading.counts.reads["mask"] == visited


@pytest.mark.parametrize("density", [0.0, 0.25, 0.5, 1.0])
def test_block_sparse_costs_what_it_visits(density: float) -> None:
    n, d, b = 32, 4, 4
    q, k, v, do = inputs(n, n, d)
    t = n // b
    flat = torch.zeros(t * t, dtype=torch.bool)
    flat[torch.randperm(t * t, generator=torch.Generator().manual_seed(1))[: int(density * t * t)]] = True
    tiles = flat.view(t, t)
    blocks, mask = Blocks(b, b, tiles=tiles), BlockMask(tiles[None, None], b, b)
    o, lse = oracle(q, k, v, mask=mask)
    expected = oracle_gradients(q, k, v, do, mask=mask)
    visited, columns = int(tiles.sum()), int(tiles.any(dim=0).sum())
    assert visited == density * t * t

    one = Machine()
    v1 = flash_v1.forward(one, q, k, v, blocks)
    close((v1.o, v1.m + v1.l.log()), (o, lse))
    assert one.counts.traffic == n * d + 2 * n + columns * 2 * b * d + visited * (3 * b * d + 4 * b)
    two = Machine()
    v2 = flash_v2.forward(two, q, k, v, blocks)
    close(v2, (o, lse))
    assert two.counts.traffic == 2 * n * d + n + visited * 2 * b * d
    for counts in (one.counts, two.counts):
        assert counts.flops.matmul == density * 4 * n * n * d

    close(flash_v1.backward(Machine(), (q, k, v), v1, do, blocks), expected)
    base = {"outer_keys": 7 * n * d + n, "outer_rows": 7 * n * d + 3 * n, "separate": 9 * n * d + 3 * n}
    tile = {
        "outer_keys": 4 * b * d + 2 * b,
        "outer_rows": 6 * b * d,
        "separate": 4 * b * d + 2 * b,
    }
    for loop in LOOPS:
        machine = Machine()
        close(backward.backward(machine, (q, k, v), v2, do, blocks, loop=loop), expected)
        assert machine.counts.traffic == base[loop] + visited * tile[loop]


def test_bad_input_is_refused() -> None:
    q, k, v, do = inputs(8, 8)
    for forward in (flash_v1.forward, flash_v2.forward):
        with pytest.raises(errors.DtypeError, match=r"k: got torch.float32; supported: torch.float64"):
            forward(Machine(), q, k.float(), v, Blocks(4, 4))
        with pytest.raises(errors.ShapeError, match="k: got"):
            forward(Machine(), q, k[:, :2], v, Blocks(4, 4))
        with pytest.raises(errors.ShapeError, match="v: got"):
            forward(Machine(), q, k, v[:3], Blocks(4, 4))
        with pytest.raises(errors.ShapeError, match="a matrix"):
            forward(Machine(), q[None], k, v, Blocks(4, 4))
        with pytest.raises(errors.ShapeError, match="tiles: got"):
            forward(Machine(), q, k, v, Blocks(4, 4, tiles=torch.ones(1, 2, dtype=torch.bool)))
    with pytest.raises(errors.ArgumentError, match="block_q: got 0"):
        Blocks(0, 4)
    with pytest.raises(errors.ShapeError, match=r"torch\.bool"):
        Blocks(4, 4, tiles=torch.ones(2, 2))
    with pytest.raises(errors.ArgumentError, match=r"dropout_p: got 1\.0"):
        Replayed(0, 1.0)
    out = flash_v2.forward(Machine(), q, k, v, Blocks(4, 4))
    with pytest.raises(errors.ArgumentError, match="loop: got 'both'"):
        backward.backward(Machine(), (q, k, v), out, do, Blocks(4, 4), loop="both")
