"""Hopper's kernel for caches without a GPU: what the compiler makes of its tiles, and which calls it takes.

The default run takes some tiles and options; ``TILEWISE_ALL_TILES=1`` takes all.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import budgets
import loops
import pytest
import test_hopper
import torch
from offline import SHARED, Compiled, catching, keys
from test_cache_recompiles import FEATURES, SIZES, caches
from test_cache_replay import CALLS, assert_replayed
from test_hopper import check, check_budget, elsewhere  # noqa: F401 - a fixture
from test_recompiles import assert_one_key
from test_replay import Machine, machine  # noqa: F401 - a fixture

import tilewise
from tilewise import hopper, masks
from tilewise.cache_arguments import prepare
from tilewise.hopper import cache
from tilewise.kvcache import FP8, CacheInputs, CacheProblem
from tilewise.tiles import lookup

ALL = os.environ.get("TILEWISE_ALL_TILES") == "1"
Options = dict[str, Any]
# What a multiprocessor keeps of its memory for each program.
RESERVED = 1024
# Rows of q with which a group of 4 heads fills a tile.
ROWS = {64: 1, 128: 40}


def posed(
    head_dim: int = 128,
    rows: int = 1,
    page_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[CacheProblem, CacheInputs]:
    """A call of two sequences of 8 over 2 heads, with room for 384 keys each."""
    q = torch.empty(2, rows, 8, head_dim, dtype=torch.bfloat16)
    lead = (2, 384) if page_size is None else (2 * 384 // page_size, page_size)
    if page_size is not None:
        options["page_table"] = torch.zeros(2, 384 // page_size, dtype=torch.int32)
    k, v = (torch.empty(*lead, 2, head_dim, dtype=dtype) for _ in range(2))
    options.setdefault("cache_seqlens", torch.zeros(2, dtype=torch.int32))
    return prepare(q, k, v, **options)


def compiled(*args: Any, **options: Any) -> list[Compiled]:
    """The kernels of a call."""
    problem, inputs = posed(*args, **options)
    there = replace(problem.attention, assumed_capability=(9, 0))
    with catching(90) as caught:
        hopper.attend_cache(replace(problem, attention=there), inputs)
    return caught


TILES = [(rows, dim, page) for rows in ROWS for dim in (64, 128, 256) for page in (None, 16)]
SAMPLE = [(64, 64, None), (64, 128, 16), (128, 128, None)]


@pytest.mark.parametrize("rows, head_dim, page_size", TILES if ALL else SAMPLE)
def test_tile(elsewhere: None, rows: int, head_dim: int, page_size: int | None) -> None:  # noqa: F811 - a fixture
    kernel = compiled(head_dim, ROWS[rows], page_size, causal=True)[0]
    assert kernel.kernel == "decode_kernel"
    tile = lookup("hopper", f"decode {rows}", torch.bfloat16, head_dim)
    assert (kernel.shared + RESERVED) * tile.programs <= SHARED[90] + RESERVED
    found = loops.hot_loops(kernel.cubin, head_dim // 16 + tile.block_n // 16)
    assert len(found) == rows // 64
    check_budget(kernel, found, budgets.of(budgets.DECODE[rows, head_dim]))


def _curve(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return s + table[h, (q - k) % 7]


def _striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k % 2 == h


def _new() -> Options:
    return {name: torch.empty(2, 3, 2, 128, dtype=torch.bfloat16) for name in ("k_new", "v_new")}


def _turned() -> Options:
    return {"rotary": tilewise.Rotary(torch.empty(400, 32), torch.empty(400, 32), interleaved=True), **_new()}


def modified(heads: int) -> Options:
    """A window and what changes the scores of so many query heads."""
    return {"softcap": 3.0, "alibi_slopes": torch.empty(heads), "sinks": torch.empty(heads), "window": (9, 3)}


# Options of any call of two sequences and three rows.
ANY: dict[str, Options] = {
    "tree": {"mask": torch.ones(1, 3, 3, dtype=torch.bool), "num_splits": 3},
    "indexed": {
        "cache_batch_idx": torch.tensor([1, 0]), "cache_leftpad": torch.zeros(2, dtype=torch.int32), "split_size": 128
    },
    "unrounded": {"out_dtype": torch.float32},
}  # fmt: skip
OPTIONS: dict[str, Options] = {
    "modified": modified(8),
    "score_mod": {"score_mod": tilewise.ScoreMod(_curve, None, (torch.empty(8, 7),))},
    "predicate": {"mask": masks.PrefixLM(4) | masks.Predicate(_striped)},
    "rotated": _turned(),
    **ANY,
}


@pytest.mark.parametrize("name", OPTIONS if ALL else ["modified", "tree", "rotated"])
def test_option_compiles(elsewhere: None, name: str) -> None:  # noqa: F811 - a fixture
    kernels = compiled(rows=3, **OPTIONS[name])
    appends = ["append_kernel"] if "k_new" in OPTIONS[name] else []
    # Few rows are merged where they are computed, if the plan says who may have cut them.
    merged = [] if not {"num_splits", "split_size"} & set(OPTIONS[name]) else ["combine_kernel"]
    assert [kernel.kernel for kernel in kernels] == [*appends, "decode_kernel", *merged]
    check(kernels[len(appends)])


@pytest.mark.parametrize("page_size, keys_at_once", [(None, 64), (48, 16), (64, 64), (128, 64)])
def test_a_tile_arrives_in_as_few_boxes_as_pages_allow(
    elsewhere: None,  # noqa: F811 - a fixture
    page_size: int | None,
    keys_at_once: int,
) -> None:
    problem, _ = posed(64, 33, page_size)
    tile = cache.tile(problem)
    problem, _ = posed(128, 1, page_size)
    assert cache.box(problem, cache.tile(problem)) == keys_at_once
    assert tile.block_n % cache.box(problem, tile) == 0


def test_keys_and_values_arrive_by_tma_alone(elsewhere: None) -> None:  # noqa: F811 - a fixture
    (kernel,) = compiled(page_size=16)
    body, _ = loops.instructions(kernel.cubin)
    # Four pages of a tile, two rows of 128 bytes for each key, keys and values.
    assert sum("UTMALDG" in text for text in body) == 4 * 2 * 2
    assert not any("LDGSTS" in text for text in body)


@pytest.mark.parametrize("page_size", [None, 16], ids=["rows", "pages"])
@pytest.mark.parametrize("name", ["plain", "window", "modified", "tree", "rotated", "split_size", "num_splits"])
def test_lengths_batches_and_values_compile_nothing_anew(
    elsewhere: None,  # noqa: F811 - a fixture
    name: str,
    page_size: int | None,
) -> None:
    calls = []
    for s in SIZES:
        (k, v), table = caches(s, page_size, torch.bfloat16)
        q = torch.empty(s.batch, s.rows, 8, 64, dtype=torch.bfloat16)
        lengths = torch.full((s.batch,), s.used, dtype=torch.int32)
        problem, inputs = prepare(q, k, v, lengths, **table, **FEATURES[name](s))
        with keys() as caught:
            hopper.attend_cache(problem, inputs)
        calls.append(caught)
    # Where the capacity is a single part there is nothing to merge.
    for i in range(max(map(len, calls))):
        assert_one_key([call[i : i + 1] for call in calls if len(call) > i])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "fp8"])
def test_a_replay_passes_what_triton_would(machine: Machine, name: str) -> None:  # noqa: F811 - a fixture
    assert_replayed(machine, hopper, name)


def on_hopper(problem: CacheProblem) -> CacheProblem:
    """The call on a GPU that the kernel is for."""
    return replace(problem, attention=test_hopper.posed(problem.attention))


def test_what_it_declines_is_said() -> None:
    assert hopper.cache_unsupported_reasons(on_hopper(posed(96)[0])) == []
    assert cache.unsupported_reasons(on_hopper(posed(64, page_size=24, causal=True)[0])) == []
    (here,) = hopper.cache_unsupported_reasons(posed()[0])
    assert "compute capability 9.0" in here
    scale = torch.ones(2)
    refused = {
        "a cache of torch.float8_e4m3fn, which is not q's dtype": {"dtype": FP8, "k_scale": scale, "v_scale": scale},
        "a head dim above 256": {"head_dim": 264},
        "pages of 12; TMA takes multiples of 8": {"page_size": 12},
        "cache_leftpad with pages; TMA takes tiles that begin with a part of a page": {
            "page_size": 16, "cache_leftpad": torch.zeros(2, dtype=torch.int32)
        },
        "an assumed maximum (softmax_max)": {"softmax_max": 4.0},
        "caches whose rows do not begin at multiples of 16 bytes": {"head_dim": 60},
    }  # fmt: skip
    for reason, options in refused.items():
        assert cache.unsupported_reasons(on_hopper(posed(**options)[0])) == [reason]


def test_caches_that_tma_cannot_address() -> None:
    q, lengths = torch.empty(2, 1, 4, 64).half(), torch.zeros(2, dtype=torch.int32)
    base = torch.empty(2 * 70 * 2 * 80).half()
    wide = base.view(2, 70, 2, 80)
    aligned = {"as it is": wide[..., :64], "later": wide[:, 3:, :, 8:72]}
    for x in aligned.values():
        assert prepare(q, x, x, lengths)[0].aligned
    shifted = {"dims": wide[..., 4:68], "start": base[1 : 1 + 2 * 60 * 2 * 80].view(2, 60, 2, 80)[..., :64]}
    for x in shifted.values():
        assert not prepare(q, x, x, lengths)[0].aligned
    assert not prepare(q, wide[:1, ..., :64].expand(2, -1, -1, -1), wide[..., :64], lengths)[0].aligned


def test_bytes_under_way_outlast_the_latency_of_memory() -> None:
    """Beside the tile that is multiplied, a multiprocessor's rings hold as much as makes no more faster.

    These 64 KiB, in one program or two, were measured beside 128 (docs/tuning.md).
    """
    for head_dim in (64, 128, 256):
        tile = lookup("hopper", "decode 64", torch.bfloat16, head_dim)
        ahead = tile.programs * (tile.num_stages - 1) * tile.block_n * 2 * head_dim * 2
        assert ahead >= 64 << 10
        assert math.log2(tile.block_n).is_integer() and 128 % tile.block_n == 0
