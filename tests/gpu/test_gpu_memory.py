"""GPU memory beside inputs and results: linear in the length for every option, and the plan's square is small.

A mask that is no band gets a plan, the list of tiles to visit, int32 [B|1, H|1, tiles, tiles]: what is quadratic, but
for each pair of tiles and not of positions. While it is made (sorted by 64-bit indices) it takes at most 128 bytes for
each pair of 64 x 64 tiles, 1/32 byte for each pair of positions; what is kept takes 4 bytes for each pair of the
kernel's tiles.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from subjects import BACKENDS

import tilewise
from test_memory import OPTIONS
from tilewise import masks
from tilewise.kernels import plans
from tilewise.mask_algebra import Mask

SHORT, LONG = 8192, 16384
HEADS, HEAD_DIM = 2, 64
PLANNED = {"document", "scattered_document", "blocks", "either"}


def plan_bytes(n: int) -> int:
    """What making a plan may take for n rows and n keys."""
    return 128 * (n // 64) ** 2


def moved(value: Any) -> Any:
    """An option of a call on the CPU, on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cuda().requires_grad_(value.requires_grad)
    if isinstance(value, Mask):
        tensors: list[torch.Tensor] = []
        text = value.encode(tensors)
        return masks.decode(ast.literal_eval(text), tuple(x.cuda() for x in tensors))
    return value


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def usage(run: Callable[[], tuple[torch.Tensor, ...]]) -> int:
    """The most bytes held at once beside what was there before and what `run` returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


def forward_and_backward(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor], with_lse: bool
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The passes of ``attend()``, from cotangents that exist before."""
    out, lse = attend()
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    del out, lse

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = attend()
        ys, dys = ([out, lse], [do, dlse]) if with_lse else ([out], [do])
        return (out.detach(), lse.detach(), *torch.autograd.grad(ys, leaves, dys))

    return run


def dense(n: int, heads_kv: int, name: str, with_lse: bool, backend: str | None) -> int:
    """Usage of a dense call, without what a first call compiles and keeps; a mask's plan is made anew."""
    q, k, v = (drawn(1, n, heads, HEAD_DIM).requires_grad_() for heads in (HEADS, heads_kv, heads_kv))
    measured = 0
    for _ in range(2):
        options = {key: moved(value) for key, value in OPTIONS[name](n).items()}
        leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]

        def attend(options: dict[str, Any] = options) -> tuple[torch.Tensor, torch.Tensor]:
            return tilewise.attention(q, k, v, return_lse=True, backend=backend, **options)

        run = forward_and_backward(attend, leaves, with_lse)
        plans._kept._made.clear()
        measured = usage(run)
    return measured


def packed(n: int, backend: str | None) -> int:
    q, k, v = (drawn(n, HEADS, HEAD_DIM).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, n // 4, n // 4, n], dtype=torch.int32, device="cuda")
    used = torch.tensor([n // 4, 0, n // 2], dtype=torch.int32, device="cuda")

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        return tilewise.attention_varlen(
            q, k, v, cu, cu, max_seqlen_q=n, max_seqlen_k=n, seqused_k=used, causal=True, return_lse=True,
            backend=backend,
        )  # fmt: skip

    run = forward_and_backward(attend, [q, k, v], with_lse=False)
    usage(run)
    return usage(run)


def assert_linear(short: int, long: int, planned: bool = False) -> None:
    # A map of bytes over rows and keys would be larger, whatever its dtype.
    assert long < LONG * LONG
    assert long <= 2.1 * short + (plan_bytes(LONG) if planned else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, backend: str | None) -> None:
    short, long = (dense(n, HEADS, name, False, backend) for n in (SHORT, LONG))
    assert_linear(short, long, planned=name in PLANNED)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads_kv, with_lse", [(1, False), (1, True), (2, True)], ids=["gqa", "gqa_lse", "lse"])
def test_grouped_heads_and_lse(heads_kv: int, with_lse: bool, backend: str | None) -> None:
    short, long = (dense(n, heads_kv, "plain", with_lse, backend) for n in (SHORT, LONG))
    assert_linear(short, long)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences(backend: str | None) -> None:
    assert_linear(packed(SHORT, backend), packed(LONG, backend))


def test_what_is_kept_of_a_plan() -> None:
    mask = tilewise.BlockMask(torch.ones(1, HEADS, LONG // 128, LONG // 128, dtype=torch.bool, device="cuda"), 128, 128)
    q, k, v = (drawn(1, LONG, HEADS, HEAD_DIM).requires_grad_() for _ in range(3))
    tilewise.attention(q, k, v, mask=mask, backend="triton").sum().backward()
    kept = [made.tensor for made in plans._kept._made[mask.tiles].values()]
    # Keys for tiles of rows, forward and dq, and rows for tiles of keys; the tables' smallest tile here is 64 x 64.
    assert 2 <= len(kept) <= 3
    tiles = LONG // 64
    assert all(plan.nbytes <= 4 * HEADS * tiles * (tiles + 18) for plan in kept)


def test_the_measure_sees_a_matrix_of_scores() -> None:
    q = drawn(1, HEADS, LONG, HEAD_DIM)
    assert usage(lambda: ((q @ q.mT).softmax(-1) @ q,)) >= LONG * LONG
