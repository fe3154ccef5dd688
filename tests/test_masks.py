"""Masks: what a mask lowers to shows exactly what its definition shows, and expressions survive their encoding."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import BlockMask, Causal, Document, Interval, PrefixLM, Window, errors, masks
from tilewise.mask_algebra import Frame, Mask, Positions, interval
from tilewise.masks import Dense, Full, Predicate

BATCH, HEADS = 2, 3
CPU = torch.device("cpu")


def positions(seqlen_q: int, seqlen_k: int, off: int) -> Positions:
    shapes = ((BATCH, 1, 1, 1), (1, HEADS, 1, 1), (1, 1, seqlen_q, 1), (1, 1, 1, seqlen_k))
    b, h, q, k = (torch.arange(max(shape)).view(shape) for shape in shapes)
    return Positions(b, h, q, k, off)


def frame(seqlen_q: int, seqlen_k: int, off: int) -> Frame:
    return Frame(0, BATCH, seqlen_q, seqlen_k, off, CPU)


def defined(mask: Mask, seqlen_q: int, seqlen_k: int, off: int) -> torch.Tensor:
    return mask.visible(positions(seqlen_q, seqlen_k, off)).expand(BATCH, HEADS, seqlen_q, seqlen_k)


def lowered(mask: Mask, seqlen_q: int, seqlen_k: int, off: int) -> torch.Tensor:
    """What a kernel shows: interval and tile map and residual."""
    at, where = positions(seqlen_q, seqlen_k, off), frame(seqlen_q, seqlen_k, off)
    low = mask.lower(where)
    lo, hi = (x[:, None, :, None] for x in interval(low, where))
    seen = (at.k >= lo) & (at.k < hi)
    for part in (low.blocks, low.residual):
        if part is not None:
            seen = seen & part.visible(at)
    return seen.expand(BATCH, HEADS, seqlen_q, seqlen_k)


def bits(draw: Any, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))


def ids(draw: Any, length: int) -> torch.Tensor:
    rows = draw(st.sampled_from([None, 1, BATCH]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    drawn = torch.randint(-1, 4, (length,) if rows is None else (rows, length), generator=generator)
    return drawn.sort(dim=-1).values if draw(st.booleans()) else drawn


@st.composite
def leaf(draw: Any, seqlen_q: int, seqlen_k: int) -> Mask:
    kind = draw(
        st.sampled_from(
            ["full", "causal", "window", "document", "interval", "prefix", "lengths", "blocks", "dense", "modulo"]
        )
    )
    bound = st.one_of(st.none(), st.integers(0, 12), st.just(10**30))
    if kind == "causal":
        return Causal()
    if kind == "window":
        return Window(draw(bound), draw(bound))
    if kind == "document":
        return Document(ids(draw, seqlen_q), ids(draw, seqlen_k))
    if kind == "interval":
        lo, hi = (2 * ids(draw, seqlen_q) + shift for shift in (-3, 4))
        return Interval(draw(st.sampled_from([None, lo])), draw(st.sampled_from([None, hi.int()])))
    if kind == "prefix":
        return PrefixLM(draw(st.integers(0, 20)))
    if kind == "lengths":
        return PrefixLM(torch.tensor(draw(st.lists(st.integers(-2, 20), min_size=BATCH, max_size=BATCH))))
    if kind == "blocks":
        block_q, block_k = draw(st.integers(1, 5)), draw(st.integers(1, 5))
        lead = draw(st.sampled_from([(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)]))
        return BlockMask(bits(draw, *lead, -(-seqlen_q // block_q), -(-seqlen_k // block_k)), block_q, block_k)
    if kind == "dense":
        shape = draw(st.sampled_from([(BATCH, HEADS, seqlen_q, seqlen_k), (seqlen_q, 1), (1, 1, 1, seqlen_k)]))
        return Dense(bits(draw, *shape))
    if kind == "modulo":
        return Predicate(lambda b, h, q, k, step: (q + k + b + h) % step == 0, (draw(st.integers(1, 4)),))
    return Full()


@st.composite
def problem(draw: Any) -> tuple[Mask, int, int, int]:
    """An expression of masks, two lengths and the diagonal's offset."""
    seqlen_q, seqlen_k = draw(st.integers(1, 11)), draw(st.integers(1, 13))
    leaves = leaf(seqlen_q, seqlen_k)
    expression = st.recursive(
        leaves,
        lambda part: st.builds(lambda a, b, both: a & b if both else a | b, part, part, st.booleans()),
        max_leaves=4,
    )
    return draw(expression), seqlen_q, seqlen_k, draw(st.sampled_from([0, seqlen_k - seqlen_q]))


@settings(max_examples=300)
@given(problem())
def test_lowering_shows_what_the_definition_shows(case: tuple[Mask, int, int, int]) -> None:
    assert torch.equal(lowered(*case), defined(*case))


@settings(max_examples=100)
@given(problem())
def test_encoding_is_lossless(case: tuple[Mask, int, int, int]) -> None:
    mask, *shape = case
    tensors: list[torch.Tensor] = []
    again = masks.decode(ast.literal_eval(mask.encode(tensors)), tuple(tensors))
    assert torch.equal(defined(again, *shape), defined(mask, *shape))
    assert again.encode([]) == mask.encode([])


