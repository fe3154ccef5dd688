"""Hugging Face transformers: its models on tilewise's attention, under the name ``tilewise``.

    from tilewise.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tilewise")

Two functions are registered: one that computes attention, and one that says what is visible (`transformers_masks`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from .. import api
from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError, fail
from ..mask_algebra import Mask
from ..masks import Causal, Dense, Full, Interval, Window
from .transformers_masks import TransformersMask, attention_mask, conjunction, readable

# transformers takes names with "flash", "sdpa", "flex_attention" or "/" in them for implementations of its own.
NAME = "tilewise"

# What models pass along to whatever may want it, and what does not concern attention. Add what yours passes.
UNRELATED = {
    "cache_position", "encoder_attention_mask", "encoder_hidden_states", "labels", "layer_idx", "logits_to_keep",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
    "return_dict", "token_type_ids", "use_cache",
    # Of sparse attention: the mask holds it, as it does for eager attention.
    "indices",
}  # fmt: skip
_INSTEAD = {
    "output_attentions": "weights are never formed here: use attn_implementation='eager'",
    "head_mask": "use attn_implementation='eager'",
    "cache": "continuous batching is not served: use generate(), or attn_implementation='paged|sdpa'",
}


def register() -> None:
    """Make ``attn_implementation="tilewise"`` known to transformers. Doing it again changes nothing.

    Example:
        >>> from transformers import AutoModel, LlamaConfig
        >>> from tilewise.integrations import transformers
        >>> transformers.register()
        >>> sizes = {"vocab_size": 10, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        >>> config = LlamaConfig(num_hidden_layers=1, **sizes)
        >>> model = AutoModel.from_config(config, attn_implementation="tilewise")
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: TransformersMask | torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' `AttentionInterface` asks for it.

    Args:
        module: the layer that asks: whether it trains, and whether it is causal where nothing else says so.
        query: [batch, heads_q, seqlen_q, head_dim].
        key: [batch, heads_kv, seqlen_k, head_dim], not repeated.
        value: [batch, heads_kv, seqlen_k, head_dim_v].
        attention_mask: what `transformers_masks.attention_mask` returned; or a tensor that broadcasts to [batch,
            heads_q, seqlen_q, seqlen_k], bool with True for visible, or floating to be added to the scores; or None. It
            holds causality and window, as for eager attention.
        dropout: probability of dropping a weight while the module trains.
        scaling: of the scores; None is ``1 / sqrt(head_dim)``.
        is_causal: None: what the module says. Counts where there is no mask.
        sliding_window: the last so many keys, a query's own included. Counts where there is no mask.
        softcap: ``s -> softcap · tanh(s / softcap)``, or None.
        s_aux: [heads_q] sinks, or None; with gradient.
        position_bias: broadcasts to the scores and is added to them, or None; with gradient.
        position_ids: [batch or 1, seqlen]. Where they do not go up, the next of several documents in a row begins.
            Counts for causal layers without padding, over new tokens alone.
        seq_idx: [batch or 1, seqlen]: the document that each token belongs to, one run each.
        cu_seq_lens_q, cu_seq_lens_k: [documents + 1] cumulative lengths of documents that share one row.
        max_length_q, max_length_k: the longest of them; None: all of the row.
        deterministic: bitwise repeatable gradients.
        others: what does not concern attention (`UNRELATED`), or is None or False.

    Returns:
        [batch, seqlen_q, heads_q, head_dim_v], and None in place of weights.

    Raises:
        tilewise.errors.TilewiseError: an argument that is not served, by name, and what to do instead.
    """
    _refuse(module, others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap,
        "dropout_p": dropout if module.training else 0.0,
        "deterministic": bool(deterministic),
        "sinks": None if s_aux is None else s_aux.to(torch.promote_types(s_aux.dtype, torch.float32)),
    }
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible, bias = _visible(attention_mask, causal, sliding_window, q, k)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    documents = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        offsets = _offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if causal and q.shape[1] != k.shape[1]:
            got = f"offsets for {q.shape[1]} queries and {k.shape[1]} keys"
            fix = "packed documents go through the model in one pass, without a cache of earlier ones"
            fail(UnsupportedError, "cu_seq_lens_q", got, "as many keys as queries in causal layers", fix)
        if visible.band is not None and bias is None:
            return offsets.attend(q, k, v, visible.band, options), None
        documents = offsets.documents(q)
    elif seq_idx is not None:
        documents = _documents(seq_idx, "seq_idx", q, k)
    elif position_ids is not None and not visible.settled and q.shape[1] == k.shape[1] > 1:
        documents = _documents(position_ids, "position_ids", q, k)
    mask = conjunction(visible.mask, documents)
    return api.attention(q, k, v, mask=mask, bias=bias, **options), None


def _refuse(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise for the first argument that would change attention if it were heard."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        others = {**others, "output_attentions": True}
    for name, value in others.items():
        if value is None or value is False or name in UNRELATED:
            continue
        want = "the arguments of tilewise.integrations.transformers.attention"
        fix = "if it does not concern attention, add its name to UNRELATED there; else use attn_implementation='eager'"
        got = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)[:60]
        fail(UnsupportedError, name, got, want, _INSTEAD.get(name, fix))


def _visible(
    mask: TransformersMask | torch.Tensor | None,
    causal: bool,
    sliding_window: int | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> tuple[TransformersMask, torch.Tensor | None]:
    """The mask, whatever it came as, and what of it is to be added to the scores."""
    grid = (q.shape[0], 1, q.shape[1], k.shape[1])
    if mask is None:
        side = None if sliding_window is None else sliding_window - 1
        band = conjunction(
            Causal() if causal else None, None if side is None else Window(side, None if causal else side)
        )
        return TransformersMask(band, band, not causal, grid), None
    if isinstance(mask, TransformersMask):
        if mask.grid[2:] != grid[2:]:
            got, want = (f"{rows} queries and {keys} keys" for _, _, rows, keys in (mask.grid, grid))
            fix = "let the model make its masks with the cache that its layers use"
            fail(ShapeError, "attention_mask", f"a mask of {got}", f"one of the layer's {want}", fix)
        return mask, None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (3, 4):
        got = f"shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        want = "None, a mask made by transformers, or a tensor that broadcasts to [batch, heads, seqlen_q, seqlen_k]"
        fix = "give padding masks [batch, seqlen] to the model, not to its layers"
        fail(ShapeError, "attention_mask", got, want, fix)
    if mask.dtype == torch.bool:
        return TransformersMask(Dense(mask), None, True, grid), None
    if not mask.dtype.is_floating_point:
        want = "bool with True for visible, or a floating dtype to be added to the scores"
        fail(DtypeError, "attention_mask", mask.dtype, want, "pass mask.bool()")
    return TransformersMask(Full(), None, True, grid), mask


class _Offsets(NamedTuple):
    """Documents that share one row, by their cumulative lengths."""

    q: torch.Tensor
    k: torch.Tensor
    longest_q: int | None
    longest_k: int | None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Mask, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of each document to itself."""
        rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))
        longest_q = rows.shape[0] if self.longest_q is None else int(self.longest_q)
        longest_k = keys.shape[0] if self.longest_k is None else int(self.longest_k)
        out = api.attention_varlen(
            rows, keys, values, self.q, self.k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, mask=band, **options
        )
        return out.unflatten(0, q.shape[:2])

    def documents(self, q: torch.Tensor) -> Mask:
        """The same as a mask, for calls that packed ones do not serve."""
        if q.shape[0] != 1:
            got = f"offsets beside a mask or a position bias, for {q.shape[0]} rows"
            fail(UnsupportedError, "cu_seq_lens_q", got, "one row", "leave out attention_mask, or pack into one row")
        ends, offsets = self.q[1:].to(q.device).contiguous(), self.k.to(q.device)
        document = torch.searchsorted(ends, torch.arange(q.shape[1], device=q.device), right=True)
        # What comes after the last document sees nothing.
        offsets = torch.cat([offsets, offsets[-1:]])
        return Interval(offsets[document].int(), offsets[document + 1].int())


