"""flash-attn's calls with a key/value cache, in the words of `tilewise.attention_with_kvcache`.

No gradient, as in flash-attn: the output hangs on nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache_api import attention_with_kvcache
from ..errors import ArgumentError, ShapeError, fail
from ..kvcache import FP8, Rotary
from . import conventions
from .flash_attn_probabilities import Members
from .flash_attn_rotary_kernel import positions, turn

__all__ = ["flash_attn_with_kvcache"]


class Cache(NamedTuple):
    """The tensors of a call, by flash-attn 3's names; 2 calls the page_table block_table, and has no ragged rows."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cache_seqlens: Any = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def rows_new(self) -> int | torch.Tensor:
        """New keys of each sequence."""
        if self.k is None:
            return 0
        return self.k.shape[1] if self.cu_seqlens_k_new is None else self.cu_seqlens_k_new.diff()

    @property
    def rows_q(self) -> int | torch.Tensor:
        """Queries of each sequence."""
        return self.q.shape[1] if self.cu_seqlens_q is None else self.cu_seqlens_q.diff()

    @property
    def pairs(self) -> bool:
        """Whether every sequence has as many new keys as queries, for sure: what the native call takes."""
        if self.k is None:
            return False
        if self.cu_seqlens_q is None and self.cu_seqlens_k_new is None:
            return self.k.shape[1] == self.q.shape[1]
        return self.cu_seqlens_k_new is self.cu_seqlens_q


