"""Split-K decoding and paged caches: results, traffic, and when a split pays."""

from __future__ import annotations

import pytest
import torch

from textbook.cases import close, inputs, oracle
from tilewise import errors
from tilewise.textbook import decode, flash_v2, paged
from tilewise.textbook.decode import Load, published_rule, threshold
from tilewise.textbook.memory import Machine
from tilewise.textbook.tiling import Blocks

NAN = float("nan")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows, keys, block", [(1, 64, 8), (4, 61, 8), (3, 5, 8), (2, 0, 4), (0, 6, 2), (9, 4, 2)])
@pytest.mark.parametrize("splits", [1, 2, 3, 100])
def test_split_keys_give_the_whole(splits: int, rows: int, keys: int, block: int, causal: bool) -> None:
    q, k, v, _ = inputs(rows, keys, 4, 3)
    got = decode.forward(Machine(), q, k, v, num_splits=splits, block_k=block, causal=causal)
    close(got, oracle(q, k, v, causal=causal))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_split_counts_are_the_closed_forms(splits: int, rows: int) -> None:
    n, d, block = 64, 4, 8
    q, k, v, _ = inputs(rows, n, d)
    machine = Machine()
    decode.forward(machine, q, k, v, num_splits=splits, block_k=block)
    counts, s = machine.counts, splits
    assert counts.of("k") + counts.of("v") == 2 * n * d, "however many splits, each key is read once"
    if s == 1:
        assert counts.traffic == 2 * n * d + 2 * rows * d + rows
        assert counts.peak_hbm == 2 * n * d + 2 * rows * d + rows
    else:
        assert counts.traffic == 2 * n * d + (3 * s + 1) * rows * d + (2 * s + 1) * rows
        assert counts.peak_hbm == 2 * n * d + (s + 2) * rows * d + (s + 1) * rows
    assert counts.peak_sram == max(2 * d * (rows + block), s * rows * d)


def test_more_splits_than_tiles_make_no_empty_parts() -> None:
    q, k, v, _ = inputs(1, 20, 4)
    machine = Machine()
    decode.forward(machine, q, k, v, num_splits=4, block_k=4)  # 5 tiles in runs of 2 are 3 parts
    assert machine.counts.traffic == 2 * 20 * 4 + 10 * 4 + 7


def test_splitting_pays_where_tasks_are_few_and_keys_are_many() -> None:
    assert not Load(tasks=132, blocks=1000, processors=132).pays(), "full already"
    assert not Load(tasks=1, blocks=1, processors=132).pays(), "nothing to split"
    assert Load(tasks=1, blocks=1000, processors=132).best() > 60
    one, best = Load(8, 256, 132), Load(8, 256, 132).best()
    assert one.time(1) / one.time(best) > 10


@pytest.mark.parametrize("tasks", [1, 8, 32, 66, 100, 120, 132, 140])
def test_threshold_is_where_it_starts_to_pay(tasks: int) -> None:
    limit = threshold(tasks, 132)
    if limit is None:
        assert not any(Load(tasks, n, 132).pays() for n in range(1, 200))
        return
    assert Load(tasks, limit, 132).pays()
    assert not any(Load(tasks, n, 132).pays() for n in range(1, limit))


@pytest.mark.parametrize("tasks", [1, 4, 8, 16, 32, 64, 100])
@pytest.mark.parametrize("blocks", [16, 64, 512])
def test_the_published_rule_is_near_the_best_of_the_model(tasks: int, blocks: int) -> None:
    load = Load(tasks, blocks, 132)
    assert load.time(published_rule(load)) <= 1.35 * load.time(load.best())


def test_no_splits_are_refused() -> None:
    q, k, v, _ = inputs(1, 4)
    with pytest.raises(errors.ArgumentError, match="num_splits: got 0"):
        decode.forward(Machine(), q, k, v, num_splits=0, block_k=2)


def paged_cache(k: torch.Tensor, page_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of a pool in random order, NaN wherever no key is, and the table, with a tail that leads nowhere."""
    used = -(-k.shape[0] // page_size)
    ids = torch.randperm(used + 2, generator=torch.Generator().manual_seed(seed))[:used]
    pool = torch.full((used + 2, page_size, k.shape[1]), NAN, dtype=torch.float64)
    for position in range(k.shape[0]):
        pool[ids[position // page_size], position % page_size] = k[position]
    return pool, torch.cat([ids, torch.tensor([-1, 10**6])])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size, block_k", [(4, 4), (4, 8), (8, 4), (1, 5), (3, 4)])
@pytest.mark.parametrize("rows, keys", [(1, 21), (6, 16), (3, 1)])
def test_pages_hold_the_same_keys(rows: int, keys: int, page_size: int, block_k: int, causal: bool) -> None:
    q, k, v, _ = inputs(rows, keys, 4, 3)
    (k_pages, table), (v_pages, _) = paged_cache(k, page_size), paged_cache(v, page_size)
    blocks, machine, plain = Blocks(2, block_k, causal), Machine(), Machine()
    got = paged.forward(machine, q, (k_pages, v_pages), table, keys, blocks)
    close(got, oracle(q, k, v, causal=causal))
    flash_v2.forward(plain, q, k, v, blocks)
    assert machine.counts.traffic - machine.counts.reads["page_table"] == plain.counts.traffic
    if block_k % page_size == 0 and not causal:
        assert machine.counts.reads["page_table"] == -(-rows // 2) * -(-keys // page_size)


def test_bad_pages_are_refused() -> None:
    q, k, v, _ = inputs(1, 8, 4)
    (k_pages, table), (v_pages, _) = paged_cache(k, 4), paged_cache(v, 4)
    with pytest.raises(errors.ArgumentError, match="seqlen_k: got 17; supported: 0 to 16"):
        paged.forward(Machine(), q, (k_pages, v_pages), table, 17, Blocks(1, 4))
    with pytest.raises(errors.ArgumentError, match="page_table: got -1"):
        paged.forward(Machine(), q, (k_pages, v_pages), table, 9, Blocks(1, 4))
