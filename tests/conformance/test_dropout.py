"""Dropout in a call: the mask is a function of position and seed alone, and the backward pass replays it."""

from __future__ import annotations

import math

import pytest
import torch

from targets import Target
from tilewise import dropout

from .calls import Call, Draw, Shape, cotangents, dense, offsets
from .verify import assert_same, attend, compute, verify

P, SEED = 0.3, 1234567890123


def kept(target: Target, call: Call) -> torch.Tensor:
    """The weights that a call uses, [B, Hq, Sq, Sk], read out with values that are one-hot columns."""
    seqlen_k, dims = call.k.shape[1], 64
    columns = []
    for first in range(0, seqlen_k, dims):
        eye = torch.eye(seqlen_k, device=target.device)[:, first : first + dims]
        v = eye[None, :, None].expand(call.k.shape[0], -1, call.k.shape[2], -1).contiguous()
        out, _ = attend(target, call.with_tensors(v=v))
        columns.append(out)
    return torch.cat(columns, dim=-1).transpose(1, 2)


def _call(target: Target, shape: Shape, **options: object) -> Call:
    call = dense(shape, torch.float32, Draw(target.device), dropout_p=P, dropout_seed=SEED, **options)
    return call.with_tensors(q=torch.zeros_like(call.q))


def _expected(shape: Shape, device: str) -> torch.Tensor:
    head = torch.arange(shape.batch * shape.heads_q, device=device).view(shape.batch, shape.heads_q, 1, 1)
    rows = torch.arange(shape.seqlen_q, device=device)
    return dropout.keep_mask(SEED, head, rows, (0, shape.seqlen_k), dropout.keep_threshold(P))


@pytest.mark.parametrize("shape", [Shape(2, 66, 97, 4, 2), Shape(1, 1, 33, 3, 1), Shape(1, 40, 5)], ids=str)
def test_weights_are_the_definition(target: Target, shape: Shape) -> None:
    """Uniform attention: each weight is 1/Sk, dropped or scaled up by the exact inverse of the keep probability."""
    weights = kept(target, _call(target, shape))
    expected = _expected(shape, target.device)
    assert torch.equal(weights != 0, expected)
    scale = dropout.scale(dropout.keep_threshold(P)) / shape.seqlen_k
    torch.testing.assert_close(weights, expected * scale)


def test_position_decides_not_the_call(target: Target) -> None:
    """A row or a key has the same fate in a longer call, under a mask, and alone in a packed one."""
    shape = Shape(1, 50, 70, 2, 1)
    whole = _expected(shape, target.device)
    windowed = kept(target, _call(target, shape, causal=True, window=(30, None)))
    rows, keys = torch.arange(50, device=target.device)[:, None] + 20, torch.arange(70, device=target.device)
    visible = (keys <= rows) & (keys >= rows - 30)
    assert torch.equal(windowed != 0, whole & visible)

    cu = offsets([50], target.device), offsets([70], target.device)
    call = _call(target, shape)
    alone = Call(call.q[0], call.k[0], call.v[0], {**call.options, "max_seqlen_q": 50, "max_seqlen_k": 70}, cu)
    out, lse = attend(target, alone)
    expected, expected_lse = attend(target, call)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected_lse[0])


def test_lse_and_normaliser_know_nothing_of_it(target: Target) -> None:
    call = dense(Shape(1, 33, 65), torch.float32, Draw(target.device), causal=True)
    _, plain = attend(target, call)
    call.options.update(dropout_p=P, dropout_seed=SEED)
    torch.testing.assert_close(attend(target, call)[1], plain)


@pytest.mark.parametrize("tensor", [False, True], ids=["int", "tensor"])
def test_seed(target: Target, tensor: bool) -> None:
    """The same seed, as an int or a tensor, repeats bit for bit; another gives another mask."""
    call = dense(
        Shape(1, 40, 50), torch.float32, Draw(target.device), dropout_p=P, dropout_seed=SEED, deterministic=True
    )
    wanted = cotangents(call, Draw(target.device, seed=1))
    first = compute(target, call, wanted)
    seed = torch.tensor(SEED, device=target.device) if tensor else SEED
    call.options["dropout_seed"] = seed
    assert_same(compute(target, call, wanted), first)
    call.options["dropout_seed"] = seed + 1
    assert not torch.equal(compute(target, call, wanted).out, first.out)


def test_seed_from_the_generator(target: Target) -> None:
    """Without a seed, `torch.manual_seed` decides; a call moves the generator on."""
    call = dense(Shape(1, 40, 50), torch.float32, Draw(target.device), dropout_p=P)
    torch.manual_seed(7)
    first, second = (attend(target, call)[0] for _ in range(2))
    torch.manual_seed(7)
    assert torch.equal(attend(target, call)[0], first) and not torch.equal(first, second)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.999])
def test_any_probability(target: Target, p: float) -> None:
    verify(target, dense(Shape(2, 37, 53, 4, 2), target.dtype, Draw(target.device), dropout_p=p, dropout_seed=3))


def test_gradients_belong_to_the_same_mask(target: Target) -> None:
    """Through dO = 1 and uniform weights, a key's gradient counts the rows that kept it."""
    shape = Shape(2, 66, 97, 4, 2)
    got = compute(target, _call(target, shape), (torch.ones(2, 66, 4, 16, device=target.device), None))
    mask = _expected(shape, target.device)
    counts = mask.sum(2).view(2, 2, 2, 97).sum(2).mT  # over rows, then over each group of 2 query heads
    scale = dropout.scale(dropout.keep_threshold(P)) / shape.seqlen_k
    torch.testing.assert_close(got.grads["v"], (counts * scale)[..., None].expand(2, 97, 2, 16))


def test_expectation_is_unbiased(target: Target) -> None:
    """The mean over seeds is the output without dropout, within five standard errors."""
    call = dense(Shape(1, 4, 64, 1, 1), torch.float32, Draw(target.device), dropout_p=P)
    exact, _ = attend(target, Call(call.q, call.k, call.v))
    runs = 48
    outs = []
    for seed in range(runs):
        call.options["dropout_seed"] = seed
        outs.append(attend(target, call)[0])
    stacked = torch.stack(outs)
    error = (stacked.mean(0) - exact).abs() / (stacked.std(0) / math.sqrt(runs))
    assert float(error.max()) < 5.0
