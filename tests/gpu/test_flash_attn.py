"""flash-attn's functions on a GPU return what they return on the CPU, the masks of dropout included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.calls import Draw
from tilewise.compat import flash_attn, flash_attn_3, flash_attn_interface, flash_attn_padding, flash_attn_probabilities
from tilewise.compat.flash_attn_rotary import RotaryEmbedding, apply_rotary_emb

LENGTHS_Q, LENGTHS_K = [70, 0, 130], [150, 40, 11]
SLOPES = [0.5, 0.25, 0.125, 0.0625]


def dense(draw: Draw, **options: Any) -> list[torch.Tensor]:
    leaves = [draw.normal(2, n, h, 64).requires_grad_() for n, h in ((150, 4), (200, 2), (200, 2))]
    out, *others = flash_attn.flash_attn_func(*leaves, **options, return_attn_probs=True)
    return [out, *others, *torch.autograd.grad(out, leaves, draw.normal(*out.shape))]


def offsets(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def packed(draw: Draw) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    shapes = ((sum(LENGTHS_Q), 4), (sum(LENGTHS_K), 2), (sum(LENGTHS_K), 2))
    members = (offsets(LENGTHS_Q, draw.device), offsets(LENGTHS_K, draw.device), max(LENGTHS_Q), max(LENGTHS_K))
    return [draw.normal(n, h, 64).requires_grad_() for n, h in shapes], members


def varlen(draw: Draw, **options: Any) -> list[torch.Tensor]:
    leaves, members = packed(draw)
    out, *others = flash_attn.flash_attn_varlen_func(*leaves, *members, **options, return_attn_probs=True)
    return [out, *others, *torch.autograd.grad(out, leaves, draw.normal(*out.shape))]


def varlen_3(draw: Draw, **options: Any) -> list[torch.Tensor]:
    leaves, members = packed(draw)
    used = {
        name: torch.tensor(x, device=draw.device) for name, x in (("seqused_q", [60, 0, 1]), ("seqused_k", [9, 40, 2]))
    }
    out, lse = flash_attn_3.flash_attn_varlen_func(*leaves, *members, **used, **options, return_attn_probs=True)
    return [out, lse, *torch.autograd.grad(out, leaves, draw.normal(*out.shape))]


def cached(draw: Draw, ragged: bool = False, paged: bool = False, **options: Any) -> list[torch.Tensor]:
    """New keys that are not as many as the queries, so that the append is a call of its own."""
    caches = [draw.normal(3, 256, 2, 64) for _ in range(2)]
    q, k, v = draw.normal(3, 4, 4, 64), draw.normal(3, 2, 2, 64), draw.normal(3, 2, 2, 64)
    angle = draw.uniform(300, 16)
    given: dict[str, Any] = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    given["cache_seqlens"] = torch.tensor([100, 0, 250], dtype=torch.int32, device=draw.device)
    if ragged:
        q, k, v = q[:, :2].flatten(0, 1), k.flatten(0, 1)[:5], v.flatten(0, 1)[:5]
        given |= {"cu_seqlens_q": offsets([2, 2, 2], draw.device), "max_seqlen_q": 2}
        given["cu_seqlens_k_new"] = offsets([3, 0, 2], draw.device)
    if paged:
        caches = [x.view(12, 64, 2, 64) for x in caches]
        given["page_table"] = torch.arange(12, dtype=torch.int32, device=draw.device).view(3, 4).flip(1).contiguous()
    fn = flash_attn_3.flash_attn_with_kvcache
    out, lse = fn(q, *caches, k, v, **given, **options, return_softmax_lse=True)
    return [out, lse, *caches]


def one_pass_at_a_time(draw: Draw) -> list[torch.Tensor]:
    q, k, v = (draw.normal(2, 100, 4, 64) for _ in range(3))
    options = (0.2, 0.1, True, -1, -1, 0.0, None)
    out, lse, s_dmask, rng_state = flash_attn_interface._flash_attn_forward(q, k, v, *options, True)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    do = draw.normal(*out.shape)
    delta = flash_attn_interface._flash_attn_backward(do, q, k, v, out, lse, *grads, *options, True, rng_state)
    return [out, lse, s_dmask, *grads, delta]


def helpers(draw: Draw) -> list[torch.Tensor]:
    x = draw.normal(3, 20, 3, 4, 64)
    mask = draw.bools(3, 20)
    rows, indices, cu_seqlens, longest, _ = flash_attn_padding.unpad_input(x, mask)
    angle = draw.uniform(40, 16)
    turned = apply_rotary_emb(
        rows[:, 0], angle.cos(), angle.sin(), cu_seqlens=cu_seqlens, max_seqlen=longest,
        seqlen_offsets=torch.tensor([0, 5, 9], device=draw.device),
    )  # fmt: skip
    layer = RotaryEmbedding(32, scale_base=512.0, device=draw.device)
    return [turned, flash_attn_padding.pad_input(rows, indices, 3, 20), layer(x, seqlen_offset=4)]


def combined(draw: Draw) -> list[torch.Tensor]:
    return list(flash_attn_3.flash_attn_combine(draw.normal(5, 2, 30, 4, 64), draw.normal(5, 2, 30, 4)))


CALLS: dict[str, Callable[[Draw], list[torch.Tensor]]] = {
    "dense": lambda d: dense(d, causal=True, window_size=(50, 0), softcap=4.0),
    "dense_dropout": lambda d: dense(d, dropout_p=0.2, causal=True),
    "dense_alibi": lambda d: dense(d, alibi_slopes=torch.tensor(SLOPES, device=d.device), deterministic=True),
    "varlen": lambda d: varlen(d, causal=True),
    "varlen_dropout": lambda d: varlen(d, dropout_p=0.2),
    "used": lambda d: varlen_3(d, causal=True),
    "used_chunk": lambda d: varlen_3(d, attention_chunk=7),
    "cached": lambda d: cached(d, causal=True),
    "cached_chunk": lambda d: cached(d, attention_chunk=100),
    "cached_ragged": lambda d: cached(d, ragged=True, paged=True, window_size=(60, 0)),
    "one_pass_at_a_time": one_pass_at_a_time,
    "helpers": helpers,
    "combined": combined,
}


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flash_attn_probabilities, flash_attn_interface):
        # Each device draws seeds of its own.
        monkeypatch.setattr(module, "seed_tensor", lambda _, device: torch.tensor(7, device=device))
    there, here = (CALLS[name](Draw(device)) for device in ("cuda", "cpu"))
    assert len(there) == len(here)
    for i, (x, y) in enumerate(zip(there, here, strict=True)):
        assert x.device.type == "cuda" and (x.shape, x.dtype) == (y.shape, y.dtype), i
        x, finite = x.detach().cpu(), y.isfinite()
        assert torch.equal(x[~finite], y[~finite]), i
        assert torch.allclose(x[finite], y[finite].detach(), atol=2e-4, rtol=1e-4), i
