"""This package underneath PyTorch: `F.scaled_dot_product_attention`, `varlen_attn` and context parallelism on CUDA.

PyTorch keeps a registry of implementations of its flash-attention operators (``torch.nn.attention``). `register` adds
this package to it under the name ``tilewise``; `activate` puts its functions in PyTorch's place for CUDA tensors, until
`restore`. Which calls of `F.scaled_dot_product_attention` reach them is decided by PyTorch before: those without masks,
in fp16 or bf16, with one head dim of at most 256, square where causal. `tilewise.compat.sdpa` has no such limits.

Dropout draws the mask of `tilewise.attention`; gradients repeat bit by bit where ``torch.use_deterministic_algorithms``
asks for that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import attention as torch_attention

from ..arguments import seed_tensor
from ..cache_api import attention_with_kvcache
from ..compat import conventions, explicit
from ..compat.flash_attn_probabilities import Members
from ..errors import UnsupportedError, fail

__all__ = ["NAME", "activate", "activated", "register", "restore"]

NAME = "tilewise"


def register() -> None:
    """Add this package to PyTorch's registry, without activating it; twice is as once.

    After it, ``torch.nn.attention.activate_flash_attention_impl("tilewise")`` does what `activate` does.
    """
    torch_attention.register_flash_attention_impl(NAME, register_fn=_take_over)


def activate() -> None:
    """Let PyTorch's flash-attention operators run here for CUDA tensors, until `restore` or another's activation.

    Example:
        >>> import torch
        >>> from tilewise.integrations import torch_sdpa
        >>> torch_sdpa.activate()
        >>> torch.nn.attention.current_flash_attention_impl()
        'tilewise'
        >>> torch_sdpa.restore()
    """
    register()
    torch_attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Give PyTorch its own kernels back, if this package's are active; leave another implementation alone."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


@contextmanager
def activated() -> Iterator[None]:
    """`activate` for a with statement; afterwards what was active before is so again."""
    before = torch_attention.current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        restore()
        if before is not None and before != NAME:
            torch_attention.activate_flash_attention_impl(before)
        elif before == NAME:
            activate()


class _Handle:
    """Keeps the operators' functions in place; PyTorch calls `remove` to take them away."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None


def _take_over() -> _Handle:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        # PyTorch says that kernels of its own are overridden, which is what was asked for.
        warnings.filterwarnings("ignore", message=r"(?s).*overrid", category=UserWarning)
        for name, fn in operators().items():
            library.impl(name, fn, "CUDA")
    return _Handle(library)


def operators() -> dict[str, Callable[..., Any]]:
    """This package's functions by the names of PyTorch's operators, those that this PyTorch has."""
    ours: dict[str, Callable[..., Any]] = {
        "_scaled_dot_product_flash_attention": _sdpa_forward,
        "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_backward": _flash_backward,
        "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,  # PyTorch 2.12
    }
    return {name: fn for name, fn in ours.items() if hasattr(torch.ops.aten, name)}


def _sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Dense BHSD. Causal is flash-attn's, bottom-right: `F.scaled_dot_product_attention` sends square calls alone."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    dense = (q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask)
    out, lse, rng_state, unused, debug_mask = _flash_forward(*dense, scale=scale)
    out = _placed_as(query, out.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, unused, debug_mask


def _sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dense = (do, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    grads = _flash_backward(*dense, scale=scale)
    inputs = (query, key, value)
    return tuple(_placed_as(x, grad.transpose(1, 2)) for x, grad in zip(inputs, grads, strict=True))


def _flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """BSHD, or packed with cum_seq_q: output, LSE, dropout's state (its seed), nothing, and an empty debug mask."""
    debug = "use tilewise.compat.flash_attn, whose return_attn_probs=True returns the dropped weights"
    conventions.refuse("return_debug_mask", return_debug_mask, False, debug)
    options = _options(scale, is_causal, (window_size_left, window_size_right), dropout_p, alibi_slopes)
    rng_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if dropout_p:
        rng_state[0] = seed_tensor(None, query.device)
        options["dropout_seed"] = rng_state[0]
    if block_table is not None:
        pages = (block_table, seqused_k, cum_seq_q, max_q)
        out, lse = _paged(query, key, value, pages, {**options, "num_splits": num_splits})
    else:
        # Splitting the keys is for caches; a pass that is not split is what 1 asks for, and None leaves open.
        splits = "use tilewise.attention_with_kvcache, which takes num_splits"
        conventions.refuse("num_splits", 1 if num_splits is None else num_splits, 1, splits)
        members = _members(cum_seq_q, cum_seq_k, max_q, max_k)
        if members is not None:
            options["seqused_k"] = seqused_k
        else:
            conventions.refuse("seqused_k", seqused_k, None, "pass cum_seq_q and cum_seq_k with it")
        q, k, v = conventions.dense(query, key, value)
        out, lse = explicit.forward(q, k, v, members, options)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, rng_state.view(torch.uint64), unused, query.new_empty(0)


def _flash_forward_into(out: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """`_flash_forward` into a tensor that is there; returns the LSE."""
    result, lse, *_ = _flash_forward(*arguments, **named)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    options = _options(scale, is_causal, (window_size_left, window_size_right), dropout_p, None)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if dropout_p:
        options["dropout_seed"] = rng_state.view(torch.int64)[0]
    q, k, v = conventions.dense(query, key, value)
    members = _members(cum_seq_q, cum_seq_k, max_q, max_k)
    grads = explicit.backward(grad_out, (out, logsumexp), (q, k, v), members, options)
    return tuple(_placed_as(x, grad) for x, grad in zip((query, key, value), grads, strict=True))


def _options(
    scale: float | None,
    is_causal: bool,
    bounds: tuple[int | None, int | None],
    dropout_p: float,
    alibi_slopes: torch.Tensor | None,
) -> dict[str, Any]:
    left, right = (-1 if bound is None else bound for bound in bounds)
    return conventions.options(
        softmax_scale=scale, causal=is_causal, window_size=(left, right), softcap=0.0, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _members(cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, max_q: int, max_k: int) -> Members | None:
    if cu_q is None and cu_k is None:
        return None
    if cu_q is None or cu_k is None:
        got = f"cum_seq_{'k' if cu_q is None else 'q'} alone"
        fail(UnsupportedError, "cum_seq_q, cum_seq_k", got, "both, or neither", "pass the offsets of both")
    return Members(cu_q, cu_k, max_q, max_k)


def _paged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: tuple[Any, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed queries over pages of keys, of which `seqused_k` are in use; without a gradient, as in PyTorch."""
    block_table, seqused_k, cum_seq_q, max_q = pages
    if seqused_k is None or cum_seq_q is None:
        want = "block_table together with seqused_k and cum_seq_q"
        fail(UnsupportedError, "block_table", "pages without lengths", want, "pass the keys in use of each sequence")
    conventions.refuse("dropout_p", options.pop("dropout_p"), 0.0, "gather the pages, or leave dropout out")
    del options["deterministic"]
    with explicit.outside_autograd(query.device):
        return attention_with_kvcache(
            query, key, value, cache_seqlens=seqused_k, page_table=block_table, cu_seqlens_q=cum_seq_q,
            max_seqlen_q=max_q, return_lse=True, **options,
        )  # fmt: skip


def _placed_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` with the strides of ``torch.empty_like(like)``, which compiled code counts on; a copy only if needed."""
    if x.shape != like.shape or x.stride() == like.stride():
        return x
    wanted = torch.empty_like(like)
    return x if x.stride() == wanted.stride() else wanted.copy_(x)
