"""Attention of many sequences that begin alike: the common keys are read once for all of them (cascade attention)."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import shown
from .cache_api import attention_with_kvcache
from .decode.rotary import rotate
from .errors import ArgumentError, ShapeError, UnsupportedError, fail
from .kvcache import Rotary
from .mask_algebra import BOTTOM_RIGHT
from .masks import Predicate, Window
from .score_mods import ScoreMod
from .softmax import merge_states

# What a pass over the prefix cannot say, and why.
_REFUSED = {
    "score_mod": "it may depend on positions of the whole sequence",
    "cache_batch_idx": "contiguous rows share no memory",
    "cache_leftpad": "a prefix begins at the first slot",
}


def attention_with_shared_prefix(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    prefix: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    window: Any = None,
    alibi_slopes: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    **arguments: Any,
) -> Any:
    """`attention_with_kvcache` for sequences whose first `prefix` tokens lie in the same pages.

    One pass has the rows of all sequences against the prefix, which it reads once instead of once for each sequence;
    the other has each sequence's rows against its own tokens; `merge_states` makes one result of both. A window cuts
    where it does without the split: bounds count from the row's own position.

    Args:
        q, k_cache, v_cache: as there; the cache is paged.
        prefix: tokens that all sequences begin with, a Python int; sequence 0's pages are read for all. The page in
            which it ends may be each sequence's own copy, as `PagedKVCache.fork` leaves it.
        cache_seqlens: as there, the prefix included; each row's token comes after the prefix.
        page_table: as there.
        window, alibi_slopes, return_lse, out_dtype: as there.
        rotary: as there; q and k_new are rotated by operators, not in the kernel.
        arguments: others of `attention_with_kvcache`: k_new, v_new, cu_seqlens_q, max_seqlen_q, causal, a boolean
            tree as mask, softcap, softmax_scale, sinks, num_splits, split_size, softmax_max, k_scale, v_scale (per
            head or page), backend, validate. score_mod, other masks, cache_batch_idx and cache_leftpad are refused.

    Returns:
        What `attention_with_kvcache` returns, to rounding.

    Raises:
        tilewise.errors.TilewiseError: as there; also a prefix longer than a sequence, or of different pages.

    Source:
        FlashInfer's cascade attention; Hydragen (Juravsky et al., 2024).

    Example:
        >>> import torch, tilewise
        >>> cache = tilewise.PagedKVCache(8, 4, heads_kv=2, head_dim=16)
        >>> first = cache.allocate()
        >>> step, (q, k, v) = cache.append([first], 8), torch.randn(3, 1, 8, 2, 16).unbind()
        >>> _ = tilewise.attention_with_kvcache(q, cache.k[0], cache.v[0], k_new=k, v_new=v, causal=True, **step)
        >>> step = cache.append([first, cache.fork(first)], 1)
        >>> q, k, v = torch.randn(3, 2, 1, 2, 16).unbind()
        >>> new = {"k_new": k, "v_new": v, "causal": True, **step}
        >>> out = tilewise.attention_with_shared_prefix(q, cache.k[0], cache.v[0], prefix=8, **new)
        >>> torch.allclose(out, tilewise.attention_with_kvcache(q, cache.k[0], cache.v[0], **new), atol=1e-6)
        True
    """
    _check(q, k_cache, page_table, cache_seqlens, prefix, arguments)
    if rotary is not None:
        q, arguments = _rotated(q, cache_seqlens, rotary, arguments)
    partial = torch.float32 if q.dtype.itemsize == 2 else None
    own = dict(arguments, window=window, alibi_slopes=alibi_slopes, out_dtype=partial, return_lse=True)
    pages, rest = divmod(prefix, k_cache.shape[1])
    used = cache_seqlens - pages * k_cache.shape[1]
    if rest:
        own["cache_leftpad"] = torch.full_like(used, rest)
    own_out, own_lse = attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, page_table=page_table[:, pages:].contiguous(), **own
    )
    position = _row_positions(q, cache_seqlens, arguments)
    shared, shared_lse = _prefix_pass(q, k_cache, v_cache, prefix, page_table, position, own)
    out, lse = merge_states(own_out, own_lse, shared, shared_lse)
    out = out.to(out_dtype or q.dtype)
    return (out, lse) if return_lse else out


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    prefix: int,
    arguments: dict[str, Any],
) -> None:
    """What the two calls would not notice, or say in terms of their own."""
    for name, why in _REFUSED.items():
        if arguments.get(name) is not None:
            fail(
                UnsupportedError, name, "a value beside a shared prefix", f"None: {why}", "call attention_with_kvcache"
            )
    mask = arguments.get("mask")
    if mask is not None and not isinstance(mask, torch.Tensor):
        want = "causal, window and a boolean tree"
        fail(UnsupportedError, "mask", type(mask).__name__, want, "call attention_with_kvcache")
    if arguments.get("causal") not in (None, True, False, BOTTOM_RIGHT):
        fail(UnsupportedError, "causal", shown(arguments["causal"]), "True, False, 'bottom_right'", "leave it out")
    for name in ("k_scale", "v_scale"):
        scale = arguments.get(name)
        if scale is not None and scale.ndim == 2 and scale.shape[0] != k_cache.shape[0]:
            want = "per head or per page, for the prefix is of all sequences"
            fail(UnsupportedError, name, f"shape {list(scale.shape)}", want, "scale by page")
    if not isinstance(page_table, torch.Tensor) or page_table.ndim != 2 or k_cache.ndim != 4:
        fail(ShapeError, "page_table", shown(page_table), "a table [batch, max_pages] beside paged caches", "pass one")
    room = page_table.shape[1] * k_cache.shape[1]
    if isinstance(prefix, bool) or not isinstance(prefix, int) or not 0 <= prefix <= room:
        fail(ArgumentError, "prefix", shown(prefix), f"a Python int, 0 to the capacity of {room}", "count its tokens")
    known = page_table.device.type == cache_seqlens.device.type == "cpu"
    if known or arguments.get("validate"):
        _check_values(q, page_table.cpu(), cache_seqlens.cpu(), (prefix, k_cache.shape[1]), arguments)


def _check_values(
    q: torch.Tensor, table: torch.Tensor, seqlens: torch.Tensor, prefix: tuple[int, int], arguments: dict[str, Any]
) -> None:
    """The sequences share the prefix's pages and go on after it."""
    pages = prefix[0] // prefix[1]
    other = (table[:, :pages] != table[:1, :pages]).any(dim=1).nonzero().flatten()
    if other.numel():
        b = int(other[0])
        got = f"other pages for sequence {b} than for sequence 0 within the prefix of {prefix[0]}"
        fix = "pass the tokens that they share, or call attention_with_kvcache"
        fail(ArgumentError, "page_table", got, f"the same first {pages} pages in each row", fix)
    rows = _lengths(q, arguments)
    new = 0
    if _appends(arguments):
        new = rows if arguments.get("cu_seqlens_q") is not None else arguments["k_new"].shape[1]
    after = seqlens.long() + new - prefix[0]
    short = ((seqlens < prefix[0]) | (after < rows)).nonzero().flatten()
    if short.numel():
        b = int(short[0])
        want = f"at most {int(seqlens[b])}, so that the rows of sequence {b} come after it"
        fail(ArgumentError, "prefix", prefix[0], want, "pass a shorter prefix")