@settings(max_examples=60)
@given(problem(), st.integers(1, 6))
def test_from_mask_covers_the_mask_tightly(case: tuple[Mask, int, int, int], block: int) -> None:
    mask, seqlen_q, seqlen_k, _ = case
    cover = BlockMask.from_mask(mask, seqlen_q, seqlen_k, block=block, batch=BATCH, heads=HEADS)
    shape = (seqlen_q, seqlen_k, seqlen_k - seqlen_q)
    seen = defined(mask, *shape)
    assert not (seen & ~defined(cover, *shape)).any()
    assert torch.equal(defined(mask & cover, *shape), seen)
    for b, h, i, j in cover.tiles.nonzero().tolist():
        assert seen[b, h, i * block : (i + 1) * block, j * block : (j + 1) * block].any()


@pytest.mark.parametrize("off", [0, 3])
def test_simple_masks_need_no_element_test(off: int) -> None:
    bounds = torch.arange(7)
    plain = [Full(), Causal(), Window(2, 1), PrefixLM(3), Document.from_lengths([2, 0, 5])]
    for mask in [
        *plain,
        Interval(bounds - 2, bounds),
        Causal() & Window(3, None),
        Causal() & Document.from_lengths([2, 5]) & PrefixLM(2),
    ]:
        low = mask.lower(frame(7, 7, off))
        assert low.residual is None and low.blocks is None


def test_documents_in_runs_need_no_element_test() -> None:
    low = Document(torch.tensor([3, 3, 1, 1, 2])).lower(frame(5, 5, 0))
    assert low.residual is None
    scattered = Document(torch.tensor([3, 1, 3, 1, 2]))
    assert scattered.lower(frame(5, 5, 0)).residual is scattered
    # Without a promise, tensors elsewhere are not read to find out.
    assert Document(torch.tensor([0, 0, 1]), contiguous=False).lower(frame(3, 3, 0)).residual is not None


def test_documents_that_no_key_has() -> None:
    mask = Document(torch.tensor([0, 5, -1]), torch.tensor([0, 0, 7, 7]))
    assert defined(mask, 3, 4, 1)[0, 0].tolist() == [[True, True, False, False], [False] * 4, [False] * 4]
    assert torch.equal(lowered(mask, 3, 4, 1), defined(mask, 3, 4, 1))


def test_block_maps_of_one_size_stay_maps() -> None:
    a, b = BlockMask.longformer(64, block=8), BlockMask.bigbird(64, block=8, seed=1)
    low = (a & b).lower(frame(64, 64, 0))
    assert low.residual is None and low.blocks is not None
    assert torch.equal(low.blocks.tiles, a.tiles & b.tiles)
    either = a | b
    assert isinstance(either, BlockMask) and torch.equal(either.tiles, a.tiles | b.tiles)
    assert (a & BlockMask.longformer(64, block=4)).lower(frame(64, 64, 0)).residual is not None


def test_words_instead_of_operators_are_refused() -> None:
    for wrong in (lambda: Causal() and Window(1, 0), lambda: Causal() or Window(1, 0), lambda: not Causal()):
        with pytest.raises(errors.ArgumentError, match="write a & b, not 'a and b'"):
            wrong()


def test_presets_have_the_density_of_their_papers() -> None:
    n = 32
    longformer = BlockMask.longformer(n * 16, block=16, window_blocks=2, global_blocks=1)
    band = sum(min(i, 2) + 1 + min(n - 1 - i, 2) for i in range(n))
    # The first row and column of tiles, as far as the band does not hold them.
    expected = band + 2 * (n - 3)
    assert int(longformer.tiles.sum()) == expected
    assert longformer.density == pytest.approx(expected / n**2)
    assert f"{longformer.density:.1%} visible, {1 - longformer.density:.1%} sparse" in str(longformer)

    bigbird = BlockMask.bigbird(n * 16, block=16, window_blocks=2, global_blocks=1, random_blocks=3, heads=2, seed=4)
    assert bigbird.tiles.shape == (1, 2, n, n)
    assert (bigbird.tiles | longformer.tiles).equal(bigbird.tiles)
    extra = (bigbird.tiles & ~longformer.tiles).sum(-1)
    assert int(extra.max()) <= 3 and int(extra.sum()) > n
    assert not torch.equal(bigbird.tiles[:, 0], bigbird.tiles[:, 1])
    again = BlockMask.bigbird(n * 16, block=16, window_blocks=2, global_blocks=1, random_blocks=3, heads=2, seed=4)
    assert torch.equal(again.tiles, bigbird.tiles)
    assert BlockMask(torch.zeros(1, 1, 0, 0, dtype=torch.bool), 16, 16).density == 0.0


def test_alignment_of_the_call_reaches_all_parts() -> None:
    x, y = torch.randn(1, 4, 1, 8), torch.randn(1, 9, 1, 8)
    for mask in (Window(2, 0), PrefixLM(1), Predicate(lambda b, h, q, k: k <= q + 20)):
        got = tilewise.attention(x, y, y, mask=mask & Causal("top_left"))
        at = positions(4, 9, 0)
        seen = (mask & Causal()).visible(at)[:1, :1]
        torch.testing.assert_close(got, tilewise.attention(x, y, y, mask=seen))
    assert (Causal("top_left") & Window(1, 1)).alignment() == "top_left"
