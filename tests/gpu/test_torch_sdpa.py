"""PyTorch's attention functions with this package underneath: which calls arrive here, and what they return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from conformance.calls import Draw
from tilewise.compat import explicit
from tilewise.integrations import torch_sdpa
from tolerance import assert_close

SEQLEN, HEADS, HEAD_DIM = 200, 4, 64


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often each pass has run here, with this package underneath PyTorch."""
    counts = {"forward": 0, "backward": 0}

    def counted(name: str) -> Any:
        real = getattr(explicit, name)

        def run(*arguments: Any) -> Any:
            counts[name] += 1
            return real(*arguments)

        return run

    for name in counts:
        monkeypatch.setattr(explicit, name, counted(name))
    with torch_sdpa.activated():
        yield counts


def bhsd(heads: int = HEADS, order: str = "bhsd", dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    draw, found = Draw("cuda"), []
    for n in (HEADS, heads, heads):
        x = draw.normal(2, SEQLEN, n, HEAD_DIM, dtype=dtype).transpose(1, 2)
        found.append(x if order == "bshd" else x.contiguous())
    return found


def largest(tensors: list[torch.Tensor]) -> float:
    return max(float(x.abs().max()) for x in tensors)


def with_grads(tensors: list[torch.Tensor], do: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = functional.scaled_dot_product_attention(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, do.to(out.dtype))]


def exact(tensors: list[torch.Tensor], do: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return with_grads([x.double() for x in tensors], do, **options)


def plain(tensors: list[torch.Tensor], do: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return with_grads(tensors, do, **options)


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_scaled_dot_product_attention(calls: dict[str, int], options: dict[str, Any], order: str) -> None:
    tensors = bhsd(2 if "enable_gqa" in options else HEADS, order)
    do = Draw("cuda", seed=1).normal(2, HEADS, SEQLEN, HEAD_DIM, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = with_grads(tensors, do, **options)
    assert calls == {"forward": 1, "backward": 1}
    for name, x, ref, other in zip(("out", "dq", "dk", "dv"), got, exact(tensors, do, **options),
                                   plain(tensors, do, **options), strict=True):  # fmt: skip
        assert_close(name, x.detach(), ref.detach(), other.detach(), largest(tensors), x.dtype)
    assert got[0].stride() == torch.empty_like(tensors[0]).stride()


def test_dropout_has_one_mask_for_both_passes(calls: dict[str, int]) -> None:
    q, k, _ = bhsd()
    v = torch.randn_like(k, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(3)
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        torch.manual_seed(3)
        again = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    assert torch.equal(out, again)
    # The output is linear in v, through the same weights as the gradient.
    do = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, do)
    left, right = (x.detach().double() * y.detach().double() for x, y in ((out, do), (dv, v)))
    # Roundings add up like the root of how many there are; another mask would be off by all of it.
    assert abs(float(left.sum() - right.sum())) < 0.02 * float(left.abs().sum()) ** 0.5
    assert calls == {"forward": 2, "backward": 1}


@pytest.mark.filterwarnings("ignore")  # of the compiler, by its version
def test_compiled(calls: dict[str, int]) -> None:
    tensors = bhsd(order="bshd")
    do = Draw("cuda", seed=1).normal(2, HEADS, SEQLEN, HEAD_DIM, dtype=torch.bfloat16)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch._dynamo.reset()
    leaves = [x.detach().requires_grad_() for x in tensors]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.compile(run, fullgraph=True)(*leaves)
        got = [out, *torch.autograd.grad(out, leaves, do)]
        eager = with_grads(tensors, do, is_causal=True)
    assert calls["forward"] >= 2 and calls["backward"] >= 2
    for x, y in zip(got, eager, strict=True):
        assert torch.allclose(x.float(), y.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 0), (20, 10)])
def test_varlen_attn(calls: dict[str, int], window: tuple[int, int]) -> None:
    draw = Draw("cuda")
    lengths = [10, 0, 190]
    cu = torch.tensor([0, 10, 10, 200], dtype=torch.int32, device="cuda")
    leaves = [draw.normal(200, HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    out, lse = varlen_attn(*leaves, cu, cu, 190, 190, window_size=window, return_aux=AuxRequest(lse=True))
    do = draw.normal(200, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    got = [out, *torch.autograd.grad(out, leaves, do)]
    assert calls == {"forward": 1, "backward": 1}
    assert lse.shape == (HEADS, 200)
    row = torch.arange(190, device="cuda")
    left, right = (190 if bound < 0 else bound for bound in window)
    first = 0
    for n in lengths:
        visible = (row[:n, None] - left <= row[:n]) & (row[:n] <= row[:n, None] + right)
        member = [x[first : first + n].detach().transpose(0, 1)[None] for x in leaves]
        part = do[first : first + n].transpose(0, 1)[None]
        if n:
            ref, other = (f(member, part, attn_mask=visible) for f in (exact, plain))
            for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, ref, other, strict=True):
                here = x[first : first + n].detach().transpose(0, 1)[None]
                assert_close(name, here, y.detach(), z.detach(), largest(member), torch.bfloat16)
        first += n


def test_restored() -> None:
    """PyTorch's own kernel is back afterwards, bit by bit."""
    tensors = bhsd()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = functional.scaled_dot_product_attention(*tensors, is_causal=True)
        with torch_sdpa.activated():
            assert torch_attention.current_flash_attention_impl() == "tilewise"
        after = functional.scaled_dot_product_attention(*tensors, is_causal=True)
    assert torch_attention.current_flash_attention_impl() is None
    assert torch.equal(before, after)
