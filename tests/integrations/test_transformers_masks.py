"""What transformers asks for and what our mask shows are the same, for all rules, offsets, caches and paddings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as theirs

from tilewise import errors, masks
from tilewise.integrations.transformers_masks import TransformersMask, attention_mask
from tilewise.mask_algebra import Positions

BATCH = 2
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
RULES: dict[str, Callable[[], Any]] = {
    "causal": lambda: theirs.causal_mask_function,
    "both_ways": lambda: theirs.bidirectional_mask_function,
    "window": lambda: theirs.sliding_window_causal_mask_function(3),
    "window_of_none": lambda: theirs.sliding_window_causal_mask_function(0),
    "window_both_ways": lambda: theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda: theirs.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "packed": lambda: theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(PACKED)),
    "packed_window": lambda: theirs.and_masks(
        theirs.sliding_window_causal_mask_function(3), theirs.packed_sequence_mask_function(PACKED)
    ),
}
# Queries, keys, position of the first query and of the first key.
GRIDS: dict[str, tuple[int, int, Any, int]] = {
    "whole": (9, 9, 0, 0),
    "continued": (4, 11, 7, 0),
    "one_more": (1, 8, 7, 0),
    "static": (5, 12, 0, 0),
    "static_continued": (3, 12, torch.tensor(4), 0),
    "static_one_more": (1, 12, torch.tensor(6), 0),
    "sliding_cache": (2, 5, 9, 6),
    "sliding_cache_part_full": (2, 7, 3, 0),
}
PADDINGS: dict[str, list[list[int]] | None] = {
    "none": None,
    "full": [[1] * 12] * 2,
    "left": [[0] * 3 + [1] * 9, [1] * 12],
    "right": [[1] * 12, [1] * 5 + [0] * 7],
    "gaps": [[1, 0] * 6, [1] * 12],
    "all": [[0] * 12, [0] * 11 + [1]],
}


def shown(mask: TransformersMask) -> torch.Tensor:
    """All that a mask shows, bool [B, 1, Sq, Sk]."""
    _, _, rows, keys = mask.shape
    shapes = ((BATCH, 1, 1, 1), (1, 1, 1, 1), (1, 1, rows, 1), (1, 1, 1, keys))
    b, h, q, k = (torch.arange(max(shape)).view(shape) for shape in shapes)
    top_left = mask.mask.alignment() == "top_left"
    return mask.mask.visible(Positions(b, h, q, k, 0 if top_left else keys - rows)).expand(BATCH, 1, rows, keys)


def asked(rule: str, grid: str, padding: str) -> dict[str, Any]:
    """The arguments that transformers passes."""
    rows, keys, q_offset, kv_offset = GRIDS[grid]
    seen = int(q_offset) + rows
    kept = None if PADDINGS[padding] is None else torch.tensor(PADDINGS[padding], dtype=torch.bool)[:, :seen]
    return {
        "batch_size": BATCH, "q_length": rows, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": RULES[rule](), "attention_mask": kept, "allow_is_causal_skip": "packed" not in rule,
        "allow_is_bidirectional_skip": "both_ways" in rule,
    }  # fmt: skip


CASES = [
    (rule, grid, padding)
    for rule in RULES
    for grid in GRIDS
    for padding in PADDINGS
    if grid == "whole" or not ("packed" in rule or "both_ways" in rule)
    if padding == "none" or "packed" not in rule
]


@pytest.mark.parametrize("rule, grid, padding", CASES)
def test_a_mask_shows_what_was_asked_for(rule: str, grid: str, padding: str) -> None:
    arguments = asked(rule, grid, padding)
    mask = attention_mask(**arguments)
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    assert torch.equal(shown(mask), theirs.sdpa_mask(**{**arguments, **skips}))
    # Bytes that grow with queries times keys are made for nothing.
    dense = [part for part in masks.parts(mask.mask) if isinstance(part, masks.Dense)]
    assert all(part.tensor.shape[2] == 1 for part in dense) and bool(dense) <= (padding == "gaps")


COMPILED = [
    ("causal", "continued", "left"),
    ("window", "sliding_cache", "gaps"),
    ("window", "static_one_more", "none"),
    ("window_both_ways", "whole", "right"),
    ("chunks", "whole", "none"),
    ("packed_window", "whole", "none"),
]


@pytest.mark.parametrize("rule, grid, padding", COMPILED)
def test_a_compiled_mask_shows_the_same(rule: str, grid: str, padding: str) -> None:
    # The function is made inside the graph, as models make it.
    def shows() -> torch.Tensor:
        return shown(attention_mask(**asked(rule, grid, padding)))

    torch._dynamo.reset()
    assert torch.equal(torch.compile(shows, fullgraph=True, backend="eager")(), shows())


@pytest.mark.parametrize("grid", ["whole", "continued", "one_more", "sliding_cache"])
def test_plain_masks_are_bands(grid: str) -> None:
    for rule, parts in (("causal", [masks.Causal()]), ("window", [masks.Causal(), masks.Window(2, None)])):
        for padding in ("none", "full"):
            mask = attention_mask(**asked(rule, grid, padding))
            assert masks.parts(mask.mask) == parts and mask.band is not None


def test_other_functions_become_tensors() -> None:
    either = theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(PACKED))
    for function, by_vmap in ((either, False), (lambda b, h, q, k: (q + k) % 3 != 0, True)):
        arguments = {**asked("causal", "whole", "left"), "mask_function": function, "use_vmap": by_vmap}
        mask = attention_mask(**arguments)
        assert mask.dtype == torch.bool
        assert torch.equal(mask, theirs.sdpa_mask(**{**arguments, "allow_is_causal_skip": False}))


def test_models_that_want_a_tensor_get_one() -> None:
    for rule, grid in (("causal", "whole"), ("window", "static"), ("causal", "one_more")):
        arguments = {**asked(rule, grid, "left"), "allow_is_causal_skip": False}
        assert torch.equal(attention_mask(**arguments), theirs.sdpa_mask(**arguments))


def test_masks_move_and_are_copied() -> None:
    mask = attention_mask(**asked("packed_window", "whole", "none"))
    for other in (mask.to("cpu"), copy.deepcopy(mask)):
        assert torch.equal(shown(other), shown(mask)) and other.shape == mask.shape == (2, 1, 9, 9)
        assert other.ndim == 4
    assert "Interval" in str(mask)


def test_masks_refuse_to_be_tensors() -> None:
    mask = attention_mask(**asked("causal", "whole", "none"))
    scores = torch.zeros(2, 1, 9, 9)
    for work in (lambda: scores + mask, lambda: mask[:, :, :, :4], lambda: torch.where(mask, scores, scores)):
        with pytest.raises(errors.UnsupportedError, match="attention_mask: got a model that computes with its mask"):
            work()


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"^sinks: got a value"):
        attention_mask(**asked("causal", "whole", "none"), sinks=1)
