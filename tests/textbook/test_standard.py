"""Standard attention and the softmax in passes: results, and exactly the traffic of the closed forms."""

from __future__ import annotations

import pytest
import torch

from textbook.cases import close, inputs, oracle, oracle_gradients
from tilewise.textbook import softmax_passes, standard
from tilewise.textbook.memory import Machine, SramError
from tilewise.textbook.tiling import Blocks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_q, n_k", [(9, 9), (6, 11), (11, 6), (1, 4)])
def test_standard_is_exact(n_q: int, n_k: int, causal: bool) -> None:
    q, k, v, do = inputs(n_q, n_k, 4, 3)
    o, _ = oracle(q, k, v, causal=causal)
    for blocks in (Blocks(4, 3, causal), standard.whole(q, k, causal)):
        saved = standard.forward(Machine(), q, k, v, blocks)
        close((saved.o,), (o,))
    grads = standard.backward(Machine(), (q, k, v), saved, do)
    close(grads, oracle_gradients(q, k, v, do, causal=causal))


@pytest.mark.parametrize("n", [4, 16, 48])
@pytest.mark.parametrize("d", [1, 4, 16])
def test_standard_counts_are_the_published_ones(n: int, d: int) -> None:
    q, k, v, do = inputs(n, n, d)
    machine = Machine()
    saved = standard.forward(machine, q, k, v)
    counts = machine.counts
    assert counts.traffic == 4 * n * n + 4 * n * d
    assert (counts.of("s"), counts.of("p")) == (2 * n * n, 2 * n * n)
    assert counts.flops.matmul == 4 * n * n * d
    assert counts.flops.exp == n * n
    assert counts.flops.elementwise == 5 * n * n + n * d
    assert counts.peak_hbm == 2 * n * n + 4 * n * d
    causal = Machine()
    standard.forward(causal, q, k, v, standard.whole(q, k, causal=True))
    assert causal.counts.traffic == counts.traffic, "masked scores cross HBM like the others"

    machine = Machine()
    standard.backward(machine, (q, k, v), saved, do)
    assert machine.counts.traffic == 7 * n * n + 8 * n * d
    assert machine.counts.flops.matmul == 8 * n * n * d


@pytest.mark.parametrize("b_r", [1, 4, 8, 32])
def test_tiled_products_read_keys_once_per_row_tile(b_r: int) -> None:
    n, d, b_c = 32, 4, 8
    q, k, v, _ = inputs(n, n, d)
    machine = Machine(sram=b_r * n + b_c * d + b_r * b_c)
    standard.forward(machine, q, k, v, Blocks(b_r, b_c))
    assert machine.counts.traffic == 4 * n * n + 2 * n * d + 2 * (n // b_r) * n * d
    with pytest.raises(SramError):
        standard.forward(Machine(sram=b_r * n - 1), q, k, v, Blocks(b_r, b_c))


@pytest.mark.parametrize("rows, n, block", [(1, 1, 1), (3, 8, 4), (2, 12, 3), (5, 16, 16)])
def test_softmax_in_passes(rows: int, n: int, block: int) -> None:
    x, _, v, _ = inputs(rows, n, n, 3)
    x = 50 * x  # far apart, so that every rescaling matters
    expected = x.softmax(dim=1)
    three, two, one = Machine(), Machine(), Machine()
    close(
        (
            softmax_passes.three_pass(three, x, block=block),
            softmax_passes.two_pass(two, x, block=block),
            softmax_passes.one_pass(one, x, v, block=block),
        ),
        (expected, expected, expected @ v),
    )
    blocks = n // block
    assert (three.counts.read, three.counts.written) == (3 * rows * n, rows * n)
    assert (two.counts.read, two.counts.written) == (2 * rows * n, rows * n)
    assert (one.counts.read, one.counts.written) == (rows * n + n * 3, rows * 3)
    assert three.counts.flops.exp == 2 * rows * n
    assert two.counts.flops.exp == 2 * rows * n + rows * blocks
    assert one.counts.flops.exp == rows * n + rows * blocks
    assert three.counts.peak_sram == two.counts.peak_sram == rows * block
    assert one.counts.peak_sram == rows * 3 + block * (rows + 3)


def test_a_last_block_may_be_short() -> None:
    x, _, v, _ = inputs(2, 7, 7, 3)
    for block in (2, 3, 100):
        close(
            (
                softmax_passes.two_pass(Machine(), x, block=block),
                softmax_passes.one_pass(Machine(), x, v, block=block),
            ),
            (x.softmax(dim=1), x.softmax(dim=1) @ v),
        )


def test_scores_may_start_hidden() -> None:
    x = torch.tensor([[float("-inf"), float("-inf"), 1.0, 2.0]], dtype=torch.float64)
    close((softmax_passes.two_pass(Machine(), x, block=2),), (x.softmax(dim=1),))
