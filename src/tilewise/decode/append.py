"""Slots of a cache in plain operators: where they are, gathering keys from them, appending new keys in place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kvcache import FP8, PER_HEAD, PER_PAGE, CacheInputs, CacheProblem, Lengths
from .rotary import rotate


class Places(NamedTuple):
    """Indices into the first (row or page) and the second dimension of a cache, int64 [n] each."""

    rows: torch.Tensor
    slots: torch.Tensor


def places(inputs: CacheInputs, b: int, slots: torch.Tensor) -> Places:
    """Where these slots (int64) of sequence b lie."""
    if inputs.page_table is not None:
        size = inputs.k_cache.shape[1]
        return Places(inputs.page_table[b].long()[slots // size], slots % size)
    row = b if inputs.cache_batch_idx is None else int(inputs.cache_batch_idx[b])
    return Places(torch.full_like(slots, row), slots)


def scale_at(scale: torch.Tensor, kind: str | None, b: int, rows: torch.Tensor) -> torch.Tensor:
    """The scale of slots of sequence b that lie in these rows (pages) of the cache, as [1 or slots, Hkv, 1]."""
    if kind == PER_HEAD:
        return scale[None, :, None]
    return (scale[rows] if kind == PER_PAGE else scale[b][None])[..., None]


def stretch(cache: torch.Tensor, inputs: CacheInputs, b: int, start: int, stop: int) -> torch.Tensor:
    """The slots ``start .. stop`` of sequence b as the cache holds them, [n, Hkv, D]; a view of a contiguous one."""
    if inputs.page_table is None:
        row = b if inputs.cache_batch_idx is None else int(inputs.cache_batch_idx[b])
        return cache[row, start:stop]
    size = cache.shape[1]
    first = start // size
    pages = inputs.page_table[b, first : -(-stop // size)].long()
    raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    return raw[pages].flatten(0, 1)[start - first * size : stop - first * size].view(cache.dtype)


def append(problem: CacheProblem, inputs: CacheInputs, at: Lengths) -> None:
    """Rotate the new keys and write them, and the new values, into their slots. Host lengths; in place."""
    if inputs.k_new is None or inputs.v_new is None:
        return
    for b, (n, used) in enumerate(zip(at.new.tolist(), at.used.tolist(), strict=True)):
        tokens = torch.arange(n, device=inputs.q.device)
        where = places(inputs, b, used + tokens)
        k, v = (rows_of(x, inputs, b, n) for x in (inputs.k_new, inputs.v_new))
        if inputs.rotary_cos is not None and inputs.rotary_sin is not None:
            first = used if inputs.rotary_positions is None else int(inputs.rotary_positions[b])
            k = rotate(k, inputs.rotary_cos, inputs.rotary_sin, first + tokens, problem.static.rotary_interleaved)
        for cache, x, scale, kind in (
            (inputs.k_cache, k, inputs.k_scale, problem.static.k_scale),
            (inputs.v_cache, v, inputs.v_scale, problem.static.v_scale),
        ):
            if cache.dtype == FP8:
                x = quantize(x if scale is None else x.float() / scale_at(scale, kind, b, where.rows))
                cache, x = cache.view(torch.uint8), x.view(torch.uint8)
            cache[where.rows, where.slots] = x


def quantize(x: torch.Tensor) -> torch.Tensor:
    """`x` as e4m3, saturated: beyond its largest value 448 it would become NaN."""
    most = torch.finfo(FP8).max
    return x.float().clamp(-most, most).to(FP8)


def rows_of(x: torch.Tensor, inputs: CacheInputs, b: int, n: int) -> torch.Tensor:
    """The rows [n, H, D] of sequence b in q, k_new or v_new."""
    if inputs.cu_seqlens_q is None:
        return x[b, :n]
    first = int(inputs.cu_seqlens_q[b])
    return x[first : first + n]
