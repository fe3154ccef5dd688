"""PyTorch's `F.scaled_dot_product_attention`, by its signature and semantics.

Layout ``[..., heads, seqlen, head_dim]``, causal anchored at the top left, masks with True for visible or added to the
scores, batch dimensions that broadcast.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import checks
from ..api import attention
from ..errors import ArgumentError, DtypeError, ShapeError, fail

_NAMES = ("query", "key", "value")


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed tile by tile.

    ``softmax(scale · query keyᵀ + attn_mask) value``, with dropout on the weights.

    Args:
        query: [..., heads_q, seqlen_q, head_dim], or without heads [seqlen_q, head_dim]; fp16, bf16, fp32 (fp64 on the
            CPU).
        key: [..., heads, seqlen_k, head_dim], query's dtype. Batch dimensions broadcast between the three.
        value: [..., heads, seqlen_k, head_dim_v], query's dtype.
        attn_mask: at least 2-D, broadcasts to [..., heads_q, seqlen_q, seqlen_k]: bool, True is visible; or floating,
            added to the scores, and differentiable.
        dropout_p: probability of dropping a weight, [0, 1); applied whenever it is not 0, as in PyTorch.
        is_causal: row i sees key j iff ``j <= i`` (top-left, whatever the lengths). Not together with `attn_mask`.
        scale: default ``1 / sqrt(head_dim)``; may be 0 or negative.
        enable_gqa: query head h reads key/value head ``h // (heads_q // heads)``. Without it the heads must be as many,
            or 1, which broadcasts.

    Returns:
        [..., heads_q, seqlen_q, head_dim_v] in the order of dimensions in memory that `query` has: for a
        ``[batch, seqlen, heads, head_dim]`` tensor that was transposed, that layout again, without a copy.

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention`; and for `attn_mask` with `is_causal`, which PyTorch's
            documentation forbids and some of its backends accept.

    Numerics:
        A row that sees no key is exactly 0, as in PyTorch. Dropout draws this package's mask (see docs/dropout.md), so
        the same seed drops other weights than in PyTorch.

    Source:
        PyTorch's documentation of `scaled_dot_product_attention`.

    Example:
        >>> import torch
        >>> from tilewise.compat.sdpa import scaled_dot_product_attention
        >>> q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
        >>> out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        >>> torch.nn.functional.scaled_dot_product_attention(
        ...     q, k, v, is_causal=True, enable_gqa=True
        ... ).allclose(out, atol=1e-5)
        True
    """
    _check(query, key, value, is_causal, enable_gqa)
    batch = _batch(query, key, value)
    heads_q, heads_k, heads_v = _heads(query, key, value, enable_gqa)
    if attn_mask is not None and is_causal:
        fix = "pass is_causal=False and a mask that is causal, or tilewise.attention(..., causal='top_left', mask=...)"
        fail(ArgumentError, "attn_mask", "a mask together with is_causal=True", "one of the two", fix)
    q, k, v = _bshd(query, heads_q, batch), _bshd(key, heads_k, batch), _bshd(value, heads_v, batch)
    if heads_k != heads_v:
        k, v = (x.repeat_interleave(heads_q // x.shape[2], dim=2) for x in (k, v))
    if scale is not None and scale <= 0:
        # The kernels find a row's maximum before they scale, and so need a factor that keeps the order.
        q, scale = q * scale, 1.0
    out = attention(
        q, k, v,
        causal="top_left" if is_causal else False, softmax_scale=scale, dropout_p=dropout_p, **_mask(attn_mask, batch),
    )  # fmt: skip
    out = out.transpose(1, 2)
    if query.ndim == 4 and len(batch) == 1 and query.stride(1) < query.stride(2):
        return out
    has_heads = max(query.ndim, key.ndim, value.ndim) > 2
    return out.reshape(*batch, *out.shape[1 if has_heads else 2 :]).contiguous()


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, enable_gqa: bool) -> None:
    """Flags, and of the tensors what the checks below the surface would say of other dimensions."""
    checks.flags(is_causal=is_causal, enable_gqa=enable_gqa)
    for name, x in zip(_NAMES, (query, key, value), strict=True):
        checks.plain(name, x)
        if x.ndim < (3 if enable_gqa else 2):
            want = "[..., heads, seqlen, head_dim]" + ("" if enable_gqa else ", or [seqlen, head_dim]")
            fail(ShapeError, name, f"shape {list(x.shape)}", want, "unsqueeze it")
    if key.shape[-1] != query.shape[-1]:
        got = f"head dim {key.shape[-1]}, query's is {query.shape[-1]}"
        fail(ShapeError, "key", got, "query's head dim (value's may differ)", "project both to one size")
    if key.shape[-2] != value.shape[-2]:
        got = f"{value.shape[-2]} rows, key has {key.shape[-2]}"
        fail(ShapeError, "value", got, "one value per key", "cut the longer one")


def _batch(*tensors: torch.Tensor) -> tuple[int, ...]:
    """The dimensions before the heads that the tensors have together."""
    leads = [tuple(x.shape[:-3]) for x in tensors]
    if leads[0] == leads[1] == leads[2]:
        return leads[0]
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        got = ", ".join(f"{name} {list(lead)}" for name, lead in zip(_NAMES, leads, strict=True))
        fail(ShapeError, "batch", got, "batch dimensions that broadcast: equal, or 1", "expand the smaller ones")


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> tuple[int, int, int]:
    """How many heads to give each of the three: key and value keep theirs if the query's are a multiple."""
    q, k, v = (x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value))
    got = f"{q} query, {k} key and {v} value heads"
    if enable_gqa:
        if 0 in (k, v) or q % k or q % v:
            want = "query heads that are a multiple of both, with enable_gqa=True"
            fail(ShapeError, "heads", got, want, "pass key and value with a divisor of query's heads")
        return q, k, v
    most = max(q, k, v)
    if not {q, k, v} <= {1, most} or 0 in (q, k, v):
        want = "as many of each, or 1"
        fail(
            ShapeError, "heads", got, want, "try enable_gqa=True, where each key/value head serves several query heads"
        )
    shared = 1 if k == v == 1 else most
    return most, shared, shared


