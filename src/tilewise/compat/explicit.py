"""Forward and backward passes one at a time, for callers that keep a graph of their own: PyTorch's operators, rings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..api import attention, attention_varlen
from ..arguments import prepare
from .flash_attn_probabilities import Members


@contextmanager
def outside_autograd(device: torch.device) -> Iterator[None]:
    """Neither a graph nor autocast: the caller sees to the one, and has been through the other."""
    with torch.no_grad():
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, members: Members | None, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE.

    Args:
        q, k, v: as `tilewise.attention` takes them, or packed.
        members: of a packed call.
        options: of `tilewise.attention`.
    """
    with outside_autograd(q.device):
        if members is None:
            return attention(q, k, v, **options, return_lse=True)
        return attention_varlen(q, k, v, **members._asdict(), **options, return_lse=True)


def backward(
    do: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    members: Members | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv.

    Args:
        do: gradient of the output.
        stats: output and LSE: of this forward pass, or of the whole of which its keys are a part.
        qkv: its inputs.
        members: of a packed call.
        options: of its call, with the seed of its dropout.
    """
    with outside_autograd(do.device):
        q, k, v = qkv
        given = options if members is None else {**members._asdict(), **options}
        problem, inputs, _ = prepare(q, k, v, **given)
        extras: list[torch.Tensor] = []
        spec = replace(problem.options, needs_grad=True).encode(extras)
        longest = problem.seqlen_q, problem.seqlen_k
        dq, dk, dv = torch.ops.tilewise.backward(*stats, do, None, "q k v", *inputs, extras, spec, *longest)
    return dq, dk, dv
