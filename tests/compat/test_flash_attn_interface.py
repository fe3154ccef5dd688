"""flash-attn 2's passes one at a time, as rings use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import errors, merge_states
from tilewise.compat import flash_attn_interface as interface
from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

from .test_flash_attn import CU_K, CU_Q, draw, grads, packed, qkv

SCALE = 0.3
FORWARD = {
    "dropout_p": 0.0, "softmax_scale": SCALE, "causal": True, "window_size_left": 4, "window_size_right": -1,
    "softcap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]),
}  # fmt: skip
PUBLIC = {
    "softmax_scale": SCALE, "causal": True, "window_size": (4, -1), "softcap": 3.0,
    "alibi_slopes": FORWARD["alibi_slopes"],
}  # fmt: skip


def outputs(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(x, float("nan")) for name, x in zip(("dq", "dk", "dv"), tensors, strict=True)}


def test_dense() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    expected = flash_attn_func(*leaves, **PUBLIC)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(*leaves, **FORWARD, return_softmax=False)
    assert torch.equal(out, expected) and not out.requires_grad
    assert s_dmask.shape == (0,) and rng_state.tolist() == [0, 0]
    do, into = draw(*out.shape, seed=9), outputs(leaves)
    delta = interface._flash_attn_backward(do, *leaves, out, lse, **into, **FORWARD, deterministic=True)
    for x, y in zip(into.values(), grads(expected, *leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)
    assert torch.allclose(delta, (do * out).sum(-1).transpose(1, 2), atol=1e-5)


def test_packed() -> None:
    leaves = [x.requires_grad_() for x in packed()]
    lengths = (CU_Q, CU_K, 6, 5)
    expected = flash_attn_varlen_func(*leaves, *lengths, **PUBLIC)
    out, lse, *_ = interface._flash_attn_varlen_forward(*leaves, *lengths, **FORWARD)
    assert torch.equal(out, expected)
    do, into = draw(*out.shape, seed=9), outputs(leaves)
    interface._flash_attn_varlen_backward(
        do, *leaves, out, lse, *into.values(), *lengths, **FORWARD, deterministic=False
    )
    for x, y in zip(into.values(), grads(expected, *leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_keys_in_use() -> None:
    used = torch.tensor([3, 2, 1])
    out, *_ = interface._flash_attn_varlen_forward(*packed(), CU_Q, CU_K, 6, 5, 0.0, None, False, seqused_k=used)
    assert torch.allclose(out[6:], packed()[2][9:10].repeat_interleave(2, 1).expand(4, -1, -1))


def test_dropout_is_replayed_from_its_state() -> None:
    leaves = [x.requires_grad_() for x in qkv(40, 60)]
    forward = {**FORWARD, "dropout_p": 0.25, "window_size_left": -1, "softcap": 0.0}
    torch.manual_seed(0)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(*leaves, **forward, return_softmax=True)
    torch.manual_seed(0)
    expected, _, signs = flash_attn_func(
        *leaves, 0.25, **{**PUBLIC, "window_size": (-1, -1), "softcap": 0.0}, return_attn_probs=True
    )
    assert torch.equal(out, expected) and torch.equal(s_dmask, signs)
    do, into = draw(*out.shape, seed=9), outputs(leaves)
    interface._flash_attn_backward(do, *leaves, out, lse, **into, **forward, deterministic=False, rng_state=rng_state)
    for x, y in zip(into.values(), grads(expected, *leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_a_ring_of_two() -> None:
    """Each half of the keys, with the output and LSE of all of them: the gradients add up to the whole's."""
    leaves = [x.requires_grad_() for x in qkv(8, 8)]
    whole = flash_attn_func(*leaves, softmax_scale=SCALE)
    q, k, v = (x.detach() for x in leaves)
    plain = {
        "dropout_p": 0.0, "softmax_scale": SCALE, "causal": False, "window_size_left": -1, "window_size_right": -1,
        "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip
    halves = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    parts = [interface._flash_attn_forward(q, *half, **plain, return_softmax=False)[:2] for half in halves]
    out, lse = merge_states(*parts[0], *parts[1])
    assert torch.allclose(out, whole, atol=1e-6)
    do, found = draw(*out.shape, seed=9), []
    for half in halves:
        found.append(outputs([q, *half]))
        interface._flash_attn_backward(do, q, *half, out, lse, **found[-1], **plain, deterministic=False)
    dq, dk, dv = grads(whole, *leaves)
    assert torch.allclose(found[0]["dq"] + found[1]["dq"], dq, atol=1e-5)
    assert torch.allclose(torch.cat([part["dk"] for part in found], 1), dk, atol=1e-5)
    assert torch.allclose(torch.cat([part["dv"] for part in found], 1), dv, atol=1e-5)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"block_table": torch.zeros(3, 1).int()}, "block_table: got Tensor.*attention_with_kvcache"),
        ({"leftpad_k": torch.zeros(3)}, "leftpad_k: got Tensor.*attention_with_kvcache"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=message):
        interface._flash_attn_varlen_forward(*packed(), CU_Q, CU_K, 6, 5, 0.0, None, False, **changed)


def test_dropout_without_its_state_is_refused() -> None:
    tensors = qkv()
    out = torch.zeros_like(tensors[0])
    given = {**FORWARD, "dropout_p": 0.5, "deterministic": False}
    with pytest.raises(errors.ArgumentError, match="rng_state: got None"):
        interface._flash_attn_backward(out, *tensors, out, torch.zeros(2, 4, 6), None, None, None, **given)


def test_one_block_of_keys() -> None:
    assert interface._get_block_size_n("cuda", 64, True, False) > 2**20
    assert interface._get_block_size_n("cuda", 256, False, True) > 2**20
