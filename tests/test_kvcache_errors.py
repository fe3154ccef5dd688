"""Bad input to a call with a cache: what was passed, what is supported, how to fix it; and not a byte of it changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from targets import Target
from tilewise import errors, masks

B, CAPACITY, PAGE, PAGES, HEADS, DIM = 2, 64, 16, 12, 2, 16


def _base(paged: bool) -> dict[str, Any]:
    """A call that is served: two sequences of 20 and 33 slots, two new tokens each."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lead = (PAGES, PAGE) if paged else (B, CAPACITY)
    call: dict[str, Any] = {
        "q": normal(B, 2, 2 * HEADS, DIM),
        "k_cache": normal(*lead, HEADS, DIM),
        "v_cache": normal(*lead, HEADS, DIM),
        "cache_seqlens": torch.tensor([20, 33], dtype=torch.int32),
        "k_new": normal(B, 2, HEADS, DIM),
        "v_new": normal(B, 2, HEADS, DIM),
    }
    if paged:
        call["page_table"] = torch.tensor([[3, 1, -1, -1], [7, 0, 5, 10**6]], dtype=torch.int32)
    return call


def _rotary(dim: int = DIM, length: int = 100, **changes: Any) -> tilewise.Rotary:
    tables = {"cos": torch.ones(length, dim // 2), "sin": torch.zeros(length, dim // 2)}
    return tilewise.Rotary(**{**tables, **changes})


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Change = Callable[[dict[str, Any]], dict[str, Any]]
# What is passed, whether to a paged cache, the error, and what its message says.
BAD: dict[str, tuple[bool, Change, type[Exception], str]] = {
    "longer_than_the_cache": (
        False, lambda c: {"cache_seqlens": _ints(20, 65), "k_new": None, "v_new": None},
        errors.ArgumentError, r"cache_seqlens\[1\]: got 65; supported: 0 to the capacity of 64 slots",
    ),
    "longer_than_the_table": (
        True, lambda c: {"cache_seqlens": _ints(70, 33), "k_new": None, "v_new": None},
        errors.ArgumentError, r"cache_seqlens\[0\]: got 70; supported: 0 to the capacity of 64 slots, pages of 16",
    ),
    "negative_length": (
        False, lambda c: {"cache_seqlens": _ints(-1, 5)}, errors.ArgumentError, r"cache_seqlens\[0\]: got -1",
    ),
    "append_past_the_last_slot": (
        False, lambda c: {"cache_seqlens": _ints(20, 63)},
        errors.ArgumentError, r"k_new: got 2 new keys for sequence 1, which has 63; supported: a total of at most 64",
    ),
    "append_past_the_last_page": (
        True, lambda c: {"cache_seqlens": _ints(63, 33)},
        errors.ArgumentError, r"k_new: got 2 new keys for sequence 0.*list more pages in page_table",
    ),
    "table_too_narrow": (
        True, lambda c: {"page_table": c["page_table"][:, :2]},
        errors.ArgumentError, r"cache_seqlens\[1\]: got 33; supported: 0 to the capacity of 32 slots, pages of 16",
    ),
    "page_id_too_large": (
        True, lambda c: {"page_table": torch.tensor([[3, 1, 0, 0], [7, 12, 5, 0]])},
        errors.ArgumentError, r"page_table\[1, 1\]: got 12; supported: 0 to 11",
    ),
    "page_id_negative": (
        True, lambda c: {"page_table": torch.tensor([[-1, 1, 0, 0], [7, 0, 5, 0]])},
        errors.ArgumentError, r"page_table\[0, 0\]: got -1; supported: 0 to 11",
    ),
    "page_to_append_to_missing": (
        True, lambda c: {"cache_seqlens": _ints(31, 33)},
        errors.ArgumentError, r"page_table\[0, 2\]: got -1; supported: 0 to 11, for sequence 0 uses 33 slots",
    ),
    "page_written_by_two": (
        True, lambda c: {"page_table": torch.tensor([[3, 5, 0, 0], [7, 0, 5, 0]])},
        errors.ArgumentError, r"page 5, which sequence 0 appends to and which is listed elsewhere too",
    ),
    "table_of_another_batch": (
        True, lambda c: {"page_table": c["page_table"][:1]}, errors.ShapeError, r"page_table: got shape \[1, 4\]",
    ),
    "table_of_floats": (
        True, lambda c: {"page_table": c["page_table"].float()}, errors.DtypeError, r"page_table: got torch.float32",
    ),
    "table_and_index": (
        True, lambda c: {"cache_batch_idx": _ints(0, 1)}, errors.UnsupportedError, "cache_batch_idx.*page_table",
    ),
    "index_out_of_range": (
        False, lambda c: {"cache_batch_idx": _ints(0, 2)},
        errors.ArgumentError, r"cache_batch_idx\[1\]: got 2; supported: 0 to 1",
    ),
    "index_twice_in_an_append": (
        False, lambda c: {"cache_batch_idx": _ints(1, 1)},
        errors.ArgumentError, r"cache_batch_idx: got row 1 more than once, in a call that appends",
    ),
    "rows_of_another_batch": (
        False, lambda c: {"q": c["q"][:1], "k_new": c["k_new"][:1], "v_new": c["v_new"][:1],
                          "cache_seqlens": _ints(5)},
        errors.ShapeError, "k_cache: got 2 rows for 1 sequences.*cache_batch_idx",
    ),
    "padding_past_the_end": (
        False, lambda c: {"cache_leftpad": _ints(21, 0)},
        errors.ArgumentError, r"cache_leftpad\[0\]: got 21; supported: 0 to cache_seqlens\[0\] = 20",
    ),
    "rotary_of_too_many_dims": (
        False, lambda c: {"rotary": _rotary(DIM + 2)},
        errors.ShapeError, "rotary.cos: got tables of 9 angles, for 18 dims; supported: 1 to 8 angles: an even number",
    ),
    "rotary_of_no_dims": (False, lambda c: {"rotary": _rotary(0)}, errors.ShapeError, "rotary.cos: got tables of 0"),
    "rotary_tables_differ": (
        False, lambda c: {"rotary": _rotary(sin=torch.zeros(100, 7))}, errors.ShapeError, "rotary.sin.*beside cos",
    ),
    "rotary_table_too_short": (
        False, lambda c: {"rotary": _rotary(length=34)},
        errors.ShapeError, "rotary.cos: got tables of 34 positions; supported: at least 35, for sequence 1 reaches",
    ),
    "rotary_positions_too_large": (
        False, lambda c: {"rotary": _rotary(positions=_ints(99, 5))}, errors.ShapeError, "at least 101, for sequence 0",
    ),
    "rotary_positions_negative": (
        False, lambda c: {"rotary": _rotary(positions=_ints(5, -1))},
        errors.ArgumentError, r"rotary.positions\[1\]: got -1",
    ),
    "rotary_of_another_dtype": (
        False, lambda c: {"rotary": _rotary(cos=torch.ones(100, 8).half())}, errors.DtypeError, "rotary.cos.*float16",
    ),
    "rotary_as_a_pair": (
        False, lambda c: {"rotary": (torch.ones(100, 8), torch.zeros(100, 8))},
        errors.ArgumentError, r"rotary: got tuple; supported: a tilewise.Rotary",
    ),
    "keys_without_values": (
        False, lambda c: {"v_new": None}, errors.ArgumentError, "k_new, v_new: got k_new alone",
    ),
    "values_of_other_keys": (
        False, lambda c: {"v_new": c["v_new"][:, :1]}, errors.ShapeError, r"v_new: got shape \[2, 1, 2, 16\]",
    ),
    "new_keys_of_other_heads": (
        False, lambda c: {"k_new": c["k_new"][:, :, :1]}, errors.ShapeError, r"supported: \[2, seqlen_new, 2, 16\]",
    ),
    "new_keys_of_another_dtype": (
        False, lambda c: {"k_new": c["k_new"].half()}, errors.DtypeError, "k_new: got torch.float16",
    ),
    "cache_of_another_dtype": (
        False, lambda c: {"k_cache": c["k_cache"].half()}, errors.DtypeError, "k_cache: got torch.float16",
    ),
    "caches_of_two_dtypes": (
        False, lambda c: {"k_cache": c["k_cache"].to(torch.float8_e4m3fn)},
        errors.DtypeError, "v_cache: got torch.float32; supported: torch.float8_e4m3fn, k_cache's",
    ),
    "cache_in_e5m2": (
        False, lambda c: {n: c[n].to(torch.float8_e5m2) for n in ("k_cache", "v_cache")},
        errors.DtypeError, "k_cache: got torch.float8_e5m2",
    ),
    "append_to_an_expanded_cache": (
        False, lambda c: {"k_cache": c["k_cache"][:1].expand(B, -1, -1, -1)},
        errors.ShapeError, "k_cache: got strides.*slots of their own",
    ),
    "head_dim_of_another_q": (
        False, lambda c: {"q": c["q"][..., :8]}, errors.ShapeError, "k_cache: got head dim 16, q's is 8",
    ),
    "heads_that_do_not_divide": (
        False, lambda c: {"q": c["q"][:, :, :3]}, errors.ShapeError, "heads: got 3 query heads with 2 key/value heads",
    ),
    "scale_without_fp8": (
        False, lambda c: {"k_scale": torch.ones(HEADS)}, errors.UnsupportedError, "k_scale.*float8_e4m3fn cache",
    ),
    "both_kinds_of_split": (
        False, lambda c: {"num_splits": 2, "split_size": 128}, errors.ArgumentError, "num_splits, split_size: got both",
    ),
    "split_size_of_100": (
        False, lambda c: {"split_size": 100}, errors.ArgumentError, "multiple of 128. Fix: round it to 128",
    ),
    "no_splits": (False, lambda c: {"num_splits": 0}, errors.ArgumentError, "num_splits: got 0"),
    "infinite_maximum": (
        False, lambda c: {"softmax_max": float("inf")}, errors.ArgumentError, "softmax_max: got inf",
    ),
    "tree_of_another_size": (
        False, lambda c: {"mask": torch.ones(B, 2, 3, dtype=torch.bool)}, errors.ShapeError,
        r"mask: got shape \[2, 2, 3\]",
    ),
    "tree_of_floats": (False, lambda c: {"mask": torch.ones(B, 2, 2)}, errors.DtypeError, "mask: got torch.float32"),
    "block_mask": (
        False, lambda c: {"mask": tilewise.BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 64, 64)},
        errors.UnsupportedError,
        "mask: got BlockMask; supported: causal, window, PrefixLM, predicates, and a boolean tree",
    ),
    "documents": (
        False, lambda c: {"mask": masks.Document(torch.zeros(2, dtype=torch.int64)) & masks.Causal()},
        errors.UnsupportedError, "mask: got Document",
    ),
    "bias": (False, lambda c: {"bias": torch.zeros(2, CAPACITY)}, errors.UnsupportedError, "bias: got a tensor"),
    "dropout": (False, lambda c: {"dropout_p": 0.1}, errors.UnsupportedError, "dropout_p: got 0.1"),
    "max_rows_without_offsets": (
        False, lambda c: {"max_seqlen_q": 2}, errors.ArgumentError, "max_seqlen_q: got 2; supported: None unless",
    ),
    "offsets_without_max_rows": (
        False, lambda c: {"q": c["q"][0], "cu_seqlens_q": _ints(0, 1, 2), "k_new": c["k_new"][0],
                          "v_new": c["v_new"][0]},
        errors.ArgumentError, "max_seqlen_q: got None",
    ),
    "offsets_past_the_rows": (
        False, lambda c: {"q": c["q"][0], "cu_seqlens_q": _ints(0, 1, 5), "k_new": c["k_new"][0],
                          "v_new": c["v_new"][0], "max_seqlen_q": 4},
        errors.ArgumentError, "cu_seqlens_q: got an end of 5; supported: at most the 2 rows",
    ),
    "understated_max_rows": (
        False, lambda c: {"q": c["q"][0], "cu_seqlens_q": _ints(0, 0, 2), "k_new": c["k_new"][0],
                          "v_new": c["v_new"][0], "max_seqlen_q": 1},
        errors.ArgumentError, "max_seqlen_q: got 1, but member 1 has 2 rows",
    ),
    "lengths_as_a_list": (False, lambda c: {"cache_seqlens": [20, 33]}, errors.DtypeError, "cache_seqlens: got list"),
    "lengths_of_floats": (
        False, lambda c: {"cache_seqlens": torch.tensor([20.0, 33.0])}, errors.DtypeError,
        "cache_seqlens: got torch.float32",
    ),
    "gradient": (
        False, lambda c: {"q": c["q"].requires_grad_()},
        errors.UnsupportedError, r"q: got a tensor that requires a gradient.*Fix: call under torch.no_grad\(\)",
    ),
    "unknown_backend": (False, lambda c: {"backend": "abacus"}, errors.ArgumentError, "backend: got 'abacus'"),
}  # fmt: skip


def _on(device: str, value: Any) -> Any:
    """A value with its tensors on a device."""
    if isinstance(value, tilewise.Rotary):
        fields = (value.cos, value.sin, value.interleaved, value.positions)
        return tilewise.Rotary(*(_on(device, field) for field in fields))
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("case", BAD)
def test_refused_and_unchanged(target: Target, case: str) -> None:
    """On a GPU too, where values are read with ``validate=True``."""
    paged, change, error, message = BAD[case]
    call = _base(paged)
    call |= change(call)
    call = {name: _on(target.device, value) for name, value in call.items()} | {"validate": True}
    before = [call[name].clone() for name in ("k_cache", "v_cache")]
    positional = [call.pop(name) for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(error, match=message):
        tilewise.attention_with_kvcache(*positional, **call)
    for cache, kept in zip(positional[1:], before, strict=True):
        assert torch.equal(cache.contiguous().view(torch.uint8), kept.contiguous().view(torch.uint8))


@pytest.mark.parametrize("paged", [False, True])
def test_the_base_call_is_served(paged: bool) -> None:
    call = _base(paged)
    positional = [call.pop(name) for name in ("q", "k_cache", "v_cache")]
    assert tilewise.attention_with_kvcache(*positional, **call, validate=True).shape == (B, 2, 2 * HEADS, DIM)


def test_scale_of_two_meanings() -> None:
    """As many sequences as pages: [2, heads] could be either."""
    pages = torch.zeros(2, PAGE, HEADS, DIM).to(torch.float8_e4m3fn)
    arguments = {"cache_seqlens": _ints(3, 3), "page_table": torch.tensor([[0], [1]])}
    q = torch.zeros(2, 1, HEADS, DIM, dtype=torch.float16)
    with pytest.raises(errors.ShapeError, match=r"with as many sequences as pages.*add a spare page"):
        tilewise.attention_with_kvcache(q, pages, pages, **arguments, k_scale=torch.ones(2, HEADS))
    with pytest.raises(errors.ShapeError, match=r"k_scale: got shape \[3\]"):
        tilewise.attention_with_kvcache(q, pages, pages, **arguments, k_scale=torch.ones(3))


def test_ids_before_a_window_are_nobodys_business() -> None:
    """Only pages that hold a visible key, or a new one, are looked at."""
    call = _base(paged=True)
    call["page_table"] = torch.tensor([[7, 1, 0, 0], [-5, 10**6, 5, 0]])
    positional = [call.pop(name) for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(errors.ArgumentError, match=r"page_table\[1, 0\]: got -5"):
        tilewise.attention_with_kvcache(*positional, **call)
    tilewise.attention_with_kvcache(*positional, **call, window=(0, 0))
