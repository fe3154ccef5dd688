"""A call as a value: shapes, random tensors, options; and what it takes to run it forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewise.problem import DIFFERENTIABLE

Offsets = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 16
    head_dim_v: int = 16

    def __str__(self) -> str:
        heads, dims = f"{self.heads_q}over{self.heads_kv}", f"{self.head_dim}to{self.head_dim_v}"
        return f"b{self.batch}q{self.seqlen_q}k{self.seqlen_k}h{heads}d{dims}"


class Draw:
    """Random tensors on a device: drawn on the CPU, so that every backend gets the same numbers.

    `dtype` is that of the packed calls drawn with it.
    """

    def __init__(self, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def bools(self, *shape: int, share: float = 0.5) -> torch.Tensor:
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)


@dataclass(frozen=True)
class Call:
    """The tensors and options of one call; packed where `offsets` (cu_seqlens_q, cu_seqlens_k) are given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)
    offsets: Offsets | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The differentiable inputs, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        return {name: found[name] for name in DIFFERENTIABLE if found.get(name) is not None}

    def with_tensors(self, **tensors: torch.Tensor) -> Call:
        """This call with other tensors in place of those named."""
        q, k, v = (tensors.pop(name, x) for name, x in (("q", self.q), ("k", self.k), ("v", self.v)))
        return replace(self, q=q, k=k, v=v, options={**self.options, **tensors})

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of the entry point."""
        return (self.q, self.k, self.v, *(self.offsets or ()))

    def attend(self, module: Any, **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE, from `tilewise` or from `tilewise.reference`."""
        entry = module.attention if self.offsets is None else module.attention_varlen
        return entry(*self.arguments(), return_lse=True, **self.options, **extra)


def dense(shape: Shape, dtype: torch.dtype, draw: Draw, **options: Any) -> Call:
    """Standard normal q, k, v of a shape."""
    q = draw.normal(shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim, dtype=dtype)
    k = draw.normal(shape.batch, shape.seqlen_k, shape.heads_kv, shape.head_dim, dtype=dtype)
    v = draw.normal(shape.batch, shape.seqlen_k, shape.heads_kv, shape.head_dim_v, dtype=dtype)
    return Call(q, k, v, options)


def offsets(lengths: Iterable[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """cu_seqlens of members of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device, dtype)


def packed(
    lengths_q: list[int],
    lengths_k: list[int],
    draw: Draw,
    dtype: torch.dtype | None = None,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 24),
    **options: Any,
) -> Call:
    """Members of these lengths, one after the other: so many query heads over those of keys, head dims of q and v."""
    dtype = dtype or draw.dtype
    q = draw.normal(sum(lengths_q), heads[0], dims[0], dtype=dtype)
    k, v = (draw.normal(sum(lengths_k), heads[1], n, dtype=dtype) for n in dims)
    longest = {"max_seqlen_q": max(lengths_q, default=0), "max_seqlen_k": max(lengths_k, default=0)}
    cu = (offsets(lengths_q, draw.device), offsets(lengths_k, draw.device))
    return Call(q, k, v, {**longest, **options}, cu)


@dataclass(frozen=True)
class Result:
    """Output, LSE and the gradients that were asked for."""

    out: torch.Tensor
    lse: torch.Tensor
    grads: dict[str, torch.Tensor]

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return [("out", self.out), ("lse", self.lse), *((f"d{name}", grad) for name, grad in self.grads.items())]


Cotangents = tuple[torch.Tensor | None, torch.Tensor | None]


def _grad(losses: list[tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor]) -> Iterable[torch.Tensor | None]:
    if not losses or not leaves:
        return [None] * len(leaves)
    ys, dys = zip(*losses, strict=True)
    return torch.autograd.grad(ys, leaves, dys, allow_unused=True)


def run(
    attend: Callable[[Call], tuple[torch.Tensor, torch.Tensor]],
    call: Call,
    cotangents: Cotangents,
    needs: Iterable[str] | None = None,
) -> Result:
    """Forward, and backward from the cotangents of (out, lse); None: that output is not part of the loss."""
    names = tuple(call.tensors()) if needs is None else tuple(needs)
    leaves = {name: x.detach().requires_grad_(name in names) for name, x in call.tensors().items()}
    out, lse = attend(call.with_tensors(**leaves))
    losses = [(y, dy.to(y.dtype)) for y, dy in zip((out, lse), cotangents, strict=True) if dy is not None]
    if not losses:
        return Result(out.detach(), lse.detach(), {})
    # To the oracle an LSE does not depend on v, and nothing on a call without members: such gradients are 0.
    reached = [(y, dy) for y, dy in losses if y.requires_grad]
    found = _grad(reached, [leaves[name] for name in names])
    grads = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, found, strict=True)}
    return Result(out.detach(), lse.detach(), grads)


def cotangents(call: Call, draw: Draw, kind: str = "both") -> Cotangents:
    """Random gradients of out, of lse, or of both ("out", "lse", "both")."""
    rows, heads = call.q.shape[:-1], call.q.shape[-2]
    do = draw.normal(*rows, call.v.shape[-1], dtype=call.q.dtype)
    shape = (heads, call.q.shape[0]) if call.offsets is not None else (rows[0], heads, rows[1])
    dlse = draw.normal(*shape)
    return (None if kind == "lse" else do, None if kind == "out" else dlse)
