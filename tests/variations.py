"""Calls that differ in lengths, batch and values alone, feature by feature: what may not compile a kernel anew.

Tensors are made on PyTorch's default device, but not by `torch.empty`: the suite fills that with NaN, and a default
device does not know it then. What they hold is of no interest, only what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tilewise
from tilewise import masks
from tilewise.score_mods import ScoreMod

HEADS, HEADS_KV, HEAD_DIM = 16, 4, 64


class Size(NamedTuple):
    """Lengths of a call, its batch, and `turn`, which tells calls with other values apart."""

    seqlen_q: int
    seqlen_k: int
    batch: int
    turn: int


# Multiples of 16, odd ones, powers of two, and 1, which Triton would make a constant.
SIZES = [Size(200, 333, 2, 0), Size(256, 512, 3, 1), Size(1, 77, 1, 2), Size(1024, 16, 16, 3)]
NUMBERS = [5, 16, 1, 4096]
Options = dict[str, Any]


def tensors(size: Size, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = [(size.seqlen_q, HEADS), (size.seqlen_k, HEADS_KV), (size.seqlen_k, HEADS_KV)]
    return [torch.zeros(size.batch, seqlen, heads, HEAD_DIM, dtype=dtype) for seqlen, heads in shapes]


def table_curve(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return s + table[h, (q - k) % 7]


def table_curve_backward(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return ds


def shifted(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, factor: Any) -> Any:
    return s + factor * table[k]


def shifted_backward(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, factor: Any) -> Any:
    return ds


def near(b: Any, h: Any, q: Any, k: Any, reach: Any) -> Any:
    return q - k < reach


def striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k) % 3 != 0


def block_mask(s: Size) -> tilewise.BlockMask:
    grid = -(-s.seqlen_q // 128), -(-s.seqlen_k // 128)
    return tilewise.BlockMask(torch.ones(s.batch, HEADS, *grid, dtype=torch.bool), 128, 128)


def documents(s: Size) -> masks.Document:
    lengths = ([s.seqlen_q // 3, s.seqlen_q - s.seqlen_q // 3], [s.seqlen_k // 2, s.seqlen_k - s.seqlen_k // 2])
    q, k = (masks.Document.from_lengths(x) for x in lengths)
    return masks.Document(q.q_ids, k.q_ids, contiguous=True)


FEATURES: dict[str, Callable[[Size], Options]] = {
    "plain": lambda s: {},
    "causal": lambda s: {"causal": True},
    "scale": lambda s: {"softmax_scale": float(NUMBERS[s.turn])},
    "window": lambda s: {"window": (NUMBERS[s.turn], NUMBERS[-1 - s.turn])},
    "window_left": lambda s: {"window": (NUMBERS[s.turn], None)},
    "alibi": lambda s: {"alibi_slopes": torch.rand(HEADS), "causal": True},
    "alibi_per_batch": lambda s: {"alibi_slopes": torch.rand(s.batch, HEADS)},
    "bias_per_key": lambda s: {"bias": torch.zeros(1, 1, 1, s.seqlen_k)},
    "dropout_seed": lambda s: {"dropout_p": 0.1, "dropout_seed": NUMBERS[s.turn]},
    "softcap": lambda s: {"softcap": float(min(NUMBERS[s.turn], 64))},
    "block_mask": lambda s: {"mask": block_mask(s)},
    "block_mask_causal": lambda s: {"mask": block_mask(s), "causal": True},
    "documents": lambda s: {"mask": documents(s), "causal": True},
    "predicate": lambda s: {"mask": striped},
    "score_mod": lambda s: {"score_mod": ScoreMod(table_curve, table_curve_backward, (torch.rand(HEADS, 7),))},
    "dropout_rate": lambda s: {"dropout_p": 1 - NUMBERS[s.turn] / 65536, "dropout_seed": 1},
    "prefix": lambda s: {"mask": masks.PrefixLM(NUMBERS[s.turn])},
    "union": lambda s: {"mask": masks.Window(NUMBERS[s.turn], 0) | masks.PrefixLM(NUMBERS[s.turn])},
    "predicate_number": lambda s: {"mask": masks.Predicate(near, (NUMBERS[s.turn],))},
    "score_mod_table": lambda s: {
        "score_mod": ScoreMod(shifted, shifted_backward, (torch.rand(s.seqlen_k), NUMBERS[s.turn]))
    },
    "boolean_per_key": lambda s: {"mask": torch.ones(1, 1, 1, s.seqlen_k, dtype=torch.bool)},
    "sinks": lambda s: {"sinks": torch.rand(HEADS), "causal": True},
}


PACKED: dict[str, Callable[[], Options]] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"window": (16, 0)},
    "alibi_dropout": lambda: {"alibi_slopes": torch.rand(HEADS), "dropout_p": 0.1, "dropout_seed": 1},
}
PACKED_LENGTHS = [([7, 0, 200], [64, 1, 31]), ([16], [16]), ([1], [1]), ([32] * 16, [128] * 16)]


def packed(lengths_q: list[int], lengths_k: list[int]) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """q, k, v and both cu_seqlens of members of these lengths, and max_seqlen_*."""
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    q = torch.zeros(sum(lengths_q), HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k, v = (torch.zeros(sum(lengths_k), HEADS_KV, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    return (q, k, v, cu_q, cu_k), {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
