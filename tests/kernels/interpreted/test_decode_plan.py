"""The plan that decode kernels compute in closed form is `decode.plan.work_list`, piece by piece and slot by slot."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from tilewise import _triton
from tilewise._triton import decode_plan
from tilewise._triton.cache import Limits, Slots
from tilewise.decode.plan import SEQUENCE, Plan, work_list
from tilewise.kvcache import Lengths, Static

assert _triton.NAME, "what mends the interpreter is imported"

MOST = 256  # pieces of a program that the test has room for


class Shape(NamedTuple):
    """What the plan reads of a kernel's compile-time sizes."""

    HEADS_KV: Any
    GROUP: Any
    TOP_LEFT: Any
    BLOCK_M: Any
    BLOCK_N: Any
    MODE: Any


@triton.jit
def list_pieces(
    pieces, counts, cuts, slots, shape: tl.constexpr, batch, seqlen_q, total_q, capacity, row_tiles, splits, cut, whole,
    left, right, MOST: tl.constexpr,
):  # fmt: skip
    """The loop of `decode_kernel`, which writes down each piece instead of computing it."""
    limits = Limits(batch, seqlen_q, total_q, 0, capacity, batch, 0)
    work = decode_plan.Work(row_tiles, splits, cut, whole)
    program = tl.program_id(0)
    mine = decode_plan.share(program, tl.num_programs(0), slots, limits, work, shape, left, right)
    unit, g, begin, n = mine.first, mine.group, mine.begin, 0
    while unit < mine.last:
        group = decode_plan.group_of(g, slots, limits, work, shape, left, right)
        width = group.units * shape.HEADS_KV
        if unit < begin + width:
            h = (unit - begin) // group.units
            start = begin + h * group.units
            piece = decode_plan.piece_of(unit, start, program, mine, group, g * shape.HEADS_KV + h, work, shape)
            at = pieces + (program * MOST + n) * 6
            tl.store(at, group.seq.b)
            tl.store(at + 1, group.row0 // shape.BLOCK_M)
            tl.store(at + 2, h)
            tl.store(at + 3, piece.lo)
            tl.store(at + 4, piece.hi)
            tl.store(at + 5, piece.slot)
            if piece.is_first & (piece.slot >= 0):
                tl.store(cuts + program * 2, g * shape.HEADS_KV + h)
                more = decode_plan.pieces_from(program, tl.num_programs(0), start, group.units, mine.total)
                tl.store(cuts + program * 2 + 1, more)
            n += 1
            unit = piece.stop
        if unit >= begin + width:
            begin += width
            g += 1
    tl.store(counts + program, n)


class Case(NamedTuple):
    """Rows and keys of each sequence, and what differs from plain decoding."""

    rows: list[int]
    keys: list[int]
    heads_kv: int = 2
    group: int = 4
    programs: int = 7
    whole: int = 0
    band: tuple[int | None, int | None] = (None, None)


CASES = {
    "one": Case([1], [1000]),
    "several": Case([1] * 5, [1000, 3, 0, 517, 64]),
    "short_ones_whole": Case([1] * 6, [130, 2000, 64, 200, 0, 300], whole=4),
    "all_short": Case([1] * 9, [100] * 9, whole=4, programs=5),
    "fewer_tiles_than_programs": Case([1, 1], [60, 70], heads_kv=1, programs=13),
    "nothing": Case([1, 1, 1], [0, 0, 0]),
    "ragged": Case([3, 0, 40, 1], [500, 900, 41, 0], programs=11),
    "no_rows": Case([0, 0], [500, 900]),
    "window": Case([1, 20, 7], [900, 800, 20], band=(130, 0)),
    "chunks": Case([64, 64], [64, 900], band=(None, 0), programs=4),
    "many_sequences": Case([1] * 140, [(37 * i) % 300 for i in range(140)], heads_kv=1, programs=6, whole=2),
}
STATICS = {"balanced": Static(), "of_256": Static(split_size=256), "five": Static(num_splits=5)}


def _listed(case: Case, plan: Plan, lengths: Lengths) -> tuple[list[list[int]], list[list[list[int]]], torch.Tensor]:
    """The pieces that the kernel lists, all and by program, and what each program notes for the merge."""
    static = plan.static
    mode = decode_plan.BALANCED if plan.balanced else decode_plan.BY_SIZE
    mode = decode_plan.BY_NUMBER if static.num_splits is not None else mode
    sizes = (case.heads_kv, case.group, False, plan.block_m, plan.block_n)
    shape = Shape(*map(tl.constexpr, sizes), mode)
    offsets = torch.tensor([0, *case.rows]).cumsum(0).int()
    slots = Slots(lengths.k.int(), None, None, None, offsets)
    pieces = torch.full((plan.programs, MOST, 6), -7, dtype=torch.int32)
    counts, cuts = torch.zeros(plan.programs, dtype=torch.int32), torch.full((plan.programs, 2), -1, dtype=torch.int32)
    cut = static.split_size or static.num_splits or 0
    list_pieces[(plan.programs,)](
        pieces, counts, cuts, slots, shape, len(case.rows), max(case.rows), sum(case.rows), plan.capacity,
        max(1, plan.row_tiles), 0 if plan.balanced else plan.splits, cut, plan.whole, *case.band, MOST=MOST,
    )  # fmt: skip
    by_program = [pieces[p, :n].tolist() for p, n in enumerate(counts.tolist())]
    return [piece for own in by_program for piece in own], by_program, cuts


@pytest.mark.parametrize("static", STATICS)
@pytest.mark.parametrize("name", CASES)
def test_pieces(name: str, static: str) -> None:
    case = CASES[name]
    q, k = torch.tensor(case.rows), torch.tensor(case.keys)
    lengths = Lengths(q, torch.zeros_like(q), k, torch.zeros_like(k), k, k - q)
    row_tiles = -(-max(case.rows) * case.group // 16)
    plan = Plan(
        len(case.rows),
        case.heads_kv,
        row_tiles,
        16,
        64,
        case.group,
        64,
        2048,
        STATICS[static],
        case.programs,
        case.whole,
    )
    found, by_program, cuts = _listed(case, plan, lengths)
    work = work_list(plan, lengths, *case.band)
    expected = [piece for piece in work.pieces.tolist() if piece[SEQUENCE] >= 0]
    assert found == expected
    if not plan.balanced:
        return
    assert [len(own) for own in by_program] == work.starts.diff().tolist()
    noted = {item: count for item, count in cuts.tolist() if item >= 0}
    assert noted == {item: count for item, (_, _, count) in enumerate(work.merges.tolist()) if count > 1}
