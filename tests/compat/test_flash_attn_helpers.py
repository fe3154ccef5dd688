"""flash-attn's padding helpers and rotary layer, against what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise import errors
from tilewise.compat import flash_attn_padding as padding
from tilewise.compat import flash_attn_rotary as rotary
from tilewise.compat.flash_attn_rotary_kernel import apply_rotary

from .test_flash_attn import described, draw

SIGNATURES = {
    padding.index_first_axis: "input, indices",
    padding.index_first_axis_residual: "input, indices",
    padding.index_put_first_axis: "values, indices, first_axis_dim",
    padding.pad_input: "hidden_states, indices, batch, seqlen",
    padding.unpad_input: "hidden_states, attention_mask, unused_mask=None",
    padding.unpad_input_for_concatenated_sequences: "hidden_states, attention_mask_in_length",
    rotary.rotate_half: "x, interleaved=False",
    rotary.apply_rotary_emb_torch: "x, cos, sin, interleaved=False",
    rotary.apply_rotary_emb: "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    rotary.apply_rotary_emb_qkv_: "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
    "num_heads_q=None",
    rotary.apply_rotary_emb_kv_: "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    rotary.RotaryEmbedding: "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    rotary.RotaryEmbedding.forward: "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    apply_rotary: "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
    "inplace=False, conjugate=False",
}


@pytest.mark.parametrize("fn", SIGNATURES, ids=lambda fn: fn.__qualname__)
def test_signatures(fn: Callable[..., Any]) -> None:
    assert described(fn) == SIGNATURES[fn]


MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)], ids=str)
def test_unpad_and_pad(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    x = draw(3, 4, *trailing).requires_grad_()
    rows, indices, cu_seqlens, longest, used = padding.unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 3, 8, 9, 10, 11]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 3, 7], 4, [3, 0, 4])
    assert cu_seqlens.dtype == used.dtype == torch.int32
    padded = padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(padding.pad_input(rows, indices.int(), 3, 4), padded)
    kept = MASK.view(3, 4, *[1 for _ in trailing])
    assert torch.equal(padded, x * kept)
    (dx,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(dx, kept.expand_as(x).to(x.dtype))


def test_rows_that_are_there_but_unused() -> None:
    unused = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    x = draw(3, 4, 2)
    rows, _, cu_seqlens, longest, used = padding.unpad_input(x, MASK, unused)
    assert torch.equal(rows, x[(MASK + unused).bool()])
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 5, 9], 4, [3, 0, 4])
    assert torch.equal(padding.unpad_input(x, MASK.bool(), unused.bool())[0], rows)


def test_several_sequences_in_a_row() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = draw(3, 6, 2)
    rows, indices, cu_seqlens, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert (cu_seqlens.tolist(), longest, indices.shape) == ([0, 2, 5, 8, 10, 16], 6, (16,))


def test_nothing_is_left() -> None:
    rows, indices, cu_seqlens, longest, _ = padding.unpad_input(draw(2, 3, 4), torch.zeros(2, 3))
    assert (rows.shape, longest, cu_seqlens.tolist()) == ((0, 4), 0, [0, 0, 0])
    assert not padding.pad_input(rows, indices, 2, 3).any()


def test_rows_and_what_goes_around_them() -> None:
    x, indices = draw(5, 3).requires_grad_(), torch.tensor([0, 4])
    rows, residual = padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    (dx,) = torch.autograd.grad(rows.sum() + 2.0 * residual.sum(), x)
    assert dx[:, 0].tolist() == [3.0, 2.0, 2.0, 2.0, 3.0]


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(errors.ShapeError, match=r"attention_mask: got shape \[3, 4\]; supported: .* \[3, 5\]"):
        padding.unpad_input(draw(3, 5, 2), MASK)


def tables(rows: int = 12, rotary_dim: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    angle = draw(rows, rotary_dim // 2, seed=7)
    return angle.cos(), angle.sin()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each token rotated as a complex number for each pair of dims; `at` [batch, seqlen]."""
    half = cos.shape[1]
    if interleaved:
        pairs = torch.complex(x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
    else:
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.complex(cos, sin)[at][:, :, None]
    parts = (pairs.real, pairs.imag)
    head = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([head, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([0, 5]), torch.tensor([2, 6], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotation(interleaved: bool, inplace: bool, offsets: Any, rotary_dim: int) -> None:
    x, (cos, sin) = draw(2, 6, 3, 16), tables(rotary_dim=rotary_dim)
    first = offsets.long()[:, None] if isinstance(offsets, torch.Tensor) else torch.full((2, 1), offsets)
    leaf = x.clone().requires_grad_()
    expected = turned(leaf, cos, sin, first + torch.arange(6), interleaved)
    leaf_2 = x.clone().requires_grad_()
    given = leaf_2 if not inplace else leaf_2 * 1.0
    out = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.equal(given, out) == inplace
    do = draw(*out.shape, seed=3)
    assert torch.allclose(
        torch.autograd.grad(out, leaf_2, do)[0], torch.autograd.grad(expected, leaf, do)[0], atol=1e-6
    )
    back = apply_rotary(out.detach(), cos, sin, offsets, interleaved=interleaved, conjugate=True)
    assert torch.allclose(back, x, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_rotation_in_plain_operators(interleaved: bool, per_sequence: bool) -> None:
    x, (cos, sin) = draw(2, 6, 3, 16), tables(6)
    rows = (cos.expand(2, -1, -1), sin.expand(2, -1, -1)) if per_sequence else (cos, sin)
    expected = rotary.apply_rotary_emb(x, cos, sin, interleaved)
    assert torch.allclose(rotary.apply_rotary_emb_torch(x, *rows, interleaved), expected, atol=1e-6)


@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([1, 0, 4])], ids=str)
def test_packed_sequences(offsets: Any) -> None:
    lengths, (cos, sin) = [3, 0, 5], tables()
    x, cu = draw(8, 2, 16), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    out = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=5)
    for b, (first, n) in enumerate(zip(cu.tolist(), lengths, strict=False)):
        start = int(offsets[b]) if isinstance(offsets, torch.Tensor) else offsets
        alone = rotary.apply_rotary_emb(x[None, first : first + n], cos, sin, seqlen_offsets=start)
        assert torch.allclose(out[first : first + n], alone[0], atol=1e-6)


def test_positions_past_the_tables_stay_as_they_are() -> None:
    x, (cos, sin) = draw(1, 6, 2, 16), tables(8)
    out = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([5]))
    assert torch.equal(out[:, 3:], x[:, 3:]) and not torch.allclose(out[:, :3], x[:, :3])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("other_keys", [False, True])
def test_packed_tensors_in_place(interleaved: bool, grouped: bool, other_keys: bool) -> None:
    (cos, sin), (cos_k, sin_k) = tables(), [x.flip(0) for x in tables()]
    x = draw(2, 6, 8, 16) if grouped else draw(2, 6, 3, 4, 16)
    leaf, leaf_2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    q, k, v = leaf.split([4, 2, 2], dim=2) if grouped else leaf.unbind(2)
    keys = (cos_k, sin_k) if other_keys else (cos, sin)
    q, k = (rotary.apply_rotary_emb(y, *t, interleaved, seqlen_offsets=2) for y, t in ((q, (cos, sin)), (k, keys)))
    expected = torch.cat([q, k, v], dim=2) if grouped else torch.stack([q, k, v], dim=2)
    given = leaf_2 * 1.0
    out = rotary.apply_rotary_emb_qkv_(
        given, cos, sin, *(keys if other_keys else ()), interleaved=interleaved, seqlen_offsets=2,
        num_heads_q=4 if grouped else None,
    )  # fmt: skip
    assert torch.allclose(out, expected, atol=1e-6) and torch.equal(given, out)
    do = draw(*out.shape, seed=3)
    assert torch.allclose(
        torch.autograd.grad(out, leaf_2, do)[0], torch.autograd.grad(expected, leaf, do)[0], atol=1e-6
    )


def test_keys_of_a_packed_tensor_in_place() -> None:
    x, (cos, sin) = draw(2, 6, 2, 4, 16), tables()
    out = rotary.apply_rotary_emb_kv_(x.clone(), cos, sin, seqlen_offsets=torch.tensor([1, 3]))
    assert torch.equal(out[:, :, 1], x[:, :, 1])
    expected = rotary.apply_rotary_emb(x[:, :, 0], cos, sin, seqlen_offsets=torch.tensor([1, 3]))
    assert torch.allclose(out[:, :, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_the_layer(dtype: torch.dtype, scale_base: float | None) -> None:
    dim, base = 16, 1000.0
    layer = rotary.RotaryEmbedding(dim, base, scale_base=scale_base).to(dtype)
    q, kv = draw(2, 6, 4, 16).to(dtype), draw(2, 6, 2, 2, 16).to(dtype)
    position = torch.arange(9.0)[:, None]
    pair = torch.arange(0, dim, 2.0)
    angle = position * base ** (-pair / dim)
    factor = torch.ones(1)
    if scale_base is not None:
        factor = ((pair + 0.4 * dim) / (1.4 * dim)) ** ((position - 9 // 2) / scale_base)
    cos, sin, cos_k, sin_k = (
        x.to(dtype) for x in (angle.cos() * factor, angle.sin() * factor, angle.cos() / factor, angle.sin() / factor)
    )
    got_q, got_kv = layer(q.clone(), kv.clone(), seqlen_offset=3)
    assert torch.allclose(got_q, rotary.apply_rotary_emb(q, cos, sin, seqlen_offsets=3))
    assert torch.allclose(got_kv[:, :, 0], rotary.apply_rotary_emb(kv[:, :, 0], cos_k, sin_k, seqlen_offsets=3))
    assert torch.equal(got_kv[:, :, 1], kv[:, :, 1])
    qkv = draw(2, 6, 3, 4, 16).to(dtype)
    packed = layer(qkv.clone(), seqlen_offset=torch.tensor([3, 0]))
    assert torch.allclose(packed[:1, :, 0], rotary.apply_rotary_emb(qkv[:1, :, 0], cos, sin, seqlen_offsets=3))
    grouped = layer(draw(2, 6, 8, 16).to(dtype), num_heads_q=4, max_seqlen=9)
    assert grouped.shape == (2, 6, 8, 16)


def test_the_layers_tables_survive_inference_mode_and_growth() -> None:
    layer = rotary.RotaryEmbedding(16)
    with torch.inference_mode():
        layer(draw(1, 4, 3, 2, 16))
    x = draw(1, 4, 3, 2, 16).requires_grad_()
    layer(x * 1.0).sum().backward()
    assert x.grad is not None
    assert layer(draw(1, 40, 3, 2, 16)).shape[1] == 40
    assert not layer.state_dict()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (lambda: rotary.apply_rotary_emb(draw(6, 2, 16), *tables()), r"x: got shape \[6, 2, 16\]"),
    "tables": (lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 6), *tables()), "head dim 6"),
    "past": (lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 16), *tables(), seqlen_offsets=7), "seqlen_offsets: got 7"),
    "long": (lambda: rotary.apply_rotary_emb(draw(1, 13, 2, 16), *tables()), "sequences of 13"),
    "negative": (lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 16), *tables(), seqlen_offsets=-1), "got -1"),
    "offsets": (
        lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 16), *tables(), seqlen_offsets=torch.tensor([1, 2])),
        r"seqlen_offsets: got shape \[2\]",
    ),
    "float": (
        lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 16), *tables(), seqlen_offsets=torch.tensor([1.0])),
        r"seqlen_offsets: got torch\.float32",
    ),
    "no_max": (
        lambda: rotary.apply_rotary_emb(draw(6, 2, 16), *tables(), cu_seqlens=torch.tensor([0, 6])),
        "max_seqlen: got None",
    ),
    "max_alone": (lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 16), *tables(), max_seqlen=6), "max_seqlen: got 6"),
    "flag": (lambda: rotary.apply_rotary_emb(draw(1, 6, 2, 16), *tables(), interleaved=1), "interleaved: got 1"),
    "one_of_two": (
        lambda: rotary.apply_rotary_emb_qkv_(draw(1, 6, 3, 2, 16), *tables(), tables()[0]),
        "one of the two",
    ),
    "qkv": (lambda: rotary.apply_rotary_emb_qkv_(draw(1, 6, 8, 16), *tables()), "num_heads_q=None"),
    "kv": (lambda: rotary.apply_rotary_emb_kv_(draw(1, 6, 3, 2, 16), *tables()), "kv: got shape"),
    "no_tables": (
        lambda: rotary.RotaryEmbedding(16)(draw(1, 6, 3, 2, 16), seqlen_offset=torch.tensor([2])),
        "max_seqlen: got None",
    ),
    "heads": (
        lambda: rotary.RotaryEmbedding(16)(draw(1, 6, 2, 16), draw(1, 6, 2, 2, 16), num_heads_q=2),
        "num_heads_q: got 2",
    ),
    "plain": (lambda: rotary.apply_rotary_emb_torch(draw(1, 6, 2, 6), *tables(6)), "a rotary dim of 8, head dim 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(errors.ArgumentError, match=message):
        call()
