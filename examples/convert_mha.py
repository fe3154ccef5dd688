"""PyTorch's nn.MultiheadAttention becomes tilewise.nn.MultiHeadAttention: same weights, same outputs, same gradients.

What is said differently: batches come first, masks say True for visible (PyTorch's say True for masked), and a mask for
padding is one more mask. Every case that PyTorch's module can be built for is converted and compared; then both run on
a longer sequence, where the one with the S×S matrix needs memory for it.

    python examples/convert_mha.py
    python examples/convert_mha.py --seqlen 4096
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.nn import MultiHeadAttention

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 10, 14, 48, 4

# What the module is built with; widths of keys and values where they are not the queries'.
MODULES: dict[str, dict[str, Any]] = {
    "self-attention": {},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "cross-attention": {"kdim": 20, "vdim": 36},
    "with a zero key": {"add_zero_attn": True},
}


def visible(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """PyTorch's two masks, True for masked, as one of [batch, heads, queries, keys], True for visible."""
    parts = []
    if attn_mask is not None:
        parts.append(~(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, HEADS))))
    if key_padding_mask is not None:
        parts.append(~key_padding_mask[:, None, None])
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def both(module: nn.MultiheadAttention, inputs: list[Tensor], masks: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """Output and gradients of the inputs, from PyTorch's module and from the one that it is converted to."""
    layer = MultiHeadAttention.from_torch(module)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not module.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out: Tensor = module(q, k, v, need_weights=False, **masks)[0]
        return out if module.batch_first else out.transpose(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, (k, v), mask=visible(masks.get("attn_mask"), masks.get("key_padding_mask")))
        return out

    results = []
    for attend in (theirs, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    return results


def compare(name: str, options: dict[str, Any], generator: torch.Generator) -> float:
    """The largest difference in outputs and gradients, over all masks."""
    module = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    shapes = [(BATCH, n, width) for n, width in zip((QUERIES, KEYS, KEYS), widths, strict=True)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    causal = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    padding = torch.arange(KEYS) >= torch.tensor([[KEYS], [5], [9]])
    by_head = torch.rand(BATCH * HEADS, QUERIES, KEYS, generator=generator) < 0.3
    by_head[..., 0] = False  # a row that sees nothing is 0 here and not a number there
    worst = 0.0
    for masks in ({}, {"attn_mask": causal}, {"key_padding_mask": padding}, {"attn_mask": by_head},
                  {"attn_mask": causal, "key_padding_mask": padding}):  # fmt: skip
        theirs, ours = both(module, inputs, masks)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in zip(theirs, ours, strict=True)))
    print(f"{name:<18}{worst:.1e}")
    return worst


def seconds(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def longer(seqlen: int) -> None:
    """Both on one long causal sequence."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    layer = MultiHeadAttention.from_torch(module, causal=True)
    x = torch.randn(1, seqlen, WIDTH)
    mask = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
    with torch.no_grad():
        theirs = seconds(lambda: module(x, x, x, attn_mask=mask, need_weights=False))
        ours = seconds(lambda: layer(x))
    print(f"\n{seqlen} tokens, causal: PyTorch {theirs * 1e3:.0f} ms and a mask of {mask.numel() / 2**20:.0f} MiB, "
          f"tilewise {ours * 1e3:.0f} ms without one")  # fmt: skip


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens of the long sequence (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    print("largest difference in output and gradients")
    worst = max(compare(name, given, generator) for name, given in MODULES.items())
    longer(options.seqlen)
    return worst


if __name__ == "__main__":
    main()
