"""Calls with a key/value cache as values: the same sequences in any layout, with NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import tilewise
from targets import Target
from tilewise import dispatch, reference
from tilewise.cache_arguments import prepare
from tilewise.kvcache import FP8
from tolerance import assert_close, assert_zero

from .calls import Draw, offsets

NAN = float("nan")


@dataclass(frozen=True)
class Sizes:
    """Sequences of a call: slots in use, rows, heads, dims.

    `rows`: of each sequence, an int, or a list for a ragged call. `new`: keys to append, None: none; ragged calls
    append one for each row.
    """

    used: tuple[int, ...] = (37, 5, 130)
    rows: int | tuple[int, ...] = 1
    new: int | None = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    capacity: int = 150
    pad: tuple[int, ...] | None = None

    def __str__(self) -> str:
        rows = "x".join(map(str, self.rows)) if isinstance(self.rows, tuple) else str(self.rows)
        heads, dims = f"{self.heads_q}over{self.heads_kv}", f"{self.head_dim}to{self.head_dim_v}"
        return f"n{'x'.join(map(str, self.used))}q{rows}+{self.new}h{heads}d{dims}"

    @property
    def ragged(self) -> bool:
        return isinstance(self.rows, tuple)

    @property
    def batch(self) -> int:
        return len(self.used)

    @property
    def seqlen_q(self) -> int:
        return max(self.rows) if isinstance(self.rows, tuple) else self.rows


@dataclass(frozen=True)
class CacheCall:
    """The tensors and options of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def having(self, **options: Any) -> CacheCall:
        """This call with other options."""
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Result:
    """Output, LSE, and both caches as the call left them."""

    out: torch.Tensor
    lse: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def draw_call(sizes: Sizes, dtype: torch.dtype, draw: Draw, cache_dtype: torch.dtype | None = None) -> CacheCall:
    """Random sequences in a contiguous cache, a row for each; slots not in use hold NaN."""
    caches = []
    for dim in (sizes.head_dim, sizes.head_dim_v):
        x = draw.normal(sizes.batch, sizes.capacity, sizes.heads_kv, dim, dtype=dtype)
        slot = torch.arange(sizes.capacity, device=draw.device)
        used = torch.tensor(sizes.used, device=draw.device)[:, None]
        pad = torch.tensor(sizes.pad or [0] * sizes.batch, device=draw.device)[:, None]
        hidden = (slot >= used) | (slot < pad)
        caches.append(x.masked_fill(hidden[..., None, None], NAN).to(cache_dtype or dtype))
    lengths = torch.tensor(sizes.used, dtype=torch.int32, device=draw.device)
    options: dict[str, Any] = {"cache_seqlens": lengths}
    if isinstance(sizes.rows, tuple):
        lead = [sum(sizes.rows)]
        options |= {"cu_seqlens_q": offsets(sizes.rows, draw.device), "max_seqlen_q": sizes.seqlen_q}
        new = lead
    else:
        lead, new = [sizes.batch, sizes.rows], [sizes.batch, sizes.new or 0]
    if sizes.new is not None:
        options["k_new"] = draw.normal(*new, sizes.heads_kv, sizes.head_dim, dtype=dtype)
        options["v_new"] = draw.normal(*new, sizes.heads_kv, sizes.head_dim_v, dtype=dtype)
    if sizes.pad is not None:
        options["cache_leftpad"] = torch.tensor(sizes.pad, dtype=torch.int32, device=draw.device)
    q = draw.normal(*lead, sizes.heads_q, sizes.head_dim, dtype=dtype)
    return CacheCall(q, caches[0], caches[1], options)


def paged(call: CacheCall, page_size: int, seed: int | None = 0) -> CacheCall:
    """The same sequences in pages: shuffled (seed None: in order), between pages of NaN; unused entries are absurd."""
    capacity = call.k_cache.shape[1]
    batch, device = call.options["cache_seqlens"].shape[0], call.q.device
    width = -(-capacity // page_size)
    count = batch * width + 3
    generator = torch.Generator().manual_seed(seed or 0)
    order = torch.arange(count) if seed is None else torch.randperm(count, generator=generator)
    table = order[: batch * width].view(batch, width).to(device, torch.int32)
    caches = []
    for cache in (call.k_cache, call.v_cache):
        wide = torch.full((batch, width * page_size, *cache.shape[2:]), NAN, device=device).to(cache.dtype)
        raw = wide.view(torch.uint8) if cache.dtype == FP8 else wide
        raw[:, :capacity] = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        pool = torch.full((count, page_size, *cache.shape[2:]), NAN, device=device).to(cache.dtype)
        into = pool.view(torch.uint8) if cache.dtype == FP8 else pool
        into[table.long()] = raw.view(batch, width, page_size, *cache.shape[2:])
        caches.append(pool)
    new = call.options.get("k_new")
    rows = call.options.get("cu_seqlens_q")
    appended = 0 if new is None else new.shape[1] if rows is None else rows.diff()
    in_use = -(-(call.options["cache_seqlens"] + appended) // page_size)
    unused = torch.arange(width, device=device) >= in_use[:, None]
    table = table.masked_fill(unused, -1)
    table[:, -1:] = table[:, -1:].masked_fill(unused[:, -1:], 2_147_480_000)
    return replace(call, k_cache=caches[0], v_cache=caches[1]).having(page_table=table)


def indexed(call: CacheCall) -> CacheCall:
    """The same sequences in other rows of a larger cache, whose other rows hold NaN."""
    batch = call.k_cache.shape[0]
    rows = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(1))[:batch].to(call.q.device)
    caches = []
    for cache in (call.k_cache, call.v_cache):
        larger = torch.full((batch + 3, *cache.shape[1:]), NAN, device=cache.device).to(cache.dtype)
        larger[rows] = cache
        caches.append(larger)
    return replace(call, k_cache=caches[0], v_cache=caches[1]).having(cache_batch_idx=rows.int())


def heads_first(call: CacheCall) -> CacheCall:
    """The same caches, stored with the heads before the slots."""
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.k_cache, call.v_cache))
    return replace(call, k_cache=k, v_cache=v)


