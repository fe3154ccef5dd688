"""torch.vmap: each element's result and gradients are those of a call of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise import BlockMask, Document, Predicate, PrefixLM, ScoreMod, batching

SIZE = 3


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


QKV = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6)}


def assert_like_a_loop(
    attend: Callable[..., Any], tensors: dict[str, torch.Tensor], dims: dict[str, int | None]
) -> None:
    """Results, gradients for each element, and gradients of their sum, against calls in turn."""

    def result(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(**tensors, return_lse=True)

    def loss(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        out, lse = result(tensors)
        return out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()

    def turns(function: Callable[..., Any]) -> list[Any]:
        return [
            function({name: x if dims[name] is None else x.select(dims[name], i) for name, x in tensors.items()})
            for i in range(SIZE)
        ]

    for got, want in zip(torch.vmap(result, (dims,))(tensors), zip(*turns(result), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
    each = torch.vmap(torch.func.grad(loss), (dims,))(tensors)
    total = torch.func.grad(lambda x: torch.vmap(loss, (dims,))(x).sum())(tensors)
    expected = turns(torch.func.grad(loss))
    for name, dim in dims.items():
        stacked = torch.stack([grads[name] for grads in expected])
        torch.testing.assert_close(each[name], stacked)
        torch.testing.assert_close(total[name], stacked.sum(0) if dim is None else stacked.movedim(0, dim))


def inputs(**dims: int | None) -> tuple[dict[str, torch.Tensor], dict[str, int | None]]:
    """q, k, v with a mapped dimension where `dims` says, by default in front."""
    dims = {**dict.fromkeys(QKV, 0), **dims}
    shapes = {name: list(shape) for name, shape in QKV.items()}
    for name, dim in dims.items():
        if dim is not None:
            shapes[name].insert(dim, SIZE)
    return {name: randn(*shape) for name, shape in shapes.items()}, dims


def later(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k >= q + b + h


OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "causal": (True, {"causal": True, "window": (3, 0), "softcap": 4.0}),
    "prefix": (True, {"mask": PrefixLM(3)}),
    "prefixes": (False, {"mask": PrefixLM(torch.tensor([1, 4]))}),
    "documents": (True, {"mask": Document(torch.arange(5) // 2, torch.arange(7) // 2)}),
    "documents_of_entries": (False, {"mask": Document(torch.arange(10).view(2, 5) // 3, torch.arange(7) // 2)}),
    "boolean": (True, {"mask": randn(4, 5, 7) > 0}),
    "blocks": (True, {"mask": BlockMask(randn(1, 4, 3, 4) > 0, 2, 2) | PrefixLM(1)}),
    "blocks_of_entries": (False, {"mask": BlockMask(randn(2, 1, 3, 4) > 0, 2, 2)}),
    "predicate": (False, {"mask": Predicate(later)}),
    "score_mod": (
        False,
        {"score_mod": ScoreMod(lambda s, b, h, q, k: s * (b + 1), lambda ds, s, b, h, q, k: ds * (b + 1))},
    ),
    "dropout": (False, {"dropout_p": 0.4, "dropout_seed": 9}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each mapped pass, whether it was folded into one call."""
    seen: list[bool] = []
    foldable = batching._foldable
    monkeypatch.setattr(batching, "_foldable", lambda *given: seen.append(foldable(*given)) or seen[-1])
    return seen


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, calls: list[bool]) -> None:
    folds, options = OPTIONS[name]
    assert_like_a_loop(lambda **x: tilewise.attention(**x, **options), *inputs())
    assert calls
    assert set(calls) == {folds}


@pytest.mark.parametrize(
    "dims", [{"q": 1}, {"k": None}, {"q": None}, {"k": None, "v": None}, {"v": 2, "q": 3}], ids=str
)
def test_where_the_mapped_dimension_is(dims: dict[str, int | None]) -> None:
    assert_like_a_loop(lambda **x: tilewise.attention(**x, causal=True), *inputs(**dims))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "name, shape",
    [("bias", (2, 4, 5, 7)), ("bias", (4, 5, 7)), ("alibi_slopes", (4,)), ("alibi_slopes", (2, 4)), ("sinks", (4,))],
)
def test_modifiers_and_their_gradients(name: str, shape: tuple[int, ...], mapped: bool) -> None:
    tensors, dims = inputs(v=None)
    tensors[name] = randn(SIZE, *shape) if mapped else randn(*shape)
    assert_like_a_loop(lambda **x: tilewise.attention(**x, causal=True), tensors, {**dims, name: 0 if mapped else None})


def test_masks_that_are_mapped() -> None:
    tensors, _ = inputs()
    masks = randn(SIZE, 2, 1, 5, 7) > 0
    got = torch.vmap(lambda q, k, v, mask: tilewise.attention(q, k, v, mask=mask))(*tensors.values(), masks)
    for i in range(SIZE):
        torch.testing.assert_close(got[i], tilewise.attention(*(x[i] for x in tensors.values()), mask=masks[i]))


def test_packed_sequences() -> None:
    offsets = torch.tensor([0, 3, 3, 10])

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return tilewise.attention_varlen(
            q, k, v, offsets, offsets, max_seqlen_q=7, max_seqlen_k=7, causal=True, **options
        )

    tensors = {"q": randn(SIZE, 10, 4, 8), "k": randn(SIZE, 10, 2, 8), "v": randn(10, 2, 6)}
    assert_like_a_loop(attend, tensors, {"q": 0, "k": 0, "v": None})


def test_two_maps() -> None:
    q, k = randn(SIZE, 4, 2, 5, 4, 8), randn(4, 2, 7, 2, 8)

    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, k, causal=True)

    got = torch.vmap(torch.vmap(attend), (0, None))(q, k)
    for i in range(SIZE):
        for j in range(4):
            torch.testing.assert_close(got[i, j], attend(q[i, j], k[j]))


def test_jacobians() -> None:
    q, k, v = (randn(*shape)[:1, :3] for shape in QKV.values())
    attend = lambda *x: tilewise.attention(*x, causal=True, window=(1, 0))  # noqa: E731 - it is passed on twice
    got = torch.func.jacrev(attend, argnums=(0, 1, 2))(q, k, v)
    expected = torch.autograd.functional.jacobian(attend, (q, k, v))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_drawn_dropout_follows_the_randomness_asked_for(randomness: str) -> None:
    x = randn(1, 8, 2, 8).expand(SIZE, 1, 8, 2, 8)
    attend = torch.vmap(lambda x: tilewise.attention(x, x, x, dropout_p=0.5), randomness=randomness)
    results = attend(x)
    assert all(torch.equal(results[0], results[i]) == (randomness == "same") for i in (1, 2))


def test_drawn_dropout_is_pytorchs_error_otherwise() -> None:
    x = randn(SIZE, 1, 8, 2, 8)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda x: tilewise.attention(x, x, x, dropout_p=0.5))(x)
