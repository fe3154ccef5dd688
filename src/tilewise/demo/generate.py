"""Writing bytes with the trained model, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Cache, Decoder


@torch.no_grad()
def generate(model: Decoder, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """`count` bytes that continue `prompt`, which is not part of the result.

    Each new byte is one query against the cached keys: bottom-right alignment puts it on the last diagonal, so causal
    and windowed layers need no further argument.

    Args:
        prompt: at least one byte.
        temperature: 0 takes the likeliest byte; otherwise logits are divided by it and the byte is drawn.
        seed: of the draws.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    cache, written = Cache(), bytearray()
    tokens = torch.tensor([list(prompt)], device=device)
    while len(written) < count:
        logits = model(tokens, cache=cache)[0, -1].float().cpu()
        written.append(_choose(logits, temperature, generator))
        tokens = torch.tensor([[written[-1]]], device=device)
    return bytes(written)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
