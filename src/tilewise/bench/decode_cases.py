"""Calls with a key/value cache: which are timed, and their tensors.

A case has several caches, more than the L2 holds together, and a call for each: whoever runs them in turn finds no key
of a call in the L2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..cache_arguments import prepare
from ..kvcache import FP8, CacheInputs, CacheProblem
from .cases import DTYPES

# Keys and values of all calls of a case together, and how many calls there are at most.
COLD_BYTES = 200 << 20
MOST_CALLS = 96


@dataclass(frozen=True)
class DecodeCase:
    """One call: `rows` newest tokens of each sequence over `seqlen` keys.

    Args:
        batch: sequences.
        seqlen: keys in use of each, all of the cache.
        heads: query heads.
        heads_kv: key heads.
        head_dim: of q and k.
        latent: of values that are the first dims of the keys (MLA); None: values of their own, of `head_dim`.
        rows: query rows of each sequence.
        page_size: None: contiguous.
        fp8: keys and values in e4m3, with a scale for each head.
        split_size: keys of a part, for bits that do not depend on the batch; None: the backend decides.
        dtype: a name of `cases.DTYPES`, of q.
    """

    batch: int
    seqlen: int
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    latent: int | None = None
    rows: int = 1
    page_size: int | None = None
    fp8: bool = False
    split_size: int | None = None
    dtype: str = "bf16"

    @property
    def head_dim_v(self) -> int:
        return self.latent or self.head_dim

    @property
    def cache_dtype(self) -> torch.dtype:
        return FP8 if self.fp8 else DTYPES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one call; a latent that is both counts once."""
        dims = self.head_dim if self.latent else 2 * self.head_dim
        return self.batch * self.seqlen * self.heads_kv * dims * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        """Of both products."""
        return 2 * self.batch * self.rows * self.heads * self.seqlen * (self.head_dim + self.head_dim_v)

    @property
    def calls(self) -> int:
        """How many caches there are."""
        return min(MOST_CALLS, max(2, -(-COLD_BYTES // max(1, self.cache_bytes))))

    def plain(self) -> DecodeCase | None:
        """The same call without pages and parts of one size, to be timed beside it; None if it has neither."""
        contiguous = replace(self, page_size=None, split_size=None)
        return None if contiguous == self else contiguous

    @property
    def name(self) -> str:
        """The case in words, short.

        >>> DecodeCase(16, 8192, page_size=64).name
        'decode B16 S8192 32/8 heads D128 page 64'
        """
        parts = [f"decode B{self.batch} S{self.seqlen} {self.heads}/{self.heads_kv} heads D{self.head_dim}"]
        options = {
            f"latent {self.latent}": self.latent is not None,
            f"{self.rows} rows": self.rows > 1,
            f"page {self.page_size}": self.page_size is not None,
            "fp8": self.fp8,
            f"parts of {self.split_size}": self.split_size is not None,
        }
        return " ".join([*parts, *(text for text, wanted in options.items() if wanted)])

    def to_json(self) -> dict[str, Any]:
        return {"pass": "decode", **asdict(self)}


# The anchors of docs/tuning.md, then what each of them costs in pages and in 8 bits, then sweeps.
ANCHORS = (
    DecodeCase(1, 8192),
    DecodeCase(1, 131072),
    DecodeCase(16, 8192),
    DecodeCase(64, 4096),
    DecodeCase(32, 8192, heads_kv=32),
    DecodeCase(8, 32768, heads=64),
)
PAGED = tuple(DecodeCase(16, 8192, page_size=size) for size in (1, 16, 64, 256))
EIGHT_BIT = (
    DecodeCase(16, 16384, fp8=True),
    DecodeCase(64, 8192, fp8=True),
    DecodeCase(64, 8192, fp8=True, page_size=64),
)
LATENT = (
    DecodeCase(64, 4096, 128, 1, 576, latent=512, page_size=64),
    DecodeCase(64, 4096, 16, 1, 576, latent=512, page_size=64),
)
OTHERS = (
    DecodeCase(16, 8192, split_size=512),
    DecodeCase(16, 8192, rows=4),
    DecodeCase(16, 8192, rows=16),
    DecodeCase(4, 8192, rows=512),
)
SETS: dict[str, tuple[DecodeCase, ...]] = {
    "decode": (*ANCHORS, *PAGED, *EIGHT_BIT, *LATENT, *OTHERS),
    "decode-batches": tuple(DecodeCase(2**i, 4096) for i in range(9)),
    "decode-lengths": tuple(DecodeCase(4, 128 << i) for i in range(11)),
}


class DecodeData(NamedTuple):
    """The tensors of one call; caches [batch, seqlen, heads_kv, D], or pages of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    seqlens: Tensor
    table: Tensor | None
    scale: Tensor | None


def make(case: DecodeCase, device: torch.device, calls: int | None = None) -> list[DecodeData]:
    """Random tensors, other ones for each call; pages are shuffled."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[case.dtype]

    def draw(*shape: int, to: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).to(to)

    found = []
    for _ in range(calls or case.calls):
        q = draw(case.batch, case.rows, case.heads, case.head_dim, to=dtype)
        size = case.page_size or case.seqlen
        pages = case.batch * (case.seqlen // size)
        slots = (pages, size, case.heads_kv)
        k = draw(*slots, case.head_dim, to=case.cache_dtype)
        v = k[..., : case.latent] if case.latent else draw(*slots, case.head_dim, to=case.cache_dtype)
        seqlens = torch.full((case.batch,), case.seqlen, dtype=torch.int32, device=device)
        table = None
        if case.page_size is not None:
            order = torch.randperm(pages, generator=generator, device=device)
            table = order.int().view(case.batch, -1)
        scale = 0.5 + torch.rand(case.heads_kv, generator=generator, device=device) if case.fp8 else None
        found.append(DecodeData(q, k, v, seqlens, table, scale))
    return found


def options(case: DecodeCase, data: DecodeData) -> dict[str, Any]:
    """A call as keywords of `tilewise.attention_with_kvcache`."""
    return {
        "cache_seqlens": data.seqlens,
        "page_table": data.table,
        "k_scale": data.scale,
        "v_scale": data.scale,
        "split_size": case.split_size,
        "causal": case.rows > 1,
    }


def posed(case: DecodeCase, data: DecodeData) -> tuple[CacheProblem, CacheInputs]:
    """The call as backends take it."""
    return prepare(data.q, data.k, data.v, **options(case, data))


def gathered(case: DecodeCase, data: DecodeData, b: int, h: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence and key head, [seqlen, D], in fp64."""
    rows = slice(b, b + 1) if data.table is None else data.table[b].long()
    scale = 1.0 if data.scale is None else float(data.scale[h])
    k, v = (x.view(torch.uint8) if case.fp8 else x for x in (data.k, data.v))
    pair = (x[rows][:, :, h].flatten(0, 1) for x in (k, v))
    k, v = ((x.view(FP8) if case.fp8 else x).double() * scale for x in pair)
    return k, v


def error(case: DecodeCase, data: DecodeData, out: Tensor) -> float:
    """Largest error of single rows of the first and the last head, relative to the row's size, against the oracle."""
    worst, group = 0.0, case.heads // case.heads_kv
    for b, h in ((0, 0), (case.batch - 1, case.heads_kv - 1)):
        heads = slice(h * group, (h + 1) * group)
        k, v = (x[None, :, None] for x in gathered(case, data, b, h))
        rows, seqlens = data.q[b : b + 1, :, heads].double(), data.seqlens[b : b + 1]
        truth = reference.attention_with_kvcache(rows, k, v, cache_seqlens=seqlens, causal=case.rows > 1)
        got = out[b : b + 1, :, heads].double()
        relative = (got - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-30)
        worst = max(worst, float(relative.nan_to_num(nan=float("inf")).max()))
    return worst
