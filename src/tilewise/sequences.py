"""Where the sequences of a call lie in its tensors: dense batches, or members packed one after the other.

Packing is an address function, not a mask: a member is a slice of the packed rows, with lengths of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Member(NamedTuple):
    """One sequence of a packed call: its batch index and its rows ``q0 .. q1`` and keys ``k0 .. k1`` in use."""

    b: int
    q0: int
    q1: int
    k0: int
    k1: int


def members(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None) -> list[Member]:
    """The members of a packed call, in order, empty ones included. Reads the lengths on the host.

    >>> offsets = torch.tensor([0, 2, 2, 5])
    >>> members(offsets, offsets, None)[1:]
    [Member(b=1, q0=2, q1=2, k0=2, k1=2), Member(b=2, q0=2, q1=5, k0=2, k1=5)]
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used = seqused_k.tolist() if seqused_k is not None else None
    found = []
    for b in range(len(starts_q) - 1):
        k0 = starts_k[b]
        k1 = starts_k[b + 1] if used is None else k0 + used[b]
        found.append(Member(b, starts_q[b], starts_q[b + 1], k0, k1))
    return found
