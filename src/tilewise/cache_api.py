"""The public entry point for calls with a key/value cache."""

from __future__ import annotations

from typing import Any

import torch

from . import cached, eager_cache
from .cache_arguments import prepare
from .kvcache import Rotary


def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softmax_max: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool | str = False,
    window: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Any:
    """Append new keys and values to a cache, in place, and attend to all that is in it.

    ``cache[n : n + m] = rope(k_new), v_new``, then ``out = softmax(mask(mod(softmax_scale · rope(q) keysᵀ))) values``
    over the ``n + m`` slots in use, with n of `cache_seqlens` and m new keys for each sequence. Decoding (one query),
    speculative decoding (some, perhaps with a tree) and chunked prefill (many) are this one call.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim], or ragged [total_q, heads_q, head_dim] beside `cu_seqlens_q`; fp16,
            bf16, fp32 (fp64 on the CPU). head_dim 1 to 576.
        k_cache: contiguous [rows, capacity, heads_kv, head_dim], or with `page_table` [pages, page_size, heads_kv,
            head_dim] with any page size; q's dtype or float8_e4m3fn. Only the last dimension must have stride 1.
        v_cache: the same with head_dim_v, 1 to 512; may be a view of k_cache (MLA).
        cache_seqlens: int32 or int64 [batch]: slots in use before this call, `cache_leftpad` included.
        k_new: [batch, seqlen_new, heads_kv, head_dim], ragged like q beside `cu_seqlens_q`, in q's dtype; None: nothing
            is appended. New key t of sequence b goes to slot ``cache_seqlens[b] + t``.
        v_new: the same with head_dim_v.
        page_table: int32 or int64 [batch, max_pages]: slot s of sequence b is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. Entries of pages without a visible or new key may hold anything.
        cache_batch_idx: int32 or int64 [batch]: the row of a contiguous cache of each sequence; None: row b.
        cache_leftpad: int32 or int64 [batch]: slots before the first key; they are not read.
        rotary: a `Rotary`, applied to q and k_new; None: none.
        cu_seqlens_q: int32 or int64 [batch + 1]: sequence b has rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` of q
            (and of k_new, v_new).
        max_seqlen_q: the most rows of a sequence, a Python int, beside `cu_seqlens_q`.
        num_splits: cut the keys of every row into this many parts, which are computed apart and merged; None: the
            backend decides, by how much work there is.
        split_size: cut them at multiples of this many keys instead, a multiple of 128: then a row's bits depend on its
            own sequence alone, whatever else is in the batch. Excludes num_splits.
        softmax_max: a maximum φ assumed for all scores (Flash-Decoding++), so that parts add without rescaling. Rows
            whose true maximum is more than 60 away from it are computed again with that, so results hold for any φ;
            it is fast if φ fits, such as the softcap. None: the true maximum.
        k_scale, v_scale: fp32 [heads_kv], [batch, heads_kv] or, paged, [pages, heads_kv]: what an fp8 cache holds is
            value / scale. None: 1.
        causal, window, score_mod, softcap, softmax_scale, alibi_slopes, sinks, out_dtype, backend: as in `attention`,
            in positions of the keys in use, counted from `cache_leftpad`. Row i is at key ``i + seqlen_k - seqlen_q``:
            the rows are the newest tokens.
        mask: a bool tensor [batch|1, seqlen_q, seqlen_q], a tree over the newest seqlen_q keys (older ones stay
            visible; beside `cu_seqlens_q`, seqlen_q is max_seqlen_q, and a shorter sequence uses the top left); or
            a mask made of Causal, Window, PrefixLM and predicates.
        bias, dropout_p: refused here.
        return_lse: also return the log-sum-exp of the scores.
        validate: also check lengths and tables that live on the GPU, at the price of a synchronisation.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v] (ragged [total_q, heads_q, head_dim_v]); with `return_lse` also lse
        fp32 [batch, heads_q, seqlen_q] (ragged [heads_q, total_q]), natural log. Rows without a visible key, and ragged
        rows past ``cu_seqlens_q[-1]``, are 0 with LSE -inf.

    Raises:
        tilewise.errors.TilewiseError: before any work, so the cache is as it was. Values of lengths, indices and tables
            are checked where all of them are on the CPU, or with ``validate=True``.

    Numerics:
        Rotation in fp32, rounded to q's dtype. Attention as in `attention`, over what the cache then holds. There is no
        gradient; call under ``torch.no_grad()``.

    Cost:
        Reads each key and value in use once: bytes, not FLOPs, bound it up to some 200 rows per key head.

    Source:
        Flash-Decoding (Dao et al., 2023); PagedAttention (Kwon et al., 2023); Flash-Decoding++ (Hong et al., 2023).

    Example:
        >>> import torch, tilewise
        >>> k_cache, v_cache = torch.zeros(2, 1, 64, 2, 16)  # one sequence, room for 64 tokens, 2 heads
        >>> q, k, v = torch.randn(3, 1, 10, 2, 16).unbind()
        >>> prompt = {"cache_seqlens": torch.tensor([0]), "k_new": k[:, :9], "v_new": v[:, :9]}
        >>> first = tilewise.attention_with_kvcache(q[:, :9], k_cache, v_cache, causal=True, **prompt)
        >>> token = {"cache_seqlens": torch.tensor([9]), "k_new": k[:, 9:], "v_new": v[:, 9:]}
        >>> last = tilewise.attention_with_kvcache(q[:, 9:], k_cache, v_cache, causal=True, **token)
        >>> whole = tilewise.attention(q, k, v, causal=True)
        >>> torch.allclose(torch.cat([first, last], dim=1), whole, atol=1e-5)
        True
    """
    given = {
        "k_new": k_new, "v_new": v_new, "page_table": page_table, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "rotary": rotary, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q,
        "num_splits": num_splits, "split_size": split_size, "softmax_max": softmax_max, "k_scale": k_scale,
        "v_scale": v_scale, "causal": causal, "window": window, "mask": mask, "score_mod": score_mod,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks,
        "softmax_scale": softmax_scale, "dropout_p": dropout_p, "return_lse": return_lse, "out_dtype": out_dtype,
        "backend": backend, "validate": validate,
    }  # fmt: skip
    key = None
    if not torch.compiler.is_compiling():
        key, known, tensors = eager_cache.find((q, k_cache, v_cache, cache_seqlens), given)
        if known is not None:
            out, lse = known(tensors)
            return (out, lse) if return_lse else out
    problem, inputs = prepare(q, k_cache, v_cache, cache_seqlens, **given)
    out, lse = cached.attend(problem, inputs)
    if key is not None:
        eager_cache.remember(key, problem, inputs)
    return (out, lse) if return_lse else out