def _appends(arguments: dict[str, Any]) -> bool:
    return arguments.get("k_new") is not None


def _lengths(q: torch.Tensor, arguments: dict[str, Any]) -> Any:
    """Rows of each sequence: an int, or int64 [batch] on the CPU."""
    cu = arguments.get("cu_seqlens_q")
    return q.shape[1] if cu is None else cu.cpu().long().diff()


def _row_positions(q: torch.Tensor, cache_seqlens: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """The position of each row's token in its sequence, int64, of q's shape without heads; no length is read."""
    used, cu = cache_seqlens.to(q.device, torch.int64), arguments.get("cu_seqlens_q")
    if cu is None:
        new = arguments["k_new"].shape[1] if _appends(arguments) else 0
        return (used + new - q.shape[1])[:, None] + torch.arange(q.shape[1], device=q.device)
    cu = cu.to(q.device, torch.int64)
    start = used if _appends(arguments) else used - cu.diff()
    row = torch.arange(q.shape[0], device=q.device)
    b = (torch.searchsorted(cu, row, right=True) - 1).clamp(max=used.shape[0] - 1)
    return start[b] + row - cu[b]


def _rotated(
    q: torch.Tensor, cache_seqlens: torch.Tensor, rotary: Rotary, arguments: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """q and k_new, rotated: both passes need the same q."""
    start = cache_seqlens if rotary.positions is None else rotary.positions
    at = _row_positions(q, start, arguments)
    arguments = dict(arguments)
    if _appends(arguments):
        k = arguments["k_new"]
        first = at if arguments.get("cu_seqlens_q") is not None else start.to(q.device, torch.int64)[:, None]
        token = 0 if arguments.get("cu_seqlens_q") is not None else torch.arange(k.shape[1], device=k.device)
        arguments["k_new"] = rotate(k, rotary.cos, rotary.sin, first + token, rotary.interleaved)
    return rotate(q, rotary.cos, rotary.sin, at, rotary.interleaved), arguments


def _in_window(b: Any, h: Any, q: Any, k: Any, first: Any) -> Any:
    return k >= first[q]


def _alibi(s: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, heads: Any, position: Any) -> Any:
    return s - slopes[q * heads + h] * (position[q] - k)


def _prefix_pass(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix: int,
    page_table: torch.Tensor,
    position: torch.Tensor,
    own: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of all rows, as of one sequence, over the prefix; in the shapes of the other pass."""
    ragged = own.get("cu_seqlens_q") is not None
    rows, at = q.reshape(1, -1, *q.shape[-2:]), position.flatten()
    names = ("softcap", "softmax_scale", "num_splits", "split_size", "softmax_max", "k_scale", "v_scale", "backend",
             "out_dtype", "validate")  # fmt: skip
    options = {name: own[name] for name in names if name in own}
    window = own["window"] if isinstance(own["window"], (Window, type(None))) else Window(*own["window"])
    if window is not None and window.left is not None:
        options["mask"] = Predicate(_in_window, aux=((at - min(window.left, 2**40)).clamp(min=0).int(),))
    if own["alibi_slopes"] is not None:
        slopes = _slopes_of_rows(own["alibi_slopes"], q, own.get("cu_seqlens_q"))
        options["score_mod"] = ScoreMod(_alibi, aux=(slopes, q.shape[-2], at.int()))
    length = torch.full((1,), prefix, dtype=torch.int32, device=q.device)
    table = page_table[:1, : -(-prefix // k_cache.shape[1])]
    out, lse = attention_with_kvcache(
        rows, k_cache, v_cache, cache_seqlens=length, page_table=table, return_lse=True, **options
    )
    if not ragged:
        return out.view(*q.shape[:-1], -1), lse[0].unflatten(1, q.shape[:2]).transpose(0, 1)
    end = own["cu_seqlens_q"][-1:].to(q.device)
    return out[0], lse[0].masked_fill(torch.arange(q.shape[0], device=q.device) >= end, float("-inf"))


def _slopes_of_rows(slopes: torch.Tensor, q: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor:
    """The slope of each row and head, flat."""
    rows = q.shape[:-2].numel()
    if slopes.ndim == 1:
        return slopes.float().expand(rows, -1).flatten()
    if cu_seqlens_q is None:
        return slopes.float().repeat_interleave(q.shape[1], dim=0).flatten()
    row = torch.arange(rows, device=q.device)
    b = torch.searchsorted(cu_seqlens_q.to(q.device, torch.int64), row, right=True) - 1
    return slopes.float()[b.clamp(max=slopes.shape[0] - 1)].flatten()
