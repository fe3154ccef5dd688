"""The attention functions that a decoder can be built with, behind one signature."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise

from .. import reference
from ..errors import UnsupportedError, fail


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks for beside its tensors; every layer is causal, a window is `(left, 0)`."""

    window: tuple[int, int] | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None


class Attend(Protocol):
    """Causal attention: `q [B,Sq,Hq,D]`, `k [B,Sk,Hkv,D]`, `v [B,Sk,Hkv,D]` → `[B,Sq,Hq,D]`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor: ...


def attend_tilewise(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """By this package: the call says what is visible and what is dropped, and nothing S×S is stored."""
    return tilewise.attention(
        q, k, v, causal=True, window=call.window, dropout_p=call.dropout_p, dropout_seed=call.dropout_seed
    )


def attend_oracle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """By the oracle, in fp64."""
    return reference.attention(
        q, k, v, causal=True, window=call.window, dropout_p=call.dropout_p, dropout_seed=call.dropout_seed
    )


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """By torch: a window becomes a dense S×S mask.

    Raises:
        UnsupportedError: with dropout, since torch draws a mask of its own that nothing else can replay.
    """
    if call.dropout_p > 0:
        fail(UnsupportedError, "dropout_p", call.dropout_p, "0 with torch SDPA", "compare with dropout off")
    mask = None if call.window is None else dense_window(q.shape[1], call.window[0], q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


@lru_cache(maxsize=4)
def dense_window(seqlen: int, left: int, device: torch.device) -> Tensor:
    """Boolean `[S,S]`, True where query `i` sees key `j`: `i - left <= j <= i`.

    >>> dense_window(4, 1, torch.device("cpu")).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    age = torch.arange(seqlen, device=device)[:, None] - torch.arange(seqlen, device=device)
    return (age >= 0) & (age <= left)
