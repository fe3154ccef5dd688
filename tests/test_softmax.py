"""The online-softmax state and the merge of two: any cut of the keys, in any order, gives the whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise
from tilewise import errors, reference, softmax
from tolerance import assert_close

NEG_INF = float("-inf")
Pair = tuple[torch.Tensor, torch.Tensor]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def scores(draw: Any) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Scores [3, N] of any size, some hidden, values [N, 2], and where to cut the keys."""
    n = draw(st.integers(0, 9))
    finite = st.floats(-1e4, 1e4, width=32)
    rows = draw(st.lists(st.lists(finite | st.just(NEG_INF), min_size=n, max_size=n), min_size=3, max_size=3))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
    return torch.tensor(rows, dtype=torch.float64).view(3, n), randn(n, 2, seed=n), [0, *cuts, n]


def of(s: torch.Tensor, v: torch.Tensor) -> Pair:
    """Output and LSE of one tile alone."""
    state = softmax.init((s.shape[0],), v.shape[-1], s)
    return softmax.finalize(softmax.update(state, s.clone(), v, s > NEG_INF) if s.shape[1] else state)


def plain(s: torch.Tensor, v: torch.Tensor) -> Pair:
    """By PyTorch's softmax, rows without keys set to what the contract says."""
    empty = (s == NEG_INF).all(-1)
    p = torch.softmax(s, dim=-1).masked_fill(empty[:, None], 0.0)
    return p @ v, torch.logsumexp(s, dim=-1).masked_fill(empty, NEG_INF)


def close(got: Pair, expected: Pair) -> None:
    for name, x, y in zip(("out", "lse"), got, expected, strict=True):
        assert_close(name, x, y, y, scale=4.0, dtype=x.dtype)


@given(scores())
def test_tiles_in_any_cut_are_the_whole(case: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    s, v, cuts = case
    state = softmax.init((3,), 2, s)
    for first, last in itertools.pairwise(cuts):
        if last > first:
            tile = s[:, first:last].clone()
            state = softmax.update(state, tile, v[first:last], tile > NEG_INF)
    close(softmax.finalize(state), plain(s, v))


@given(scores())
def test_merge_of_parts_is_the_whole(case: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    s, v, cuts = case
    parts = [of(s[:, a:b], v[a:b]) for a, b in itertools.pairwise(cuts)]
    left = parts[0]
    for part in parts[1:]:
        left = softmax.merge(*left, *part)
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = softmax.merge(*part, *right)
    close(left, plain(s, v))
    close(right, left)  # associative
    close(softmax.merge(*right, *of(s[:, :0], v[:0])), right)  # the empty state is the identity


@given(scores())
def test_merge_commutes_bit_for_bit(case: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    s, v, cuts = case
    a, b = of(s[:, : cuts[1]], v[: cuts[1]]), of(s[:, cuts[1] :], v[cuts[1] :])
    assert all(torch.equal(x, y) for x, y in zip(softmax.merge(*a, *b), softmax.merge(*b, *a), strict=True))


def test_a_sink_is_one_key_of_value_zero() -> None:
    s, v, sink = randn(3, 5), randn(5, 2, seed=1), randn(3, seed=2)
    got = softmax.finalize(softmax.update(softmax.init((3,), 2, s, sink), s.clone(), v))
    close(got, plain(torch.cat([s, sink[:, None]], -1), torch.cat([v, torch.zeros(1, 2, dtype=v.dtype)])))


def _state(layout: str, seed: int, hidden: bool = True) -> Pair:
    o = randn(*((2, 5, 3, 4) if layout == "dense" else (5, 3, 4)), seed=seed)
    lse = randn(*((2, 3, 5) if layout == "dense" else (3, 5)), seed=seed + 10)
    lse = lse.masked_fill(randn(*lse.shape, seed=seed + 20) > 0.8, NEG_INF) if hidden else lse
    return o.masked_fill((lse == NEG_INF).mT[..., None], 0.0), lse


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_empty_is_the_identity_exactly(layout: str) -> None:
    o, lse = _state(layout, 0)
    # The output beside an LSE of -inf counts for nothing, whatever it holds.
    nothing = torch.full_like(o, float("nan")), torch.full_like(lse, NEG_INF)
    for pair in (tilewise.merge_states(o, lse, *nothing), tilewise.merge_states(*nothing, o, lse)):
        assert torch.equal(pair[0], o) and torch.equal(pair[1], lse)
    both = tilewise.merge_states(*nothing, *nothing)
    assert not both[0].count_nonzero() and bool((both[1] == NEG_INF).all())


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_merge_states_is_differentiable(layout: str) -> None:
    states = [x.requires_grad_() for seed in (1, 2) for x in _state(layout, seed, hidden=False)]
    assert torch.autograd.gradcheck(tilewise.merge_states, states)


def test_gradients_where_one_side_or_both_are_empty() -> None:
    (o_a, lse_a), (o_b, lse_b) = _state("dense", 3), _state("dense", 4)
    leaves = [x.detach().requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    o, lse = tilewise.merge_states(*leaves)
    grads = torch.autograd.grad((o.sum(), lse.masked_fill(lse == NEG_INF, 0.0).sum()), leaves)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    empty = (lse_a == NEG_INF).mT[..., None]
    assert not grads[0][empty.expand(o_a.shape)].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_shards_of_the_keys_merge_to_the_call(dtype: torch.dtype) -> None:
    """Keys cut in three, one part empty of visible keys for most rows: output, LSE and all gradients."""
    q, k, v = (randn(2, 17, heads, 16, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def sharded(*x: torch.Tensor) -> Pair:
        total: Pair | None = None
        for first, last in ((0, 5), (5, 6), (6, 17)):
            mask = tilewise.Predicate(later, (first,))
            keys, values = x[1][:, first:last], x[2][:, first:last]
            part = tilewise.attention(x[0], keys, values, mask=mask, out_dtype=torch.float32, return_lse=True)
            total = part if total is None else tilewise.merge_states(*total, *part)
        assert total is not None
        return total

    got = sharded(*leaves)
    assert got[0].dtype == torch.float32
    ref = reference.attention(*leaves, causal=True, return_lse=True)
    rounded = reference.attention(*leaves, causal=True, return_lse=True, dtype=dtype)
    cotangents = randn(*ref[0].shape, seed=5), randn(*ref[1].shape, seed=6)

    def everything(pair: Pair) -> list[torch.Tensor]:
        grads = torch.autograd.grad(pair, leaves, [d.to(y.dtype) for d, y in zip(cotangents, pair, strict=True)])
        return [x.detach() for x in (*pair, *grads)]

    scale = float(v.detach().abs().max())
    for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), *map(everything, (got, ref, rounded)), strict=True):
        assert_close(name, x, y, z, scale, torch.float32 if name == "lse" else dtype)


def later(b: Any, h: Any, q: Any, k: Any, first: Any) -> Any:
    """Causal for keys that start at `first`."""
    return k + first <= q


@pytest.mark.parametrize(
    "change, kind",
    [
        (lambda s: (s[0], s[1], s[2][:, :4], s[3]), errors.ShapeError),
        (lambda s: (s[0], s[1].mT, s[2], s[3]), errors.ShapeError),
        (lambda s: (s[0], s[1], s[2], s[3][:1]), errors.ShapeError),
        (lambda s: (s[0], s[1], s[2].float(), s[3]), errors.DtypeError),
    ],
    ids=["o_b", "lse_a", "lse_b", "dtype"],
)
def test_states_that_do_not_go_together(change: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="supported"):
        tilewise.merge_states(*change((*_state("dense", 0), *_state("dense", 1))))
