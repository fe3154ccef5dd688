"""Plans of split-KV work: every key of every row tile once, bounded partial results, even programs, exact slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.decode.plan import (
    HEAD,
    KEY_HI,
    KEY_LO,
    ROW_TILE,
    SEQUENCE,
    SLOT,
    WHOLE,
    WHOLE_COST,
    WHOLE_EXCESS,
    Items,
    Plan,
    WorkList,
    items_of,
    parts,
    work_list,
)  # fmt: skip
from tilewise.kvcache import Lengths, Static


def lengths(rows: list[int], keys: list[int]) -> Lengths:
    q, k = torch.tensor(rows, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64)
    return Lengths(q, torch.zeros_like(q), k, torch.zeros_like(k), k, k - q)


@st.composite
def plans(draw: Any) -> tuple[Plan, Lengths, tuple[int | None, int | None]]:
    batch = draw(st.integers(1, 6))
    group, block_m = draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([16, 64]))
    most = draw(st.sampled_from([1, 4, 40]))
    rows = draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
    capacity = draw(st.sampled_from([64, 1000, 5000]))
    least = draw(st.sampled_from([0, capacity - 40]))
    keys = draw(st.lists(st.one_of(st.integers(least, capacity), st.just(0)), min_size=batch, max_size=batch))
    static = draw(
        st.one_of(
            st.just(Static()),
            st.integers(1, 9).map(lambda n: Static(num_splits=n)),
            st.sampled_from([128, 256, 1024]).map(lambda n: Static(split_size=n)),
        )
    )
    plan = Plan(
        batch, draw(st.integers(1, 3)), -(-most * group // block_m), block_m, draw(st.sampled_from([32, 64, 128])),
        group, 64, capacity, static, draw(st.sampled_from([1, 7, 132])), draw(st.sampled_from([0, 1, 4])),
    )  # fmt: skip
    band = draw(st.tuples(st.one_of(st.none(), st.integers(0, 300)), st.sampled_from([None, 0, 5])))
    return plan, lengths(rows, keys), band


def pieces_by_item(plan: Plan, work: WorkList) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}
    for piece in work.pieces.tolist():
        if piece[SEQUENCE] >= 0:
            item = (piece[SEQUENCE] * plan.row_tiles + piece[ROW_TILE]) * plan.heads_kv + piece[HEAD]
            found.setdefault(item, []).append(piece)
    return found


def all_whole(plan: Plan, items: Items) -> int:
    """How many items a program has at most, if none is cut because they are alike; else 0."""
    each = -(-int((items.tiles > 0).sum()) // plan.programs)
    most = each * int(items.tiles.max()) * plan.programs
    total = int(items.tiles.sum())
    return each if most <= min(total + total / WHOLE_COST, total + WHOLE_EXCESS * plan.programs) else 0


def visible(plan: Plan, at: Lengths, band: tuple[int | None, int | None], item: int) -> list[int] | None:
    """The keys that any row of an item sees, row by row; None: there is no such row tile."""
    b, m = item // plan.heads_kv // plan.row_tiles, item // plan.heads_kv % plan.row_tiles
    packed = range(m * plan.block_m, min((m + 1) * plan.block_m, int(at.q[b]) * plan.group_size))
    if not packed:
        return None
    left, right = band
    seen = []
    for i in {r // plan.group_size for r in packed}:
        center = i + int(at.off[b])
        lo = 0 if left is None else max(0, center - left)
        hi = int(at.k[b]) if right is None else min(int(at.k[b]), center + right + 1)
        if lo < hi:
            seen.append((lo, hi))
    # Those of neighbouring rows differ by one key at each end, so together they are a run.
    return list(range(min(lo for lo, _ in seen), max(hi for _, hi in seen))) if seen else []


@given(plans())
def test_every_key_once(drawn: tuple[Plan, Lengths, tuple[int | None, int | None]]) -> None:
    plan, at, band = drawn
    work = work_list(plan, at, *band)
    found = pieces_by_item(plan, work)
    for item in range(plan.items):
        keys = visible(plan, at, band, item)
        if keys is None:
            assert item not in found
            continue
        own = found[item]
        listed = [key for piece in own for key in range(piece[KEY_LO], piece[KEY_HI])]
        # In order, without a gap or a repetition, and no key that nobody sees.
        assert listed == keys
        assert len(own) == 1 or all(piece[KEY_LO] < piece[KEY_HI] for piece in own)


@given(plans())
def test_slots(drawn: tuple[Plan, Lengths, tuple[int | None, int | None]]) -> None:
    """Whole items need no slot; pieces of cut ones have one each, which the merges name in the order of keys."""
    plan, at, band = drawn
    work = work_list(plan, at, *band)
    found, taken, merges = pieces_by_item(plan, work), [], work.merges.tolist()
    assert work.pieces.shape == (plan.max_pieces, 6)
    assert work.starts.shape == ((plan.programs if plan.balanced else plan.max_pieces) + 1,)
    assert len(merges) == plan.items
    step = 2 if plan.balanced else 1
    for item, own in found.items():
        first, second, count = merges[item]
        slots = [piece[SLOT] for piece in own]
        assert count == len(own)
        if count == 1:
            assert slots == [WHOLE]
        else:
            assert slots == [first, *(second + step * i for i in range(count - 1))]
            taken += slots
    assert all(merges[item][2] == 0 for item in range(plan.items) if item not in found)
    assert len(taken) == len(set(taken))
    assert all(0 <= slot < plan.slots for slot in taken)
    assert plan.workspace_bytes() == plan.slots * plan.block_m * 65 * 4


def in_use(plan: Plan, items: Items) -> int:
    """Programs that share the tiles of items that are cut: of equal ones as many as have equal parts, if almost all."""
    total, there, longest = int(items.tiles.sum()), int((items.tiles > 0).sum()), int(items.tiles.max())
    programs = plan.programs
    equal = programs // max(1, there) * there
    if longest * there == total and WHOLE_COST * programs <= (WHOLE_COST + 1) * equal:
        programs = equal
    return min(programs, total)


@given(plans())
def test_programs_are_even(drawn: tuple[Plan, Lengths, tuple[int | None, int | None]]) -> None:
    """Without short items each program has the same number of tiles, or one more; with them, no short one is cut.

    Nor is any, where the busiest program then has hardly more than its share.
    """
    plan, at, band = drawn
    if not plan.balanced:
        return
    work, items = work_list(plan, at, *band), items_of(plan, at, *band)
    starts, pieces = work.starts.tolist(), work.pieces.tolist()
    used = sum(piece[SEQUENCE] >= 0 for piece in pieces)
    assert starts[0] == 0 and starts[-1] == used and starts == sorted(starts)
    loads = []
    total = int(items.tiles.sum())
    for p in range(max(1, in_use(plan, items))):
        tiles = 0
        for piece in pieces[starts[p] : starts[p + 1]]:
            tiles += max(1, -(-piece[KEY_HI] // plan.block_n) - piece[KEY_LO] // plan.block_n)
        loads.append(tiles)
    assert sum(loads) == total
    if each := all_whole(plan, items):
        assert max(loads) <= each * int(items.tiles.max())
        assert all(len(own) == 1 for own in pieces_by_item(plan, work).values())
        return
    spread = max(0, plan.whole // 2) * 2
    assert max(loads) - min(loads) <= 1 + spread
    for item, own in pieces_by_item(plan, work).items():
        assert len(own) == 1 or int(items.tiles[item]) > plan.whole


@given(plans())
def test_fixed_parts_do_not_depend_on_other_sequences(
    drawn: tuple[Plan, Lengths, tuple[int | None, int | None]],
) -> None:
    plan, at, band = drawn
    if plan.balanced:
        return
    together = pieces_by_item(plan, work_list(plan, at, *band))
    for b in range(plan.batch):
        alone = Lengths(*(x[b : b + 1] for x in at))
        single = replace(plan, batch=1)
        per_item = plan.row_tiles * plan.heads_kv
        for item, own in pieces_by_item(single, work_list(single, alone, *band)).items():
            mates = together[b * per_item + item]
            assert [p[KEY_LO:SLOT] for p in own] == [p[KEY_LO:SLOT] for p in mates]


@given(plans())
def test_fixed_parts_are_those_of_the_plain_function(
    drawn: tuple[Plan, Lengths, tuple[int | None, int | None]],
) -> None:
    plan, at, band = drawn
    if plan.balanced:
        return
    items = items_of(plan, at, *band)
    for item, own in pieces_by_item(plan, work_list(plan, at, *band)).items():
        lo, hi = int(items.lo[item]), int(items.hi[item])
        assert [(p[KEY_LO], p[KEY_HI]) for p in own] == parts(plan.static, lo, hi)


@given(plans())
def test_closed_form(drawn: tuple[Plan, Lengths, tuple[int | None, int | None]]) -> None:
    """What docs/kvcache.md tells kernels to compute: which programs an item's pieces belong to."""
    plan, at, band = drawn
    if not plan.balanced:
        return
    work, items = work_list(plan, at, *band), items_of(plan, at, *band)
    if all_whole(plan, items):
        return
    ends = items.tiles.cumsum(0).tolist()
    total, programs = ends[-1], in_use(plan, items)
    for item, own in pieces_by_item(plan, work).items():
        begin, end = ends[item] - int(items.tiles[item]), ends[item]
        p1, p2 = -(-(begin + 1) * programs // total), -(-end * programs // total) - 1
        cut = int(items.tiles[item]) > plan.whole and p1 <= p2
        assert len(own) == (p2 - p1 + 2 if cut else 1)
        if cut:
            slots = [2 * (p1 - 1) + 1, *(2 * p for p in range(p1, p2 + 1))]
            assert [piece[SLOT] for piece in own] == slots


def test_equal_items_have_equal_parts() -> None:
    """On 264 programs, 128 items are cut in two and 8 more stay idle; 120 would leave too many of them idle."""
    for batch, counts in ((16, {2}), (15, {3})):
        plan = Plan(batch, 8, 1, 64, 64, 4, 128, 8192, Static(), 264, 4)
        work = work_list(plan, lengths([1] * batch, [8192] * batch), None, None)
        assert set(work.merges[:, 2].tolist()) == counts
        if batch == 16:
            assert (work.starts.diff() == 1).tolist() == [True] * 256 + [False] * 8
            assert set((work.pieces[:256, KEY_HI] - work.pieces[:256, KEY_LO]).tolist()) == {4096}


def test_alike_items_are_whole_unless_some_wait_long() -> None:
    """Four of 1,024 items for most of 264 programs: 3 % more than an even share, of 4 tiles each or of 128."""
    for keys, cut in ((256, False), (4096, False), (8192, True)):
        plan = Plan(32, 32, 1, 64, 64, 1, 128, 8192, Static(), 264, 4)
        work = work_list(plan, lengths([1] * 32, [keys] * 32), None, None)
        assert bool((work.merges[:, 2] > 1).any()) == cut


def test_short_contexts_are_not_split() -> None:
    plan = Plan(2, 1, 1, 16, 64, 4, 64, 4096, Static(), 132, 4)
    short = work_list(plan, lengths([1, 1], [200, 256]), None, None)
    assert short.merges[:, 2].tolist() == [1, 1]
    long = work_list(plan, lengths([1, 1], [200, 4096]), None, None)
    assert long.merges[0, 2] == 1 and long.merges[1, 2] > 60


@pytest.mark.parametrize("static", [Static(), Static(num_splits=4)], ids=str)
def test_no_rows(static: Static) -> None:
    plan = Plan(2, 1, 0, 16, 64, 4, 64, 4096, static, 5, 0)
    work = work_list(plan, lengths([0, 0], [10, 0]), None, None)
    assert not bool((work.pieces[:, SEQUENCE] >= 0).any()) and not bool(work.starts.any()) and not len(work.merges)


@pytest.mark.parametrize("static", [Static(), Static(num_splits=4), Static(split_size=256)], ids=str)
def test_nothing_depends_on_values(static: Static) -> None:
    """Shapes and memory are those of the sizes, so one captured launch serves all lengths, from none to capacity."""
    plan = Plan(3, 2, 1, 16, 64, 4, 128, 4096, static, 132, 2)
    works = [work_list(plan, lengths([1] * 3, keys), None, 0) for keys in ([0] * 3, [1] * 3, [4096] * 3, [5, 0, 900])]
    assert len({tuple(x.shape for x in work) for work in works}) == 1
    assert all(x.dtype == torch.int32 for work in works for x in work)
