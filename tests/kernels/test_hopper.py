"""The Hopper forward without a GPU: what the compiler makes of every shipped tile, and how tiles are dealt."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import budgets
import loops
import pytest
import torch
import triton
from budgets import Budget
from offline import SHARED, Compiled, catching

import tilewise
from tilewise import hopper, masks
from tilewise.arguments import prepare
from tilewise.hopper import launch, unread, variants
from tilewise.hopper.schedule import Bounds, deal
from tilewise.kernels import score
from tilewise.kernels.call import prepare as prepare_records
from tilewise.mask_algebra import Frame, interval
from tilewise.problem import Inputs, Problem
from tilewise.tiles import lookup

ALL = os.environ.get("TILEWISE_ALL_TILES") == "1"
HOPPER = {"multi_processor_count": 132}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's answers where there is none; plans made from them are forgotten afterwards."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**HOPPER))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launch.plan.cache_clear()
    yield
    launch.plan.cache_clear()


def posed_call(
    dims: tuple[int, int], packed: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Problem, Inputs]:
    """A call of 4 query heads over 2 with these head dims; a packed one has three members."""
    rows = (1280,) if packed else (2, 640)
    q = torch.empty(*rows, 4, dims[0], dtype=dtype)
    k, v = (torch.empty(*rows, 2, d, dtype=dtype) for d in dims)
    if packed:
        cu = torch.tensor([0, 300, 300, 1280], dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 980, "max_seqlen_k": 980}
    return prepare(q, k, v, **options)[:2]


def compiled(head_dim: int, packed: bool = False, **options: Any) -> Compiled:
    """The kernel for a call with this head dim."""
    with catching(90) as caught:
        hopper.forward(*posed_call((head_dim, head_dim), packed, **options))
    return caught[-1]


def products(head_dim: int) -> int:
    """Matrix instructions of a key tile: of 16 columns of q and k each, and of 16 keys for each part of v."""
    block_n = lookup("hopper", "forward", torch.bfloat16, head_dim).block_n
    high = launch.high(head_dim)
    columns = launch.block(head_dim) // 2 + high if high else launch.block(head_dim)
    return columns // 16 + block_n // 16 * (2 if high else 1)


def loops_of(kernel: Compiled, head_dim: int, consumers: int = 2) -> list[list[str]]:
    """The consumers' loops over key tiles."""
    found = loops.hot_loops(kernel.cubin, products(head_dim))
    assert len(found) == consumers
    return found


def check(kernel: Compiled) -> None:
    """What holds for every kernel, however rare its options."""
    assert kernel.shared <= SHARED[90]
    assert "C75" not in kernel.log, "ptxas serialises the matrix products"
    # Dropped without a word where the roles ask for more registers than there are.
    assert "setmaxnreg" in kernel.ptx


def check_order(loop: list[str]) -> None:
    """A buffer is released when all of a warpgroup have waited for the product that reads it, not before."""
    waited = False
    for text in loop:
        if "WARPGROUP.DEPBAR" in text:
            waited = True
        elif "BAR.SYNC" in text:
            waited = False
        assert not ("SYNCS.ARRIVE" in text and waited), "released before the warpgroup has met"


def check_budget(kernel: Compiled, found: list[list[str]], budget: Budget) -> None:
    """What holds for a kernel whose speed counts, and its loops."""
    check(kernel)
    assert kernel.spilled <= budget.spilled
    for loop in found:
        assert len(loop) <= budget.instructions
        assert loops.spills(loop) <= budget.spills
        check_order(loop)


DIMS = [64, 96, 128, 192, 256]
BANDS_OF_KERNELS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (100, 0)}]
SHIPPED = [(d, band) for d in DIMS for band in BANDS_OF_KERNELS if ALL or not band or (d == 128 and "window" in band)]


@pytest.mark.parametrize("head_dim, options", SHIPPED, ids=str)
def test_shipped_tile(elsewhere: None, head_dim: int, options: dict[str, Any]) -> None:
    kernel = compiled(head_dim, **options)
    found = loops_of(kernel, head_dim)
    check_budget(kernel, found, budgets.of((budgets.BAND if options else budgets.PLAIN)[head_dim]))
    if not options and head_dim in budgets.LOOPS and triton.__version__ == "3.6.0":
        assert [loops.digest(loop) for loop in found] == budgets.LOOPS[head_dim]


LONG_ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": dict,
    "causal": lambda: {"causal": True},
    "softcap": lambda: {"causal": True, "softcap": 30.0},
    "alibi": lambda: {"causal": True, "alibi_slopes": torch.ones(4)},
}


