"""What is timed: one frozen record per case, sets of them, and the filters that cut a set to a time budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .. import errors
from ..roofline import BACKWARD, FORWARD

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# The papers' convention: every shape has the same number of tokens and the same width.
TOKENS, WIDTH = 16384, 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
CORNERS = (1024, 4096, 16384)
BLOCK = 128  # rows and keys of one tile of a block mask


@dataclass(frozen=True)
class Case:
    """One attention call.

    Args:
        pass_: "forward", or "backward": all launches of the gradients of q, k and v.
        head_dim: of q, k and v.
        seqlen: queries and keys of each sequence; of the longest one where `lengths` are given.
        causal: bottom-right, which is also top-left here.
        dtype: a name of `DTYPES`.
        heads: query heads.
        heads_kv: key/value heads.
        batch: sequences.
        window: (left, right), inclusive, None is unbounded.
        softcap: cap of the scores.
        alibi: with the standard geometric slopes.
        dropout_p: probability of dropping a weight.
        block_density: share of visible tiles of a random block mask, the same number in every row of tiles.
        lengths: of packed sequences; empty: dense.
        deterministic: bitwise repeatable gradients.
        beside_full: of a causal case: the plain call that is timed beside it is not causal.
    """

    pass_: str
    head_dim: int
    seqlen: int
    causal: bool
    dtype: str
    heads: int
    heads_kv: int
    batch: int
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    dropout_p: float = 0.0
    block_density: float | None = None
    lengths: tuple[int, ...] = ()
    deterministic: bool = False
    beside_full: bool = False

    @property
    def backward(self) -> bool:
        return self.pass_ == BACKWARD

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def ragged(self) -> bool:
        """Packed, and not all of one length."""
        return len(set(self.lengths)) > 1

    def features(self) -> set[str]:
        """What an implementation must have beyond plain dense multi-head attention forward in 16 bits."""
        asked = {
            "backward": self.backward,
            "grouped heads": self.heads_kv != self.heads,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "alibi": self.alibi,
            "dropout": self.dropout_p > 0,
            "block mask": self.block_density is not None,
            "packed": bool(self.lengths),
            "deterministic": self.deterministic,
        }
        return {name for name, wanted in asked.items() if wanted}

    def plain(self) -> Case | None:
        """The same call without its variants, to be timed beside it; None if it has none."""
        dense = replace(
            self,
            causal=self.causal and not self.beside_full,
            heads_kv=self.heads,
            window=None,
            softcap=None,
            alibi=False,
            dropout_p=0.0,
            block_density=None,
            lengths=self.lengths if self.ragged else (),
            deterministic=False,
            beside_full=False,
        )
        return None if dense == self else dense

    @property
    def name(self) -> str:
        """The case in words, short.

        >>> Case("forward", 128, 4096, True, "bf16", 32, 8, 4, softcap=50.0).name
        'forward D128 S4096 causal 32/8 heads softcap 50'
        """
        parts = [self.pass_, f"D{self.head_dim}", f"S{self.seqlen}", "causal" if self.causal else "full"]
        options = {
            f"{self.heads}/{self.heads_kv} heads": self.heads_kv != self.heads,
            f"window {self.window}": self.window is not None,
            f"softcap {self.softcap or 0:g}": self.softcap is not None,
            "alibi": self.alibi,
            f"dropout {self.dropout_p:g}": self.dropout_p > 0,
            f"blocks {self.block_density or 0:.0%}": self.block_density is not None,
            f"{len(self.lengths)} packed": bool(self.lengths),
            "deterministic": self.deterministic,
            "beside full": self.beside_full,
        }
        parts += [text for text, wanted in options.items() if wanted]
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        return {"pass": record.pop("pass_"), **record}


def standard(pass_: str, head_dim: int, seqlen: int, causal: bool, **options: Any) -> Case:
    """A case of the common shape: as many sequences as `TOKENS` allow, as many heads as `WIDTH` does."""
    heads = options.pop("heads", WIDTH // head_dim)
    heads_kv = options.pop("heads_kv", heads)
    batch = options.pop("batch", max(1, TOKENS // seqlen))
    return Case(pass_, head_dim, seqlen, causal, options.pop("dtype", "bf16"), heads, heads_kv, batch, **options)


def _grid(pass_: str, seqlens: Iterable[int], **options: Any) -> list[Case]:
    seqlens = tuple(seqlens)
    return [standard(pass_, d, s, causal, **options) for d in HEAD_DIMS for causal in (False, True) for s in seqlens]


def _both(make: Callable[[str], list[Case]]) -> list[Case]:
    return [*make(FORWARD), *make(BACKWARD)]


def _variants(pass_: str) -> list[Case]:
    cases = []
    for d in (64, 128):
        cases += [
            standard(pass_, d, 4096, True, window=(1023, 0)),
            standard(pass_, d, 32768, True, window=(4095, 0)),
            standard(pass_, d, 4096, True, alibi=True),
            standard(pass_, d, 4096, True, softcap=50.0),
            standard(pass_, d, 4096, True, dropout_p=0.1),
            standard(pass_, d, 16384, False, block_density=0.1),
            standard(pass_, d, 4096, True, lengths=(4096,) * 4),
            standard(pass_, d, 4096, False, lengths=(4096,) * 4),
        ]
    return cases


def _causal(pass_: str) -> list[Case]:
    return [standard(pass_, d, 16384, True, beside_full=True) for d in HEAD_DIMS]


def _gqa(pass_: str) -> list[Case]:
    shapes = [(s, causal) for causal in (False, True) for s in (1024, 4096, 16384)]
    return [standard(pass_, 128, s, causal, heads=32, heads_kv=8) for s, causal in shapes]


def log_normal_lengths(count: int, mean: int, sigma: float = 0.8, seed: int = 0) -> tuple[int, ...]:
    """Lengths of a corpus: log-normal around `mean`, the same for the same seed.

    >>> len(log_normal_lengths(64, 2048)), min(log_normal_lengths(64, 2048)) > 0
    (64, True)
    """
    draw, mu = random.Random(seed), math.log(mean) - sigma**2 / 2
    return tuple(max(1, round(draw.lognormvariate(mu, sigma))) for _ in range(count))


def _varlen(pass_: str) -> list[Case]:
    lengths = log_normal_lengths(64, 2048)
    sizes = {"batch": len(lengths), "lengths": lengths}
    return [standard(pass_, d, max(lengths), causal, **sizes) for d in (64, 128) for causal in (False, True)]


def _small(device_type: str) -> list[Case]:
    if device_type == "cpu":
        sizes: dict[str, Any] = {"dtype": "fp32", "heads": 4, "batch": 1}
        return _both(lambda p: [standard(p, 64, s, causal, **sizes) for s in (256, 1024) for causal in (False, True)])
    return _both(lambda p: [standard(p, d, 4096, causal) for d in (64, 128) for causal in (False, True)])


# Each set, given the kind of device, from the case that matters most to the one that matters least.
SETS: dict[str, Callable[[str], list[Case]]] = {
    "forward": lambda _: _grid(FORWARD, SEQLENS),
    "backward": lambda _: _grid(BACKWARD, SEQLENS),
    "deterministic": lambda _: _grid(BACKWARD, CORNERS, deterministic=True),
    "variants": lambda _: _both(_variants),
    "causal": lambda _: _both(_causal),
    "gqa": lambda _: _both(_gqa),
    "varlen": lambda _: _both(_varlen),
    "small": _small,
}


@dataclass(frozen=True)
class Filters:
    """Which cases of a set to keep; None keeps all.

    Args:
        passes: "forward", "backward".
        head_dims: head dims.
        seqlens: sequence lengths.
        causal: only causal ones, or only others.
        dtype: replaces the set's own dtype.
    """

    passes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    seqlens: tuple[int, ...] | None = None
    causal: bool | None = None
    dtype: str | None = None

    def keep(self, case: Case) -> bool:
        """Whether the case passes."""
        wanted = ((self.passes, case.pass_), (self.head_dims, case.head_dim), (self.seqlens, case.seqlen))
        return all(values is None or value in values for values, value in wanted) and (
            self.causal is None or case.causal == self.causal
        )


def select(names: Iterable[str], filters: Filters, device_type: str) -> list[Case]:
    """The cases of the named sets that pass the filters, each once.

    Raises:
        tilewise.errors.ArgumentError: a set that does not exist, or no case is left.
    """
    names, chosen = tuple(names), []
    for name in names:
        if name not in SETS:
            errors.fail(errors.ArgumentError, "set", repr(name), ", ".join(SETS), "name one of these")
        chosen += [case for case in SETS[name](device_type) if filters.keep(case)]
    if filters.dtype is not None:
        chosen = [replace(case, dtype=filters.dtype) for case in chosen]
    if not chosen:
        offered = [case for name in names for case in SETS[name](device_type)]
        has = f"D {sorted({c.head_dim for c in offered})}, S {sorted({c.seqlen for c in offered})}"
        errors.fail(errors.ArgumentError, "filters", str(filters), f"in {', '.join(names)}: {has}", "drop a filter")
    return list(dict.fromkeys(chosen))
