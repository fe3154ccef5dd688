"""The backend's own functions against the oracle, on one small call."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import _triton, reference
from tilewise.arguments import prepare
from tilewise.problem import DIFFERENTIABLE


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def operands(
    seqlen_q: int = 37,
    seqlen_k: int = 45,
    heads: tuple[int, int] = (2, 1),
    head_dims: tuple[int, int] = (20, 12),
    **kw: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of one batch entry; heads are (query, key/value), head dims those of q, k and of v."""
    (heads_q, heads_kv), (head_dim, head_dim_v) = heads, head_dims
    shapes = ((seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v))
    return tuple(draw(1, *shape, seed=i, **kw) for i, shape in enumerate(shapes))  # type: ignore[return-value]  # there are three shapes


def _oracle(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rest = {name: x for name, x in tensors.items() if name not in "qkv"}
    attend = reference.attention_varlen if "cu_seqlens_q" in options else reference.attention
    return attend(tensors["q"], tensors["k"], tensors["v"], **options, **rest, return_lse=True)


def assert_agrees(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tolerance: float = 1e-5, **options: Any) -> None:
    """Fail unless output, LSE and all gradients are within `tolerance` of the oracle's, relative to the largest."""
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: options.pop(name) for name in DIFFERENTIABLE[3:] if name in options}
    problem, inputs, _ = prepare(**tensors, **options)
    assert not _triton.unsupported_reasons(problem)
    out, lse = _triton.forward(problem, inputs)
    do, dlse = draw(*out.shape, seed=7).to(out.dtype), draw(*lse.shape, seed=8)
    got = _triton.backward(problem, inputs, out, lse, do, dlse, tuple(tensors))

    leaves = {name: x.double().requires_grad_() for name, x in tensors.items()}
    out64, lse64 = _oracle(leaves, options)
    seen = torch.isfinite(lse64)
    loss = (out64 * do).sum() + (torch.where(seen, lse64, 0.0) * dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert torch.equal(torch.isfinite(lse), seen)
    pairs = {"out": (out, out64), "lse": (lse[seen], lse64[seen])}
    pairs |= {f"d{name}": (got[name], grad) for name, grad in zip(tensors, grads, strict=True)}
    for name, (x, y) in pairs.items():
        expected = torch.zeros_like(x, dtype=torch.float64) if y is None else y.detach()
        error = float((x.double() - expected).abs().max()) if x.numel() else 0.0
        limit = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        assert error <= limit, f"{name}: {error:.2g} > {limit:.2g}"
