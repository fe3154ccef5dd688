"""What holds bit for bit: pages are an address function, rows do not know their neighbours, unused memory is unread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from targets import Target

from .caches import CacheCall, Result, Sizes, assert_same, attend, bits, declines, draw_call, indexed, paged, verify
from .calls import Draw
from .features import striped
from .test_kvcache import rotary

SIZES = Sizes(used=(37, 5, 130), rows=2, new=2)
OPTIONS: list[dict[str, Any]] = [{"causal": True}, {"window": (33, 0)}, {"mask": striped, "split_size": 128}]


def _ids(options: dict[str, Any]) -> str:
    return "_".join(options)


@pytest.mark.parametrize("options", OPTIONS, ids=_ids)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_permuted_pages_are_a_contiguous_cache(target: Target, page_size: int, options: dict[str, Any]) -> None:
    call = draw_call(SIZES, target.dtype, Draw(target.device)).having(**options)
    if declines(target, call):
        return
    shuffled, in_order = (attend(target, paged(call, page_size, seed)) for seed in (3, None))
    assert_same(shuffled, in_order)
    assert_same(shuffled, attend(target, call))
    assert_same(attend(target, indexed(call)), attend(target, call))


def _alone(call: CacheCall, b: int) -> CacheCall:
    """Sequence b of a dense call in a batch of its own; its cache is the whole pool of pages."""
    names = ("cache_seqlens", "k_new", "v_new", "page_table", "cache_batch_idx", "cache_leftpad")
    own = {name: x[b : b + 1] for name, x in call.options.items() if name in names}
    return replace(call, q=call.q[b : b + 1]).having(**own)


@pytest.mark.parametrize("layout", [lambda call: paged(call, 16), indexed], ids=["pages", "rows"])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("split_size", [128, 256])
def test_a_row_does_not_know_its_neighbours(target: Target, split_size: int, rows: int, layout: Any) -> None:
    """With a fixed split size, a batch of one gives the bits of a batch of any."""
    sizes = Sizes(used=(700, 5, 130, 0, 384), rows=rows, new=rows, capacity=800)
    call = layout(draw_call(sizes, target.dtype, Draw(target.device))).having(split_size=split_size, causal=True)
    if declines(target, call):
        return
    together = attend(target, call)
    for b in range(5):
        alone = attend(target, _alone(call, b))
        assert torch.equal(alone.out[0], together.out[b]) and torch.equal(alone.lse[0], together.lse[b]), f"row {b}"


def test_a_row_does_not_know_the_capacity(target: Target) -> None:
    """Nor do unused pages at the end of its table change its bits, with a fixed split size."""
    call = paged(draw_call(SIZES, target.dtype, Draw(target.device)), 16).having(split_size=128)
    if declines(target, call):
        return
    table = call.options["page_table"]
    wider = call.having(page_table=torch.cat([table, torch.full_like(table, 10**6)], dim=1))
    assert_same(attend(target, wider), attend(target, call))


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 0)}, {"softmax_max": 3.0}], ids=_ids)
@pytest.mark.parametrize("layout", [lambda call: paged(call, 16), indexed], ids=["pages", "rows"])
def test_unused_slots(target: Target, layout: Any, options: dict[str, Any], fill: float) -> None:
    """What lies in slots that are not in use gives, bit for bit, what zeros give."""
    call = layout(draw_call(SIZES, target.dtype, Draw(target.device))).having(**options)
    if declines(target, call):
        return
    results = []
    for value in (fill, 0.0):
        k, v = (x.masked_fill(x.isnan(), value) for x in (call.k_cache, call.v_cache))
        results.append(attend(target, replace(call, k_cache=k, v_cache=v)))
    assert_same(*results)
    assert bool(torch.isfinite(results[0].out).all())


def test_pages_before_a_window_are_not_looked_up(target: Target) -> None:
    """Their ids may be anything, and so may what is before the window in the first page that is read."""
    call = paged(draw_call(SIZES, target.dtype, Draw(target.device)), 16).having(window=(9, 0))
    if declines(target, call):
        return
    expected = attend(target, call)
    table = call.options["page_table"].clone()
    # The rows of the last sequence are 130 and 131: they see keys 121 and on, of page 7.
    table[2, :7] = torch.tensor([-1, 10**6, 2**31 - 1, -(2**31), -7, 10**9, 5], dtype=torch.int32)
    assert_same(attend(target, call.having(page_table=table)), expected)
    for cache in (call.k_cache, call.v_cache):
        cache[int(table[2, 7]), : 121 - 112] = float("nan")
    assert_same(attend(target, call.having(page_table=table)), expected)


def test_empty_sequences(target: Target) -> None:
    """A padded batch: sequences of no keys are written as 0 and -inf, and change nobody else."""
    draw = Draw(target.device)
    call = paged(draw_call(Sizes(used=(37, 0, 130, 0), new=None), target.dtype, draw), 16).having(split_size=128)
    if declines(target, call):
        return
    got = attend(target, call)
    assert not got.out[[1, 3]].count_nonzero() and bool((got.lse[[1, 3]] == float("-inf")).all())
    others = replace(call, q=call.q[::2]).having(**{n: call.options[n][::2] for n in ("cache_seqlens", "page_table")})
    assert torch.equal(attend(target, others).out, got.out[::2])


def test_pages_that_sequences_share(target: Target) -> None:
    """A prefix in pages of two sequences is read by both."""
    call = paged(draw_call(Sizes(used=(64, 70), rows=1, new=1), target.dtype, Draw(target.device)), 16)
    table = call.options["page_table"].clone()
    table[1, :4] = table[0, :4]
    verify(target, call.having(page_table=table, causal=True))


def test_values_on_visible_nan_stay_where_they_are(target: Target) -> None:
    """A NaN among one sequence's keys in use reaches the rows that see it, and no other."""
    call = draw_call(Sizes(used=(37, 5), rows=3, new=3), target.dtype, Draw(target.device)).having(causal=True)
    if declines(target, call):
        return
    expected = attend(target, call)
    call.options["v_new"][0, 2] = float("nan")
    got = attend(target, call)
    assert torch.equal(got.out[0, :2], expected.out[0, :2]) and torch.equal(got.out[1], expected.out[1])
    assert bool(got.out[0, 2].isnan().all())


