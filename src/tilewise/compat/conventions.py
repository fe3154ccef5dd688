"""From flash-attn's conventions to this package's: one function per argument that means something else there."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch

from .. import checks
from ..errors import ArgumentError, ShapeError, UnsupportedError, fail
from ..mask_algebra import Mask
from ..masks import Predicate, Window


def options(
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The options of `tilewise.attention` for these arguments of flash-attn's."""
    checks.flags(causal=causal, deterministic=deterministic)
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": window(window_size),
        "softcap": cap(softcap),
        "deterministic": deterministic,
        "dropout_p": dropout_p,
        "alibi_slopes": alibi_slopes,
    }


def window(window_size: Any) -> tuple[int | None, int | None] | None:
    """(left, right) with None for -1; None where both are.

    >>> window((-1, -1)), window((127, 0)), window([-1, 3])
    (None, (127, 0), (None, 3))
    """
    try:
        left, right = (operator.index(bound) for bound in window_size)
    except (TypeError, ValueError, RuntimeError):
        fix = "-1 is unbounded; a window of W tokens with the query's own is (W - 1, 0)"
        fail(ArgumentError, "window_size", repr(window_size)[:60], "two integers (left, right)", fix)
    if left < -1 or right < -1:
        got, fix = repr((left, right)), "pass -1 for an unbounded side"
        fail(ArgumentError, "window_size", got, "bounds of 0 and more, or -1", fix)
    bounds = tuple(None if bound == -1 else bound for bound in (left, right))
    return None if bounds == (None, None) else (bounds[0], bounds[1])


def cap(softcap: Any) -> float | None:
    """A cap, or None: flash-attn means none by 0.0, or less."""
    is_number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    return None if is_number and softcap <= 0 else softcap


def integer(name: str, value: Any) -> int:
    """A Python integer from what has the value of one; a tensor on a GPU is waited for, as it is there.

    >>> integer("max_seqlen_q", torch.tensor(7))
    7
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # the compiler's integer
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        fail(ArgumentError, name, type(value).__name__, "an integer", f"pass int({name})")


def dense(*tensors: Any) -> list[Any]:
    """The tensors, copied where their last dimension has a stride: flash-attn takes such, the kernels here do not."""
    return [x.contiguous() if isinstance(x, torch.Tensor) and x.ndim and x.stride(-1) != 1 else x for x in tensors]


def unpacked(name: str, x: torch.Tensor, parts: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The tensors that are packed in dimension -3 of one; their gradients come packed in one, too.

    Raises:
        tilewise.errors.ShapeError: the tensor has not this rank, or not so many parts.
    """
    lead = "[batch, seqlen, " if rank == 5 else "[total, "
    if not isinstance(x, torch.Tensor) or x.ndim != rank or x.shape[-3] != parts:
        got = f"shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        fix = "torch.stack([...], dim=-3), or call the function that takes them apart"
        fail(ShapeError, name, got, f"{lead}{parts}, heads, head_dim]", fix)
    return x.unbind(-3)


def packed_parts(name: str, packed: torch.Tensor, num_heads_q: int | None) -> tuple[Any, Any, Any]:
    """The indices of q, k, v in ``[..., 3, heads, head_dim]``, or ``[..., heads_q + 2 · heads_k, head_dim]``.

    Raises:
        tilewise.errors.ShapeError: neither; or `num_heads_q` with the first, or without it with the second.
    """
    whole = slice(None)
    if packed.ndim == 5 and packed.shape[2] == 3 and num_heads_q is None:
        return (..., 0, whole, whole), (..., 1, whole, whole), (..., 2, whole, whole)
    heads = packed.shape[2] if packed.ndim == 4 else 0
    if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        got = f"shape {list(packed.shape)} and num_heads_q={num_heads_q}"
        want = (
            "[batch, seqlen, 3, heads, head_dim], or [batch, seqlen, heads_q + 2 · heads_k, head_dim] and num_heads_q"
        )
        fail(ShapeError, name, got, want, "pass num_heads_q with four dimensions, and only then")
    last_k = num_heads_q + (heads - num_heads_q) // 2
    parts = slice(0, num_heads_q), slice(num_heads_q, last_k), slice(last_k, heads)
    return (..., parts[0], whole), (..., parts[1], whole), (..., parts[2], whole)


def refuse(name: str, value: Any, default: Any, fix: str) -> None:
    """Raise if an argument that is not served is more than its default.

    Args:
        name: the argument.
        value: what was passed.
        default: what asks for nothing.
        fix: the native way to get the same.
    """
    asked = value is not default if default is None or isinstance(value, torch.Tensor) else value != default
    if asked:
        got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)[:60]
        fail(UnsupportedError, name, got, f"{default!r}", fix)


def refuse_fp8(tensors: dict[str, torch.Tensor], **scales: Any) -> None:
    """Raise if tensors are fp8, or scales are given, which mean something for fp8 alone."""
    fix = "use tilewise.attention_fp8, or dequantise: (x.float() * descale).bfloat16()"
    for name, value in scales.items():
        refuse(name, value, None, fix)
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.dtype.itemsize == 1 and x.dtype.is_floating_point:
            fail(UnsupportedError, name, x.dtype, "float16, bfloat16, float32 and float64", fix)


def hint(name: str, value: Any, default: Any) -> None:
    """Say once that an argument which is about speed alone has no effect here; the result is the same by contract."""
    if value != default:
        text = f"{name}={value!r} steers flash-attn's kernels; tilewise schedules by itself, the result is the same"
        warnings.warn(text, UserWarning, stacklevel=4)


def chunk(attention_chunk: Any, diagonal: int | torch.Tensor) -> Mask | None:
    """The mask of chunked attention: a query sees the keys whose position gives its own quotient by the chunk's length.

    Args:
        attention_chunk: the chunk's length; 0 is none.
        diagonal: seqlen_k - seqlen_q, which makes a query's row its position among keys; a tensor [batch] where
            sequences differ.
    """
    length = integer("attention_chunk", attention_chunk)
    if length < 0:
        fail(ArgumentError, "attention_chunk", length, "a length > 0, or 0 for none", "pass 0 for no chunks")
    if length == 0:
        return None
    same = _in_chunk_of_member if isinstance(diagonal, torch.Tensor) else _in_chunk
    # The window holds nothing back; it is what kernels can skip tiles by.
    return Predicate(same, aux=(diagonal, length)) & Window(length - 1, length - 1)


def _in_chunk(b: Any, h: Any, q: Any, k: Any, diagonal: Any, length: Any) -> Any:
    return (q + diagonal >= k - k % length) & (q + diagonal < k - k % length + length)


def _in_chunk_of_member(b: Any, h: Any, q: Any, k: Any, diagonal: Any, length: Any) -> Any:
    return (q + diagonal[b] >= k - k % length) & (q + diagonal[b] < k - k % length + length)


def places(cu_seqlens: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each packed row, the member that it is in and its position there; rows past the last member count on in it.

    >>> [x.tolist() for x in places(torch.tensor([0, 2, 2, 3]), 4)]
    [[0, 0, 2, 2], [0, 1, 0, 1]]
    """
    starts = cu_seqlens.to(torch.int64)
    row = torch.arange(rows, device=starts.device)
    member = (torch.searchsorted(starts, row, right=True) - 1).clamp_(max=max(0, starts.shape[0] - 2))
    return member, row - starts[member]
