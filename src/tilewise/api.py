"""The public entry points."""

from __future__ import annotations

from typing import Any

import torch

from . import autograd, eager, jagged
from .arguments import prepare


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
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
    dropout_seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Any:
    """Exact scaled dot-product attention, computed tile by tile.

    ``out = dropout(softmax(mask(mod(softmax_scale · q kᵀ)))) v`` with ``mod``: softcap, then `score_mod`, then ALiBi,
    then `bias`. Query head h reads key/value head ``h // (heads_q // heads_kv)``.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim] fp16, bf16, fp32 (fp64 on the CPU). Only the last dimension must have
            stride 1; a transposed BHSD tensor costs no copy. head_dim 1 to 512. Or, with k and v, nested in jagged
            layout, [batch, j, heads, head_dim]; results are then nested like q.
        k: [batch, seqlen_k, heads_kv, head_dim], q's dtype; heads_q is a multiple of heads_kv.
        v: [batch, seqlen_k, heads_kv, head_dim_v], q's dtype.
        causal: True or "bottom_right": row i sees key j iff ``j <= i + seqlen_k - seqlen_q``. "top_left": iff
            ``j <= i``.
        window: (left, right), a `Window`, or None. Inclusive bounds around the diagonal; None is unbounded. A model's
            window of W tokens including itself is ``(W - 1, 0)``.
        mask: a mask of `tilewise.masks`, a predicate ``(b, h, q, k) -> bool`` in positions, or a bool tensor that
            broadcasts to [batch, heads_q, seqlen_q, seqlen_k]. True is visible. Combines with causal and window by &.
        score_mod: a `ScoreMod`, or None.
        softcap: ``s -> softcap · tanh(s / softcap)``, or None.
        alibi_slopes: fp32 or q's dtype, [heads_q] or [batch, heads_q]: adds ``-slope · |i + off - j|``.
        bias: floating, broadcasts to [batch, heads_q, seqlen_q, seqlen_k]; added to the scores.
        sinks: [heads_q] fp32 or q's dtype: logits of a virtual key with value 0, in every row's denominator.
        softmax_scale: default ``1 / sqrt(head_dim)``.
        dropout_p: probability of dropping an attention weight, [0, 1), rounded to 1/65536.
        dropout_seed: int or scalar int64 tensor; None draws from torch's generator of the device. The same seed gives
            the same mask on every backend, whatever the tiling.
        deterministic: bitwise repeatable gradients (the output always is).
        return_lse: also return the log-sum-exp of the scores.
        out_dtype: torch.float32 for unrounded results to merge; default q's dtype.
        backend: a backend's name, which then never falls back, or None: the best that serves the call.
        validate: also check metadata that lives on the GPU, at the price of a synchronisation.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v], contiguous; with `return_lse` also lse fp32 [batch, heads_q,
        seqlen_q], natural log, sink included. Both are differentiable.

    Raises:
        tilewise.errors.ArgumentError, ShapeError, DtypeError, DeviceError: before any work, naming the argument.
        tilewise.errors.UnsupportedError: no backend, or not the one named, serves the call.

    Numerics:
        Scores, softmax, LSE and accumulation in fp32 (fp64 for fp64). A row that sees no key has output exactly 0,
        LSE -inf and adds exactly 0 to all gradients. Keys that nobody sees may hold NaN.

    Cost:
        4 · batch · heads_q · seqlen_q · seqlen_k · head_dim FLOPs (visible part), O(seqlen · head_dim) memory; see
        `tilewise.explain`.

    Source:
        FlashAttention (Dao et al., 2022); FlashAttention-2 (Dao, 2023), Algorithms 1 and 2.

    Example:
        >>> import torch, tilewise
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> out, lse = tilewise.attention(q, k, v, causal=True, window=(63, 0), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    """
    key = None
    if torch.compiler.is_compiling():
        q, k, v = _autocast(q, k, v)
    else:
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast(q, k, v)
        tensors = (q, k, v, bias, alibi_slopes, sinks, None, None, None, None)
        asked = (
            mask, window, score_mod, causal, softcap, softmax_scale, dropout_p, deterministic, return_lse, out_dtype,
            backend, validate,
        )  # fmt: skip
        key, known = eager.find(tensors, asked)
        if known is not None:
            return known(tensors, dropout_seed)
    options = {
        "causal": causal, "window": window, "mask": mask, "score_mod": score_mod, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks, "softmax_scale": softmax_scale,
        "dropout_p": dropout_p, "dropout_seed": dropout_seed, "deterministic": deterministic,
        "return_lse": return_lse, "out_dtype": out_dtype, "backend": backend, "validate": validate,
    }  # fmt: skip
    if jagged.is_nested(q, k, v):
        return jagged.attend(attention_varlen, q, k, v, options)
    problem, inputs, return_lse = prepare(q, k, v, **options)
    out, lse = autograd.attend(problem.options, inputs, problem.seqlen_q, problem.seqlen_k, return_lse)
    if key is not None:
        eager.remember(key, problem, inputs, return_lse)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None = None,
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
    dropout_seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Any:
    """`attention` over sequences of different lengths, packed one after the other.

    Member b has queries ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` and keys likewise; it attends to itself alone, as
    if it were called alone. Masks, ALiBi and dropout use positions inside the member.

    Args:
        q: [total_q, heads_q, head_dim].
        k: [total_k, heads_kv, head_dim].
        v: [total_k, heads_kv, head_dim_v].
        cu_seqlens_q: int32 or int64 [batch + 1], on any device: 0 and the cumulative lengths. Members may be empty.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: the longest member's queries, a Python int.
        max_seqlen_k: the longest member's keys.
        seqused_k: int32 or int64 [batch], keys in use of each member (its first ones), or None: all.
        bias: refused here, like boolean masks and BlockMask; predicates, Document and PrefixLM work.
        causal, window, mask, score_mod, softcap, alibi_slopes, sinks, softmax_scale, dropout_p, dropout_seed,
        deterministic, return_lse, out_dtype, backend, validate: as in `attention`.

    Returns:
        out [total_q, heads_q, head_dim_v]; with `return_lse` also lse fp32 [heads_q, total_q]. Rows past
        ``cu_seqlens_q[-1]`` are 0 (LSE -inf) and have zero gradients.

    Raises:
        tilewise.errors.TilewiseError: as in `attention`; values of lengths are checked where they are on the CPU, or
            with ``validate=True``.

    Source:
        FlashAttention-2 (Dao, 2023) and its variable-length interface.

    Example:
        >>> import torch, tilewise
        >>> x = torch.randn(10, 2, 16)
        >>> offsets = torch.tensor([0, 3, 3, 10])
        >>> tilewise.attention_varlen(x, x, x, offsets, offsets, max_seqlen_q=7, max_seqlen_k=7, causal=True).shape
        torch.Size([10, 2, 16])
    """
    key = None
    if torch.compiler.is_compiling():
        q, k, v = _autocast(q, k, v)
    else:
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast(q, k, v)
        tensors = (q, k, v, bias, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k, seqused_k)
        asked = (
            mask, window, score_mod, causal, softcap, softmax_scale, dropout_p, deterministic, return_lse, out_dtype,
            backend, validate, max_seqlen_q, max_seqlen_k,
        )  # fmt: skip
        key, known = eager.find(tensors, asked)
        if known is not None:
            return known(tensors, dropout_seed)
    problem, inputs, return_lse = prepare(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, seqused_k=seqused_k,
        causal=causal, window=window, mask=mask, score_mod=score_mod, softcap=softcap,
        alibi_slopes=alibi_slopes, bias=bias, sinks=sinks, softmax_scale=softmax_scale, dropout_p=dropout_p,
        dropout_seed=dropout_seed, deterministic=deterministic, return_lse=return_lse, out_dtype=out_dtype,
        backend=backend, validate=validate,
    )  # fmt: skip
    out, lse = autograd.attend(problem.options, inputs, max_seqlen_q, max_seqlen_k, return_lse)
    if key is not None:
        eager.remember(key, problem, inputs, return_lse)
    return (out, lse) if return_lse else out


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v in autocast's dtype where it is on, as `F.scaled_dot_product_attention` casts them (never fp64)."""
    first = tensors[0]
    device = first.device.type if isinstance(first, torch.Tensor) else "meta"
    # Of meta tensors, which autocast does not know, only shapes count.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    eligible = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in eligible else x for x in tensors)
