"""The kernels of calls with a key/value cache, compiled offline: every tile fits, loads are wide and asynchronous.

The default run takes some tiles, and one call with each option; ``TILEWISE_ALL_TILES=1`` takes all tiles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import budgets
import pytest
import torch
from loops import hot_loops, instructions, spills
from offline import CLASSES, SHARED, Compiled, catching, keys

import tilewise
from tilewise import _triton, masks, tiles
from tilewise.cache_arguments import prepare
from tilewise.kvcache import FP8
from tilewise.tiles import TileConfig

ALL = os.environ.get("TILEWISE_ALL_TILES") == "1"
Options = dict[str, Any]
DTYPES = {"8bit": FP8, "16bit": torch.bfloat16, "32bit": torch.float32}
# Query rows with which a group of 4 heads fills a tile.
ROWS = {"16": 1, "64": 9, "128": 40}


class Row(NamedTuple):
    """One row of the table, for one compute capability."""

    arch: int
    pass_: str
    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return f"sm{self.arch}-{self.pass_.replace(' ', '')}-{self.dtype}-{self.head_dim}"


def rows() -> Iterator[Row]:
    """All rows for GPUs that Triton has kernels of its own for, the latent ones last."""
    for backend, pass_, architecture, dtype, head_dim in tiles.TABLE:
        kind = pass_.split(" ")[0]
        if backend == "triton" and kind in ("decode", "latent") and architecture in CLASSES.values():
            (arch,) = (arch for arch, name in CLASSES.items() if name == architecture)
            if not (dtype == "8bit" and arch == 80):  # it has no instructions for them
                yield Row(arch, pass_, dtype, head_dim)


# Of a multiprocessor; a thread has a multiple of 8.
_REGISTERS = 65536
SAMPLE = {
    "sm90-decode64-16bit-64",
    "sm90-decode16-16bit-128",
    "sm90-decode16-8bit-128",
    "sm90-decode64-16bit-128",
    "sm89-decode16-16bit-128",
}


def compiled(
    arch: int,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[torch.Tensor],
    tile: TileConfig | None = None,
    **options: Any,
) -> list[Compiled]:
    """The kernels of a call."""
    monkeypatch.setattr(_triton, "_architecture", lambda problem: CLASSES[arch])
    options.setdefault("cache_seqlens", torch.zeros(inputs[0].shape[0], dtype=torch.int32))
    problem, given = prepare(*inputs, **options)
    with catching(arch) as caught:
        _triton.attend_cache(problem, given, tile)
    return caught


def call(seqlen_q: int, head_dim: int, cache: torch.dtype, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """q and both caches of two sequences, 8 over 2 heads; above head dim 256 values have 512 dims at most."""
    q = torch.empty(2, seqlen_q, 8, head_dim, dtype=dtype)
    return [q, *(torch.empty(2, 256, 2, dim, dtype=cache) for dim in (head_dim, min(head_dim, 512)))]


@pytest.mark.parametrize("row", [row for row in rows() if ALL or str(row) in SAMPLE], ids=str)
def test_tile(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, size = row.pass_.split(" ")
    cache = DTYPES[row.dtype]
    q, k, v = call(ROWS[size], row.head_dim, cache, torch.float32 if row.dtype == "32bit" else torch.bfloat16)
    if kind == "latent":
        v = k[..., :512]
    kernel = compiled(row.arch, monkeypatch, [q, k, v], causal=True)[0]
    assert kernel.kernel == "decode_kernel"
    tile = tiles.lookup("triton", row.pass_, cache, row.head_dim, CLASSES[row.arch])
    room = SHARED[row.arch] if tile.programs == 1 else (SHARED[row.arch] + 1024) // tile.programs - 1024
    assert kernel.shared <= room, f"{tile.programs} programs do not share a multiprocessor's memory"
    threads = 32 * tile.num_warps * tile.programs
    assert -(-kernel.registers // 8) * 8 * threads <= _REGISTERS, f"{tile.programs} programs do not share its registers"
    assert kernel.spilled <= budgets.of(budgets.CACHES[row.head_dim > 128])


# What compiles differently from what the interpreter runs: compile-time values inside records.
def _curve(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return s + table[h, (q - k) % 7]


def _striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k % 2 == h


def _rotary(**options: Any) -> tilewise.Rotary:
    return tilewise.Rotary(torch.empty(300, 32), torch.empty(300, 32), **options)


def _new() -> Options:
    return {name: torch.empty(2, 3, 2, 64, dtype=torch.bfloat16) for name in ("k_new", "v_new")}


def _int(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


OPTIONS: dict[str, Options] = {
    "modified": {"softcap": 3.0, "alibi_slopes": torch.empty(8), "sinks": torch.empty(8), "window": (9, 3)},
    "score_mod": {"score_mod": tilewise.ScoreMod(_curve, None, (torch.empty(8, 7),))},
    "predicate": {"mask": masks.PrefixLM(4) | masks.Predicate(_striped)},
    "tree": {"mask": torch.ones(1, 3, 3, dtype=torch.bool), "cache_batch_idx": _int(1, 0)},
    "rotated": {"rotary": _rotary(interleaved=True), "cache_leftpad": _int(0, 0), **_new()},
    "positions": {"rotary": _rotary(positions=torch.zeros(2, dtype=torch.int64)), "causal": True},
    "assumed": {"softmax_max": 4.0, "split_size": 128},
    "parts": {"num_splits": 3, "out_dtype": torch.float32},
}


CACHES = {"rows": None, "pages_of_16": 16, "pages_of_64": 64}
# In the default run each option with one kind of cache.
WITH = [
    pytest.param(name, size, id=f"{name}-{cache}")
    for i, name in enumerate(OPTIONS)
    for j, (cache, size) in enumerate(CACHES.items())
    if ALL or j == i % len(CACHES)
]


@pytest.mark.parametrize("name, page_size", WITH)
def test_option_compiles(name: str, page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(OPTIONS[name])
    inputs = call(3, 64, torch.bfloat16)
    if page_size is not None:
        options.pop("cache_batch_idx", None)
        inputs = [inputs[0], *(x.view(-1, page_size, 2, 64) for x in inputs[1:])]
        options["page_table"] = torch.zeros(2, 256 // page_size, dtype=torch.int32)
    kernels = [kernel.kernel for kernel in compiled(90, monkeypatch, inputs, **options)]
    assert kernels == [*(["append_kernel"] if "k_new" in options else []), "decode_kernel", "combine_kernel"]


@pytest.mark.parametrize("scales", [(2,), (2, 2), (16, 2)], ids=["head", "sequence", "page"])
def test_fp8_compiles(scales: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = call(3, 64, FP8)
    pages = [x.view(-1, 32, 2, 64) for x in (k, v)]
    options = {"page_table": torch.zeros(2, 8, dtype=torch.int32), "k_scale": torch.ones(scales), **_new()}
    kernels = compiled(90, monkeypatch, [q, *pages], v_scale=torch.ones(scales), **options)
    assert [kernel.kernel for kernel in kernels] == ["append_kernel", "decode_kernel", "combine_kernel"]


@pytest.mark.parametrize("page_size", [None, 16, 64], ids=["rows", "pages_of_16", "pages_of_64"])
def test_keys_arrive_in_wide_asynchronous_loads(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = call(1, 128, torch.bfloat16)
    options: Options = {}
    if page_size is not None:
        k, v = (x.view(-1, page_size, 2, 128) for x in (k, v))
        options["page_table"] = torch.zeros(2, 256 // page_size, dtype=torch.int32)
    kernel = compiled(90, monkeypatch, [q, k, v], **options)[0]
    body, _ = instructions(kernel.cubin)
    copies = [text for text in body if "LDGSTS" in text]
    assert copies and all(".128" in text for text in copies)


# Matrix instructions for 64 keys: 36 for the scores of a warpgroup's 32, 16 for its 256 dims of the output. Scores that
# are not divided take 72.
_LATENT_PRODUCTS = 52


def _latent(heads: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The kernel of a call with a latent cache."""
    q = torch.empty(2, 1, heads, 576, dtype=torch.bfloat16)
    k = torch.empty(512 // page_size if page_size else 2, page_size or 256, 1, 576, dtype=torch.bfloat16)
    table = {"page_table": torch.zeros(2, 256 // page_size, dtype=torch.int32)} if page_size else {}
    return compiled(90, monkeypatch, [q, k, k[..., :512]], **table)[0]


@pytest.mark.parametrize("page_size", budgets.LATENT if ALL else [16])
def test_warpgroups_share_the_products_of_a_latent(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _latent(128, page_size, monkeypatch)
    budget = budgets.of(budgets.LATENT[page_size])
    hot, edge = sorted(hot_loops(kernel.cubin, _LATENT_PRODUCTS), key=len)
    assert len(hot) <= budget.instructions and spills(hot) <= budget.spills
    copies = [text for text in hot if "LDGSTS" in text]
    assert len(copies) == 18 and all(".128" in text for text in copies), "64 keys are loaded once, 16 bytes at a time"
    assert not [text for text in edge if "LDGSTS" in text], "the tile with element tests would take memory of its own"
    assert kernel.spilled <= budget.spilled and kernel.shared <= SHARED[90]


def test_few_rows_of_a_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _latent(16, 64, monkeypatch)
    assert kernel.spilled <= budgets.of(budgets.FEW_LATENT)
    assert 2 * (kernel.shared + 1024) <= SHARED[90] + 1024


def test_kernels_are_launched_early_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """From sm_90 on, and the first that a kernel does is to let the next one come, and wait for the one before."""
    monkeypatch.setattr(_triton, "_architecture", lambda problem: "hopper")
    problem, given = prepare(*call(1, 128, torch.bfloat16), torch.zeros(2, dtype=torch.int32))
    on_gpu = replace(problem, attention=replace(problem.attention, assumed_capability=(9, 0)))
    with catching(90) as kernels:
        _triton.attend_cache(on_gpu, given)
    assert [kernel.kernel for kernel in kernels] == ["decode_kernel", "combine_kernel"]
    for kernel in kernels:
        memory = re.compile(r"griddepcontrol\.\w+|\b(?:ld|st|cp\.async|red|atom)\.[\w.]*global|cp\.async")
        first, second, *rest = memory.findall(kernel.ptx)
        assert (first, second) == ("griddepcontrol.launch_dependents", "griddepcontrol.wait")
        assert rest and not [text for text in rest if text.startswith("griddep")]
    with keys() as early:
        _triton.attend_cache(on_gpu, given)
    with keys() as usual:
        _triton.attend_cache(problem, given)
    assert ["'launch_pdl': True" in key.options for key in [*early, *usual]] == [True, True, False, False]


def test_what_was_cut_is_told_after_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group, head and pieces of the item that a program cuts come out of its loop over pieces, not from before it.

    Triton compiles a name that begins as another carried one, and is given that one in the loop, as if it never
    changed. The interpreter does not.
    """
    kernel = compiled(90, monkeypatch, call(1, 128, torch.bfloat16))[0]
    loop = re.search(r"%(\w+):\d+ = scf\.while", kernel.ttir)
    assert loop is not None
    stored = re.findall(r"tt\.store %\w+, %(\w+)(?:#\d+)? : !tt\.ptr<i32>", kernel.ttir)
    assert stored == [loop[1]] * 3