@pytest.mark.parametrize("name", LONG_ROWS if ALL else ["full"])
def test_tile_of_long_rows(elsewhere: None, name: str) -> None:
    q, k = (torch.empty(1, 16384, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    with catching(90) as caught:
        hopper.forward(*prepare(q, k, k, **LONG_ROWS[name]())[:2])
    (kernel,) = caught
    check_budget(kernel, loops_of(kernel, 64, consumers=3), budgets.of(budgets.LONG_ROWS[name]))


@pytest.mark.parametrize("rows, options", [(128, {"dropout_p": 0.1}), (192, {"softcap": 30.0}), (192, {})])
def test_long_rows_take_three_consumers_where_registers_last(rows: int, options: dict[str, Any]) -> None:
    q = torch.empty(1, 16384, 4, 64, dtype=torch.bfloat16, device="meta")
    assert variants.tile_of(prepare(q, q, q, causal=True, **options)[0]).block_m == rows


def _bend(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - 0.1 * s * s + 0.01 * (q - k) * (h + 1)


def _striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + 2 * k + h + b) % 3 != 0


def _tiles() -> tilewise.BlockMask:
    return tilewise.BlockMask(torch.ones(1, 4, 5, 5, dtype=torch.bool), 128, 128)


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "packed": lambda: {"packed": True},
    "packed_causal": lambda: {"packed": True, "causal": True},
    "packed_window": lambda: {"packed": True, "window": (100, 20)},
    "softcap": lambda: {"softcap": 30.0},
    "alibi": lambda: {"alibi_slopes": torch.ones(4)},
    "sinks": lambda: {"sinks": torch.ones(4)},
    "bias": lambda: {"bias": torch.empty(2, 4, 640, 640, dtype=torch.bfloat16)},
    "dropout": lambda: {"dropout_p": 0.1, "dropout_seed": 3},
    "score_mod": lambda: {"score_mod": tilewise.ScoreMod(_bend)},
    "documents": lambda: {"mask": masks.Document(torch.arange(640) // 100), "causal": True},
    "block_mask": lambda: {"mask": _tiles()},
    "predicate": lambda: {"mask": _striped},
    "out_dtype": lambda: {"out_dtype": torch.float32},
}
SAMPLE = {"packed_causal", "dropout", "block_mask"}


@pytest.mark.parametrize("name", [name for name in VARIANTS if ALL or name in SAMPLE])
def test_variant(elsewhere: None, name: str) -> None:
    kernel = compiled(128, **VARIANTS[name]())
    check_budget(kernel, loops_of(kernel, 128), budgets.of(budgets.VARIANTS[name]))


@pytest.mark.parametrize(
    "name, head_dim", [(n, d) for n in VARIANTS for d in DIMS if ALL or (n, d) == ("packed_window", 192)]
)
def test_variant_of_other_head_dims(elsewhere: None, name: str, head_dim: int) -> None:
    check(compiled(head_dim, **VARIANTS[name]()))


def _few_queries(**options: Any) -> tuple[Problem, Inputs]:
    q, k = torch.empty(2, 16, 8, 128, dtype=torch.float16), torch.empty(2, 640, 2, 128, dtype=torch.float16)
    return prepare(q, k, k, **options)[:2]


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": torch.ones(8), "sinks": torch.ones(8), "dropout_p": 0.2}])
def test_few_queries_share_a_tile_with_their_group(elsewhere: None, options: dict[str, Any]) -> None:
    with catching(90) as caught:
        hopper.forward(*_few_queries(**options))
    (kernel,) = caught
    found = loops_of(kernel, 128)
    if options:
        check(kernel)
    else:
        check_budget(kernel, found, budgets.of(budgets.PLAIN[128]))


def test_how_many_heads_share_a_tile() -> None:
    def stack(seqlen_q: int, heads: tuple[int, int], **options: Any) -> int:
        q = torch.empty(1, seqlen_q, heads[0], 64, dtype=torch.float16)
        k = torch.empty(1, 300, heads[1], 64, dtype=torch.float16)
        return variants.stack(prepare(q, k, k, **options)[0])

    assert [stack(n, (8, 2)) for n in (1, 32, 33)] == [4, 4, 1]
    assert [stack(1, heads) for heads in ((8, 8), (64, 1), (128, 1), (6, 2))] == [1, 64, 1, 1]


def test_absent_options_cost_nothing(elsewhere: None) -> None:
    """Where no more is asked than an output that TMA cannot store, the loop is no longer than the plain kernel's."""
    kernels = [compiled(64, **options) for options in ({}, {"out_dtype": torch.float32})]
    plain, other = (max(map(len, loops_of(kernel, 64))) for kernel in kernels)
    assert other <= plain


def test_head_dims_between_are_filled_with_zeros() -> None:
    dims = (8, 64, 72, 96, 104, 128, 136, 160, 192, 200, 256)
    assert [launch.block(d) for d in dims] == [64, 64, 128, 128, 128, 128, 256, 256, 256, 256, 256]
    assert [launch.high(d) for d in dims] == [0, 0, 16, 32, 0, 0, 16, 32, 64, 0, 0]
    for d in range(1, 257):
        native = launch.block(d) // 2 + launch.high(d) if launch.high(d) else launch.block(d)
        assert d <= native <= launch.block(d)


@pytest.mark.parametrize("dims", [(192, 128), (16, 160)], ids=str)
def test_values_of_another_head_dim(elsewhere: None, dims: tuple[int, int]) -> None:
    with catching(90) as caught:
        hopper.forward(*posed_call(dims, dtype=torch.float16))
    assert caught[0].spilled <= budgets.of((0, 8))
    check(caught[0])


def posed(problem: Problem) -> Problem:
    """The problem on a Hopper GPU."""
    return replace(problem, device=torch.device("cuda"), assumed_capability=(9, 0))


def test_what_it_declines_is_said() -> None:
    x, wide = torch.empty(1, 16, 2, 63, dtype=torch.float16), torch.empty(1, 16, 2, 264)
    assert hopper.unsupported_reasons(posed(prepare(x, x, x, causal=True, window=(3, 0))[0])) == []
    assert hopper.unsupported_reasons(posed(prepare(x, x, x)[0]), "backward") == []
    reasons = hopper.unsupported_reasons(posed(prepare(wide, wide, wide, softcap=3.0)[0]))
    assert reasons == ["torch.float32 inputs; it takes float16 and bfloat16", "a head dim above 256"]
    (here,) = hopper.unsupported_reasons(prepare(x, x, x)[0])
    assert "compute capability 9.0" in here
    (what,) = hopper.unsupported_reasons(posed(prepare(x, x, x, mask=lambda b, h, q, k: k > torch.ones(1))[0]))
    assert "functions that Triton can compile" in what


BANDS = [
    Bounds(1000, 1000, 0, None, None),
    Bounds(1000, 1000, 0, None, 0),
    Bounds(300, 1111, 811, None, 0),
    Bounds(1111, 300, -811, None, 0),
    Bounds(1000, 1000, 0, 100, 30),
]


@pytest.mark.parametrize("bounds", BANDS, ids=str)
def test_every_tile_is_dealt_once_and_no_program_waits_long(bounds: Bounds) -> None:
    pairs, programs = 12, 7
    dealt = deal(bounds, 128, 64, pairs, programs, torch.device("cpu"))
    tiles_m = -(-bounds.len_q // 128)
    numbers = dealt.table[dealt.table >= 0]
    assert sorted(numbers.tolist()) == list(range(pairs * tiles_m))
    assert dealt.table.shape == (dealt.rounds + 1, programs)
    assert bool((dealt.table[-1] < 0).all())
    lengths = torch.tensor([bounds.key_tiles(m * 128, 128, 64) + 1.5 for m in range(tiles_m)])
    loads = torch.where(dealt.table >= 0, lengths[dealt.table.clamp(min=0) % tiles_m], 0.0).sum(0)
    # Graham's bound for the longest-first rule, against the lower bounds of any schedule.
    best = max(float(loads.sum()) / programs, float(lengths.max()))
    assert float(loads.max()) <= 4 / 3 * best + 1e-6


@pytest.mark.parametrize("together", [1, 3, 12])
@pytest.mark.parametrize("bounds", BANDS, ids=str)
def test_pairs_in_groups_have_every_tile_once(bounds: Bounds, together: int) -> None:
    pairs, programs = 12, 7
    dealt = deal(bounds, 128, 64, pairs, programs, torch.device("cpu"), together)
    numbers = dealt.table[dealt.table >= 0]
    assert sorted(numbers.tolist()) == list(range(pairs * -(-bounds.len_q // 128)))
    assert bool((dealt.table[-1] < 0).all())


@pytest.mark.parametrize("right, most", [(None, 1.1), (0, 1.6)], ids=["full", "causal"])
def test_keys_come_from_memory_about_once(right: int | None, most: float) -> None:
    """256 pairs of 1024 keys of half a MiB, where 32 MiB stay in L2: their own 128 MiB are read, and little more."""
    bounds = Bounds(1024, 1024, 0, None, right)
    dealt = deal(bounds, 128, 128, 256, 132, torch.device("cpu"), 32)
    last: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for number in (int(x) for x in dealt.table.flatten() if x >= 0):
        if number // 8 not in last:
            missed += bounds.key_tiles(number % 8 * 128, 128, 128)
        last[number // 8] = None
        last.move_to_end(number // 8)
        if len(last) > 64:
            last.popitem(last=False)
    assert missed <= most * 256 * 8


@pytest.mark.parametrize("bounds", BANDS, ids=str)
def test_the_key_tiles_of_a_row_tile_cover_what_its_rows_see(bounds: Bounds) -> None:
    x = torch.empty(1, bounds.len_q, 1, 8)
    k = torch.empty(1, bounds.len_k, 1, 8)
    window = (bounds.left, bounds.right)
    problem, _, _ = prepare(x, k, k, window=None if window == (None, None) else window)
    frame = Frame(0, 1, bounds.len_q, bounds.len_k, bounds.off, x.device)
    lo, hi = interval(problem.options.mask.lower(frame), frame)
    for m0 in range(0, bounds.len_q, 128):
        first, last = int(lo[0, m0 : m0 + 128].min()), int(hi[0, m0 : m0 + 128].max())
        wanted = max(1, -(-last // 64) - min(first, bounds.len_k - 1) // 64)
        assert bounds.key_tiles(m0, 128, 64) == wanted


def test_keys_that_nobody_sees_are_cut_off() -> None:
    q, k = torch.empty(1, 10, 1, 64), torch.empty(1, 30, 1, 64)
    band, first, last = launch.bounds(prepare(q, k, k, window=(4, 2))[0])
    assert (first, last) == (16, 30)
    assert band == Bounds(10, 14, 4, 4, 2)
    assert launch.bounds(prepare(q, k, k, causal="top_left")[0])[1:] == (0, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_not_finite_is_found_by_its_exponent(dtype: torch.dtype) -> None:
    """The arithmetic of `unread.strange_signs` and `unread.clean`, for every number of 16 bits in both halves."""
    exponents, unit = unread.exponent_masks.fn(launch.GLUON[dtype])
    halves = torch.arange(1 << 16)
    strange = ~halves.to(torch.int16).view(dtype).isfinite()
    for words, at in ((halves << 16 | 0x3C00, 31), (halves | 0x3C00 << 16, 15)):
        signs = (words & exponents) + unit
        assert torch.equal((signs >> at & 1).bool(), strange)
        other = 15 if at == 31 else 31
        assert not (signs >> other & 1).any()
        cleaned = words & ~((signs >> 15 & 0x00010001) * 0xFFFF)
        assert torch.equal(cleaned >> at - 15 & 0xFFFF, torch.where(strange, 0, halves))
        assert torch.equal(cleaned >> other - 15 & 0xFFFF, words >> other - 15 & 0xFFFF)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_times_zero_only_what_is_not_finite_is_nan(dtype: torch.dtype) -> None:
    """The arithmetic of `unread.sum_of_zeros`, with every number of 16 bits in each of its places but the last."""
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype)
    zeros = torch.zeros_like(numbers)
    for at in range(4):
        a, b, c, d = (numbers if place == at else zeros for place in range(4))
        t, u = a * 0 + b, c * 0 + d
        found = (t * 0 + u) * 0 + zeros
        marks = found.view(torch.int16) & 0x7FFF
        assert torch.equal(marks != 0, ~numbers.isfinite())


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_one_role_looks_for_what_is_not_finite(elsewhere: None, options: dict[str, Any]) -> None:
    """Where there is a mask, the looker's instructions are there, and once: no consumer has them."""
    kernel = compiled(64, **options)
    # A tile of 128 keys of 64 columns: two numbers a word, for 64 threads.
    assert kernel.ptx.count("fma.rn.bf16x2") == (128 * 64 // 2 // 64 if options else 0)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """``a b + c`` rounded once: the product of two fp32 numbers is exact in fp64."""
    return (a.double() * b.double() + c).float()


@pytest.mark.parametrize("scale, cap", [(0.088, 30.0), (0.125, 50.0), (1.0, 0.5), (2e-3, 15.0)])
def test_the_softcap_of_small_scores_is_as_close_as_promised(scale: float, cap: float) -> None:
    """`score.near_factor` in the roundings of its instructions: 3e-7 of the cap is what docs/numerics.md allows."""
    coefficients = [torch.tensor(c.value) for c in (score._TANH_0, score._TANH_2, score._TANH_4, score._TANH_6)]
    x, c = torch.tensor(scale / cap), torch.tensor(scale) * math.log2(math.e)
    terms = []
    for coefficient in coefficients:
        terms.append(c * coefficient)
        c = c * (x * x)
    edge = float(score.NEAR.value * cap / scale)
    last = int(torch.tensor(edge).view(torch.int32))
    # Every 97th number of the eight binades below the edge.
    qk = torch.arange(last - (8 << 23), last, 97, dtype=torch.int32).view(torch.float32)
    y = qk * qk
    factor = _fused(y, _fused(y, _fused(y, terms[3], terms[2]), terms[1]), terms[0])
    true = cap * math.log2(math.e) * torch.tanh(qk.double() * scale / cap)
    assert float((_fused(qk, factor, 0.0) - true).abs().max()) < 2e-7 * cap * math.log2(math.e)


def test_the_exponential_without_a_special_function_is_as_close_as_promised() -> None:
    """The arithmetic of `score.bounded_weights`, over all that a softcap of 64 leaves."""
    cap = score.BOUNDED_CAP * math.log2(math.e)
    x = torch.linspace(-cap - score.BOUNDED.value, cap - score.BOUNDED.value, 1_000_003)
    whole = x + torch.tensor(score.INTEGER)
    rest = x - (whole - torch.tensor(score.INTEGER))
    p = torch.tensor(score.EXP2[3])
    for coefficient in score.EXP2[2::-1]:
        p = _fused(p, rest, torch.tensor(coefficient))
    found = p * (whole.view(torch.int32) << 23).view(torch.float32)
    # Scores of what a row does not see: 2**-127 is no normal number, which leaves 0 of it either way.
    hidden = torch.tensor(score.HIDDEN.value) + torch.tensor(score.INTEGER)
    assert int(hidden.view(torch.int32) << 23) == 0 and score.HIDDEN.value < -cap - score.BOUNDED.value
    assert float((found.double() / torch.exp2(x.double()) - 1.0).abs().max()) < 8e-5


def plan_of(active: torch.Tensor) -> torch.Tensor:
    """The lists of a block mask's tiles."""
    problem, inputs = posed_call((64, 64), mask=tilewise.BlockMask(active, 128, 128))
    variant, _ = prepare_records(problem, inputs).variant(launch.tile_of(problem))
    return variant.plan


def test_the_order_of_a_plan_has_every_tile_once(elsewhere: None) -> None:
    active = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    listed = variants.by_plan(plan_of(active), (2, 4, 5), 7, 1, 1 << 30, 1)
    numbers = listed.table[listed.table >= 0]
    assert listed.table.shape == (listed.rounds + 1, 7) and sorted(numbers.tolist()) == list(range(2 * 4 * 5))
    lengths = active.sum(-1).flatten()
    rounds = [lengths[row[row >= 0].long()] for row in listed.table[:-1]]
    assert all(int(a.min()) >= int(b.max()) for a, b in pairwise(rounds))
    # Whoever has none is so in the last round alone: barriers count on it. The row after it is read ahead.
    assert (listed.table[:-2] >= 0).all() and (listed.table[-1] < 0).all()


def test_a_plan_of_much_work_is_divided(elsewhere: None) -> None:
    """Two heads at a time here, which is four rounds and more; each block turns round, and the last one falls."""
    active = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    listed = variants.by_plan(plan_of(active), (2, 4, 5), 2, 1, 1 << 30, 1)
    rows = [row.flip(0) if n % 2 else row for n, row in enumerate(listed.table)]
    numbers = torch.cat(rows)[: 2 * 4 * 5].long()
    assert torch.equal(numbers // 10, torch.arange(4).repeat_interleave(10))
    for falls, block in zip((False, True, False, True), active.sum(-1).flatten()[numbers].split(10), strict=True):
        assert torch.equal(block, block.sort(descending=falls).values)


def test_without_keys_only_sinks_are_seen(elsewhere: None) -> None:
    sinks = torch.tensor([1.0, -2.0])
    q, k = torch.empty(5, 2, 64, dtype=torch.float16), torch.empty(0, 2, 64, dtype=torch.float16)
    cu = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 3, "max_seqlen_k": 0}
    out, lse = hopper.forward(*prepare(q, k, k, sinks=sinks, **lengths)[:2])
    assert not out.count_nonzero()
    assert torch.equal(lse[:, :3], sinks[:, None].expand(2, 3)) and (lse[:, 3:] == float("-inf")).all()