def _offsets(q: torch.Tensor | None, k: torch.Tensor | None, longest_q: int | None, longest_k: int | None) -> _Offsets:
    if q is None or k is None:
        missing = "cu_seq_lens_q" if q is None else "cu_seq_lens_k"
        fail(ArgumentError, missing, None, "offsets of queries and keys", "pass both; they may be one tensor")
    return _Offsets(q, k, longest_q, longest_k)


# What was read of position_ids, which all layers of a model share.
_read: Any = WeakTensorKeyDictionary()


def _documents(ids: torch.Tensor, name: str, q: torch.Tensor, k: torch.Tensor) -> Mask | None:
    """The documents that share a row, or None if there is one in each."""
    batch, length = q.shape[:2]
    if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length or k.shape[1] != length:
        if name == "position_ids":
            # Of images, or of several axes: no positions in a text.
            return None
        got = f"shape {list(ids.shape)} for {length} queries and {k.shape[1]} keys"
        fail(ShapeError, name, got, f"[{batch}, {length}] or [1, {length}], without a cache", "leave it out")
    if not readable(ids):
        return _runs(_starts(ids, name))
    version = None if ids.is_inference() else ids._version
    known = _read.get(ids)
    if known is None or known[0] != (name, version):
        starts = _starts(ids, name)
        _read[ids] = known = ((name, version), _runs(starts) if bool(starts.any()) else None)
    return known[1]


def _starts(ids: torch.Tensor, name: str) -> torch.Tensor:
    """Where a document begins, the first apart: bool [B, S]."""
    before, after = ids[:, :-1], ids[:, 1:]
    starts = after <= before if name == "position_ids" else after != before
    return torch.nn.functional.pad(starts, (1, 0))


def _runs(starts: torch.Tensor) -> Mask:
    """Each position sees the run that it is in."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    lo = torch.where(starts, positions, 0).cummax(1).values
    # The end as a tensor: a compiler takes a length that pads for a constant.
    end = positions[-1:].expand(starts.shape[0], 1) + 1
    following = torch.where(starts, positions, end).flip(1).cummin(1).values.flip(1)
    return Interval(lo.int(), torch.cat([following[:, 1:], end], dim=1).int())
