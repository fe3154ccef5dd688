"""Score modifications: a function of a score and its position, with its derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import DtypeError, fail
from .interning import check_aux, check_function, decode_aux, encode_aux, intern, lookup
from .mask_algebra import Positions, fits


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score modification ``s -> fn(s, b, h, q, k, *aux)``, applied after the softcap and before ALiBi and bias.

    Args:
        fn: ``fn(s, b, h, q, k, *aux) -> s``. `s` is the scaled score; b, h, q, k are the batch index, query head,
            query row and key column (positions inside the sequence, from 0). Operators only, so that the same
            function runs on tensors and, compiled, on tiles.
        dfn: ``dfn(ds, s, b, h, q, k, *aux) -> ds``, the gradient with respect to fn's input `s`, given the
            gradient `ds` of its output. Needed only where a gradient is needed.
        aux: numbers or tensors passed on to both. They get no gradient.

    Example:
        >>> import torch, tilewise
        >>> half = tilewise.ScoreMod(lambda s, b, h, q, k, c: s * c, lambda ds, s, b, h, q, k, c: ds * c, aux=(0.5,))
        >>> q = torch.randn(1, 4, 1, 8)
        >>> scaled = tilewise.attention(q, q, q, score_mod=half, softmax_scale=1.0)
        >>> torch.allclose(scaled, tilewise.attention(q, q, q, softmax_scale=0.5), atol=1e-6)
        True
    """

    fn: Callable[..., Any]
    dfn: Callable[..., Any] | None = None
    aux: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_aux("ScoreMod.aux", self.aux)
        check_function("ScoreMod.fn", self.fn, 5 + len(self.aux))
        if self.dfn is not None:
            check_function("ScoreMod.dfn", self.dfn, 6 + len(self.aux))

    def forward(self, s: torch.Tensor, at: Positions) -> torch.Tensor:
        """``fn`` on a tile of scores."""
        return self._checked("fn", self.fn(s, at.b, at.h, at.q, at.k, *self.aux), s)

    def backward(self, ds: torch.Tensor, s: torch.Tensor, at: Positions) -> torch.Tensor:
        """``dfn`` on a tile of gradients; `s` is what `forward` was given."""
        assert self.dfn is not None
        return self._checked("dfn", self.dfn(ds, s, at.b, at.h, at.q, at.k, *self.aux), s)

    def _checked(self, name: str, result: Any, s: torch.Tensor) -> torch.Tensor:
        good = isinstance(result, torch.Tensor) and result.dtype.is_floating_point and fits(result.shape, s.shape)
        if not good:
            got = f"{result.dtype} {list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)[:60]
            want = f"floating scores that broadcast to the tile, here {list(s.shape)}"
            fail(DtypeError, f"ScoreMod.{name}", f"a result of {got}", want, "compute elementwise from s or ds")
        return result.to(s.dtype).expand(s.shape)

    def encode(self, tensors: list[torch.Tensor]) -> str:
        """The static part as a Python literal; tensors of `aux` are appended to `tensors` and named by position."""
        dfn = "None" if self.dfn is None else f"{intern(self.dfn)}"
        return f"({intern(self.fn)},{dfn},{encode_aux(self.aux, tensors)})"


def decode(spec: Any, tensors: tuple[torch.Tensor, ...]) -> ScoreMod | None:
    """The inverse of `ScoreMod.encode`, on its evaluated literal."""
    if spec is None:
        return None
    fn, dfn, aux = spec
    return ScoreMod(lookup(fn), None if dfn is None else lookup(dfn), decode_aux(aux, tensors))
