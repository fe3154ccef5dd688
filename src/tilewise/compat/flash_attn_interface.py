"""The contents of flash-attn 2's `flash_attn.flash_attn_interface`: its functions, and the passes below them.

The latter keep no graph. Ring attention is written in them: the backward pass takes output and LSE of the whole row.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import seed_tensor
from ..errors import ArgumentError, fail
from . import conventions, explicit
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .flash_attn_probabilities import Members, signed_weights

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """After so many keys flash-attn scales a row of S_dmask anew; here it is relative to the maximum of all of them."""
    return 2**31 - 1


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass alone.

    Returns:
        (out, softmax_lse, S_dmask, rng_state): the first three as `flash_attn_func` with `return_attn_probs`, S_dmask
        empty unless `return_softmax`; rng_state int64 [2], the seed of the dropout and 0.
    """
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return _forward((q, k, v), None, options, return_softmax)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_flash_attn_forward` of packed sequences. Rows outside of them are always 0, which `zero_tensors` asks for."""
    cached = "use tilewise.attention_with_kvcache, which takes page_table and cache_leftpad"
    conventions.refuse("block_table", block_table, None, cached)
    conventions.refuse("leftpad_k", leftpad_k, None, cached)
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    options["seqused_k"] = seqused_k
    members = _members(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _forward((q, k, v), members, options, return_softmax)


def _forward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    members: Members | None,
    options: dict[str, Any],
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = conventions.dense(*qkv)
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options["dropout_p"]:
        rng_state[0] = seed_tensor(None, q.device)
        options["dropout_seed"] = rng_state[0]
    out, lse = explicit.forward(q, k, v, members, options)
    asked = return_softmax and options["dropout_p"]
    return out, lse, signed_weights(q, k, members, options) if asked else q.new_empty(0), rng_state


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backward pass alone; writes dq, dk, dv where they are given.

    Returns:
        fp32 [batch, heads_q, seqlen_q]: ``rowsum(dout · out)``.
    """
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, dropout_p=dropout_p, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return _backward(dout, (out, softmax_lse), (q, k, v), (dq, dk, dv), None, _seeded(options, rng_state))


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """`_flash_attn_backward` of packed sequences; rows outside of them are always 0. Returns [heads_q, total_q]."""
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, dropout_p=dropout_p, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    members = _members(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward(dout, (out, softmax_lse), (q, k, v), (dq, dk, dv), members, _seeded(options, rng_state))


def _members(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, longest_q: Any, longest_k: Any) -> Members:
    longest_q = conventions.integer("max_seqlen_q", longest_q)
    return Members(cu_seqlens_q, cu_seqlens_k, longest_q, conventions.integer("max_seqlen_k", longest_k))


def _seeded(options: dict[str, Any], rng_state: torch.Tensor | None) -> dict[str, Any]:
    if not options["dropout_p"]:
        return options
    if rng_state is None:
        fail(
            ArgumentError, "rng_state", None, "int64 [2] where there is dropout", "pass what the forward pass returned"
        )
    return {**options, "dropout_seed": rng_state[0]}


def _backward(
    dout: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    members: Members | None,
    options: dict[str, Any],
) -> torch.Tensor:
    q, k, v = conventions.dense(*qkv)
    found = explicit.backward(dout, stats, (q, k, v), members, options)
    with torch.no_grad():
        for into, grad in zip(grads, found, strict=True):
            if into is not None:
                into.copy_(grad)
        return (dout.float() * stats[0].float()).sum(dim=-1).transpose(-1, -2).contiguous()
