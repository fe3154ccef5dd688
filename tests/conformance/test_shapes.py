"""Every size: none, one, tile edges, primes, any head dim, any grouping of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from targets import Target

from .calls import Draw, Shape, dense
from .features import FEATURES
from .verify import attend, declines, verify

EMPTY = [Shape(0, 5, 7), Shape(2, 0, 7), Shape(2, 5, 0), Shape(2, 0, 0), Shape(0, 0, 0)]
SMALL = [Shape(1, 1, 1), Shape(2, 1, 1, 4, 2, 3, 5), Shape(1, 1, 97), Shape(1, 97, 1), Shape(3, 2, 3), Shape(2, 13, 7)]
TILE_EDGES = [Shape(1, m, n) for m, n in ((15, 17), (16, 16), (31, 33), (32, 32), (33, 31), (63, 65), (65, 64))]
WIDER_TILE_EDGES = [Shape(1, m, n) for m, n in ((127, 129), (128, 128), (129, 127))]
MANY_TILE_EDGES = [Shape(1, m, n) for m, n in ((255, 257), (256, 512), (257, 513), (511, 511), (1, 1025), (1025, 1))]
HEADS = [Shape(1, 9, 19, hq, hkv, 8, 8) for hq, hkv in ((1, 1), (5, 1), (6, 6), (12, 2), (12, 6), (9, 3), (21, 7))]
HEAD_DIMS = [
    Shape(1, 19, 23, 2, 1, d, dv)
    for d, dv in ((1, 1), (3, 3), (40, 40), (64, 64), (96, 96), (128, 128), (160, 160), (256, 256))
] + [Shape(1, 19, 23, 2, 1, d, dv) for d, dv in ((1, 64), (64, 1), (24, 17), (192, 128), (576 - 64, 512), (16, 160))]

# What meets the edges of a shape: nothing, the diagonal, a diagonal that leaves rows blind, everything at once.
OPTIONS = ("plain", "causal", "window_two_sided", "everything")


NOT_BOTH = [pytest.param("causal", marks=pytest.mark.large), "everything"]


def _verify(target: Target, shape: Shape, feature: str, dtype: torch.dtype | None = None) -> None:
    draw, dtype = Draw(target.device), dtype or target.dtype
    verify(target, dense(shape, dtype, draw, **FEATURES[feature](shape, dtype, draw)))


@pytest.mark.parametrize("feature", OPTIONS)
@pytest.mark.parametrize("shape", EMPTY + SMALL, ids=str)
def test_small(target: Target, shape: Shape, feature: str) -> None:
    _verify(target, shape, feature)


@pytest.mark.parametrize(
    "feature", ["sinks", "boolean_full", "documents_per_batch", "prefix_tensor", "blocks_odd", "bias"]
)
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_with_tensors_of_its_own(target: Target, shape: Shape, feature: str) -> None:
    _verify(target, shape, feature)


@pytest.mark.parametrize("feature", NOT_BOTH)
@pytest.mark.parametrize("shape", TILE_EDGES, ids=str)
def test_tile_edges(target: Target, shape: Shape, feature: str) -> None:
    _verify(target, shape, feature)


@pytest.mark.parametrize("shape", WIDER_TILE_EDGES, ids=str)
def test_wider_tile_edges(target: Target, shape: Shape) -> None:
    _verify(target, shape, "causal")


@pytest.mark.large
@pytest.mark.parametrize("feature", ["causal_top_left", "window_two_sided"])
@pytest.mark.parametrize("shape", MANY_TILE_EDGES, ids=str)
def test_many_tile_edges(target: Target, shape: Shape, feature: str) -> None:
    _verify(target, shape, feature)


# Lengths that are multiples of every tile, which some kernels ask for.
WHOLE_TILES = [Shape(2, 128, 256, 4, 2, 64, 64), Shape(1, 384, 256, 2, 2, 128, 96), Shape(1, 256, 256, 4, 1, 40, 40)]
# Values whose tiles lie in another order than those of keys.
WHOLE_TILES += [Shape(1, 128, 256, 2, 1, 100, 20), Shape(1, 128, 256, 2, 1, 64, 16)]


@pytest.mark.large
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ["plain", "causal", "causal_top_left", "window_two_sided"])
@pytest.mark.parametrize("shape", WHOLE_TILES, ids=str)
def test_whole_tiles(target: Target, shape: Shape, feature: str, dtype: torch.dtype) -> None:
    _verify(target, shape, feature, dtype)


@pytest.mark.parametrize("feature", NOT_BOTH)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_heads(target: Target, shape: Shape, feature: str) -> None:
    _verify(target, shape, feature)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.large)], ids=str)
@pytest.mark.parametrize("shape", HEAD_DIMS, ids=str)
def test_head_dims(target: Target, shape: Shape, dtype: torch.dtype) -> None:
    _verify(target, shape, "causal", dtype)


def test_each_query_head_reads_its_group(target: Target) -> None:
    """Values constant per key/value head: query head h must give exactly that of head h // group."""
    shape = Shape(1, 5, 9, heads_q=12, heads_kv=2, head_dim=8, head_dim_v=4)
    call = dense(shape, target.dtype, Draw(target.device))
    if declines(target, call):
        return
    labels = torch.arange(2, device=target.device, dtype=target.dtype).view(1, 1, 2, 1).expand(1, 9, 2, 4).contiguous()
    out, _ = attend(target, call.with_tensors(v=labels))
    expected = (torch.arange(12, device=target.device) // 6).view(1, 1, 12, 1)
    torch.testing.assert_close(out, expected.expand(out.shape).to(out.dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128, 256])
def test_upper_half_of_the_head_dim(target: Target, head_dim: int) -> None:
    """The whole signal lies in the upper components: row i must pick key i."""
    half, draw = head_dim // 2, Draw(target.device)
    call = dense(Shape(1, 8, 8, 1, 1, head_dim, head_dim), target.dtype, draw, softmax_scale=1.0)
    if declines(target, call):
        return
    one_hot = torch.zeros(1, 8, 1, head_dim, device=target.device, dtype=target.dtype)
    one_hot[0, :, 0, half : half + 8] = 10.0 * torch.eye(8, device=target.device)
    v = torch.cat([torch.zeros_like(call.v[..., :half]), call.v[..., half:]], dim=-1)
    out, _ = attend(target, call.with_tensors(q=one_hot, k=one_hot, v=v))
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize(
    "lengths, options, seen",
    [
        ((3, 128), {"causal": True}, [126, 127, 128]),
        ((3, 7), {"causal": "top_left"}, [1, 2, 3]),
        ((8, 8), {"causal": True, "window": (2, 0)}, [1, 2, 3, 3, 3, 3, 3, 3]),
        ((4, 8), {"window": (1, 1)}, [3, 3, 3, 2]),
        ((5, 2), {"causal": True}, [0, 0, 0, 1, 2]),
    ],
    ids=["bottom_right", "top_left", "window", "window_of_more_keys", "more_queries"],
)
def test_count_of_visible_keys(
    target: Target, lengths: tuple[int, int], options: dict[str, Any], seen: list[int]
) -> None:
    """With q = 0 every visible key weighs the same: exp(lse) counts them, without an oracle."""
    shape = Shape(1, *lengths, 1, 1)
    call = dense(shape, target.dtype, Draw(target.device), **options)
    if declines(target, call, ()):
        return
    _, lse = attend(target, call.with_tensors(q=torch.zeros_like(call.q)))
    torch.testing.assert_close(lse.exp()[0, 0].cpu(), torch.tensor(seen).float(), rtol=1e-5, atol=0)
