"""The validated description of one call with a key/value cache, and its tensors: what every layer below takes.

A sequence b of the call owns *slots* of the cache, numbered from 0. Slot s is ``cache[row_b, s]`` of a contiguous
cache, with ``row_b = cache_batch_idx[b]`` (or b), and ``cache[page_table[b, s // page_size], s % page_size]`` of a
paged one.
With ``n = cache_seqlens[b]`` slots in use before the call, ``m`` new keys and ``pad = cache_leftpad[b]`` (or 0):

1. *Append.* New key and value t go to slot ``n + t``, the key rotated to position ``p_b + t`` first, where ``p_b =
   rotary.positions[b]`` (or n). An fp8 cache holds ``e4m3(x / scale)``, saturated.
2. *Attend.* The keys are the slots ``pad <= s < n + m``: key j is slot ``pad + j``, and ``seqlen_k = n + m - pad``. All
   of the contract (causal, window, ALiBi, predicates) counts keys like that, from the first one in use. Row i, of
   ``seqlen_q`` rows, is rotated to position ``p_b + m - seqlen_q + i``: that of the key on its diagonal.

So causal rows are the newest tokens, whether their keys were appended by this call or before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .mask_algebra import Frame, Mask, Positions
from .masks import Causal, Full, Predicate, PrefixLM, Window, parts
from .problem import Options, Problem

# Of keys: a latent of 512 beside 64 rotated dims (MLA).
MAX_HEAD_DIM = 576
MAX_HEAD_DIM_V = 512
FP8 = torch.float8_e4m3fn
# Splits are multiples of it, so that no key tile of any backend crosses one.
SPLIT_UNIT = 128

# How a scale is indexed.
PER_HEAD, PER_SEQUENCE, PER_PAGE = "head", "sequence", "page"


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding (RoPE), applied to q and to the new keys of a call.

    The first ``R = 2 · cos.shape[1]`` dims of a head are rotated in pairs by the angle whose cosine and sine are in row
    p of the tables, p being the token's position: ``(x, y) -> (x cos - y sin, y cos + x sin)``. The other dims stay.

    Args:
        cos: [L, R/2], q's dtype or fp32; row p holds the angles of position p.
        sin: [L, R/2], cos's dtype.
        interleaved: pairs are dims ``(2r, 2r + 1)`` (GPT-J); False: ``(r, r + R/2)`` (GPT-NeoX, Llama).
        positions: int32 or int64 [batch]: the position of each sequence's first new token. None: `cache_seqlens`, so
            that slot and position are one. A cache padded on the left usually wants ``cache_seqlens - cache_leftpad``.

    Source:
        Su et al., "RoFormer" (2021), equation 34.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    positions: torch.Tensor | None = None


class CacheInputs(NamedTuple):
    """The tensors of a call. `T` is ``cu_seqlens_q[-1]`` or more; ragged calls have no batch dimension in q and k_new.

    Lengths and tables are int32 or int64. Backends get them on q's device, contiguous.
    """

    q: torch.Tensor  # [B, Sq, Hq, D], ragged [T, Hq, D]
    k_cache: torch.Tensor  # [rows, S_max, Hkv, D], paged [pages, page_size, Hkv, D]; q's dtype or e4m3
    v_cache: torch.Tensor  # the same with Dv; may share k_cache's memory (MLA)
    cache_seqlens: torch.Tensor  # [B]: slots in use before the append
    k_new: torch.Tensor | None = None  # [B, S_new, Hkv, D], ragged [T, Hkv, D]; q's dtype
    v_new: torch.Tensor | None = None
    page_table: torch.Tensor | None = None  # [B, max_pages]; any value where no visible key and no new one lies
    cache_batch_idx: torch.Tensor | None = None  # [B]: the cache row of each sequence
    cache_leftpad: torch.Tensor | None = None  # [B]: the first slot in use
    rotary_cos: torch.Tensor | None = None  # [L, R/2], q's dtype or fp32
    rotary_sin: torch.Tensor | None = None
    rotary_positions: torch.Tensor | None = None  # [B]
    cu_seqlens_q: torch.Tensor | None = None  # [B + 1]
    tree: torch.Tensor | None = None  # bool [B|1, Sq, Sq]: which of the newest Sq keys each row sees
    k_scale: torch.Tensor | None = None  # fp32 [Hkv], [B, Hkv] or [pages, Hkv]
    v_scale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None  # [Hq] or [B, Hq]
    sinks: torch.Tensor | None = None  # [Hq]


class Static(NamedTuple):
    """What a call asks for beside its tensors and `Options`.

    Args:
        rotary_interleaved: rotated pairs are neighbours.
        k_scale, v_scale: how the scale is indexed, "head", "sequence" or "page"; None: no scale.
        num_splits: parts that every row tile's keys are cut into, as even as whole tiles allow; None: see `split_size`.
        split_size: keys of a part, a multiple of 128: part i has the keys ``i · split_size`` and on, so no row's bits
            depend on another sequence. None, as num_splits: the backend decides.
        softmax_max: φ, a maximum that is assumed for all scores (see `attention_with_kvcache`); None: the true one.
    """

    rotary_interleaved: bool = False
    k_scale: str | None = None
    v_scale: str | None = None
    num_splits: int | None = None
    split_size: int | None = None
    softmax_max: float | None = None


def is_aligned(x: torch.Tensor) -> bool:
    """Whether the rows of a tensor, which has no dimension twice, begin at multiples of 16 bytes."""
    if torch.compiler.is_compiling():
        # Nobody knows yet where tensors will begin; the operator that is traced asks again.
        return True
    unit = 16 // x.element_size()
    steps = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    return x.storage_offset() % unit == 0 and all(step > 0 and step % unit == 0 for step in steps)


def is_latent(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether values are the first of the keys' dims, in the same memory (MLA)."""
    if k.shape[-1] <= v.shape[-1] or torch.compiler.is_compiling():
        # (As above: the operator asks again.)
        return False
    same = k.untyped_storage()._cdata == v.untyped_storage()._cdata and k.storage_offset() == v.storage_offset()
    return same and k.stride() == v.stride()


