"""A call with a key/value cache on this backend: which it takes, tiles and descriptors, and the launch."""

from __future__ import annotations

from typing import Any

import torch
import triton.experimental.gluon.language as gl

from .. import errors
from ..kernels import compiled, counters
from ..kernels.cache_call import CacheCall, Results, merge, parts_of, read_only, serve, stat_rows, variant_of
from ..kernels.replay import Tape
from ..kernels.rows import rows_of
from ..kvcache import CacheInputs, CacheProblem
from ..mask_algebra import TOP_LEFT
from ..tiles import TileConfig, lookup
from . import launch
from .decode import Shape, decode_kernel
from .latent import HALF, LATENT, SIZE, latent_kernel
from .launch import ROWS

_MAX_HEAD_DIM = 256
# Slots that a page has a multiple of: TMA writes whole rows of eight to shared memory.
_ROW_GROUP = 8
# Packed rows of a sequence up to which `decode` merges.
_MERGED_ROWS = 16
# By consumers and programs on a multiprocessor: registers of the producer and of consumers, and the option maxnreg.
_REGISTERS = {(1, 2): (56, 200, 128), (1, 1): (96, 240, 168), (2, 1): (40, 232, 168)}


def is_latent(problem: CacheProblem) -> bool:
    """Whether `latent` is what serves a call, and not `decode`."""
    call = problem.attention
    fits = call.head_dim_v == LATENT.value and call.head_dim <= LATENT.value + SIZE.value
    return problem.latent and fits


