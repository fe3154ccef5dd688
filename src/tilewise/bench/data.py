"""The tensors of a case, random and the same for every contestant, and the call that they make."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import prepare
from ..block_masks import BlockMask
from ..problem import Inputs, Problem
from .cases import BLOCK, Case


class Data(NamedTuple):
    """Inputs of one case; q, k, v and do are [batch, seqlen, heads, head_dim], or packed without the batch."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    slopes: Tensor | None = None
    seed: Tensor | None = None
    blocks: BlockMask | None = None
    offsets: Tensor | None = None  # cu_seqlens, int32 [batch + 1]


def make(case: Case, device: torch.device, seed: int = 0) -> Data:
    """Normally distributed tensors; the same for the same case, device and seed."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = (sum(case.lengths),) if case.lengths else (case.batch, case.seqlen)

    def draw(heads: int) -> Tensor:
        shape = (*rows, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.torch_dtype)

    offsets = [0, *accumulate(case.lengths)]
    return Data(
        q=draw(case.heads),
        k=draw(case.heads_kv),
        v=draw(case.heads_kv),
        do=draw(case.heads),
        slopes=_slopes(case.heads, device) if case.alibi else None,
        seed=torch.full((), 1 + seed, dtype=torch.int64, device=device) if case.dropout_p else None,
        blocks=_blocks(case, device, seed) if case.block_density is not None else None,
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device) if case.lengths else None,
    )


def _slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's geometric slopes (Press et al., 2022)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads).float()


def _blocks(case: Case, device: torch.device, seed: int) -> BlockMask:
    """As many random tiles in every row of tiles, so that no row is empty and every part of a kernel has equal work."""
    assert case.block_density is not None
    n = -(-case.seqlen // BLOCK)
    seen = max(1, round(case.block_density * n))
    order = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    tiles = torch.zeros(n, n, dtype=torch.bool).scatter_(1, order[:, :seen], True)
    return BlockMask(tiles[None, None].to(device), BLOCK, BLOCK)


def options(case: Case, data: Data) -> dict[str, Any]:
    """The case as keywords of `tilewise.attention` or `tilewise.attention_varlen`."""
    packed: dict[str, Any] = {}
    if data.offsets is not None:
        packed = {"cu_seqlens_q": data.offsets, "cu_seqlens_k": data.offsets}
        packed |= {"max_seqlen_q": case.seqlen, "max_seqlen_k": case.seqlen}
    return {
        "causal": case.causal,
        "window": case.window,
        "mask": data.blocks,
        "softcap": case.softcap,
        "alibi_slopes": data.slopes,
        "dropout_p": case.dropout_p,
        "dropout_seed": data.seed,
        "deterministic": case.deterministic,
        **packed,
    }


def leaves(case: Case, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one contestant; they collect a graph in the backward pass alone."""
    q, k, v = (x.detach().requires_grad_(case.backward) for x in (data.q, data.k, data.v))
    return q, k, v


def problem(case: Case, data: Data) -> tuple[Problem, Inputs]:
    """The case as the library sees it."""
    posed, inputs, _ = prepare(*leaves(case, data), **options(case, data))
    return posed, inputs