@dataclass(frozen=True)
class CacheProblem:
    """Shapes, dtypes and options of one call.

    `attention` is what remains when the cache is thought away: sequences of up to ``seqlen_k = capacity`` keys, packed
    where the call is ragged, with all options. A mask there is made of Causal, Window, PrefixLM and predicates; the
    tree is apart from it and must hold too: row i of a sequence sees key j only if ``j < seqlen_k - seqlen_q`` or
    ``tree[b, i, j - (seqlen_k - seqlen_q)]``.

    Args:
        attention: sizes, q's dtype, device and options.
        static: what else was asked for.
        cache_dtype: of both caches: q's dtype or float8_e4m3fn.
        rows: the first dimension of the caches: rows of a contiguous cache, or pages.
        page_size: slots of a page; None: contiguous.
        seqlen_new: new keys of each sequence (ragged: of the longest); None: nothing is appended.
        rotary_dim: dims that are rotated, R; 0: none.
        has_tree, has_leftpad, has_batch_idx, has_positions: which tensors there are.
        aligned: every row of both caches begins at a multiple of 16 bytes, as TMA has it.
        latent: values are the first of the keys' dims, in the same memory.
    """

    attention: Problem
    static: Static
    cache_dtype: torch.dtype
    rows: int
    page_size: int | None
    seqlen_new: int | None
    rotary_dim: int
    has_tree: bool
    has_leftpad: bool
    has_batch_idx: bool
    has_positions: bool
    aligned: bool = True
    latent: bool = False

    @classmethod
    def of(cls, inputs: CacheInputs, options: Options, static: Static, max_seqlen_q: int = 0) -> CacheProblem:
        """The problem that `inputs` (already checked) pose; max_seqlen_q counts for ragged calls."""
        q, k, table = inputs.q, inputs.k_cache, inputs.page_table
        cu = inputs.cu_seqlens_q
        seqlen_q = q.shape[1] if cu is None else max_seqlen_q
        seqlen_new = None
        if inputs.k_new is not None:
            seqlen_new = inputs.k_new.shape[1] if cu is None else max_seqlen_q
        attention = Problem(
            batch=q.shape[0] if cu is None else cu.shape[0] - 1,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1] if table is None else k.shape[1] * table.shape[1],
            heads_q=q.shape[-2],
            heads_kv=k.shape[2],
            head_dim=q.shape[-1],
            head_dim_v=inputs.v_cache.shape[-1],
            dtype=q.dtype,
            device=q.device,
            options=options,
            packed=cu is not None,
            has_bias=False,
            has_alibi=inputs.alibi_slopes is not None,
            has_sinks=inputs.sinks is not None,
            has_seqused=True,
        )
        return cls(
            attention=attention,
            static=static,
            cache_dtype=k.dtype,
            rows=k.shape[0],
            page_size=None if table is None else k.shape[1],
            seqlen_new=seqlen_new,
            rotary_dim=0 if inputs.rotary_cos is None else 2 * inputs.rotary_cos.shape[1],
            has_tree=inputs.tree is not None,
            has_leftpad=inputs.cache_leftpad is not None,
            has_batch_idx=inputs.cache_batch_idx is not None,
            has_positions=inputs.rotary_positions is not None,
            aligned=is_aligned(k) and is_aligned(inputs.v_cache),
            latent=is_latent(k, inputs.v_cache),
        )

    @property
    def options(self) -> Options:
        return self.attention.options

    @property
    def device(self) -> torch.device:
        return self.attention.device

    @property
    def capacity(self) -> int:
        """Slots that a sequence can have."""
        return self.attention.seqlen_k

    @property
    def appends(self) -> bool:
        return self.seqlen_new is not None

    @property
    def quantized(self) -> bool:
        return self.cache_dtype == FP8


