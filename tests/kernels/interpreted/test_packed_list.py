"""The list of a packed call's tiles for Hopper, made by the kernel itself: every tile once, near ones together."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tilewise import _triton
from tilewise.hopper import packed
from tilewise.hopper.launch import Tiles
from tilewise.hopper.variants import Members

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
    near: tuple[int, int] = (HEADS, 1 << 30)

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
    "in_blocks": Case([300, 0, 5, 700, 128, 640], [300, 9, 0, 650, 129, 900], band=(None, 0), near=(2, 500)),
    "far_apart": Case([300, 700, 640], [300, 2000, 90], near=(1, 100)),
    "many_blocks": Case(
        [(37 * i) % 200 for i in range(300)], [(53 * i) % 300 for i in range(300)], band=(None, 0), near=(1, 2000)
    ),
}


def _listed(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Records, O and LSE after the kernel."""
    members, total = len(case.lengths_q), sum(case.lengths_q) + case.slack
    most = -(-total // BLOCK_M) + members
    table = torch.full(((1 + most) * packed.RECORD.value + most * HEADS,), -7, dtype=torch.int32)
    out, lse = torch.full((total, WIDTH), float("nan")), torch.full((HEADS, total), float("nan"))
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (case.lengths_q, case.lengths_k))
    used = None if case.used_k is None else torch.tensor(case.used_k, dtype=torch.int32)
    left, right = case.band
    reach = None if left is None or right is None else left + right + BLOCK_M
    packed.list_kernel[(members + 2,)](
        cu_q, cu_k, None, used, members, total, max(case.lengths_q) if case.max_q is None else case.max_q,
        max(case.lengths_k), right, reach, table, most, HEADS, *case.near, out, lse, WIDTH, HEADS, case.top_left,
        BLOCK_M,
    )  # fmt: skip
    return table, out, lse


def _split(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Records, the first of which counts them, and the order."""
    width = packed.RECORD.value
    most = (len(table) - width) // (width + HEADS)
    return table[: (1 + most) * width].view(-1, width), table[(1 + most) * width :]


def _reach(record: tuple[int, ...], band: tuple[int | None, int | None]) -> int:
    """How far the keys of a tile reach, as the order counts them."""
    _, m0, _, _, _, keys, off = record
    left, right = band
    if right is None:
        return keys
    reach = min(keys, m0 + BLOCK_M + off + right)
    return max(0, reach if left is None else min(reach, left + right + BLOCK_M))


def _blocks(case: Case, records: list[Any]) -> list[list[tuple[int, int]]]:
    """Records and heads of each block, in the order of blocks, the longest tiles of each first."""
    near_heads, near_keys = case.near
    groups: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        groups.setdefault(record[4] // near_keys, []).append(i)
    return [
        [(i, h) for i in group for h in range(first, min(first + near_heads, HEADS))]
        for group in groups.values()
        for first in range(0, HEADS, near_heads)
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_tile_once_and_near_ones_together(name: str) -> None:
    case = CASES[name]
    table, _, _ = _listed(case)
    listed, order = _split(table)
    count = int(listed[0, 0])
    records: list[Any] = [tuple(record[:7]) for record in listed[1 : count + 1].tolist()]
    assert len(records) == len(set(records)) == count
    assert set(records) == case.tiles()
    assert (listed[count + 1 :] == -7).all(), "what follows the list was written"
    taken = [divmod(t, HEADS) for t in order[: count * HEADS].tolist()]
    assert (order[count * HEADS :] == -7).all(), "what follows the order was written"
    for number, block in enumerate(_blocks(case, records)):
        here, taken = taken[: len(block)], taken[len(block) :]
        assert sorted(here) == block, number
        lengths = [_reach(records[i], case.band) for i, _ in here]
        assert lengths in (sorted(lengths), sorted(lengths, reverse=True))
    if count:
        assert lengths == sorted(lengths, reverse=True), "the last tiles are not the shortest"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [[1024] * 8, [4096, 300, 2500, 1024, 512, 512, 3500, 100, 1500, 320, 2048]], ids=str
)
def test_programs_have_about_the_same_to_do(lengths: list[int], causal: bool) -> None:
    """By the number of keys, of programs that take tiles there and back again, in blocks as calls have them."""
    programs, cu = 16, torch.zeros(len(lengths) + 1)
    band = (None, 0) if causal else (None, None)
    total = sum(lengths)
    members = Members(cu, cu, None, None, (max(lengths),) * 2, band[1], total, 1 << 20, 512)
    near = members.together(Tiles(HEADS, BLOCK_M, BLOCK_M), 1, total, programs)
    case = Case(lengths, lengths, band=band, near=near)
    listed, order = _split(_listed(case)[0])
    loads = torch.zeros(programs, dtype=torch.int64)
    for at, t in enumerate(order[: int(listed[0, 0]) * HEADS].tolist()):
        n, program = divmod(at, programs)
        record = tuple(listed[1 + t // HEADS, :7].tolist())
        loads[program if n % 2 == 0 else programs - 1 - program] += _reach(record, case.band)
    assert loads.max() <= 1.1 * loads.double().mean()


def test_little_work_is_not_divided() -> None:
    cu = torch.zeros(3)
    members = Members(cu, cu, None, None, (4096, 4096), None, 8192, 1 << 20, 512)
    assert members.together(Tiles(4, 128, 128), 2, 8192, 132)[0] == 4
    heads, keys = members.together(Tiles(64, 128, 128), 2, 8192, 132)
    assert heads % 2 == 0 and heads < 64 and heads * keys >= 4 * 132 * 128
