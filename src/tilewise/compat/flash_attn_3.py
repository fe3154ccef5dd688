"""The functions of flash-attn 3 (its `flash_attn_interface`), by their names, arguments, defaults and conventions.

Layouts and conventions are those of `tilewise.compat.flash_attn`. What differs: no dropout and no ALiBi among the
arguments; ``return_attn_probs=True`` returns ``(out, softmax_lse)``; `attention_chunk` lets a query see the keys whose
position, counted from the diagonal, has the same quotient by it as the query's own.

Refused by name: `qv`, fp8 tensors and descales of calls without a cache, `sm_margin`, `scheduler_metadata`. What steers
flash-attn's kernels alone warns if it is not the default: `pack_gqa`, and `num_splits` where nothing is cached.

Source:
    flash-attn, hopper/flash_attn_interface.py.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from .. import softmax
from ..errors import ArgumentError, DtypeError, ShapeError, fail
from . import conventions
from .flash_attn_kvcache import Cache, dequantised, rotary
from .flash_attn_kvcache import attend as attend_cache
from .flash_attn_probabilities import Members, attend
from .flash_attn_used import with_used_queries

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_QV = "pass torch.cat([q, qv], -1) and torch.cat([k, v], -1) as q and k, with softmax_scale as given"
_SM_MARGIN = "leave it 0: no kernel here keeps multiprocessors free; order the streams, or use CUDA green contexts"


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`tilewise.attention` in flash-attn 3's words.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim].
        k: [batch, seqlen_k, heads_k, head_dim].
        v: [batch, seqlen_k, heads_k, head_dim_v].
        attention_chunk: see the module; 0: none. Has gradients here, which flash-attn 3 lacks.
        softmax_scale, causal, window_size, softcap, deterministic: as in `tilewise.compat.flash_attn`.
        num_splits, pack_gqa: hints, see the module.
        qv, q_descale, k_descale, v_descale, sm_margin: refused, see the module.
        return_attn_probs: also return the LSE.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v], or (out, softmax_lse [batch, heads_q, seqlen_q]).

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention`, and for what is refused.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn_3 import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16).unbind()
        >>> out, lse = flash_attn_func(q, k, v, causal=True, attention_chunk=4, return_attn_probs=True)
        >>> lse.shape
        torch.Size([2, 4, 8])
    """
    _refuse(qv, sm_margin)
    conventions.refuse_fp8({"q": q, "k": k, "v": v}, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _hints(num_splits, pack_gqa)
    options = conventions.options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    options["mask"] = conventions.chunk(attention_chunk, k.shape[1] - q.shape[1])
    return _two(attend(q, k, v, options, return_attn_probs))


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with all three in one tensor, and one gradient.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], or beside `num_heads_q`
            [batch, seqlen, heads_q + 2 · heads_k, head_dim].
        num_heads_q: query heads of a four-dimensional qkv.
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, return_attn_probs: as there.
        q_descale, k_descale, v_descale, sm_margin: refused as there.

    Returns:
        As `flash_attn_func`.

    Raises:
        tilewise.errors.TilewiseError: likewise.
    """
    q, k, v = _apart(qkv, num_heads_q)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def _apart(qkv: torch.Tensor, num_heads_q: int | None) -> list[torch.Tensor]:
    """q, k, v; whose gradients come in one tensor without being added up in it."""
    parts = conventions.packed_parts("qkv", qkv, num_heads_q)
    if num_heads_q is None:
        return list(qkv.unbind(-3))
    return list(qkv.split([part[1].stop - part[1].start for part in parts], dim=-2))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`tilewise.attention_varlen` in flash-attn 3's words.

    Args:
        q: [total_q, heads_q, head_dim].
        k: [total_k, heads_k, head_dim].
        v: [total_k, heads_k, head_dim_v].
        cu_seqlens_q: int32 or int64 [batch + 1]: 0 and the cumulative lengths.
        cu_seqlens_k: likewise.
        max_seqlen_q: the longest member's queries; a tensor is read, which waits for the GPU.
        max_seqlen_k: the longest member's keys.
        seqused_q: [batch], queries in use of each member, its first ones; the rows after them are 0, their LSE is -inf.
            Costs a copy of q and of the output.
        seqused_k: [batch], keys in use of each member.
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, return_attn_probs, num_splits,
        pack_gqa, qv, q_descale, k_descale, v_descale, sm_margin: as `flash_attn_func`.

    Returns:
        out [total_q, heads_q, head_dim_v], or (out, softmax_lse [heads_q, total_q]).

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention_varlen`, and for what is refused.
    """
    _refuse(qv, sm_margin)
    conventions.refuse_fp8({"q": q, "k": k, "v": v}, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _hints(num_splits, pack_gqa)
    options = conventions.options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    options["seqused_k"] = seqused_k
    longest_q = conventions.integer("max_seqlen_q", max_seqlen_q)
    longest_k = conventions.integer("max_seqlen_k", max_seqlen_k)
    if attention_chunk:
        keys = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        queries = cu_seqlens_q.diff() if seqused_q is None else seqused_q
        diagonal = keys.to(q.device) - queries.to(q.device)
        options["mask"] = conventions.chunk(attention_chunk, diagonal)
    members = Members(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
    if seqused_q is None:
        return _two(attend(q, k, v, options, return_attn_probs, members))
    return with_used_queries((q, k, v), members, seqused_q, options, return_attn_probs)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from the attention over disjoint parts of them; see `tilewise.merge_states`.

    Args:
        out_partial: fp32 [splits, batch, seqlen, heads, head_dim], or packed without batch.
        lse_partial: fp32, out_partial's shape without head_dim; natural log, -inf for no key.
        out: where to write, or None.
        out_dtype: of a new tensor; default out_partial's.

    Returns:
        (out [batch, seqlen, heads, head_dim], lse [batch, seqlen, heads]).

    Raises:
        tilewise.errors.ArgumentError: shapes or dtypes that do not go together, or `out` with another `out_dtype`.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn_3 import flash_attn_combine
        >>> out, lse = flash_attn_combine(torch.ones(3, 1, 5, 2, 8), torch.zeros(3, 1, 5, 2))
        >>> out.unique().tolist(), lse.exp().round().unique().tolist()
        ([1.0], [3.0])
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.dtype != torch.float32:
            fix = "pass partial results of out_dtype=torch.float32"
            fail(DtypeError, name, x.dtype, "float32", fix)
    if out_partial.ndim not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape or not out_partial.shape[0]:
        got = f"out_partial {list(out_partial.shape)}, lse_partial {list(lse_partial.shape)}"
        want = "[splits, batch, seqlen, heads, head_dim] and the same without head_dim, splits >= 1"
        fail(ShapeError, "out_partial, lse_partial", got, want, "lse.transpose(-1, -2) turns [.., heads, seqlen] round")
    nothing = torch.zeros_like(out_partial[0]), torch.full_like(lse_partial[0], softmax.EMPTY)
    states = zip(out_partial, lse_partial, strict=True)
    merged, lse = reduce(lambda a, b: softmax.merge(*a, *b), states, nothing)
    if out is None:
        return merged.to(out_dtype or out_partial.dtype), lse
    if out.shape != merged.shape or out_dtype not in (None, out.dtype):
        got = f"{out.dtype} {list(out.shape)} with out_dtype={out_dtype}"
        fail(ArgumentError, "out", got, f"shape {list(merged.shape)}, in out_dtype if that is given", "leave one out")
    return out.copy_(merged), lse


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`tilewise.attention_with_kvcache` in flash-attn 3's words; `tilewise.compat.flash_attn` has the shared part.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim], or with `cu_seqlens_q` [total_q, heads_q, head_dim]; float8_e4m3fn is
            multiplied by `q_descale` into bf16 first, as are such k and v by theirs.
        k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_interleaved: as
            in flash-attn 2; the caches may be float8_e4m3fn, whatever q is.
        k, v: new keys and values, [batch, seqlen_new, heads_k, head_dim], or with `cu_seqlens_k_new` packed.
        page_table: int32 [batch, max_pages], or a row for each row of the cache beside `cache_batch_idx`.
        cu_seqlens_q: [batch + 1], with `max_seqlen_q`.
        cu_seqlens_k_new: [batch + 1].
        rotary_seqlens: [batch], the position of the first new token; None: `cache_seqlens`. Nothing without tables.
        q_descale, k_descale, v_descale: fp32 [batch, heads_k]: what fp8 values are multiplied by; None: 1.
        num_splits: parts that the keys are cut into; 0: the backend decides.
        qv, sm_margin, scheduler_metadata: refused; `get_scheduler_metadata` returns None for the latter.
        pack_gqa: a hint, see the module.
        softmax_scale, causal, window_size, attention_chunk, softcap: as `flash_attn_func`.
        return_softmax_lse: also return the LSE, [batch, heads_q, seqlen_q] or [heads_q, total_q]; the accumulators that
            flash-attn 3 returns after it are not there.

    Returns:
        out, or (out, softmax_lse).

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention_with_kvcache`, and for what is refused.
    """
    _refuse(qv, sm_margin)
    fix = "pass None, which get_scheduler_metadata returns here: work is planned in the call"
    conventions.refuse("scheduler_metadata", scheduler_metadata, None, fix)
    _hints(1, pack_gqa)
    options = conventions.options(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
    cache = Cache(
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q,
        cu_seqlens_k_new, max_seqlen_q, k_descale, v_descale,
    )  # fmt: skip
    rope = rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    return attend_cache(
        dequantised(cache, q_descale),
        rope,
        options,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        attention_chunk=attention_chunk,
    )


def get_scheduler_metadata(*arguments: Any, **named: Any) -> None:
    """None: flash-attn 3 plans a call's work here, and this package in the call. Any arguments are as good."""


def _refuse(qv: torch.Tensor | None, sm_margin: int) -> None:
    conventions.refuse("qv", qv, None, _QV)
    conventions.refuse("sm_margin", sm_margin, 0, _SM_MARGIN)


def _hints(num_splits: int, pack_gqa: bool | None) -> None:
    conventions.hint("num_splits", num_splits, 1)
    conventions.hint("pack_gqa", pack_gqa, None)


def _two(found: Any) -> Any:
    """(out, lse) of flash-attn 2's three results; an output alone as it is."""
    return found[:2] if isinstance(found, tuple) else found