class Lengths(NamedTuple):
    """Lengths of each sequence of a call, int64 [B] on one device; nothing is read on the host."""

    q: torch.Tensor  # rows
    new: torch.Tensor  # keys that are appended
    used: torch.Tensor  # slots in use before that, the padding included
    pad: torch.Tensor  # slots before the first key
    k: torch.Tensor  # keys that are attended to
    off: torch.Tensor  # the diagonal's offset, k - q or 0


def lengths(problem: CacheProblem, inputs: CacheInputs, device: torch.device | None = None) -> Lengths:
    """The lengths of a call, on `device` (None: where cache_seqlens are)."""
    device = inputs.cache_seqlens.device if device is None else device
    used = inputs.cache_seqlens.to(device, torch.int64)
    cu = inputs.cu_seqlens_q
    q = torch.full_like(used, problem.attention.seqlen_q) if cu is None else cu.to(device, torch.int64).diff()
    new = q if problem.attention.packed else torch.full_like(used, problem.seqlen_new or 0)
    new = new if problem.appends else torch.zeros_like(used)
    pad = torch.zeros_like(used) if inputs.cache_leftpad is None else inputs.cache_leftpad.to(device, torch.int64)
    k = used + new - pad
    return Lengths(q, new, used, pad, k, problem.attention.offset(q, k))


def band(problem: CacheProblem) -> tuple[int | None, int | None]:
    """How far left and right of the diagonal a row sees, as far as bounds of numbers say it; None: unbounded."""
    lowered = problem.options.mask.lower(Frame(0, problem.attention.batch, 1, 1, 0, problem.device))
    # A bound beyond every distance is as good as none, and keeps sums inside int64.
    left, right = (None if x is None or x >= 2**40 else x for x in (lowered.left, lowered.right))
    return left, right


def key_range(at: Lengths, left: int | None, right: int | None, first: Any, last: Any) -> tuple[Any, Any]:
    """Keys ``lo .. hi`` that the rows ``first .. last`` (exclusive) see at most: empty, lo >= hi, where none does.

    >>> one = torch.tensor([1])
    >>> at = Lengths(q=one * 2, new=one * 2, used=one * 98, pad=one * 0, k=one * 100, off=one * 98)
    >>> [int(x) for x in key_range(at, 9, 0, 0, at.q)]
    [89, 100]
    """
    lo = torch.zeros_like(at.k) if left is None else (first + at.off - left).clamp(min=0)
    hi = at.k if right is None else torch.minimum(at.k, last + at.off + right)
    return lo, torch.where(last > first, hi, 0 * hi)


@dataclass(frozen=True, eq=False)
class Tree(Mask):
    """Which of the newest keys each row sees; older ones are visible. Backends that run on masks may use it.

    Args:
        tensor: bool [B|1, Sq, Sq].
        first: the key of the tree's column 0, ``seqlen_k - seqlen_q``; may be negative.
    """

    tensor: torch.Tensor
    first: int

    def visible(self, at: Positions) -> torch.Tensor:
        column = at.k - self.first
        old, column = column < 0, column.clamp(min=0, max=self.tensor.shape[2] - 1)
        b = at.b if self.tensor.shape[0] > 1 else torch.zeros_like(at.b)
        return old | self.tensor[b, at.q, column]


def servable(mask: Mask) -> bool:
    """Whether a mask means something for a cache that grows: none of its parts lists keys one by one."""
    return all(isinstance(part, (Full, Causal, Window, PrefixLM, Predicate)) for part in parts(mask))
