"""Attention by flash-attn's three return values: output, LSE, and the weights with the signs of dropout.

The weights are as large as the score matrix. Only a call that asks for them by ``return_attn_probs=True``, and has
dropout, builds them, from the outputs of the same kernels for one-hot values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..api import attention, attention_varlen
from ..arguments import seed_tensor
from . import conventions

# Values with one-hot columns read out the weights of so many keys at a time.
_COLUMNS = 128
# flash-attn pads both sides of its matrix to whole tiles of this.
_TILE = 128


class Members(NamedTuple):
    """Where the sequences of a packed call begin, and how long they are."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
    return_attn_probs: bool,
    members: Members | None = None,
) -> Any:
    """The output; with `return_attn_probs` also the LSE and S_dmask.

    Args:
        q, k, v: as `tilewise.attention` takes them, or packed; any strides.
        options: from `conventions.options`.
        return_attn_probs: see S_dmask in `tilewise.compat.flash_attn`.
        members: of a packed call.
    """
    q, k, v = conventions.dense(q, k, v)
    if not return_attn_probs:
        return _run(q, k, v, members, options)
    has_dropout = options["dropout_p"] != 0.0
    if has_dropout:
        options = {**options, "dropout_seed": seed_tensor(None, q.device)}
    out, lse = _run(q, k, v, members, {**options, "return_lse": True})
    return out, lse, signed_weights(q, k, members, options) if has_dropout else q.new_empty(0)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, members: Members | None, options: dict[str, Any]) -> Any:
    if members is None:
        return attention(q, k, v, **options)
    return attention_varlen(q, k, v, **members._asdict(), **options)


@torch.no_grad()
def signed_weights(q: torch.Tensor, k: torch.Tensor, members: Members | None, options: dict[str, Any]) -> torch.Tensor:
    """[batch, heads_q, seqlen_q, seqlen_k], both lengths up to whole tiles: exp(s - max s), negative where dropped."""
    options = {**options, "out_dtype": torch.float32 if q.dtype.itemsize == 2 else None}
    kept = _weights(q, k, members, options)
    weights = _weights(q, k, members, {**options, "dropout_p": 0.0, "dropout_seed": None})
    largest = weights.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny)
    signed = torch.where((kept == 0) & (weights > 0), -weights, weights) / largest
    signed = signed.transpose(1, 2) if members is None else _apart(signed, members)
    return functional.pad(signed, (0, -signed.shape[3] % _TILE, 0, -signed.shape[2] % _TILE)).to(q.dtype)


def _weights(q: torch.Tensor, k: torch.Tensor, members: Members | None, options: dict[str, Any]) -> torch.Tensor:
    """P after dropout, [batch, seqlen_q, heads_q, seqlen_k], or packed [total_q, heads_q, max_seqlen_k]."""
    if members is None:
        longest = k.shape[1]
        position = torch.arange(longest, device=k.device)
    else:
        longest = members.max_seqlen_k
        position = conventions.places(members.cu_seqlens_k.to(k.device), k.shape[0])[1]
    parts = [q.new_zeros((*q.shape[:-1], 0), dtype=options["out_dtype"] or q.dtype)]
    for first in range(0, longest, _COLUMNS):
        column = torch.arange(first, first + _COLUMNS, device=k.device)
        one_hot = (position[:, None, None] == column).to(q.dtype)  # [keys, 1, columns]
        parts.append(_run(q, k, one_hot.expand(*k.shape[:-1], _COLUMNS), members, options))
    return torch.cat(parts, dim=-1)[..., :longest]


def _apart(packed: torch.Tensor, members: Members) -> torch.Tensor:
    """[batch, heads_q, max_seqlen_q, max_seqlen_k] from [total_q, heads_q, max_seqlen_k]."""
    cu_seqlens = members.cu_seqlens_q.to(packed.device)
    member, position = conventions.places(cu_seqlens, packed.shape[0])
    used = int(cu_seqlens[-1])
    apart = packed.new_zeros(cu_seqlens.shape[0] - 1, members.max_seqlen_q, *packed.shape[1:])
    apart[member[:used], position[:used]] = packed[:used]
    return apart.transpose(1, 2)