def sliced(call: CacheCall) -> CacheCall:
    """The same caches and rows, as parts of larger tensors."""

    def part(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 8), NAN, device=x.device).to(x.dtype)
        wide[..., 8 : 8 + x.shape[-1]] = x
        return wide[..., 8 : 8 + x.shape[-1]]

    new = {name: part(call.options[name]) for name in ("k_new", "v_new") if name in call.options}
    return replace(call, q=part(call.q), k_cache=part(call.k_cache), v_cache=part(call.v_cache)).having(**new)


def attend(target: Target, call: CacheCall) -> Result:
    """The backend's results; the call's own caches stay as they are."""
    k = _copy(call.k_cache)
    shared = call.v_cache.data_ptr() == call.k_cache.data_ptr()
    v = k[..., : call.v_cache.shape[-1]] if shared else _copy(call.v_cache)
    entry = tilewise.attention_with_kvcache
    out, lse = entry(call.q, k, v, return_lse=True, backend=target.name, **call.options)
    return Result(out, lse, k, v)


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, and the same bytes between them."""
    if x.is_contiguous():
        return x.clone()
    whole = x._base if x._base is not None else x
    return whole.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def declines(target: Target, call: CacheCall) -> bool:
    """Whether the backend cannot serve the call; then it must say so, for reasons that it may have."""
    options = dict(call.options)
    problem, _ = prepare(call.q, call.k_cache, call.v_cache, options.pop("cache_seqlens"), **options)
    reasons = dispatch.cache_reasons(target.name, problem)
    surprising = [reason for reason in reasons if not target.may_refuse(reason)]
    assert not surprising, f"{target} declines what it should serve: {surprising}"
    if reasons:
        with pytest.raises(tilewise.errors.UnsupportedError) as raised:
            attend(target, call)
        assert all(reason in str(raised.value) for reason in reasons)
    return bool(reasons)


def _values(call: CacheCall) -> float:
    """The largest value that may be in a sum."""
    found = [call.v_cache.float().nan_to_num(), call.options.get("v_new", call.q[:0]).float()]
    scale = call.options.get("v_scale")
    largest = max(float(x.abs().max()) if x.numel() else 0.0 for x in found)
    return largest * (1.0 if scale is None else float(scale.max()))


def verify(target: Target, call: CacheCall) -> None:
    """Hold the backend's results against the oracle, and its caches byte for byte (rotated keys: to the tolerance)."""
    if declines(target, call):
        return
    got, arguments = attend(target, call), (call.q, call.k_cache, call.v_cache)
    options, dtype = {**call.options, "return_lse": True}, call.q.dtype
    ref_out, ref_lse = reference.attention_with_kvcache(*arguments, **options)
    plain_out, plain_lse = reference.attention_with_kvcache(*arguments, **options, dtype=dtype)
    scale = _values(call)
    assert_close("out", got.out, ref_out, plain_out, scale, dtype)
    assert_close("lse", got.lse, ref_lse, plain_lse, scale, got.lse.dtype)
    assert got.out.is_contiguous() and got.out.dtype == (call.options.get("out_dtype") or dtype)
    assert got.lse.is_contiguous() and got.lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert_zero("out", got.out, (ref_out == 0).all(dim=-1))
    verify_caches(call, got)


def verify_caches(call: CacheCall, got: Result) -> None:
    """Nothing but the new slots has changed, and these hold what they should."""
    expected = reference.appended(call.q, call.k_cache, call.v_cache, **call.options)
    for name, x, want, before in (
        ("k_cache", got.k_cache, expected[0], call.k_cache),
        ("v_cache", got.v_cache, expected[1], call.v_cache),
    ):
        if name == "k_cache" and call.options.get("rotary") is not None:
            changed = (bits(want) != bits(before)).flatten(2).any(dim=2)
            new, ref = x[changed].double(), want[changed].double()
            assert_close("new keys", new.to(x.dtype), ref, ref, 1.0, x.dtype)
            x, want = (y.masked_fill(changed[..., None, None], 0.0) for y in (x, want))
        assert torch.equal(bits(x), bits(want)), f"{name} is not what the append should leave"


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself."""
    return x.contiguous().view(torch.uint8)


def assert_same(got: Result, expected: Result) -> None:
    """Fail unless output and LSE are equal bit for bit."""
    for name in ("out", "lse"):
        x, y = getattr(got, name), getattr(expected, name)
        assert torch.equal(x, y), f"{name} differs by {float((x.double() - y.double()).abs().nan_to_num().max()):.3g}"
