"""The plan that kernels compute in closed form is `decode.plan.work_list`, piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tilewise import _triton
from tilewise._triton.cache_launch import shape
from tilewise._triton.decode import FEW_GROUPS
from tilewise.cache_arguments import prepare
from tilewise.decode.plan import Plan, work_list
from tilewise.kernels import decode_plan
from tilewise.kernels.cache import Limits, Slots
from tilewise.kernels.cache_call import CacheCall
from tilewise.kernels.decode_plan import Work
from tilewise.kvcache import band, lengths
from tilewise.tiles import TileConfig

assert _triton.NAME, "what mends the interpreter is imported"

TILE = TileConfig(16, 32, 4, 1, programs=5)
FIELDS = 9


@triton.jit
def pieces_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations
    found, count, slots, shape, batch, seqlen_q, total_q, new, capacity, rows, table_row, tree_batch, row_tiles, splits,
    cut, whole, left, right, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a program of `decode` would do: sequence, row tile, head, keys, slot, program, pieces of a cut item."""
    limits = Limits(batch, seqlen_q, total_q, new, capacity, rows, table_row, tree_batch)
    work = Work(row_tiles, splits, cut, whole)
    p, programs = tl.program_id(0), tl.num_programs(0)
    mine = decode_plan.share(p, programs, tl.arange(0, WIDTH), slots, limits, work, shape, left, right)
    unit, g, begin = mine.first, mine.group, mine.begin
    while unit < mine.last:
        group = decode_plan.group_of(g, slots, limits, work, shape, left, right)
        width = group.units * shape.HEADS_KV
        if unit < begin + width:
            h = (unit - begin) // group.units
            start = begin + h * group.units
            piece = decode_plan.piece_of(unit, start, p, mine, group, g * shape.HEADS_KV + h, work, shape)
            merged = 0
            first = -1
            if (shape.MODE == decode_plan.BALANCED) & (piece.slot >= 0):
                first = decode_plan.first_of(mine, start)
            if piece.is_first & (piece.slot >= 0):
                merged = decode_plan.pieces_from(p, mine, start, group.units)
            at = found + tl.atomic_add(count, 1) * 9
            tl.store(at, group.seq.b)
            tl.store(at + 1, g % row_tiles)
            tl.store(at + 2, h)
            tl.store(at + 3, piece.lo)
            tl.store(at + 4, piece.hi)
            tl.store(at + 5, piece.slot)
            tl.store(at + 6, p)
            tl.store(at + 7, merged)
            tl.store(at + 8, first)
            unit = piece.stop
        if unit >= begin + width:
            begin += width
            g += 1


CALLS: dict[str, dict[str, Any]] = {
    "even": {"used": (640, 640, 640)},
    "uneven": {"used": (1000, 3, 0, 170, 64)},
    "alike": {"used": (640,) * 5},
    "nearly alike": {"used": (640, 600, 0, 620, 640, 630, 610, 590, 0, 625, 640)},
    "alike and long": {"used": (1000,) * 29},
    "equal": {"used": (1000,) * 3, "programs": 13},
    "one": {"used": (1000,)},
    "nothing": {"used": (0, 0)},
    "nobody": {"used": ()},
    "many": {"used": (300, 0, 31, 64, 129) * 8},
    "rows": {"used": (300, 31, 500), "rows": 9, "causal": True},
    "window": {"used": (700, 20, 90), "rows": 5, "window": (200, 0)},
    "ragged": {"used": (300, 31, 500, 7), "ragged": (0, 7, 1, 0), "causal": True},
}
CUTS: list[dict[str, int]] = [{}, {"split_size": 128}, {"split_size": 384}, {"num_splits": 1}, {"num_splits": 3}]


def posed(
    used: tuple[int, ...], rows: int = 1, ragged: tuple[int, ...] | None = None, programs: int = 5, **options: Any
) -> CacheCall:
    """A call of 4 over 2 heads."""
    batch = len(used)
    lead = [batch, rows] if ragged is None else [sum(ragged)]
    if ragged is not None:
        offsets = torch.tensor([0, *ragged]).cumsum(0).int()
        options |= {"cu_seqlens_q": offsets, "max_seqlen_q": max(ragged)}
    q, cache = torch.zeros(*lead, 4, 16), torch.zeros(batch, 1024, 2, 16)
    problem, inputs = prepare(q, cache, cache.clone(), torch.tensor(used, dtype=torch.int32), **options)
    return CacheCall(problem, inputs, TILE, Plan.of(problem, TILE.block_m, TILE.block_n, programs, whole=4))


def named(rows: list[list[int]]) -> list[tuple[int, ...]]:
    """Pieces in one order, those without keys alike."""
    return sorted((*row[:3], *(row[3:5] if row[3] < row[4] else (0, 0)), *row[5:]) for row in rows)


@pytest.mark.parametrize("width", [FEW_GROUPS, decode_plan.CHUNK], ids=["few", "many"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_pieces(name: str, cuts: dict[str, int], width: tl.constexpr) -> None:
    call = posed(**{**CALLS[name], **cuts})
    left, right = band(call.problem)
    want = work_list(call.plan, lengths(call.problem, call.inputs), left, right)
    found = torch.full((call.plan.max_pieces + 4, FIELDS), -7, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    slots: Slots = call.slots
    pieces_kernel[(call.plan.programs,)](
        found, count, slots, shape(call), *call.limits, *call.work, left, right, width.value
    )  # fmt: skip
    got = found[: int(count)].tolist()
    assert named([row[:6] for row in got]) == named(want.pieces[want.pieces[:, 0] >= 0].tolist())
    if call.plan.balanced:
        counts = {tuple(row[:3]): row[7] for row in got if row[7]}
        items = [(b, m, h) for b in range(call.plan.batch) for m in range(call.plan.row_tiles) for h in range(2)]
        cut = {item: merge for item, merge in zip(items, want.merges.tolist(), strict=True) if merge[2] > 1}
        assert counts == {item: merge[2] for item, merge in cut.items()}
        firsts = {tuple(row[:3]): row[5:7] for row in got if row[7]}
        # All pieces of an item know who has its first.
        assert all(row[8] == firsts[tuple(row[:3])][1] for row in got if row[5] >= 0)
        for item, (first, second, _) in cut.items():
            slot, program = firsts[item]
            assert (slot, 2 * (program + 1)) == (first, second)