def _bshd(x: torch.Tensor, heads: int, batch: tuple[int, ...]) -> torch.Tensor:
    """[batch, seqlen, heads, head_dim]: a view, except where dimensions broadcast or the last one is strided."""
    if x.shape[:-2] != (*batch, heads):
        x = x.expand(*batch, heads, *x.shape[-2:])
    if len(batch) != 1:
        x = x.reshape(math.prod(batch), *x.shape[-3:])
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask(attn_mask: torch.Tensor | None, batch: tuple[int, ...]) -> dict[str, Any]:
    """The option that an attn_mask is, with four dimensions."""
    if attn_mask is None:
        return {}
    checks.plain("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
        fix = "call .bool() if it marks what is visible; float masks are added to the scores"
        fail(DtypeError, "attn_mask", attn_mask.dtype, "bool, or a floating dtype", fix)
    if attn_mask.ndim < 2:
        want, fix = "at least the dimensions [seqlen_q, seqlen_k]", "attn_mask[None] masks keys for all queries"
        fail(ShapeError, "attn_mask", f"shape {list(attn_mask.shape)}", want, fix)
    return {"mask" if attn_mask.dtype == torch.bool else "bias": _four_dimensions(attn_mask, batch)}


def _four_dimensions(mask: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    if mask.ndim < 4:
        return mask[(None,) * (4 - mask.ndim)]
    lead = mask.shape[:-3]
    if math.prod(lead) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    if len(batch) == len(lead) == 1:
        return mask
    try:
        return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])
    except RuntimeError:
        want = f"batch dimensions that broadcast to {list(batch)}"
        fail(ShapeError, "attn_mask", f"shape {list(mask.shape)}", want, "add dimensions of size 1")
