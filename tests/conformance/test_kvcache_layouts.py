"""Where a cache lies, how long its sequences are, and how its heads are made, against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tilewise
from targets import Target
from tilewise.kvcache import FP8

from .caches import CacheCall, Sizes, draw_call, heads_first, indexed, paged, sliced, verify
from .calls import Draw
from .test_kvcache import rotary

LAYOUTS: dict[str, Callable[[CacheCall], CacheCall]] = {
    "rows": lambda call: call,
    "indexed": indexed,
    "heads_first": heads_first,
    "sliced": sliced,
    "pages_of_1": lambda call: paged(call, 1),
    "pages_of_3": lambda call: paged(call, 3),
    "pages_of_64": lambda call: paged(call, 64),
    "pages_of_256": lambda call: paged(call, 256),
    "pages_heads_first": lambda call: heads_first(paged(call, 16)),
    "pages_sliced": lambda call: sliced(paged(call, 16)),
}
PADDED = Sizes(used=(37, 5, 130), pad=(10, 5, 0), rows=3, new=3)


@pytest.mark.parametrize("sizes", [Sizes(rows=2, new=2), Sizes(rows=(1, 4, 2), new=0), PADDED], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target: Target, layout: str, sizes: Sizes) -> None:
    draw = Draw(target.device)
    call = LAYOUTS[layout](draw_call(sizes, target.dtype, draw))
    verify(target, call.having(window=(40, 0), rotary=rotary(16, draw)))


SHAPES = [
    Sizes(used=(0,), rows=1, new=1),
    Sizes(used=(0, 0), rows=1, new=None),
    Sizes(used=(0, 3), rows=5, new=None),  # more rows than keys
    Sizes(used=(0, 3), rows=0, new=2),  # an append alone
    Sizes(used=(2, 0), rows=3, new=0),
    Sizes(used=(9, 1), rows=4, new=2),  # rows whose keys were appended before
    Sizes(used=(9, 1), rows=2, new=6),  # and keys without rows
    Sizes(used=(127, 128, 129), rows=1, new=1),
    Sizes(used=(1023, 513), rows=1, new=1, capacity=1030),
    Sizes(used=(60,), rows=33, new=33, heads_q=5, heads_kv=1),
    Sizes(used=(60, 7), rows=2, new=2, heads_q=15, heads_kv=3),
    Sizes(used=(60, 7), rows=2, new=2, heads_q=3, heads_kv=3),
    Sizes(used=(60, 7), rows=2, new=2, heads_q=64, heads_kv=2),
    Sizes(used=(60, 7), rows=2, new=2, head_dim=40, head_dim_v=24),
    Sizes(used=(60, 7), rows=2, new=2, head_dim=7, head_dim_v=1),
    Sizes(used=(60, 7), rows=2, new=2, head_dim=128, head_dim_v=128),
    Sizes(used=(60, 7), rows=1, new=1, head_dim=256, head_dim_v=512),
    Sizes(used=(), rows=1, new=1),
    Sizes(used=(30, 20), rows=(0, 0), new=0),
]


@pytest.mark.parametrize("page_size", [None, 16], ids=["rows", "pages"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes(target: Target, sizes: Sizes, page_size: int | None) -> None:
    call = draw_call(sizes, target.dtype, Draw(target.device))
    verify(target, (call if page_size is None else paged(call, page_size)).having(causal=True))


@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"split_size": 128}], ids=["whole", "three", "of_128"])
@pytest.mark.parametrize(
    "sizes", [Sizes(used=(1023, 513, 0), capacity=1030), Sizes(used=(300,), rows=40, new=40, capacity=350)], ids=str
)
def test_splits(target: Target, sizes: Sizes, splits: dict[str, int]) -> None:
    call = paged(draw_call(sizes, target.dtype, Draw(target.device)), 16)
    for options in ({"causal": True}, {"window": (200, 0)}):
        verify(target, call.having(**options, **splits))


def test_ragged_rows_past_the_end(target: Target) -> None:
    """A buffer of q, k_new and v_new may be larger than what is in it; the rest may be NaN, and comes out 0."""
    call = draw_call(Sizes(used=(20, 5), rows=(2, 3), new=0), target.dtype, Draw(target.device))
    more = {n: torch.cat([x, torch.full_like(x[:3], float("nan"))]) for n, x in (("q", call.q), *_new(call))}
    longer = CacheCall(more.pop("q"), call.k_cache, call.v_cache, call.options).having(**more, causal=True)
    verify(target, longer)


def _new(call: CacheCall) -> list[tuple[str, torch.Tensor]]:
    return [(name, call.options[name]) for name in ("k_new", "v_new")]


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_integers_of_either_width(target: Target, offsets: torch.dtype) -> None:
    sizes = Sizes(used=(20, 9), rows=(2, 3), new=0, pad=(3, 0))
    call = paged(draw_call(sizes, target.dtype, Draw(target.device)), 16)
    names = ("cache_seqlens", "page_table", "cu_seqlens_q", "cache_leftpad")
    verify(target, call.having(causal=True, **{name: call.options[name].to(offsets) for name in names}))


def _column(x: torch.Tensor) -> torch.Tensor:
    """The same values with other ones between them in memory."""
    return torch.stack([x, torch.full_like(x, 1_000_000)], dim=-1)[..., 0]


def test_lengths_that_are_columns(target: Target) -> None:
    """Lengths, tables, scales and angles may be parts of larger tensors."""
    draw, sizes = Draw(target.device), Sizes(used=(20, 9), rows=(2, 3), new=0, pad=(3, 0))
    call = paged(draw_call(sizes, target.dtype, draw), 16).having(causal=True, sinks=_column(draw.normal(4)))
    names = ("cache_seqlens", "page_table", "cu_seqlens_q", "cache_leftpad")
    call = call.having(**{name: _column(call.options[name]) for name in names})
    tables = rotary(16, draw)
    wide = [torch.cat([x, x * 0 + 9.0], dim=1)[:, :8] for x in (tables.cos, tables.sin)]
    verify(target, call.having(rotary=tilewise.Rotary(*wide), alibi_slopes=_column(draw.uniform(2, 4))))


# Scales are powers of two where something is appended, so that dividing by them is exact everywhere.
SCALES: dict[str, Callable[[Draw, int, int], torch.Tensor]] = {
    "per_head": lambda d, batch, pages: 2.0 ** -d.integers(3, 2).float(),
    "per_sequence": lambda d, batch, pages: 2.0 ** -d.integers(4, batch, 2).float(),
    "per_page": lambda d, batch, pages: 2.0 ** -d.integers(4, pages, 2).float(),
}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("scales", ["none", *SCALES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_fp8(target: Target, dtype: torch.dtype, scales: str, rows: int) -> None:
    draw = Draw(target.device)
    call = paged(draw_call(Sizes(rows=rows, new=rows), dtype, draw, cache_dtype=FP8), 16)
    if scales != "none":
        pages = call.k_cache.shape[0]
        call = call.having(**{f"{x}_scale": SCALES[scales](draw, 3, pages) for x in "kv"})
    verify(target, call.having(causal=True))


@pytest.mark.parametrize("layout", ["rows", "indexed", "heads_first"])
def test_fp8_in_rows(target: Target, layout: str) -> None:
    draw = Draw(target.device)
    call = LAYOUTS[layout](draw_call(Sizes(new=None), torch.float16, draw, cache_dtype=FP8))
    verify(target, call.having(k_scale=draw.uniform(2) + 0.5, v_scale=draw.uniform(3, 2) + 0.5))


def test_fp8_saturates(target: Target) -> None:
    """A value beyond what e4m3 holds becomes its largest, not NaN."""
    draw = Draw(target.device)
    call = draw_call(Sizes(used=(3, 9)), torch.float16, draw, cache_dtype=FP8)
    loud = {name: x * 1000.0 for name, x in _new(call)}
    verify(target, call.having(**loud, softmax_scale=1e-3))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.large)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("new", [False, True], ids=["read", "append"])
def test_latent_attention(target: Target, new: bool, rows: int, heads: int, page_size: int) -> None:
    """MLA, absorbed: one key head of 512 + 64 dims, whose first 512 are the values, in one tensor."""
    draw = Draw(target.device)
    sizes = Sizes((70, 13), rows, rows if new else None, heads_q=heads, heads_kv=1, head_dim=576, capacity=80)
    call = paged(draw_call(sizes, torch.float16, draw), page_size)
    latent = CacheCall(call.q, call.k_cache, call.k_cache[..., :512], call.options)
    latent = latent.having(v_new=call.options["k_new"][..., :512]) if new else latent
    verify(target, latent.having(causal=True, softmax_scale=192**-0.5))


def test_every_key_counts(target: Target) -> None:
    """With q = 0 the LSE counts the visible keys: those in use, new ones included, inside the window."""
    call = draw_call(Sizes(used=(3, 40), rows=2, new=2), target.dtype, Draw(target.device))
    call = CacheCall(torch.zeros_like(call.q), call.k_cache, call.v_cache, call.options)
    entry = tilewise.attention_with_kvcache
    for options, counts in (({"causal": True}, [4, 5, 41, 42]), ({"window": (5, 0)}, [4, 5, 6, 6])):
        k, v = call.k_cache.clone(), call.v_cache.clone()
        _, lse = entry(call.q, k, v, **call.options, **options, return_lse=True, backend=target.name)
        torch.testing.assert_close(lse[:, 0].flatten().exp().cpu(), torch.tensor(counts).float(), rtol=1e-5, atol=0)
