"""The list of a packed call's tiles for Hopper, made by the kernel itself: every tile once, in an order by which no
program gets far ahead of others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tilewise import _triton
from tilewise.hopper import packed

assert _triton.NAME, "what mends the interpreter is imported"

BLOCK_M = 128
HEADS, WIDTH, ALSO_WIDTH = 3, 6, 5


class Case(NamedTuple):
    """Lengths, keys in use, rows that belong to no member, the band, alignment, and a stated longest member."""

    lengths_q: list[int]
    lengths_k: list[int]
    used_k: list[int] | None = None
    slack: int = 0
    band: tuple[int | None, int | None] = (None, None)
    top_left: bool = False
    max_q: int | None = None
    programs: int = 0
    heads: int = HEADS

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
    "pairs": Case([300, 0, 5, 700, 128, 640], [300, 9, 0, 650, 129, 900], band=(None, 0), programs=4),
    "pairs_of_two_heads": Case([300, 700, 640], [300, 2000, 90], programs=3, heads=2),
    "pairs_of_keys": Case([300, 700, 640], [300, 900, 90], band=(0, None), programs=5, heads=4),
    "pairs_of_one_head": Case([129, 700, 5], [300, 700, 5], programs=1, heads=1),
    "many_pairs": Case(
        [(37 * i) % 200 for i in range(300)], [(53 * i) % 300 for i in range(300)], band=(None, 0), programs=7
    ),
}


def _listed(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Records, two results and an LSE after the kernel."""
    members, total = len(case.lengths_q), sum(case.lengths_q) + case.slack
    most = -(-total // BLOCK_M) + members
    table = torch.full(((1 + most) * packed.RECORD.value + most * case.heads,), -7, dtype=torch.int32)
    out, also = (torch.full((total, width), float("nan")) for width in (WIDTH, ALSO_WIDTH))
    lse = torch.full((case.heads, total), float("nan"))
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (case.lengths_q, case.lengths_k))
    used = None if case.used_k is None else torch.tensor(case.used_k, dtype=torch.int32)
    left, right = case.band
    packed.list_kernel[(members + 2,)](
        cu_q, cu_k, None, used, members, total, max(case.lengths_q) if case.max_q is None else case.max_q,
        max(case.lengths_k), left, right, table, most, case.heads, case.programs, out, also, lse, WIDTH, ALSO_WIDTH,
        case.heads, case.top_left, BLOCK_M,
    )  # fmt: skip
    return table, out, also, lse


def _split(table: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Records, the first of which counts them, and the order."""
    width = packed.RECORD.value
    most = (len(table) - width) // (width + heads)
    return table[: (1 + most) * width].view(-1, width), table[(1 + most) * width :]


def _reach(record: tuple[int, ...], band: tuple[int | None, int | None]) -> int:
    """How many keys a tile sees, as the order counts them."""
    _, m0, _, _, _, keys, off = record
    before, after = band
    if after is None:
        return keys if before is None else keys - max(0, m0 + off - before)
    reach = min(keys, m0 + BLOCK_M + off + after)
    return max(0, reach if before is None else min(reach, before + after + BLOCK_M))


def _taken(case: Case) -> list[tuple[Any, int]]:
    """Records and heads in the order in which they are taken, if every tile is, and nothing else was written."""
    table, *_ = _listed(case)
    listed, order = _split(table, case.heads)
    count = int(listed[0, 0])
    records: list[Any] = [tuple(record[:7]) for record in listed[1 : count + 1].tolist()]
    assert len(records) == len(set(records)) == count
    assert set(records) == case.tiles()
    assert (listed[count + 1 :] == -7).all(), "what follows the list was written"
    assert (order[count * case.heads :] == -7).all(), "what follows the order was written"
    taken = [divmod(t, case.heads) for t in order[: count * case.heads].tolist()]
    assert sorted(taken) == [(i, h) for i in range(count) for h in range(case.heads)]
    return [(records[i], h) for i, h in taken]


@pytest.mark.parametrize("name", CASES)
def test_every_tile_once(name: str) -> None:
    case = CASES[name]
    lengths = [_reach(record, case.band) for record, _ in _taken(case)]
    if not case.programs:
        assert lengths == sorted(lengths, reverse=True), "the dearest tiles are not first"


def _loads(case: Case) -> list[list[int]]:
    """What programs have done of their tiles after each round trip, in keys, if they take them there and back again."""
    taken, programs = _taken(case), case.programs
    loads, after = [0] * programs, []
    for at, (record, _) in enumerate(taken):
        n, program = divmod(at, programs)
        loads[program if n % 2 == 0 else programs - 1 - program] += _reach(record, case.band)
        if at % (2 * programs) == 2 * programs - 1:
            after.append(list(loads))
    return [*after, loads]


@pytest.mark.parametrize("band", [(None, None), (None, 0), (0, None)], ids=["full", "causal", "keys"])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize(
    "lengths", [[1024] * 8, [4096, 300, 2500, 1024, 512, 512, 3500, 100, 1500, 320, 2048]], ids=str
)
def test_programs_never_drift_apart(lengths: list[int], heads: int, band: tuple[int | None, int | None]) -> None:
    """After each round trip nobody is ahead by more than the dearest two tiles."""
    *after, last = _loads(Case(lengths, lengths, band=band, programs=12, heads=heads))
    assert after
    for loads in after:
        assert max(loads) - min(loads) <= 2 * (max(lengths) + BLOCK_M)
    assert max(last) <= 1.15 * sum(last) / len(last)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.programs])
def test_heads_of_a_member_follow_each_other(name: str) -> None:
    """As many tiles as two round trips have lie between the first and the last of a head, and its own, at most."""
    case = CASES[name]
    places: dict[tuple[int, int], list[int]] = {}
    for at, (record, head) in enumerate(_taken(case)):
        alone = case.heads % 2 == 1 and head == case.heads - 1
        if not alone:
            places.setdefault((record[0], head), []).append(at)
    assert all(max(at) - min(at) <= 4 * case.programs + 2 * len(at) for at in places.values())


def test_rows_of_no_member_are_blank() -> None:
    case = Case([300, 0, 5], [300, 9, 0], slack=21, max_q=200)
    _, out, also, lse = _listed(case)
    blank = torch.tensor([row >= (200 if row < 300 else 305) and not 300 <= row < 305 for row in range(326)])
    for x, value in ((out, 0.0), (also, 0.0), (lse.T, float("-inf"))):
        assert (x[blank] == value).all() and x[~blank].isnan().all()
