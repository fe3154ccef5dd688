"""The features of the contract, each as the options that ask for it.

Functions given to masks and score mods are module-level and made of operators, so that every backend can compile them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise
from tilewise import masks

from .calls import Draw, Shape

Options = dict[str, Any]
Feature = Callable[[Shape, torch.dtype, Draw], Options]


def _blocks(mask: tilewise.BlockMask, draw: Draw) -> tilewise.BlockMask:
    return tilewise.BlockMask(mask.tiles.to(draw.device), mask.block_q, mask.block_k)


def _tiles(s: Shape, draw: Draw, block: tuple[int, int], batch: int = 1, heads: int = 1) -> tilewise.BlockMask:
    grid = (-(-s.seqlen_q // block[0]), -(-s.seqlen_k // block[1]))
    return tilewise.BlockMask(draw.bools(batch, heads, *grid), *block)


def _square(s: Shape) -> int:
    return max(s.seqlen_q, s.seqlen_k)


def _crop(mask: tilewise.BlockMask, s: Shape, draw: Draw) -> tilewise.BlockMask:
    """A square pattern, cut to the call's lengths."""
    rows, columns = -(-s.seqlen_q // mask.block_q), -(-s.seqlen_k // mask.block_k)
    return _blocks(tilewise.BlockMask(mask.tiles[..., :rows, :columns], mask.block_q, mask.block_k), draw)


def _ids(draw: Draw, *shape: int, sort: bool = False) -> torch.Tensor:
    ids = draw.integers(4, *shape)
    return ids.sort(dim=-1).values if sort else ids


def striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A pattern that depends on every position."""
    return (q + 2 * k + h + b) % 3 != 0


def near(b: Any, h: Any, q: Any, k: Any, reach: Any, table: Any) -> Any:
    """A band whose width depends on a number and, per head, on a table."""
    return ((q - k) < reach) & ((k - q) <= table[h])


def first_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Four keys that all rows see."""
    return k < 4


def curve(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A score modification that bends and tilts."""
    return s - 0.1 * s * s + 0.01 * (q - k) * (h + 1)


def curve_backward(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The derivative of `curve`."""
    return ds * (1.0 - 0.2 * s)


def gain(s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any, table: Any) -> Any:
    """A gain of its own for each head, and a shift for each batch entry."""
    return s * factor * table[h] + 0.1 * b


def gain_backward(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any, table: Any) -> Any:
    """The derivative of `gain`."""
    return ds * factor * table[h]


CURVE = tilewise.ScoreMod(curve, curve_backward)


def _documents(s: Shape, d: Draw, sort: bool, batch: bool = False) -> masks.Document:
    sizes = (s.batch,) if batch else ()
    return masks.Document(_ids(d, *sizes, s.seqlen_q, sort=sort), _ids(d, *sizes, s.seqlen_k, sort=sort))


def _lengths(n: int) -> list[int]:
    return [n // 3, n // 5, 0, n - n // 3 - n // 5]


def _documents_by_length(s: Shape, d: Draw) -> masks.Document:
    q, k = (masks.Document.from_lengths(_lengths(n), d.device) for n in (s.seqlen_q, s.seqlen_k))
    return masks.Document(q.q_ids, k.q_ids, contiguous=True)


def _hiding_bias(s: Shape, t: torch.dtype, d: Draw) -> torch.Tensor:
    """A bias that hides some keys, and all keys of the first row."""
    hidden = d.bools(s.batch, 1, s.seqlen_q, s.seqlen_k, share=0.3)
    hidden[:, :, :1] = True
    return d.normal(s.batch, 1, s.seqlen_q, s.seqlen_k, dtype=t).masked_fill(hidden, float("-inf"))


MASKS: dict[str, Feature] = {
    "causal": lambda s, t, d: {"causal": True},
    "causal_top_left": lambda s, t, d: {"causal": "top_left"},
    "window_left": lambda s, t, d: {"window": (7, None)},
    "window_right": lambda s, t, d: {"window": (None, 5)},
    "window_two_sided": lambda s, t, d: {"window": (6, 3)},
    "window_causal": lambda s, t, d: {"window": (9, 0)},
    "window_zero": lambda s, t, d: {"window": (0, 0)},
    "window_top_left": lambda s, t, d: {"window": (8, 2), "causal": "top_left"},
    "window_wider_than_int64": lambda s, t, d: {"window": (2**70, 2**70), "causal": True},
    "window_mask": lambda s, t, d: {"mask": tilewise.Window(5, 9)},
    "documents_sorted": lambda s, t, d: {"mask": _documents(s, d, sort=True)},
    "documents_unsorted": lambda s, t, d: {"mask": _documents(s, d, sort=False), "causal": True},
    "documents_per_batch": lambda s, t, d: {"mask": _documents(s, d, sort=True, batch=True), "causal": True},
    "documents_by_length": lambda s, t, d: {"mask": _documents_by_length(s, d)},
    "prefix_int": lambda s, t, d: {"mask": tilewise.PrefixLM(11)},
    "prefix_tensor": lambda s, t, d: {"mask": tilewise.PrefixLM(d.integers(s.seqlen_k + 1, s.batch))},
    "predicate": lambda s, t, d: {"mask": striped},
    "predicate_aux": lambda s, t, d: {"mask": tilewise.Predicate(near, (6, d.integers(9, s.heads_q)))},
    "boolean_full": lambda s, t, d: {"mask": d.bools(s.batch, s.heads_q, s.seqlen_q, s.seqlen_k)},
    "boolean_padding": lambda s, t, d: {"mask": d.bools(s.batch, 1, 1, s.seqlen_k)},
    "boolean_rows": lambda s, t, d: {"mask": d.bools(s.heads_q, s.seqlen_q, 1)},
    "boolean_matrix": lambda s, t, d: {"mask": d.bools(s.seqlen_q, s.seqlen_k), "causal": True},
    "and": lambda s, t, d: {
        "mask": tilewise.Window(12, 6) & tilewise.Predicate(striped) & masks.Dense(d.bools(s.batch, 1, 1, s.seqlen_k))
    },
    "or": lambda s, t, d: {"mask": tilewise.Window(3, 2) | tilewise.Predicate(first_keys), "causal": True},
    "or_of_ands": lambda s, t, d: {
        "mask": (tilewise.Causal() & _documents(s, d, sort=False)) | (tilewise.Window(1, 1) & _tiles(s, d, (16, 16)))
    },
    "blocks_odd": lambda s, t, d: {"mask": _tiles(s, d, (5, 7)), "causal": True},
    "blocks_per_head": lambda s, t, d: {"mask": _tiles(s, d, (16, 32), heads=s.heads_q)},
    "blocks_per_batch": lambda s, t, d: {"mask": _tiles(s, d, (32, 16), batch=s.batch), "window": (20, 9)},
    "blocks_of_two_sizes": lambda s, t, d: {"mask": _tiles(s, d, (16, 16)) & _tiles(s, d, (8, 24))},
    "blocks_or_blocks": lambda s, t, d: {"mask": _tiles(s, d, (16, 16)) | _tiles(s, d, (16, 16))},
    "longformer": lambda s, t, d: {"mask": _crop(tilewise.BlockMask.longformer(_square(s), block=8), s, d)},
    "bigbird": lambda s, t, d: {
        "mask": _crop(tilewise.BlockMask.bigbird(_square(s), block=8, random_blocks=1, heads=s.heads_q), s, d)
    },
    "blocks_from_mask": lambda s, t, d: {
        "mask": _blocks(tilewise.BlockMask.from_mask(tilewise.Window(9, 0), s.seqlen_q, s.seqlen_k, block=8), d)
        & tilewise.Window(9, 0)
    },
}

MODIFIERS: dict[str, Feature] = {
    "plain": lambda s, t, d: {},
    "softmax_scale": lambda s, t, d: {"softmax_scale": 0.7, "causal": True},
    "softcap": lambda s, t, d: {"softcap": 1.5, "causal": True},
    "alibi": lambda s, t, d: {"alibi_slopes": d.uniform(s.heads_q)},
    "alibi_per_batch": lambda s, t, d: {"alibi_slopes": d.uniform(s.batch, s.heads_q, dtype=t), "causal": True},
    "alibi_top_left": lambda s, t, d: {"alibi_slopes": d.uniform(s.heads_q), "causal": "top_left"},
    "bias": lambda s, t, d: {"bias": d.normal(s.batch, s.heads_q, s.seqlen_q, s.seqlen_k, dtype=t)},
    "bias_per_head_fp32": lambda s, t, d: {"bias": d.normal(s.heads_q, s.seqlen_q, s.seqlen_k), "causal": True},
    "bias_per_key_fp16": lambda s, t, d: {"bias": d.normal(s.batch, 1, 1, s.seqlen_k, dtype=torch.float16)},
    "bias_per_row_bf16": lambda s, t, d: {"bias": d.normal(s.seqlen_q, 1, dtype=torch.bfloat16), "window": (9, 4)},
    "bias_scalar": lambda s, t, d: {"bias": d.normal(), "causal": True},
    "bias_hides": lambda s, t, d: {"bias": _hiding_bias(s, t, d)},
    "score_mod": lambda s, t, d: {"score_mod": CURVE, "causal": True},
    "score_mod_aux": lambda s, t, d: {
        "score_mod": tilewise.ScoreMod(gain, gain_backward, (0.5, d.uniform(s.heads_q))),
        "softcap": 3.0,
    },
    "sinks": lambda s, t, d: {"sinks": d.normal(s.heads_q), "causal": True},
    "sinks_and_window": lambda s, t, d: {"sinks": d.normal(s.heads_q, dtype=t), "window": (5, 0)},
    "dropout": lambda s, t, d: {"dropout_p": 0.3, "dropout_seed": 2**40 + 3},
    "dropout_causal": lambda s, t, d: {"dropout_p": 0.1, "dropout_seed": -5, "causal": True},
    "deterministic": lambda s, t, d: {"deterministic": True, "causal": True},
    "everything": lambda s, t, d: {
        "causal": True,
        "window": (30, None),
        "mask": tilewise.Predicate(striped),
        "softcap": 4.0,
        "score_mod": CURVE,
        "alibi_slopes": d.uniform(s.heads_q),
        "bias": d.normal(1, s.heads_q, 1, s.seqlen_k),
        "sinks": d.normal(s.heads_q),
        "softmax_scale": 0.5,
        "dropout_p": 0.2,
        "dropout_seed": 11,
        "deterministic": True,
    },
}

FEATURES = {**MODIFIERS, **MASKS}