class Rope(NamedTuple):
    """Tables of rotary embedding, and the position of each sequence's first new token (None: `cache_seqlens`)."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    positions: torch.Tensor | None = None


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`tilewise.attention_with_kvcache` in flash-attn's words: append k and v, in place, then attend.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim].
        k_cache: [rows, capacity, heads_k, head_dim], or with `block_table` [pages, page_size, heads_k, head_dim], with
            any page size.
        v_cache: the same with head_dim_v.
        k: [batch, seqlen_new, heads_k, head_dim], appended from slot `cache_seqlens` on; None: nothing is.
        v: the same with head_dim_v.
        rotary_cos: [positions, rotary_dim / 2], beside k: new keys are rotated to the positions from `cache_seqlens`
            on; queries too if causal or windowed, else all of them to `cache_seqlens`.
        rotary_sin: likewise.
        cache_seqlens: slots in use before the call, an int or integers [batch]; None: all of them, without k.
        cache_batch_idx: [batch], the cache's row of each sequence.
        cache_leftpad: [batch], the first slot in use.
        block_table: int32 [batch, max_pages].
        rotary_interleaved: pairs are dims (2r, 2r + 1).
        num_splits: parts that the keys are cut into; 0: the backend decides.
        return_softmax_lse: also return the LSE fp32 [batch, heads_q, seqlen_q].
        softmax_scale, causal, window_size, softcap, alibi_slopes: as `flash_attn_func`.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v], or (out, softmax_lse).

    Raises:
        tilewise.errors.TilewiseError: as `tilewise.attention_with_kvcache`.

    Example:
        >>> import torch
        >>> from tilewise.compat.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 1, 64, 2, 16)
        >>> q, k, v = torch.randn(3, 1, 1, 2, 16).unbind()
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
        >>> torch.allclose(out, v, atol=1e-6), torch.equal(k_cache[:, :1], k)
        (True, True)
    """
    options = conventions.options(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    rope = rotary(rotary_cos, rotary_sin, rotary_interleaved)
    cache = Cache(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    return attend(cache, rope, options, num_splits=num_splits, return_lse=return_softmax_lse)


def rotary(cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, first: Any = None) -> Rope | None:
    """The tables as one, or None without them: positions alone rotate nothing."""
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        fail(ArgumentError, "rotary_cos, rotary_sin", "one of the two", "both, or neither", "pass both tables")
    # Beside fp8 queries flash-attn 3 wants fp8 tables.
    cos, sin = (x.float() if x.dtype == FP8 else x for x in conventions.dense(cos, sin))
    return Rope(cos, sin, interleaved, first)


@torch.no_grad()
def dequantised(cache: Cache, q_descale: torch.Tensor | None) -> Cache:
    """The call with q, k and v in bf16 where they are fp8; the caches stay as they are.

    Raises:
        tilewise.errors.UnsupportedError: `q_descale` for a q that is not fp8.
    """
    k, v = cache.k, cache.v
    if cache.q.dtype != FP8:
        conventions.refuse("q_descale", q_descale, None, "multiply q by it, or pass a float8_e4m3fn q")
    q = _scaled(cache.q, q_descale, cache.cu_seqlens_q)
    if k is not None:
        k = _scaled(k, cache.k_descale, cache.cu_seqlens_k_new)
    if v is not None:
        v = _scaled(v, cache.v_descale, cache.cu_seqlens_k_new)
    return cache._replace(q=q, k=k, v=v)


def _scaled(x: torch.Tensor, scale: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """fp8 values times a scale [batch, heads_k], each for as many heads of x as there are to one."""
    if x.dtype != FP8:
        return x
    values = x.float()
    if scale is not None:
        scale = scale.to(x.device).repeat_interleave(x.shape[-2] // scale.shape[-1], dim=-1)
        where = None if cu_seqlens is None else conventions.places(cu_seqlens.to(x.device), x.shape[0])[0]
        values *= scale[:, None, :, None] if where is None else scale[where][..., None]
    return values.bfloat16()


@torch.no_grad()
def attend(
    cache: Cache,
    rope: Rope | None,
    options: dict[str, Any],
    *,
    num_splits: int,
    return_lse: bool,
    attention_chunk: int = 0,
) -> Any:
    """The call in native terms, as one where that can say it, else with the append before it.

    Args:
        cache: tensors and lengths.
        rope: from `rotary`.
        options: from `conventions.options`.
        num_splits: 0 for the backend's choice.
        return_lse: also return the LSE.
        attention_chunk: flash-attn 3's, see `conventions.chunk`.
    """
    cache = _checked(cache, rope)
    options = {name: value for name, value in options.items() if name not in ("deterministic", "dropout_p")}
    options["num_splits"] = _splits(num_splits)
    if attention_chunk:
        options["mask"] = conventions.chunk(attention_chunk, _diagonal(cache))
    # flash-attn counts the queries' positions on where a mask tells them apart, and else gives all of them the first.
    moves = options["causal"] or options["window"] is not None
    if _is_native(cache, rope, moves):
        return _native(cache, rope, options, return_lse)
    q = cache.q if rope is None else _turned(cache, rope, moves)
    return _native(_appended(cache, rope)._replace(q=q), None, options, return_lse)


def paged_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    members: Members,
    block_table: torch.Tensor,
    options: dict[str, Any],
    return_attn_probs: bool,
) -> Any:
    """`flash_attn_varlen_func` over pages: a cache to which nothing is appended."""
    conventions.refuse("dropout_p", options["dropout_p"], 0.0, "gather the pages, or leave dropout out")
    capacity = block_table.shape[-1] * k.shape[1]
    if members.max_seqlen_k > capacity:
        want = f"at most the {capacity} slots that block_table has for a sequence"
        fail(ArgumentError, "max_seqlen_k", members.max_seqlen_k, want, "pass the longest sequence's length")
    cache = Cache(
        q, k, v, cache_seqlens=members.cu_seqlens_k.diff(), page_table=block_table,
        cu_seqlens_q=members.cu_seqlens_q, max_seqlen_q=members.max_seqlen_q,
    )  # fmt: skip
    found = attend(cache, None, options, num_splits=0, return_lse=return_attn_probs)
    return (*found, q.new_empty(0)) if return_attn_probs else found


def _checked(cache: Cache, rope: Rope | None) -> Cache:
    """The call with its lengths as a tensor, one row of pages for each sequence, and last dimensions of stride 1."""
    if rope is not None and cache.k is None:
        fix = "rotate q beforehand with apply_rotary_emb, or pass k and v"
        fail(ArgumentError, "rotary_cos", "tables without new keys", "None without k and v", fix)
    lengths = cache.cache_seqlens
    if lengths is None:
        if cache.k is not None:
            fail(ArgumentError, "cache_seqlens", None, "an int or integers [batch] beside k", "pass how much is in use")
        slots = cache.k_cache.shape[1]
        lengths = slots if cache.page_table is None else slots * cache.page_table.shape[1]
    if not isinstance(lengths, torch.Tensor):
        lengths = conventions.integer("cache_seqlens", lengths)
        lengths = torch.full((cache.batch,), lengths, dtype=torch.int32, device=cache.q.device)
    if lengths.shape != (cache.batch,):
        want = f"an int, or [{cache.batch}]"
        fail(ShapeError, "cache_seqlens", f"shape {list(lengths.shape)}", want, "pass one length for each sequence")
    table = cache.page_table
    if table is not None and cache.cache_batch_idx is not None:
        cache = cache._replace(page_table=table[cache.cache_batch_idx.long()], cache_batch_idx=None)
    q, k, v = conventions.dense(cache.q, cache.k, cache.v)
    return cache._replace(q=q, k=k, v=v, cache_seqlens=lengths)


def _diagonal(cache: Cache) -> torch.Tensor:
    """seqlen_k - seqlen_q of each sequence, after the append, on q's device."""
    found = torch.zeros(cache.batch, dtype=torch.int64, device=cache.q.device)
    for sign, rows in ((1, cache.cache_seqlens), (1, cache.rows_new), (-1, cache.rows_q), (-1, cache.cache_leftpad)):
        if rows is not None:
            found += sign * (rows.to(found) if isinstance(rows, torch.Tensor) else rows)
    return found


def _splits(num_splits: Any) -> int | None:
    found = conventions.integer("num_splits", num_splits)
    if found < 0:
        fail(ArgumentError, "num_splits", found, "0 and more", "pass 0 to let the backend decide")
    return found or None


def _is_native(cache: Cache, rope: Rope | None, moves: bool) -> bool:
    """Whether one native call appends, rotates and attends as flash-attn does.

    It rotates row i to the position of the key on its diagonal: flash-attn's, if there are as many new keys, and
    positions count on or there is but one. And it takes new keys packed like the queries.
    """
    if cache.k is None:
        return True
    is_dense = cache.cu_seqlens_q is None and cache.cu_seqlens_k_new is None
    if rope is None:
        return is_dense or cache.pairs
    return cache.pairs and (moves or (is_dense and cache.q.shape[1] == 1))


def _native(cache: Cache, rope: Rope | None, options: dict[str, Any], return_lse: bool) -> Any:
    tables = None if rope is None else Rotary(*rope)
    return attention_with_kvcache(
        cache.q, cache.k_cache, cache.v_cache, cache_seqlens=cache.cache_seqlens, k_new=cache.k, v_new=cache.v,
        page_table=cache.page_table, cache_batch_idx=cache.cache_batch_idx, cache_leftpad=cache.cache_leftpad,
        rotary=tables, cu_seqlens_q=cache.cu_seqlens_q, max_seqlen_q=cache.max_seqlen_q,
        k_scale=cache.k_descale, v_scale=cache.v_descale, return_lse=return_lse, **options,
    )  # fmt: skip


def _appended(cache: Cache, rope: Rope | None) -> Cache:
    """The call after its append, which is made by one of its own: the new keys as queries, each seeing itself alone."""
    k = cache.k
    assert k is not None
    ragged = cache.cu_seqlens_k_new is not None
    new = cache._replace(q=k, cu_seqlens_q=cache.cu_seqlens_k_new, max_seqlen_q=k.shape[0] if ragged else None)
    _native(new, rope, {"window": (0, 0)}, False)
    lengths, rows = cache.cache_seqlens, cache.rows_new
    lengths = lengths + (rows.to(lengths) if isinstance(rows, torch.Tensor) else rows)
    return cache._replace(k=None, v=None, cache_seqlens=lengths, cu_seqlens_k_new=None)


def _turned(cache: Cache, rope: Rope, moves: bool) -> torch.Tensor:
    """The queries rotated: row i of a sequence to its first position, plus i if positions move on."""
    first = cache.cache_seqlens if rope.positions is None else rope.positions
    longest = cache.max_seqlen_q if cache.cu_seqlens_q is not None else None
    at = positions(cache.q, rope.cos, rope.sin, first, cache.cu_seqlens_q, longest)
    if not moves:
        if cache.cu_seqlens_q is None:
            at = at[:, :1].expand_as(at)
        else:
            at = at - conventions.places(cache.cu_seqlens_q.to(at.device), at.shape[0])[1]
    return turn(cache.q, (rope.cos, rope.sin), at, rope.interleaved, inplace=False)
