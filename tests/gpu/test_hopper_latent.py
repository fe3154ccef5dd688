"""Hopper's kernel for latents on a GPU: every row of every head, and the same bits however partitions meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import hopper
from tilewise.cache_arguments import prepare
from tilewise.kvcache import CacheInputs, CacheProblem

PAGE = 64


def posed(
    lengths: tuple[int, ...], rows: int, heads: int, **options: Any
) -> tuple[CacheProblem, CacheInputs, torch.Tensor]:
    """A causal call over shuffled pages with NaN behind each sequence's end, and what it should give."""
    generator = torch.Generator("cuda").manual_seed(0)
    width = -(-max(lengths) // PAGE)
    q, cache = (
        torch.randn(*shape, 576, generator=generator, device="cuda").bfloat16()
        for shape in ((len(lengths), rows, heads), (len(lengths), width * PAGE))
    )
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    slots = torch.arange(width * PAGE, device="cuda")
    wanted = []
    for b, n in enumerate(lengths):
        seen = slots[:n] <= torch.arange(n - rows, n, device="cuda")[:, None]
        keys = cache[b, :n].float().expand(heads, -1, -1)
        found = torch.nn.functional.scaled_dot_product_attention(
            q[b].float().transpose(0, 1), keys, keys[..., :512], attn_mask=seen, scale=192**-0.5
        )
        wanted.append(found.transpose(0, 1))
    cache.masked_fill_((slots >= used[:, None])[..., None], float("nan"))
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(0)).cuda()
    pages = torch.empty(len(lengths) * width, PAGE, 1, 576, device="cuda", dtype=torch.bfloat16)
    pages[order] = cache.view(-1, PAGE, 1, 576)
    given = {"page_table": order.view(-1, width).int(), "causal": True, "softmax_scale": 192**-0.5, **options}
    problem, inputs = prepare(q, pages, pages[..., :512], used, **given)
    return problem, inputs, torch.stack(wanted)


@pytest.mark.parametrize("splits", [{}, {"split_size": 512}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("rows, heads", [(1, 16), (1, 64), (1, 128), (2, 128)])
@pytest.mark.parametrize("lengths", [(4096,) * 16, (64, 65, 3, 200), (8192,), (129, 4000, 700) * 7], ids=len)
def test_every_head(lengths: tuple[int, ...], rows: int, heads: int, splits: dict[str, int]) -> None:
    problem, inputs, wanted = posed(lengths, rows, heads, **splits)
    out, _ = hopper.attend_cache(problem, inputs)
    error = (out.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    wrong = (~(error < 0.02)).nonzero().tolist()
    assert not wrong, f"{len(wrong)} of {error.numel()} rows (sequence, row, head) are wrong: {wrong[:24]}"


def test_the_same_bits_every_time() -> None:
    problem, inputs, _ = posed((4096, 700, 65) * 8, 1, 128)
    first = hopper.attend_cache(problem, inputs)
    for _ in range(200):
        again = hopper.attend_cache(problem, inputs)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
