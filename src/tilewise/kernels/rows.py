"""q, k, v and tensors like them, as kernels in plain Triton address them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """A tensor [B, S, H, D] with its strides in elements; packed ones [T, H, D] have batch stride 0."""

    ptr: Any
    batch: Any
    seq: Any
    head: Any


def rows_of(x: torch.Tensor, packed: bool = False) -> Rows:
    """The record of a tensor."""
    return Rows(x, 0, x.stride(0), x.stride(1)) if packed else Rows(x, *x.stride()[:3])
