"""Hopper's kernel for latents without a GPU: what the compiler makes of it, and which calls it takes.

The default run takes some options; ``TILEWISE_ALL_TILES=1`` takes all.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import budgets
import loops
import pytest
import test_cache_replay
import torch
from offline import Compiled, catching, keys
from test_hopper import check, check_budget, elsewhere  # noqa: F401 - a fixture
from test_hopper_decode import ANY, modified, on_hopper
from test_recompiles import assert_one_key
from test_replay import Machine, machine  # noqa: F401 - a fixture

import tilewise
from tilewise import eager_cache, errors, hopper, masks
from tilewise.cache_arguments import prepare
from tilewise.hopper import cache as caches
from tilewise.kvcache import CacheInputs, CacheProblem
from tilewise.tiles import TileConfig

ALL = os.environ.get("TILEWISE_ALL_TILES") == "1"
Options = dict[str, Any]
# Matrix instructions for a tile of a warpgroup's own: 576 dims of 64 keys, and 64 keys of its half of the values.
OWN = 576 // 16 + 64 // 16
# With the other's values: of warpgroup 0 these are behind a branch, for before its first tile there is none.
BOTH = OWN + 64 // 16


def posed(
    rows: int = 1, heads: int = 128, page_size: int | None = None, slots: int = 384, **options: Any
) -> tuple[CacheProblem, CacheInputs]:
    """A call of two sequences, with room for so many keys each."""
    q = torch.empty(2, rows, heads, 576, dtype=torch.bfloat16)
    lead = (2, slots) if page_size is None else (2 * slots // page_size, page_size)
    if page_size is not None:
        options["page_table"] = torch.zeros(2, slots // page_size, dtype=torch.int32)
    latent = torch.empty(*lead, 1, 576, dtype=torch.bfloat16)
    options.setdefault("cache_seqlens", torch.zeros(2, dtype=torch.int32))
    return prepare(q, latent, latent[..., :512], **options)


def compiled(*args: Any, **options: Any) -> list[Compiled]:
    """The kernels of a call."""
    problem, inputs = posed(*args, **options)
    there = replace(problem.attention, assumed_capability=(9, 0))
    with catching(90) as caught:
        hopper.attend_cache(replace(problem, attention=there), inputs)
    return caught


@cache
def paged(page_size: int | None) -> Compiled:
    """The kernel of a causal call; it takes fifteen seconds to compile."""
    return compiled(page_size=page_size, causal=True)[0]


@pytest.mark.parametrize("page_size", [None, 16, 64] if ALL else [64])
def test_tile(elsewhere: None, page_size: int | None) -> None:  # noqa: F811 - a fixture
    kernel = paged(page_size)
    assert kernel.kernel == "latent_kernel"
    found = [loops.hot_loops(kernel.cubin, products) for products in (OWN, BOTH)]
    assert list(map(len, found)) == [1, 1]
    check_budget(kernel, found[0] + found[1], budgets.of(budgets.HOPPER_LATENT))


def test_warpgroup_1_computes_weights_while_it_multiplies(elsewhere: None) -> None:  # noqa: F811 - a fixture
    (loop,) = loops.hot_loops(paged(64).cubin, BOTH)
    waits = [i for i, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
    # For nothing yet, for scores, for the other's values, for its own.
    assert [loop[i].split()[-1] for i in waits] == ["0x3", "0x1", "0x0", "0x0"]
    assert sum("MUFU.EX2" in text for text in loop[waits[1] : waits[2]]) >= 32


def test_a_tile_arrives_by_tma_once_for_both_products(elsewhere: None) -> None:  # noqa: F811 - a fixture
    body, _ = loops.instructions(paged(64).cubin)
    # Rows of 128 bytes.
    assert sum("UTMALDG" in text for text in body) == 576 * 2 // 128
    assert not any("LDGSTS" in text for text in body)


def _striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k % 2 == h % 2


def _turned() -> Options:
    new = torch.empty(2, 3, 1, 576, dtype=torch.bfloat16)
    angles = torch.empty(400, 32)
    return {"rotary": tilewise.Rotary(angles, angles), "k_new": new, "v_new": new[..., :512]}


OPTIONS: dict[str, Options] = {
    "modified": modified(128),
    "predicate": {"mask": masks.PrefixLM(4) | masks.Predicate(_striped)},
    "rotated": _turned(),
    **ANY,
}


@pytest.mark.parametrize("name", OPTIONS if ALL else ["tree"])
def test_option_compiles(elsewhere: None, name: str) -> None:  # noqa: F811 - a fixture
    kernels = compiled(rows=3, **OPTIONS[name])
    appends = ["append_kernel"] if "k_new" in OPTIONS[name] else []
    assert [kernel.kernel for kernel in kernels] == [*appends, "latent_kernel", "combine_kernel"]
    check(kernels[len(appends)])


def test_lengths_and_rows_compile_nothing_anew(elsewhere: None) -> None:  # noqa: F811 - a fixture
    calls = []
    for rows, slots in ((1, 384), (2, 384), (3, 1024)):
        with keys() as caught:
            hopper.attend_cache(*posed(rows, page_size=64, slots=slots, causal=True))
        calls.append(caught)
    for i in range(2):
        assert_one_key([call[i : i + 1] for call in calls])


def test_a_replay_passes_what_triton_would(
    machine: Machine,  # noqa: F811 - a fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_cache_replay, "posed", lambda name: posed(page_size=64, causal=True))
    test_cache_replay.assert_replayed(machine, hopper, "latent")


def test_what_it_declines_is_said() -> None:
    assert hopper.cache_unsupported_reasons(on_hopper(posed()[0])) == []
    assert caches.unsupported_reasons(on_hopper(posed(2, 16, 24, causal=True)[0])) == []
    assert caches.unsupported_reasons(on_hopper(posed(page_size=12)[0])) == ["pages of 12; TMA takes multiples of 8"]


def test_there_is_one_tile() -> None:
    with pytest.raises(errors.ArgumentError, match=r"tile: got TileConfig.*block_n=32.* alone for latents"):
        hopper.attend_cache(*posed(), TileConfig(64, 32, 4, 2, programs=1))


@pytest.mark.parametrize("dims", [(576, 256), (512, 512), (576, 512)], ids=str)
def test_other_caches_with_wide_heads_are_declined(dims: tuple[int, int]) -> None:
    """Values of other dims, or apart from the keys."""
    q, lengths = torch.empty(2, 1, 16, dims[0]).half(), torch.zeros(2, dtype=torch.int32)
    k = torch.empty(2, 64, 1, dims[0]).half()
    v = k.clone()[..., : dims[1]] if dims == (576, 512) else k[..., : dims[1]]
    problem = prepare(q, k, v, lengths)[0]
    assert caches.unsupported_reasons(on_hopper(problem)) == ["a head dim above 256"]


def test_values_in_the_keys_are_told_from_others() -> None:
    q, lengths = torch.empty(2, 1, 4, 96).half(), torch.zeros(2, dtype=torch.int32)
    k = torch.empty(2, 70, 1, 96).half()
    others = {"apart": k.clone()[..., :64], "later dims": k[..., 32:], "all of them": k}
    assert prepare(q, k, k[..., :64], lengths)[0].latent
    for v in others.values():
        assert not prepare(q, k, v, lengths)[0].latent


def test_a_call_with_values_apart_is_not_taken_for_one_with_a_latent() -> None:
    """All else, shapes and strides too, is alike."""
    q, lengths = torch.zeros(2, 1, 4, 96), torch.ones(2, dtype=torch.int32)
    k = torch.zeros(2, 70, 1, 96)
    eager_cache.forget()
    for v in (k[..., :64], k.clone()[..., :64]) * 2:
        tilewise.attention_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert [call._problem.latent for call in eager_cache._calls.values()] == [True, False]
