"""Functions of FlexAttention, lowered and compiled into kernels, forward and backward."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, operands
from torch.nn.attention.flex_attention import create_block_mask

from flexible import HEADS, KEYS, MASKS, ROWS, SCORES
from tilewise.compat.flex import as_mask, as_score_mod

CPU = torch.device("cpu")


# (The oracle's gradient is that of the lowered function, which knows no detach().)
@pytest.mark.parametrize("name", sorted(SCORES.keys() - {"no_gradient"}))
def test_score_function(name: str) -> None:
    assert_agrees(*operands(ROWS, KEYS), score_mod=as_score_mod(SCORES[name], CPU, torch.float32))


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    mask = create_block_mask(MASKS[name], None, HEADS, ROWS, KEYS, device="cpu", BLOCK_SIZE=16)
    assert_agrees(*operands(ROWS, KEYS), mask=as_mask(mask, ROWS, KEYS, CPU))
