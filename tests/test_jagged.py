"""Nested tensors in jagged layout: each part is a sequence of its own, in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise
from tilewise.errors import ArgumentError, ShapeError, UnsupportedError

LENGTHS_Q, LENGTHS_K = [3, 0, 5, 1], [4, 2, 7, 0]


def parts(lengths: list[int], *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + shape[0])
    return [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in lengths]


def nest(tensors: list[torch.Tensor], like: torch.Tensor | None = None) -> torch.Tensor:
    values = torch.cat(tensors)
    offsets = torch.tensor([0, *map(len, tensors)]).cumsum(0) if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()


def inputs(lengths_q: list[int] = LENGTHS_Q, lengths_k: list[int] = LENGTHS_K) -> list[torch.Tensor]:
    q, k = nest(parts(lengths_q, 4, 8)), nest(parts(lengths_k, 2, 8))
    return [q, k, nest(parts(lengths_k, 2, 6), like=k)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "window": (3, 0)},
    "predicate": {"mask": lambda b, h, q, k: (q + k) % 2 == 0},
    "modifiers": {"alibi_slopes": torch.linspace(0.1, 1, 4), "sinks": torch.linspace(0, 1, 4), "softcap": 3.0},
    "scale": {"softmax_scale": 0.5, "out_dtype": None, "deterministic": True, "backend": "cpu", "validate": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_part_is_a_call_of_its_own(name: str) -> None:
    results = []
    for nested in (True, False):
        given = inputs()
        if nested:
            out, lse = tilewise.attention(*given, **OPTIONS[name], return_lse=True)
            assert out.shape[:3] == (4, given[0].shape[1], 4)
            assert lse.shape == (4, 4, given[0].shape[1])
            outs, lses = out.values(), lse.values()
        else:
            pairs = [
                tilewise.attention(*(x[None] for x in part), **OPTIONS[name], return_lse=True)
                for part in zip(*(x.unbind() for x in given), strict=True)
            ]
            outs, lses = torch.cat([out[0] for out, _ in pairs]), torch.cat([lse[0] for _, lse in pairs], dim=1)
        (outs.square().sum() + lses.masked_fill(lses.isinf(), 0).sum()).backward()
        results.append([outs, lses, *(x.grad.values() for x in given)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_dropout_counts_members_as_varlen_does() -> None:
    q, k, v = inputs()
    out = tilewise.attention(q, k, v, dropout_p=0.4, dropout_seed=3)
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    packed = (q.values(), k.values(), v.values(), q.offsets(), k.offsets())
    assert torch.equal(out.values(), tilewise.attention_varlen(*packed, **lengths, dropout_p=0.4, dropout_seed=3))


def test_results_go_on_with_the_tensors_that_they_came_from() -> None:
    x = nest(parts([3, 1, 5], 2, 8))
    out = tilewise.attention(x, x, x, causal=True)
    (out + x).values().sum().backward()
    assert x.grad is not None
    assert torch.nn.functional.layer_norm(out, (8,)).shape == x.shape


def test_autocast() -> None:
    x = nest(parts([3, 2], 2, 8)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tilewise.attention(x, x, x).dtype == torch.bfloat16


# A warning that PyTorch has for its own helpers.
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is_fx_tracing")
@pytest.mark.parametrize("known", [True, False], ids=["longest_known", "longest_unknown"])
def test_compiled_lengths_share_a_graph(known: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(x: torch.Tensor) -> Any:
        return tilewise.attention(x, x, x, causal=True)

    compiled: Callable[..., Any] = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in ([3, 5, 2], [4, 4, 1], [7, 2, 6], [2, 9, 9], [8, 1, 3], [1, 4, 5]):
        x = nest(parts(lengths, 2, 8))
        if known:
            x._get_max_seqlen()
        got, expected = compiled(x), attend(x)
        assert got.shape == x.shape
        torch.testing.assert_close(got.values(), expected.values())
        grads = (torch.autograd.grad(out.values().square().sum(), x)[0] for out in (got, expected))
        torch.testing.assert_close(*(grad.values() for grad in grads))
    # One for the first lengths, and few for all others: PyTorch learns one by one which sizes vary.
    assert counter.frame_count <= 4
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_what_is_refused() -> None:
    q, k, v = inputs()
    dense = torch.zeros(4, 5, 2, 8, dtype=torch.float64)
    strided = torch.nested.nested_tensor([torch.zeros(2, 2, 8)], layout=torch.strided)
    narrowed = torch.nested.narrow(dense, 1, torch.zeros(4).long(), torch.tensor([1, 2, 3, 4]), layout=torch.jagged)
    for given, error, message in (
        ((q, dense, dense), ShapeError, r"k: got a dense tensor \[4, 5, 2, 8\] beside nested ones.*Fix: nest it too"),
        ((dense, k, v), ShapeError, "q: got a dense tensor"),
        ((q, k, nest(parts([4, 2, 6, 1], 2, 6))), ArgumentError, "k, v: got parts of k.*k.offsets()"),
        (
            (q, k.transpose(1, 2), v.transpose(1, 2)),
            ShapeError,
            r"k: got a nested tensor of shape.*\.transpose\(1, 2\)",
        ),
        ((strided,) * 3, UnsupportedError, "q: got a nested tensor of layout torch.strided.*layout=torch.jagged"),
        ((narrowed,) * 3, UnsupportedError, r"q: got a nested tensor with holes.*\.contiguous\(\)"),
        ((nest(parts([3, 3], 4, 8)), k, v), ShapeError, "k: got batch 4, q's is 2"),
    ):
        with pytest.raises(error, match=message):
            tilewise.attention(*given)
    with pytest.raises(UnsupportedError, match="bias: got a tensor with packed sequences"):
        tilewise.attention(q, k, v, bias=torch.zeros(1, dtype=torch.float64))
