"""The list of a packed call's tiles for Hopper, made by the kernel itself: every tile once, the longest first."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tilewise import _triton
from tilewise.hopper import packed

assert _triton.NAME, "what mends the interpreter is imported"

BLOCK_M = 128
HEADS, WIDTH = 3, 6


class Case(NamedTuple):
    """Lengths, keys in use, rows that belong to no member, the band, alignment, and a stated longest member."""

    lengths_q: list[int]
    lengths_k: list[int]
    used_k: list[int] | None = None
    slack: int = 0
    band: tuple[int | None, int | None] = (None, None)
    top_left: bool = False
    max_q: int | None = None

    def keys(self, b: int) -> int:
        return self.lengths_k[b] if self.used_k is None else self.used_k[b]

    def rows(self, b: int) -> int:
        return min(self.lengths_q[b], max(self.lengths_q) if self.max_q is None else self.max_q)

    def tiles(self) -> set[tuple[int, ...]]:
        """The records that the list must have."""
        found = set()
        for b, length in enumerate(self.lengths_q):
            off = 0 if self.top_left else self.keys(b) - length
            starts = sum(self.lengths_q[:b]), sum(self.lengths_k[:b])
            for m0 in range(0, self.rows(b), BLOCK_M):
                found.add((b, m0, starts[0], self.rows(b), starts[1], self.keys(b), off))
        return found


CASES = {
    "full": Case([300, 0, 5, 700, 128], [40, 9, 0, 700, 129]),
    "one": Case([129], [1]),
    "no_rows": Case([0, 0], [5, 0], slack=3),
    "causal": Case([300, 0, 5, 700, 128, 640], [300, 9, 0, 650, 129, 900], slack=21, band=(None, 0)),
    "window": Case([300, 700, 640], [300, 700, 90], band=(100, 20), used_k=[300, 3, 0]),
    "left": Case([300, 700], [300, 1200], band=(100, None), top_left=True),
    "many": Case([(37 * i) % 200 for i in range(130)], [(53 * i) % 300 for i in range(130)], band=(None, 0)),
    "understated": Case([300, 90], [300, 90], max_q=100),
}


def _listed(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Records, O and LSE after the kernel."""
    members, total = len(case.lengths_q), sum(case.lengths_q) + case.slack
    table = torch.full((1 - (-total // BLOCK_M) + members, packed.RECORD.value), -7, dtype=torch.int32)
    out, lse = torch.full((total, WIDTH), float("nan")), torch.full((HEADS, total), float("nan"))
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (case.lengths_q, case.lengths_k))
    used = None if case.used_k is None else torch.tensor(case.used_k, dtype=torch.int32)
    left, right = case.band
    most = None if left is None or right is None else left + right + BLOCK_M
    packed.list_kernel[(members + 2,)](
        cu_q, cu_k, None, used, members, total, max(case.lengths_q) if case.max_q is None else case.max_q,
        max(case.lengths_k), right, most, table, out, lse, WIDTH, HEADS, case.top_left, BLOCK_M,
    )  # fmt: skip
    return table, out, lse


def _reach(record: tuple[int, ...], band: tuple[int | None, int | None]) -> int:
    """How far the keys of a tile reach, as the order counts them."""
    _, m0, _, _, _, keys, off = record
    left, right = band
    if right is None:
        return keys
    reach = min(keys, m0 + BLOCK_M + off + right)
    return max(0, reach if left is None else min(reach, left + right + BLOCK_M))


@pytest.mark.parametrize("name", CASES)
def test_every_tile_once_and_the_longest_first(name: str) -> None:
    case = CASES[name]
    table, _, _ = _listed(case)
    count = int(table[0, 0])
    records: list[Any] = [tuple(record[:7]) for record in table[1 : count + 1].tolist()]
    assert len(records) == len(set(records)) == count
    assert set(records) == case.tiles()
    lengths = [_reach(record, case.band) for record in records]
    assert lengths == sorted(lengths, reverse=True)
    assert (table[count + 1 :] == -7).all(), "what follows the list was written"


@pytest.mark.parametrize("name", CASES)
def test_rows_of_no_member_are_blank_and_others_untouched(name: str) -> None:
    case = CASES[name]
    _, out, lse = _listed(case)
    blank = torch.ones(out.shape[0], dtype=torch.bool)
    for b in range(len(case.lengths_q)):
        start = sum(case.lengths_q[:b])
        blank[start : start + case.rows(b)] = False
    assert not out[blank].count_nonzero() and out[~blank].isnan().all()
    assert (lse[:, blank] == float("-inf")).all() and lse[:, ~blank].isnan().all()
