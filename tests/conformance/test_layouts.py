"""Strides: a result depends on values, never on how they lie in memory, and bytes between them are never read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tilewise
from targets import Target

from .calls import Call, Draw, Shape, cotangents, dense
from .verify import assert_same, attend, compare, compute, verify

SHAPE = Shape(2, 35, 43, heads_q=2, heads_kv=2, head_dim=16, head_dim_v=16)
Layout = Callable[[torch.Tensor], torch.Tensor]


def _holed(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Storage of other sizes, all NaN."""
    return x.new_full(sizes, float("nan"))


def transposed(x: torch.Tensor) -> torch.Tensor:
    """A BHSD tensor seen as BSHD."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_second_row(x: torch.Tensor) -> torch.Tensor:
    """Rows apart, NaN between them."""
    b, s, h, d = x.shape
    return _holed(x, b, 2 * s, h, d)[:, ::2].copy_(x)


def slice_of_a_row(x: torch.Tensor) -> torch.Tensor:
    """Part of a wider head dim, at an odd offset, as a slice of a packed projection lies."""
    b, s, h, d = x.shape
    return _holed(x, b, s, h, 3 * d + 1)[..., d + 1 : 2 * d + 1].copy_(x)


def batch_inside(x: torch.Tensor) -> torch.Tensor:
    """Sequence-major storage."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def reversed_order(x: torch.Tensor) -> torch.Tensor:
    """Heads outermost, batch innermost of the outer dimensions."""
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout for layout in (transposed, every_second_row, slice_of_a_row, batch_inside, reversed_order)
}


def _base(target: Target, dtype: torch.dtype | None = None) -> Call:
    return dense(SHAPE, dtype or target.dtype, Draw(target.device), causal=True, window=(20, None), deterministic=True)


@pytest.mark.parametrize("names", ["q", "k", "v", pytest.param("kv", marks=pytest.mark.large), "qkv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs(target: Target, layout: str, names: str) -> None:
    call = _base(target)
    wanted = cotangents(call, Draw(target.device, seed=1))
    expected = compute(target, call, wanted)
    moved = call.with_tensors(**{name: LAYOUTS[layout](x) for name, x in call.tensors().items() if name in names})
    assert_same(compute(target, moved, wanted), expected)


def test_slices_of_one_projection(target: Target) -> None:
    """q, k, v as chunks of one tensor, as a fused qkv projection gives them."""
    x = Draw(target.device).normal(2, 31, 4 + 2 + 2, 16, dtype=target.dtype)
    q, k, v = x.split([4, 2, 2], dim=2)
    call = Call(q, k, v, {"causal": True})
    verify(target, call)
    wanted = cotangents(call, Draw(target.device, seed=1))
    alone = Call(q.contiguous(), k.contiguous(), v.contiguous(), {"causal": True, "deterministic": True})
    together = Call(q, k, v, {"causal": True, "deterministic": True})
    assert_same(compute(target, together, wanted), compute(target, alone, wanted))


@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "heads"])
def test_expanded_keys(target: Target, dim: int) -> None:
    """Keys and values with stride 0 over the batch or the heads; their gradient is that of each copy."""
    draw = Draw(target.device)
    sizes = [2, 21, 2, 16]
    sizes[dim] = 1
    k, v = (draw.normal(*sizes, dtype=target.dtype).expand(2, 21, 2, 16) for _ in range(2))
    call = Call(draw.normal(2, 21, 4, 16, dtype=target.dtype), k, v, {"causal": True})
    verify(target, call)


DO_LAYOUTS: dict[str, Layout] = {
    **LAYOUTS,
    "ones_of_stride_0": lambda x: torch.ones((), device=x.device, dtype=x.dtype).expand(x.shape),
    "one_row_of_stride_0": lambda x: x[:1, :1, :1].expand(x.shape),
    "dense_last_dim_elsewhere": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pytest.mark.parametrize("layout", DO_LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (20, None)}], ids=["plain", "window"])
def test_gradient_of_the_output(target: Target, layout: str, options: dict[str, object]) -> None:
    call = dense(SHAPE, target.dtype, Draw(target.device), deterministic=True, **options)
    do, _ = cotangents(call, Draw(target.device, seed=1))
    assert do is not None
    moved = DO_LAYOUTS[layout](do)
    got, expected = (compute(target, call, (x, None)) for x in (moved, moved.contiguous()))
    assert_same(got, expected)
    compare(call, got, (moved, None))


def test_gradient_of_the_lse(target: Target) -> None:
    """An LSE gradient with stride 0, as ``lse.mean()`` gives, and one that is transposed."""
    call = _base(target)
    _, dlse = cotangents(call, Draw(target.device, seed=1))
    assert dlse is not None
    for moved in (torch.ones((), device=target.device).expand(dlse.shape), dlse.mT.contiguous().mT):
        got, expected = (compute(target, call, (None, x)) for x in (moved, moved.contiguous()))
        assert_same(got, expected)
        compare(call, got, (None, moved))


def test_sum_and_mean_go_backward(target: Target) -> None:

    call = dense(Shape(1, 5, 5, 2, 2, 8, 8), torch.float32, Draw(target.device), causal=True)
    for loss in (torch.sum, torch.mean, lambda out: out[:, :, :1].sum()):
        v = call.v.detach().requires_grad_()
        out, _ = attend(target, call.with_tensors(v=v))
        loss(out).backward()
        given = torch.autograd.grad(loss(y := out.detach().requires_grad_()), y)[0]
        # Rows of P sum to 1: each column of dv sums to what each column of dO sums to.
        assert v.grad is not None
        torch.testing.assert_close(v.grad.sum(1), given.sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_bias(target: Target, layout: str) -> None:
    draw = Draw(target.device)
    bias = draw.normal(2, 2, 35, 43)
    moved = {
        "transposed": bias.mT.contiguous().mT,
        "sliced": torch.cat([bias, bias], dim=-1)[..., 43:],
        "expanded": bias[:1, :1].expand(2, 2, 35, 43),
    }[layout]
    verify(target, dense(SHAPE, target.dtype, draw, causal=True, bias=moved))


def test_masks_ids_slopes_and_sinks(target: Target) -> None:
    """The other tensors, none of them contiguous."""

    draw = Draw(target.device)
    ids_q, ids_k = draw.integers(3, 2, 2 * 35)[:, ::2], draw.integers(3, 43, 2).T
    mask = tilewise.Document(ids_q, ids_k) & tilewise.masks.Dense(draw.bools(2, 2, 43, 35).mT)
    slopes, sinks = draw.uniform(2, 2).T, draw.normal(4)[::2]
    verify(target, dense(SHAPE, target.dtype, draw, mask=mask, alibi_slopes=slopes, sinks=sinks))


def test_single_head_dim_of_any_stride(target: Target) -> None:
    """A head dim of 1 has no next element, so its stride says nothing."""
    draw = Draw(target.device)
    q, k, v = (draw.normal(1, 9, 2, 3, dtype=target.dtype)[..., :1] for _ in range(3))
    odd = torch.as_strided(q, q.shape, (*q.stride()[:3], 7))
    verify(target, Call(odd, k, v, {"causal": True}))
