"""Packed queries of which each member uses its first rows alone (flash-attn 3's `seqused_q`).

The native call has no such argument. The rows in use are packed anew, with all sizes as they were, so that nothing is
read on the host, and the results are put back.
"""

from __future__ import annotations

from typing import Any

import torch

from . import conventions
from .flash_attn_probabilities import Members, attend


def with_used_queries(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    members: Members,
    seqused_q: torch.Tensor,
    options: dict[str, Any],
    return_lse: bool,
) -> Any:
    """As `attend`, with rows after the first ``seqused_q[b]`` of member b unused: 0, with an LSE of -inf."""
    q, k, v = qkv
    starts = members.cu_seqlens_q.to(q.device, torch.int64)
    used = seqused_q.to(q.device, torch.int64)
    packed_starts = torch.cat([starts.new_zeros(1), used.cumsum(0)])
    member, position = conventions.places(packed_starts, q.shape[0])
    # Where each row of the new packing comes from; rows past its end are never looked at.
    source = (starts[member] + position).clamp_(max=max(0, q.shape[0] - 1))
    repacked = members._replace(cu_seqlens_q=packed_starts)
    out, lse, _ = attend(q.index_select(0, source), k, v, options, True, repacked)
    member, position = conventions.places(starts, q.shape[0])
    in_use = (position < used[member]) & (torch.arange(q.shape[0], device=q.device) < starts[-1])
    target = (packed_starts[member] + position).clamp_(max=max(0, q.shape[0] - 1))
    out = out.index_select(0, target).masked_fill(~in_use[:, None, None], 0.0)
    if not return_lse:
        return out
    return out, lse.index_select(1, target).masked_fill(~in_use, float("-inf"))
