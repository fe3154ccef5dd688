"""The `torch.library` operators of calls with a cache, and their fakes.

One only reads the cache; the other appends to it, and says so in its schema, so that `torch.compile` keeps the order of
a model's calls and copies no cache. Both are there once the package is imported, for a saved graph may hold them; what
serves them is loaded when the first one is called, which few programs ever do.
"""

from __future__ import annotations

from typing import Any

import torch

from . import autograd

# The fields of `CacheInputs`, in their order.
_INPUTS = (
    "Tensor q, Tensor{a} k_cache, Tensor{b} v_cache, Tensor cache_seqlens, Tensor? k_new, Tensor? v_new, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_positions, Tensor? cu_seqlens_q, Tensor? tree, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor[] extras, str options, str static, SymInt max_seqlen_q"
)


def _serve(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from . import cached

    return cached.serve_operator(*arguments)


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from . import cached

    return cached.results(*arguments)


autograd.register(f"attend_cache({_INPUTS.format(a='', b='')}) -> (Tensor, Tensor)", _serve, _fake)
autograd.register(f"append_and_attend_cache({_INPUTS.format(a='(a!)', b='(b!)')}) -> (Tensor, Tensor)", _serve, _fake)
