"""flash-attn's helpers between padded batches and packed rows (its `bert_padding`), by their names and results."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..errors import ShapeError, fail

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:  # noqa: A002 - flash-attn's name
    """The rows ``input[indices]``; `input` [rows, ...], `indices` int32 or int64 [n]."""
    return input.index_select(0, indices)


def index_first_axis_residual(
    input: torch.Tensor,  # noqa: A002 - flash-attn's name
    indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input[indices], input)``: the rows, and what goes around them."""
    return input.index_select(0, indices), input.view_as(input)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """[first_axis_dim, ...], 0 but for ``values [n, ...]`` in the rows `indices`, which differ from each other."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """A padded batch as packed rows. Reads the lengths, which waits for the GPU.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: bool or integer [batch, seqlen]: 1 keeps a position.
        unused_mask: likewise: positions that get a row but do not count as used.

    Returns:
        The rows [total, ...]; their positions int64 [total] in the flattened batch; cu_seqlens int32 [batch + 1]; the
        longest member; the members' used lengths int32 [batch].

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn_padding import pad_input, unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> rows, indices, cu_seqlens, longest, used = unpad_input(torch.ones(2, 3, 4), mask)
        >>> cu_seqlens.tolist(), longest, pad_input(rows, indices, 2, 3)[..., 0].tolist()
        ([0, 2, 3], 2, [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _offsets(lengths), _longest(lengths), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As `unpad_input`, for rows that hold several sequences one after the other.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: integer [batch, seqlen]: each row begins with the lengths of its sequences, then 0.

    Returns:
        As `unpad_input`, without the used lengths; a member per sequence.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn_padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0]])
        >>> unpad_input_for_concatenated_sequences(torch.ones(2, 6, 4), lengths)[2].tolist()
        [0, 2, 5, 8, 10]
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    filled = attention_mask_in_length.sum(dim=-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[1], device=filled.device) < filled
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _offsets(lengths), _longest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Packed rows as a padded batch [batch, seqlen, ...], with 0 where there is no row.

    Args:
        hidden_states: [total, ...].
        indices: int32 or int64 [total], from `unpad_input`.
        batch: sequences.
        seqlen: the length to pad to.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> None:
    if hidden_states.shape[:2] != mask.shape:
        want = f"[batch, seqlen] = {list(hidden_states.shape[:2])}"
        fail(ShapeError, name, f"shape {list(mask.shape)}", want, "pass one value per position")


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
