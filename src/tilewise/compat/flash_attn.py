"""The functions of flash-attn 2, by their names, arguments, defaults and conventions.

What they share:

- Layout ``[batch, seqlen, heads, head_dim]``, packed ``[total, heads, head_dim]``; heads_q is a multiple of heads_k.
- `causal` is anchored at the bottom right. `window_size` is (left, right), inclusive; -1 is unbounded. `softcap` 0.0 is
  none. `alibi_slopes` [heads] or [batch, heads] add ``-slope · |i + seqlen_k - seqlen_q - j|``.
- ``return_attn_probs=True`` returns ``(out, softmax_lse, S_dmask)``: the LSE fp32 ``[batch, heads, seqlen_q]``, packed
  ``[heads, total_q]``; S_dmask ``[batch, heads, seqlen_q, seqlen_k]``, both lengths rounded up to multiples of 128,
  ``exp(s - max s)`` of each row with a minus where dropped, and empty without dropout. It costs the memory of the score
  matrix and is for tests, as in flash-attn.

Wider than flash-attn: fp32, and fp64 on the CPU; head dims from 1 to 512, other ones for values; softcap with dropout;
any device; gradients of slopes, and through the LSE.

Source:
    flash-attn 2.8, flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

from typing import Any

import torch

from . import conventions
from .flash_attn_kvcache import flash_attn_with_kvcache, paged_varlen
from .flash_attn_probabilities import Members, attend

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`tilewise.attention` in flash-attn's words.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim].
        k: [batch, seqlen_k, heads_k, head_dim].
        v: [batch, seqlen_k, heads_k, head_dim_v].
        dropout_p: probability of dropping a weight.
        softmax_scale: default ``1 / sqrt(head_dim)``.
        causal: row i sees key j iff ``j <= i + seqlen_k - seqlen_q``.
        window_size: (left, right) around that diagonal, -1 for unbounded.
        softcap: ``s -> softcap · tanh(s / softcap)``; 0.0 for none.
        alibi_slopes: fp32 [heads_q] or [batch, heads_q].
        deterministic: bitwise repeatable gradients.
        return_attn_probs: also return the LSE and S_dmask, see the module.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v], or (out, softmax_lse, S_dmask).

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention`.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]))
    """
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return attend(q, k, v, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor ``kv [batch, seqlen_k, 2, heads_k, head_dim]``, and one gradient."""
    k, v = conventions.unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with all three in one tensor ``qkv [batch, seqlen, 3, heads, head_dim]``, and one gradient."""
    q, k, v = conventions.unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """`tilewise.attention_varlen` in flash-attn's words.

    Args:
        q: [total_q, heads_q, head_dim].
        k: [total_k, heads_k, head_dim]; with `block_table` pages [pages, page_size, heads_k, head_dim].
        v: likewise.
        cu_seqlens_q: int32 or int64 [batch + 1]: 0 and the cumulative lengths.
        cu_seqlens_k: likewise.
        max_seqlen_q: the longest member's queries; a tensor is read, which waits for the GPU.
        max_seqlen_k: the longest member's keys.
        block_table: int32 [batch, max_pages], the pages of each sequence; no gradient and no dropout then.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as
            `flash_attn_func`.

    Returns:
        out [total_q, heads_q, head_dim_v], or (out, softmax_lse [heads_q, total_q], S_dmask).

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention_varlen`, with `block_table` as
            `tilewise.attention_with_kvcache`.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn import flash_attn_varlen_func
        >>> x, cu = torch.randn(10, 2, 16), torch.tensor([0, 3, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, causal=True).shape
        torch.Size([10, 2, 16])
    """
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    longest_q = conventions.integer("max_seqlen_q", max_seqlen_q)
    longest_k = conventions.integer("max_seqlen_k", max_seqlen_k)
    members = Members(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
    if block_table is not None:
        return paged_varlen(q, k, v, members, block_table, options, return_attn_probs)
    return attend(q, k, v, options, return_attn_probs, members)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor ``kv [total_k, 2, heads_k, head_dim]``, and one gradient."""
    k, v = conventions.unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with all three in one tensor ``qkv [total, 3, heads, head_dim]``, and one gradient."""
    q, k, v = conventions.unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
