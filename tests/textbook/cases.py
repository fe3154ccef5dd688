"""Inputs for one head, and what the oracle makes of them."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import reference
from tolerance import assert_close

Matrices = tuple[torch.Tensor, ...]

# seqlen_q, seqlen_k, block_q, block_k, causal: exact cuts, ragged ones, tiles beyond the matrix, rows without keys.
CUTS = [
    (16, 16, 4, 4, False),
    (16, 16, 4, 4, True),
    (13, 17, 4, 5, False),
    (13, 17, 5, 3, True),
    (17, 11, 4, 4, True),
    (5, 6, 16, 16, True),
    (1, 9, 4, 2, True),
    (3, 1, 2, 2, True),
    (0, 4, 2, 2, False),
    (4, 0, 2, 2, False),
]


def inputs(seqlen_q: int, seqlen_k: int, d: int = 4, d_v: int | None = None, seed: int = 0) -> Matrices:
    """q, k, v, do of one head, fp64."""
    generator = torch.Generator().manual_seed(seed)
    d_v = d if d_v is None else d_v
    shapes = ((seqlen_q, d), (seqlen_k, d), (seqlen_k, d_v), (seqlen_q, d_v))
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N_q, d_v] and LSE [N_q]."""
    o, lse = reference.attention(*(x[None, :, None] for x in (q, k, v)), return_lse=True, **arguments)
    return o[0, :, 0], lse[0, 0]


def oracle_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, **arguments: Any) -> Matrices:
    """dq, dk, dv by autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, _ = oracle(*leaves, **arguments)
    return torch.autograd.grad(o, leaves, do)


def close(got: Matrices, expected: Matrices) -> None:
    for index, (x, y) in enumerate(zip(got, expected, strict=True)):
        assert_close(f"result {index}", x, y, y, scale=4.0, dtype=torch.float64)
