"""Compiling the kernels of a call before its first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from . import cached, dispatch, problem
from .cache_arguments import prepare
from .errors import ArgumentError, fail
from .kvcache import CacheInputs, CacheProblem


def warmup(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    device: torch.device | str | None = None,
    **arguments: Any,
) -> None:
    """Compile what `attention_with_kvcache` needs for calls like this one, so that none of them compiles anything.

    Like it are calls whose tensors have the same shapes, strides, dtypes and alignment, and whose options are the same;
    lengths, tables and other values in tensors may be any. Call it once for each number of rows that will occur (one
    token, a draft, a piece of a prompt). Nothing is compiled on the CPU, where the call is checked alone.

    Args:
        q, k_cache, v_cache, cache_seqlens: as in `attention_with_kvcache`: tensors that will be used, or tensors on the
            meta device, which stand for such of zeros.
        device: where tensors on the meta device will be; None: where q is.
        arguments: as there.

    Raises:
        tilewise.errors.TilewiseError: as `attention_with_kvcache` would.

    Cost:
        One call, and as much memory as the tensors on the meta device take. The caches are as they were afterwards.

    Example:
        >>> import torch, tilewise
        >>> cache = tilewise.PagedKVCache(8, 16, heads_kv=2, head_dim=64)
        >>> q, lengths, table = torch.zeros(4, 1, 8, 64), torch.zeros(4).int(), torch.zeros(4, 2).int()
        >>> new = {"k_new": torch.zeros(4, 1, 2, 64), "v_new": torch.zeros(4, 1, 2, 64)}
        >>> tilewise.warmup(q, cache.k[0], cache.v[0], cache_seqlens=lengths, page_table=table, **new)
    """
    posed, inputs = prepare(q, k_cache, v_cache, cache_seqlens, **arguments)
    where = q.device if device is None else torch.device(device)
    if where.type == "meta":
        fail(ArgumentError, "device", "none, for tensors on the meta device", "the device of the calls", "name it")
    if q.device.type == "meta":
        posed, inputs = _real(posed, inputs, where)
    elif where != posed.device:
        fail(ArgumentError, "device", where, f"q's device {posed.device}", "leave it out")
    dispatch.choose_cache(posed)
    if where.type != "cpu":
        run(posed, inputs)


def _real(posed: CacheProblem, inputs: CacheInputs, where: torch.device) -> tuple[CacheProblem, CacheInputs]:
    """The same call of tensors of zeros on a device; on the CPU only what they stand for, for nothing will be run."""
    tensors: list[torch.Tensor] = []
    spec = posed.options.encode(tensors)

    def real(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where).zero_()

    if where.type == "cpu":
        attention = replace(posed.attention, device=where)
        return replace(posed, attention=attention), inputs
    options = problem.decode(spec, tuple(real(x) for x in tensors))
    made = inputs._replace(**{name: real(x) for name, x in inputs._asdict().items() if x is not None})
    return CacheProblem.of(made, options, posed.static, posed.attention.seqlen_q), made


def run(posed: CacheProblem, inputs: CacheInputs) -> None:
    """Serve the call, of sequences that are empty before it, and put back what it wrote."""
    empty = _emptied(posed, inputs)
    with _kept(posed, empty):
        # Without a look at values: sequences share pages here, which no other call may.
        cached.serve(posed, empty)
        if posed.device.type == "cuda":
            torch.cuda.synchronize(posed.device)


def _emptied(posed: CacheProblem, inputs: CacheInputs) -> CacheInputs:
    """The call with lengths of 0, so that new tokens go to the first slots, of the first pages."""
    zeros = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_positions")
    changes = {name: torch.zeros_like(x) for name in zeros if (x := getattr(inputs, name)) is not None}
    if inputs.page_table is not None:
        pages = torch.arange(inputs.page_table.shape[1], device=inputs.page_table.device) % max(1, posed.rows)
        changes["page_table"] = pages.to(inputs.page_table.dtype).repeat(inputs.page_table.shape[0], 1)
    if inputs.cu_seqlens_q is not None:
        most, rows = posed.attention.seqlen_q, inputs.q.shape[0]
        ends = torch.arange(inputs.cu_seqlens_q.shape[0], device=inputs.cu_seqlens_q.device) * most
        changes["cu_seqlens_q"] = ends.clamp(max=rows).to(inputs.cu_seqlens_q.dtype)
    return inputs._replace(**changes)


@contextmanager
def _kept(posed: CacheProblem, inputs: CacheInputs) -> Iterator[None]:
    """Put the slots back that new tokens go to."""
    parts = []
    for cache in (inputs.k_cache, inputs.v_cache) if posed.appends else ():
        new = posed.seqlen_new or 0
        part = cache[:, :new] if posed.page_size is None else cache[: -(-new // posed.page_size)]
        parts.append((part, part.clone()))
    try:
        yield
    finally:
        for part, kept in parts:
            part.copy_(kept)
