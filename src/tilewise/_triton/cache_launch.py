"""A call with a key/value cache on this backend: append, attend to shares of the keys, merge what was cut."""

from __future__ import annotations

import torch
import triton.language as tl

from ..kernels import cache as cache_slots
from ..kernels.cache_call import CacheCall, Results, merge, parts_of, read_only, serve, stat_rows, variant_of
from ..kernels.replay import Tape
from ..kernels.rows import Rows, rows_of
from ..kvcache import CacheInputs, CacheProblem
from ..mask_algebra import TOP_LEFT
from ..tiles import TileConfig
from . import decode, launch
from .decode import Shape

# Rows from which the warps of a tile have rows of their own.
_WIDE = 64
# Names, for Triton tells its hooks of what is compiled as JSON, which types in a record are not.
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def shared(inputs: CacheInputs) -> bool:
    """Whether the values are the first dims of the keys, so that they need no loads of their own."""
    k, v = inputs.k_cache, inputs.v_cache
    dim = v.shape[3]
    same = v.data_ptr() == k.data_ptr() and v.stride()[:3] == k.stride()[:3]
    return same and dim >= 32 and dim & (dim - 1) == 0 and dim <= k.shape[3] and inputs.v_scale is inputs.k_scale


def _alike(inputs: CacheInputs) -> bool:
    """Whether offsets into one cache serve for the other."""
    return inputs.k_cache.stride() == inputs.v_cache.stride()


def _blocks(head_dim: int, head_dim_v: int, one: bool) -> tuple[int, int]:
    """Two powers of two that hold a head dim, the second perhaps 0; values that are part of keys are the first."""
    first = head_dim_v if one else min(launch.block(head_dim, head_dim_v), 512)
    return first, launch.block(head_dim - first) if head_dim > first else 0


def shape(call: CacheCall) -> Shape:
    """Compile-time sizes."""
    problem, attention, tile = call.problem, call.problem.attention, call.tile
    one = shared(call.inputs)
    d, dv = attention.head_dim, attention.head_dim_v
    blocks = _blocks(d, dv, one)
    page = problem.page_size or 0
    whole = page > 0 and page % tile.block_n == 0 and not problem.has_leftpad
    kinds = call.scale_kinds
    own = _TYPES[attention.dtype]
    # An fp8 cache is multiplied in fp16, which holds e4m3 exactly; scaled values may need the range of q's own dtype.
    product = _TYPES[torch.float16] if problem.quantized and attention.dtype != torch.float32 else own
    value = own if kinds[1] is cache_slots.PER_PAGE else product
    sizes = (
        attention.heads_q, attention.heads_kv, attention.group_size, attention.options.align == TOP_LEFT,
        attention.packed, d, dv, *blocks, launch.block(dv, 0 if one else d), tile.block_m, tile.block_n,
        page, whole, one, _alike(call.inputs),
    )  # fmt: skip
    scaled = product != own or kinds[0] is cache_slots.PER_ITEM
    lanes = tile.block_n if tile.block_m < _WIDE else 1
    rest = (product, value, scaled, lanes, one and tile.block_m >= _WIDE)
    given = (*map(tl.constexpr, sizes), call.mode, *kinds, *map(tl.constexpr, rest))
    return Shape._make(given)


def _cache_rows(x: torch.Tensor) -> Rows:
    """The record of a cache. Where slots lie one after the other, their distance is known when a kernel is compiled.

    Then the rows of a tile are at distances that loads have inside their instructions.
    """
    rows, slot = rows_of(x), x.shape[2] * x.shape[3]
    return rows._replace(seq=tl.constexpr(slot)) if rows.seq == slot else rows


def attend_cache(
    problem: CacheProblem, tile: TileConfig, inputs: CacheInputs, tape: Tape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and attend: ``out`` in `out_dtype` and ``lse`` fp32."""
    return serve(problem, inputs, tile, tape, _attend)


def _attend(call: CacheCall, results: Results, tape: Tape) -> None:
    """Launch `decode`, and `combine` if an item may have more than one piece."""
    inputs, packed = call.inputs, call.problem.attention.packed
    parts, (tree, sinks), sizes = parts_of(call, tape), read_only(call, tape), shape(call)
    variant, extra, left, right = variant_of(call)
    arguments = (
        rows_of(inputs.q, packed), *map(_cache_rows, (inputs.k_cache, inputs.v_cache)), rows_of(results[0], packed),
        results[1], parts, call.slots, call.scales, call.rope, tree, sinks, variant, extra, sizes,
        *call.limits, *call.work, stat_rows(call), call.rope_length, left, right, call.problem.static.softmax_max,
        call.early,
    )  # fmt: skip
    options = call.tile.launch_options | call.early_options
    tape.launch(decode.decode_kernel, call.plan.programs, arguments, **options)
    merge(call, results, parts, sizes, (left, right), tape)