def test_repeated_calls(target: Target) -> None:
    call = paged(draw_call(Sizes(used=(700, 5, 130), capacity=800), target.dtype, Draw(target.device)), 16)
    if declines(target, call):
        return
    first = attend(target, call)
    for _ in range(3):
        again = attend(target, call)
        assert_same(again, first)
        assert torch.equal(bits(again.k_cache), bits(first.k_cache))


@pytest.mark.parametrize("phi", [-300.0, 0.0, 300.0])
def test_only_rows_that_stray_are_computed_again(target: Target, phi: float) -> None:
    """Scores near 200 in one sequence, near -200 in another, near 0 in the third; φ fits one of them or none."""
    draw = Draw(target.device)
    call = draw_call(Sizes(used=(300, 300, 300), new=None, capacity=300), target.dtype, draw)
    shift = torch.tensor([200.0, -200.0, 0.0], device=target.device)[:, None, None]
    q, k = call.q.clone(), call.k_cache.clone()
    q[..., 0], k[..., 0] = 4.0, shift
    call = replace(call, q=q, k_cache=k)
    for splits in ({"num_splits": 2}, {"split_size": 128}):
        verify(target, call.having(softmax_max=phi, **splits))


def test_rows_that_do_not_stray_keep_their_bits(target: Target) -> None:
    """Which rows are computed again is nobody else's business."""
    draw = Draw(target.device)
    call = draw_call(Sizes(used=(300, 300), new=None, capacity=300), target.dtype, draw)
    call = call.having(softmax_max=0.0, split_size=128)
    if declines(target, call):
        return
    calm, stormy = call, replace(call, q=torch.cat([call.q[:1], call.q[1:] * 1000.0]))
    results: list[Result] = [attend(target, x) for x in (calm, stormy)]
    assert torch.equal(results[0].out[0], results[1].out[0]) and torch.equal(results[0].lse[0], results[1].lse[0])


def test_a_prompt_in_pieces_is_the_whole_prompt(target: Target) -> None:
    """Chunked prefill, then single tokens, against one call: the keys are the same bytes, the rows the same values."""
    draw, sizes = Draw(target.device), Sizes(used=(0, 0), rows=50, new=50, capacity=64)
    whole = paged(draw_call(sizes, target.dtype, draw), 16).having(causal=True, rotary=rotary(16, draw))
    verify(target, whole)
    if declines(target, whole):
        return
    complete = attend(target, whole)
    k, v, done, rows = whole.k_cache, whole.v_cache, 0, []
    for step in (20, 1, 9, 17, 1, 1, 1):
        part = slice(done, done + step)
        own = {name: whole.options[name][:, part] for name in ("k_new", "v_new")}
        seqlens = torch.full((2,), done, dtype=torch.int32, device=target.device)
        got = attend(target, CacheCall(whole.q[:, part], k, v, whole.options).having(cache_seqlens=seqlens, **own))
        k, v, done = got.k_cache, got.v_cache, done + step
        rows.append(got.out)
    assert torch.equal(bits(k), bits(complete.k_cache)) and torch.equal(bits(v), bits(complete.v_cache))
    torch.testing.assert_close(torch.cat(rows, dim=1), complete.out, rtol=1e-3, atol=1e-3)
