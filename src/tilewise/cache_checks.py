"""Checks of the tensors of a call with a cache, one function per argument; `metadata` reads their values.

All run before any work, so a call that is refused has changed no byte of the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from . import checks
from .errors import ArgumentError, DtypeError, ShapeError, UnsupportedError, fail
from .kvcache import (
    FP8,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    PER_HEAD,
    PER_PAGE,
    PER_SEQUENCE,
    CacheInputs,
    CacheProblem,
    Lengths,
    band,
    key_range,
    lengths,
)

# What may lie on any device: it is moved to where it is needed.
METADATA = (
    "cache_seqlens", "page_table", "cache_batch_idx", "cache_leftpad", "rotary_positions", "cu_seqlens_q",
)  # fmt: skip


def tensors(inputs: CacheInputs, max_seqlen_q: Any) -> None:
    """Ranks, dtypes, strides and sizes of all tensors."""
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None or name in ("q", "k_cache", "v_cache", "cache_seqlens"):
            checks.plain(name, x)
    _ragged(inputs, max_seqlen_q)
    _states(inputs)
    _sizes(inputs)
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None:
            checks.placed(name, x, inputs.q.device, movable=name in METADATA)
    _new(inputs)
    _lengths(inputs)
    _pages(inputs)
    _rotary(inputs)


def batch_of(inputs: CacheInputs) -> int:
    """Sequences of the call."""
    return inputs.q.shape[0] if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1


def _ragged(inputs: CacheInputs, max_seqlen_q: Any) -> None:
    cu = inputs.cu_seqlens_q
    if cu is None:
        if max_seqlen_q is not None:
            want = "None unless q is ragged"
            fail(ArgumentError, "max_seqlen_q", repr(max_seqlen_q)[:60], want, "pass cu_seqlens_q with it")
        return
    if cu.dtype not in checks.INTEGERS or cu.ndim != 1 or cu.shape[0] < 1:
        got = f"{cu.dtype} {list(cu.shape)}"
        fail(ShapeError, "cu_seqlens_q", got, "an int32 or int64 tensor [batch + 1]", "pass one offset more than rows")
    checks.length("max_seqlen_q", max_seqlen_q)


def _states(inputs: CacheInputs) -> None:
    """q, the caches and the new keys and values: rank, dtype, last stride."""
    ragged = inputs.cu_seqlens_q is not None
    rows = (3, "[total, heads, head_dim] beside cu_seqlens_q") if ragged else (4, "[batch, seqlen, heads, head_dim]")
    paged = inputs.page_table is not None
    slots = (4, "[pages, page_size, heads_kv, head_dim]" if paged else "[rows, capacity, heads_kv, head_dim]")
    dtype = inputs.q.dtype
    if dtype not in checks.DTYPES:
        fix = "cast it; an fp8 cache goes with a 16-bit q"
        fail(DtypeError, "q", dtype, "float16, bfloat16, float32, and float64 on the CPU", fix)
    for name, (rank, layout), dtypes in (
        ("q", rows, (dtype,)),
        ("k_cache", slots, (dtype, FP8)),
        ("v_cache", slots, (inputs.k_cache.dtype,)),
        ("k_new", rows, (dtype,)),
        ("v_new", rows, (dtype,)),
    ):
        x = getattr(inputs, name)
        if x is None:
            continue
        if x.ndim != rank:
            got = f"rank {x.ndim}, shape {list(x.shape)}"
            fail(ShapeError, name, got, f"rank {rank}, {layout}", "reshape it")
        if x.dtype not in dtypes:
            want = " or ".join(str(d) for d in dtypes) + (", k_cache's" if name == "v_cache" else f", q being {dtype}")
            fail(DtypeError, name, x.dtype, want, "cast q, k_new and v_new to the cache's dtype")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            fix = "call .contiguous(); only the last dimension must be dense, other strides are free"
            fail(ShapeError, name, f"last-dimension stride {x.stride(-1)}", "stride 1 in the last dimension", fix)


def _sizes(inputs: CacheInputs) -> None:
    q, k, v = inputs.q, inputs.k_cache, inputs.v_cache
    if k.shape[:-1] != v.shape[:-1]:
        got = f"shape {list(v.shape)} beside k_cache {list(k.shape)}"
        fail(ShapeError, "v_cache", got, "k_cache's shape in all but the last dimension", "allocate both alike")
    if k.shape[-1] != q.shape[-1]:
        got = f"head dim {k.shape[-1]}, q's is {q.shape[-1]}"
        fail(ShapeError, "k_cache", got, "q's head dim", "project both to one size")
    for name, n, most in (("q", q.shape[-1], MAX_HEAD_DIM), ("v_cache", v.shape[-1], MAX_HEAD_DIM_V)):
        if not 1 <= n <= most:
            fail(ShapeError, name, f"head dim {n}", f"1 to {most}", "split the heads")
    if q.shape[-2] < 1 or k.shape[2] < 1 or q.shape[-2] % k.shape[2]:
        got = f"{q.shape[-2]} query heads with {k.shape[2]} key/value heads"
        fail(ShapeError, "heads", got, "heads_q a positive multiple of heads_kv", "check the cache's layout")


def _new(inputs: CacheInputs) -> None:
    """k_new and v_new: both or neither, as many sequences as q, and a cache that can be written."""
    k, v = inputs.k_new, inputs.v_new
    if (k is None) != (v is None):
        got = f"{'k_new' if v is None else 'v_new'} alone"
        fail(ArgumentError, "k_new, v_new", got, "both, or neither", "pass the new keys and their values")
    if k is None or v is None:
        return
    first = inputs.q.shape[:1]
    for name, x, cache in (("k_new", k, inputs.k_cache), ("v_new", v, inputs.v_cache)):
        if x.shape[:1] != first or x.shape[-2:] != cache.shape[-2:]:
            middle = [] if inputs.cu_seqlens_q is not None else ["seqlen_new"]
            want = [*first, *middle, *cache.shape[-2:]]
            fail(ShapeError, name, f"shape {list(x.shape)}", f"[{', '.join(map(str, want))}]", "match q and the cache")
        if any(n > 1 and stride == 0 for n, stride in zip(cache.shape, cache.stride(), strict=True)):
            argument = name[0] + "_cache"
            fix = "clone the expanded cache; its slots share memory"
            fail(ShapeError, argument, f"strides {list(cache.stride())}", "slots of their own, to append", fix)
    if k.shape[:-1] != v.shape[:-1]:
        got = f"shape {list(v.shape)} beside k_new {list(k.shape)}"
        fail(ShapeError, "v_new", got, "k_new's shape in all but the last dimension", "pass one value for each key")


def _lengths(inputs: CacheInputs) -> None:
    """cache_seqlens, cache_leftpad, cache_batch_idx, rotary.positions: one integer for each sequence."""
    batch = batch_of(inputs)
    for name in ("cache_seqlens", "cache_leftpad", "cache_batch_idx", "rotary_positions"):
        x = getattr(inputs, name)
        if x is None:
            continue
        argument = name.replace("rotary_", "rotary.")
        if x.dtype not in checks.INTEGERS:
            fail(DtypeError, argument, x.dtype, "an int32 or int64 tensor", "cast it with .int()")
        if tuple(x.shape) != (batch,):
            fail(ShapeError, argument, f"shape {list(x.shape)}", f"[{batch}], one value for each sequence", "match q")
    rows = inputs.k_cache.shape[0]
    if inputs.page_table is None and inputs.cache_batch_idx is None and rows != batch:
        got = f"{rows} rows for {batch} sequences"
        fail(ShapeError, "k_cache", got, "a row for each sequence", "pass cache_batch_idx, or slice the cache")


def _pages(inputs: CacheInputs) -> None:
    table = inputs.page_table
    if table is None:
        return
    if inputs.cache_batch_idx is not None:
        fix = "index the table: page_table[cache_batch_idx]"
        fail(UnsupportedError, "cache_batch_idx", "an index beside a page_table", "one of the two", fix)
    if table.dtype not in checks.INTEGERS:
        fail(DtypeError, "page_table", table.dtype, "an int32 or int64 tensor", "cast it with .int()")
    batch = batch_of(inputs)
    if table.ndim != 2 or table.shape[0] != batch:
        want = f"[{batch}, max_pages], a row for each sequence"
        fail(ShapeError, "page_table", f"shape {list(table.shape)}", want, "match q")
    if inputs.k_cache.shape[1] < 1:
        fail(ShapeError, "k_cache", "pages of 0 slots", "a page size of at least 1", "allocate [pages, page_size, ...]")


def _rotary(inputs: CacheInputs) -> None:
    cos, sin = inputs.rotary_cos, inputs.rotary_sin
    if cos is None or sin is None:
        return
    dtypes = (inputs.q.dtype, torch.float32)
    for name, x in (("rotary.cos", cos), ("rotary.sin", sin)):
        if x.dtype not in dtypes or x.dtype != cos.dtype:
            fail(DtypeError, name, x.dtype, f"q's dtype {dtypes[0]} or float32, the same for both", "cast both tables")
        if x.ndim != 2 or x.shape != cos.shape:
            got = f"shape {list(x.shape)}" + ("" if x is cos else f" beside cos {list(cos.shape)}")
            fail(ShapeError, name, got, "[positions, rotary_dim / 2], the same for both", "one angle for each pair")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            fail(ShapeError, name, f"last-dimension stride {x.stride(-1)}", "stride 1", "call .contiguous()")
    rotated, head_dim = 2 * cos.shape[1], inputs.q.shape[-1]
    if not 2 <= rotated <= head_dim:
        got = f"tables of {cos.shape[1]} angles, for {rotated} dims"
        want = f"1 to {head_dim // 2} angles: an even number of dims, at most head_dim {head_dim}"
        fail(ShapeError, "rotary.cos", got, want, "build the tables for the rotated dims, half as many columns")


def tree(mask: torch.Tensor, batch: int, seqlen_q: int) -> None:
    """A boolean mask: which of the newest keys each row sees."""
    checks.plain("mask", mask)
    want = f"[{batch}, Sq, Sq] or [1, Sq, Sq] with Sq = {seqlen_q}: the newest Sq keys, for each row"
    if mask.dtype != torch.bool:
        fail(DtypeError, "mask", mask.dtype, "torch.bool, True is visible", "use .bool()")
    if mask.ndim != 3 or mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (seqlen_q, seqlen_q):
        fix = "older keys are visible anyway; restrict them with window= or a predicate"
        fail(ShapeError, "mask", f"shape {list(mask.shape)}", want, fix)


def scale(name: str, x: torch.Tensor | None, inputs: CacheInputs) -> str | None:
    """How a scale is indexed: "head", "sequence" or "page"."""
    if x is None:
        return None
    if inputs.k_cache.dtype != FP8:
        want = f"scales of a {FP8} cache"
        fail(UnsupportedError, name, f"a scale beside a {inputs.k_cache.dtype} cache", want, "leave it out")
    if x.dtype != torch.float32:
        fail(DtypeError, name, x.dtype, "torch.float32", f"{name}.float()")
    heads, batch, pages = inputs.k_cache.shape[2], batch_of(inputs), inputs.k_cache.shape[0]
    paged = inputs.page_table is not None
    want = f"[{heads}], [{batch}, {heads}]" + (f" or [{pages}, {heads}]" if paged else "")
    if tuple(x.shape) == (heads,):
        return PER_HEAD
    fits = [kind for kind, n in ((PER_SEQUENCE, batch), (PER_PAGE, pages if paged else -1)) if x.shape == (n, heads)]
    if len(fits) == 2:
        got = f"shape {list(x.shape)}, with as many sequences as pages"
        fix = "add a spare page, so that the shape says which is meant"
        fail(ShapeError, name, got, f"a shape of one meaning: {want}", fix)
    if not fits:
        fail(ShapeError, name, f"shape {list(x.shape)}", f"{want}: per head, sequence or page", "reshape it")
    return fits[0]


def metadata(problem: CacheProblem, inputs: CacheInputs) -> None:
    """The values of lengths, indices and tables, where reading them costs nothing (CPU tensors) or was asked for."""
    found = [x for x in (getattr(inputs, name) for name in METADATA) if x is not None]
    if not problem.options.validate and any(x.device.type != "cpu" for x in found):
        return
    if inputs.cu_seqlens_q is not None:
        checks.offsets_of("q", inputs.cu_seqlens_q.tolist(), inputs.q.shape[0], problem.attention.seqlen_q)
    at = lengths(problem, inputs, torch.device("cpu"))
    _slots(problem, at)
    if inputs.cache_batch_idx is not None:
        _rows(problem, inputs.cache_batch_idx.cpu())
    if inputs.page_table is not None:
        _page_ids(problem, inputs.page_table.cpu().long(), at)
    if inputs.rotary_cos is not None:
        _angles(inputs, inputs.rotary_cos.shape[0], at)


def _first(wrong: torch.Tensor) -> int | None:
    """Index of the first True, or None."""
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def _slots(problem: CacheProblem, at: Lengths) -> None:
    room = problem.capacity
    what = "slots" if problem.page_size is None else f"slots, pages of {problem.page_size}"
    b = _first((at.used < 0) | (at.used > room))
    if b is not None:
        fix = "count the slots in use before this call; a longer sequence needs a wider cache or table"
        fail(ArgumentError, f"cache_seqlens[{b}]", int(at.used[b]), f"0 to the capacity of {room} {what}", fix)
    b = _first(at.used + at.new > room)
    if b is not None:
        got = f"{int(at.new[b])} new keys for sequence {b}, which has {int(at.used[b])}"
        fix = "list more pages in page_table" if problem.page_size is not None else "allocate a longer cache"
        fail(ArgumentError, "k_new", got, f"a total of at most {room} {what}", fix)
    b = _first((at.pad < 0) | (at.pad > at.used))
    if b is not None:
        want = f"0 to cache_seqlens[{b}] = {int(at.used[b])}"
        fail(ArgumentError, f"cache_leftpad[{b}]", int(at.pad[b]), want, "cache_seqlens counts the padding too")


def _rows(problem: CacheProblem, index: torch.Tensor) -> None:
    b = _first((index < 0) | (index >= problem.rows))
    if b is not None:
        fix = "pass each sequence's row of k_cache"
        fail(ArgumentError, f"cache_batch_idx[{b}]", int(index[b]), f"0 to {problem.rows - 1}, a row of the cache", fix)
    if problem.appends and index.unique().numel() < index.numel():
        got = f"row {int(index.mode().values)} more than once, in a call that appends"
        fail(ArgumentError, "cache_batch_idx", got, "distinct rows", "give each sequence a row of its own")


def _page_ids(problem: CacheProblem, table: torch.Tensor, at: Lengths) -> None:
    """Pages that are read or written exist, and what one sequence writes is no other's."""
    size = problem.page_size
    assert size is not None
    lo, hi = key_range(at, *band(problem), torch.zeros_like(at.q), at.q)
    entries = torch.arange(table.shape[1])
    read = _touched(entries, at.pad + lo, at.pad + hi, size)
    written = _touched(entries, at.used, at.used + at.new, size)
    wrong = (read | written) & ((table < 0) | (table >= problem.rows))
    if bool(wrong.any()):
        b, i = (int(x) for x in wrong.nonzero()[0])
        want = f"0 to {problem.rows - 1}, for sequence {b} uses {int(at.used[b] + at.new[b])} slots"
        fail(ArgumentError, f"page_table[{b}, {i}]", int(table[b, i]), want, "list the pages of the tokens in use")
    users = table[read | written].bincount(minlength=1)
    shared = written & (users[table.clamp(0, users.numel() - 1)] > 1)
    if bool(shared.any()):
        b, i = (int(x) for x in shared.nonzero()[0])
        got = f"page {int(table[b, i])}, which sequence {b} appends to and which is listed elsewhere too"
        want = "pages of one sequence where it appends"
        fail(ArgumentError, f"page_table[{b}, {i}]", got, want, "give it a copy of the page first")


def _touched(entries: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, size: int) -> torch.Tensor:
    """Which entries of each sequence's row of the table hold one of the slots ``lo .. hi``, [B, max_pages]."""
    first, last = lo // size, -(-hi // size)
    return (entries >= first[:, None]) & (entries < last[:, None]) & (hi > lo)[:, None]


def _angles(inputs: CacheInputs, rows: int, at: Lengths) -> None:
    """Every row and new key has its angles in the table."""
    start = at.used if inputs.rotary_positions is None else inputs.rotary_positions.cpu().long()
    alive = (at.q > 0) | (at.new > 0)
    b = _first(alive & (start + at.new > rows))
    if b is not None:
        got = f"tables of {rows} positions"
        end = int(start[b] + at.new[b])
        want = f"at least {end}, for sequence {b} reaches position {end - 1}"
        fail(ShapeError, "rotary.cos", got, want, "build longer tables")
    b = _first(alive & (start + at.new - torch.minimum(at.q, at.k).clamp(min=0) < 0))
    if b is not None:
        want = "positions of the first new token, so that no row's own is negative"
        fail(ArgumentError, f"rotary.positions[{b}]", int(start[b]), want, "count the tokens before this call")