def unsupported_reasons(problem: CacheProblem) -> list[str]:
    """Why the kernel does not serve a call on this device; empty if it does."""
    call = problem.attention
    refused = {
        f"{call.dtype} inputs; it takes float16 and bfloat16": call.dtype not in (torch.float16, torch.bfloat16),
        f"a cache of {problem.cache_dtype}, which is not q's dtype": problem.cache_dtype != call.dtype,
        f"a head dim above {_MAX_HEAD_DIM}": max(call.head_dim, call.head_dim_v) > _MAX_HEAD_DIM
        and not is_latent(problem),
        f"pages of {problem.page_size}; TMA takes multiples of {_ROW_GROUP}": bool(
            problem.page_size and problem.page_size % _ROW_GROUP
        ),
        "cache_leftpad with pages; TMA takes tiles that begin with a part of a page": (
            problem.page_size is not None and problem.has_leftpad
        ),
        "an assumed maximum (softmax_max)": problem.static.softmax_max is not None,
        "caches whose rows do not begin at multiples of 16 bytes": not problem.aligned,
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    try:
        compiled.check(problem.options)
    except errors.UnsupportedError as error:
        reasons.append(str(error))
    return reasons


def _tile_of_latents(problem: CacheProblem) -> TileConfig:
    """The one that the kernel is written for."""
    return lookup("hopper", "latent", problem.attention.dtype, problem.attention.head_dim)


def tile(problem: CacheProblem) -> TileConfig:
    """One warpgroup's rows where the longest sequence has no more packed ones, else two; of latents always one's."""
    call = problem.attention
    if is_latent(problem):
        return _tile_of_latents(problem)
    rows = ROWS if call.seqlen_q * call.group_size <= ROWS else 2 * ROWS
    return lookup("hopper", f"decode {rows}", call.dtype, max(call.head_dim, call.head_dim_v))


def box(problem: CacheProblem, tile: TileConfig) -> int:
    """Keys that TMA loads at once: a power of two that pages, and a tile, have a multiple of."""
    page = problem.page_size or 0
    return min(tile.block_n, page & -page) if page else tile.block_n


def _merges(call: CacheCall) -> bool:
    """Whether `decode` merges what it has cut: of few rows, for those of an item are merged by one program."""
    attention, plan = call.problem.attention, call.plan
    few = attention.seqlen_q * attention.group_size <= _MERGED_ROWS and call.tile.block_m == ROWS
    return few and plan.balanced and plan.programs <= counters.SIZE and not is_latent(call.problem)


def shape(call: CacheCall) -> Shape:
    """Compile-time sizes."""
    attention, tile = call.problem.attention, call.tile
    dims = attention.head_dim, attention.head_dim_v
    blocks = (LATENT.value,) * 2 if is_latent(call.problem) else tuple(map(launch.block, dims))
    sizes = (
        attention.heads_q, attention.heads_kv, attention.group_size, attention.options.align == TOP_LEFT,
        attention.packed, *dims, *blocks, tile.block_m, tile.block_n, call.problem.page_size or 0,
        box(call.problem, tile),
    )  # fmt: skip
    consumers, itself = gl.constexpr(tile.block_m // ROWS), gl.constexpr(_merges(call))
    return Shape._make((*map(gl.constexpr, sizes), call.mode, consumers, itself))


def work(call: CacheCall) -> tuple[Any, ...]:
    """The fields of `decode_plan.Work`. Where one tile has all rows of every sequence, nothing is divided by tiles."""
    row_tiles, *rest = call.work
    # What fits one warpgroup's rows has one tile always, so this compiles nothing anew.
    single = call.tile.block_m == ROWS and row_tiles == 1 and not is_latent(call.problem)
    return (gl.constexpr(1) if single else row_tiles, *rest)


def attend_cache(problem: CacheProblem, tile: TileConfig, inputs: CacheInputs, tape: Tape) -> Results:
    """Append and attend: ``out`` in `out_dtype` and ``lse`` fp32."""
    if is_latent(problem) and tile != _tile_of_latents(problem):
        fix = "leave the tile out"
        errors.fail(errors.ArgumentError, "tile", tile, f"{_tile_of_latents(problem)} alone for latents", fix)
    return serve(problem, inputs, tile, tape, _attend)


def _described(call: CacheCall, tape: Tape) -> list[Any]:
    """Descriptors of both caches, of latents of their three parts; where there is no slot, of one that is never read.

    A call like an earlier one may come with a cache that begins elsewhere: `addressable` copies what TMA cannot reach.
    """
    rows = box(call.problem, call.tile)
    given = (call.inputs.k_cache, call.inputs.v_cache)
    caches = [launch.addressable(x) for x in (given[:1] if is_latent(call.problem) else given)]
    caches = [x if x.numel() else x.new_empty(1, rows, *x.shape[2:]) for x in caches]
    if not is_latent(call.problem):
        return [launch.descriptor(x, rows, launch.block(x.shape[3])) for x in caches]
    half, whole = HALF.value, LATENT.value
    bounds = ((0, half), (half, whole), (whole, None))
    parts = [tape.part(caches[0][..., first:last], caches[0]) for first, last in bounds]
    return [launch.descriptor(x, rows, columns) for x, columns in zip(parts, (half, half, SIZE.value), strict=True)]


def _attend(call: CacheCall, results: Results, tape: Tape) -> None:
    """Launch `decode` or `latent`, and `combine` if an item may have more than one piece and is not merged there."""
    inputs, packed, config = call.inputs, call.problem.attention.packed, call.tile
    sizes = shape(call)
    itself = sizes.MERGES.value
    parts, (tree, sinks) = parts_of(call, tape, itself), read_only(call, tape)
    variant, extra, left, right = variant_of(call)
    one = is_latent(call.problem)
    kernel, stages = (latent_kernel, ()) if one else (decode_kernel, (config.num_stages,))
    *registers, most = _REGISTERS[2 if one else config.block_m // ROWS, config.programs]
    arguments = (
        rows_of(inputs.q, packed), *_described(call, tape), rows_of(results[0], packed), results[1], parts, call.slots,
        call.rope, tree, sinks, variant, extra, sizes, *call.limits, *work(call), stat_rows(call), call.rope_length,
        left, right, gl.constexpr(call.early), *stages, *registers,
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "maxnreg": most, **call.early_options}
    tape.launch(kernel, call.plan.programs, arguments, **options)
    if not itself:
        merge(call, results, parts, sizes, (left, right), tape)
