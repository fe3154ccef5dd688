"""What goes with the Hopper backward in plain Triton: statistics of every row, and dq from its sum."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise import _triton
from tilewise.hopper.statistics import round_kernel, row_kernel
from tilewise.kernels.rows import rows_of

assert _triton.NAME, "what mends the interpreter is imported"

BATCH, ROWS, HEADS, DIM, WIDTH, STAT_ROWS, BLOCK = 2, 37, 3, 24, 32, 128, 32


@pytest.mark.parametrize("with_dlse", [False, True])
def test_rows(with_dlse: bool) -> None:
    torch.manual_seed(0)
    # Heads first, as calls may have them.
    out, do = (torch.randn(BATCH, HEADS, ROWS, DIM).transpose(1, 2) for _ in range(2))
    lse, dlse = torch.randn(BATCH, HEADS, ROWS), torch.randn(BATCH, HEADS, ROWS)
    lse[:, :, 5] = float("-inf")
    lse2, delta = (torch.full((BATCH * HEADS, STAT_ROWS), float("nan")) for _ in range(2))
    dq_sum = torch.full((BATCH, HEADS, ROWS, WIDTH), float("nan"))
    row_kernel[(BATCH * HEADS * STAT_ROWS // BLOCK,)](
        rows_of(out), rows_of(do), lse, dlse if with_dlse else None, None, lse2, delta, dq_sum, ROWS, HEADS, STAT_ROWS,
        0, 0, BLOCK, DIM, 32, WIDTH,
    )  # fmt: skip
    wanted = (out * do).sum(-1).transpose(1, 2) - (dlse if with_dlse else 0.0)
    torch.testing.assert_close(delta[:, :ROWS].view(lse.shape), wanted)
    blind = lse == float("-inf")
    torch.testing.assert_close(
        lse2[:, :ROWS].view(lse.shape), torch.where(blind, float("inf"), lse * math.log2(math.e))
    )
    # Tiles read past the last row: nobody there sees anything.
    assert bool((lse2[:, ROWS:] == float("inf")).all()) and not delta[:, ROWS:].count_nonzero()
    assert not dq_sum.count_nonzero()


def test_rows_of_members() -> None:
    """Each member's statistics begin at a multiple of 4; between them, and after the last, nobody sees anything."""
    torch.manual_seed(0)
    lengths = [5, 0, 1, 8, 0, 3, 7, 0]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    total, slack = int(cu[-1]), 2
    rows = total + slack
    out, do = (torch.randn(rows, HEADS, DIM) for _ in range(2))
    lse = torch.randn(HEADS, rows)
    lse2, delta = (torch.full((HEADS, STAT_ROWS), float("nan")) for _ in range(2))
    dq_sum = torch.full((1, HEADS, rows, WIDTH), float("nan"))
    row_kernel[(HEADS * STAT_ROWS // BLOCK,)](
        rows_of(out, True), rows_of(do, True), lse, None, cu, lse2, delta, dq_sum, rows, HEADS, STAT_ROWS,
        len(lengths), (len(lengths) - 1).bit_length(), BLOCK, DIM, 32, WIDTH,
    )  # fmt: skip
    expected = (torch.full_like(lse2, float("inf")), torch.zeros_like(delta))
    for b, (first, last) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        at = (first // 4 + b) * 4
        expected[0][:, at : at + last - first] = lse[:, first:last] * math.log2(math.e)
        expected[1][:, at : at + last - first] = (out * do).sum(-1).T[:, first:last]
    torch.testing.assert_close((lse2, delta), expected)
    assert not dq_sum.count_nonzero()


@pytest.mark.parametrize("counted", [False, True])
def test_rounding(counted: bool) -> None:
    """A sum that nobody added to was not written; of every eight columns the even ones come first."""
    torch.manual_seed(0)
    exact = torch.randn(BATCH, HEADS, ROWS, WIDTH)
    dq_sum = exact.unflatten(-1, (WIDTH // 8, 4, 2)).transpose(-1, -2).flatten(-3)
    dq = torch.full((BATCH, ROWS, HEADS, DIM), float("nan"), dtype=torch.float16)
    blocks, added = -(-ROWS // BLOCK), None
    if counted:
        added = torch.ones(BATCH, HEADS, 3, dtype=torch.int32)
        added[1, 2, 1] = 0
        dq_sum[1, 2, 16:32], exact[1, 2, 16:32] = float("nan"), 0.0
    round_kernel[(BATCH * HEADS * blocks,)](dq_sum, added, rows_of(dq), 0.125, ROWS, HEADS, BLOCK, 16, DIM, WIDTH)
    assert torch.equal(dq, (exact[..., :DIM].transpose(1, 2) * 0.125).half())
