"""The validated description of one attention call, built once and passed to every layer below the surface."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from . import dropout, masks, score_mods
from .mask_algebra import BOTTOM_RIGHT, TOP_LEFT, Mask
from .score_mods import ScoreMod


class Inputs(NamedTuple):
    """The tensors of a call. Packed calls have cu_seqlens, and no batch dimension in q, k, v."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None


# The inputs that can have a gradient, in the order in which every layer names them.
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
# Those that may lie on any device: backends get them on q's.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_Record = TypeVar("_Record", bound=NamedTuple)


def placed(inputs: _Record, names: Collection[str]) -> _Record:
    """A record of a call's tensors, q first, the named ones on q's device and dense, as backends take them."""
    device = inputs[0].device
    found = [(name, x) for name in names if (x := getattr(inputs, name)) is not None]
    changes = {name: x.to(device).contiguous() for name, x in found if moves(x, device)}
    return inputs._replace(**changes) if changes else inputs


def moves(x: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor of lengths is not where, or how, backends take it."""
    return x.device != device or not x.is_contiguous()


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors' shapes. None means "not asked for".

    `needs_grad` says whether any input needs a gradient, `needs_scores_grad` whether what is added to scores does, bias
    or ALiBi slopes: as far as is known before the forward pass.
    The mask has no default: an object there is more than PyTorch 2.11 traces under `torch.compile`.
    """

    mask: Mask
    align: str = BOTTOM_RIGHT
    score_mod: ScoreMod | None = None
    softcap: float | None = None
    softmax_scale: float | None = None
    dropout_keep: int = dropout.KEEP_ALL
    deterministic: bool = False
    out_dtype: torch.dtype | None = None
    backend: str | None = None
    needs_grad: bool = False
    needs_scores_grad: bool = False
    validate: bool = False

    def encode(self, tensors: list[torch.Tensor]) -> str:
        """These options as a Python literal for a `torch.library` operator; tensors are appended to `tensors`."""
        mod = "None" if self.score_mod is None else self.score_mod.encode(tensors)
        out = "None" if self.out_dtype is None else f"'{self.out_dtype}'"
        return (
            f"({self.mask.encode(tensors)},{self.align!r},{mod},{self.softcap!r},{self.softmax_scale!r},"
            f"{self.dropout_keep!r},{self.deterministic!r},{out},{self.backend!r},{self.needs_grad!r},"
            f"{self.needs_scores_grad!r},{self.validate!r})"
        )


def decode(spec: str, tensors: tuple[torch.Tensor, ...]) -> Options:
    """The inverse of `Options.encode`."""
    mask, align, mod, softcap, scale, keep, deterministic, out, backend, needs, needs_scores, validate = literal(spec)
    return Options(
        mask=masks.decode(mask, tensors),
        align=align,
        score_mod=score_mods.decode(mod, tensors),
        softcap=softcap,
        softmax_scale=scale,
        dropout_keep=keep,
        deterministic=deterministic,
        out_dtype=None if out is None else getattr(torch, out.removeprefix("torch.")),
        backend=backend,
        needs_grad=needs,
        needs_scores_grad=needs_scores,
        validate=validate,
    )


@lru_cache(maxsize=1024)
def literal(spec: str) -> Any:
    """What `Options.encode` wrote, as plain data: the fields of `Options` in their order."""
    return ast.literal_eval(spec)


@dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options of one call.

    `seqlen_q` and `seqlen_k` are the lengths of a dense call and the longest member's of a packed one.
    `assumed_capability` is set where a call is only explained, for a device that may not be here.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    options: Options
    packed: bool
    has_bias: bool
    has_alibi: bool
    has_sinks: bool
    has_seqused: bool
    assumed_capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, inputs: Inputs, options: Options, max_seqlen_q: int = 0, max_seqlen_k: int = 0) -> Problem:
        """The problem that `inputs` (already checked) and `options` pose; max_seqlen_* count for packed calls."""
        q, k, v = inputs.q, inputs.k, inputs.v
        packed = inputs.cu_seqlens_q is not None
        return cls(
            batch=inputs.cu_seqlens_q.shape[0] - 1 if inputs.cu_seqlens_q is not None else q.shape[0],
            seqlen_q=max_seqlen_q if packed else q.shape[1],
            seqlen_k=max_seqlen_k if packed else k.shape[1],
            heads_q=q.shape[-2],
            heads_kv=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            device=q.device,
            options=options,
            packed=packed,
            has_bias=inputs.bias is not None,
            has_alibi=inputs.alibi_slopes is not None,
            has_sinks=inputs.sinks is not None,
            has_seqused=inputs.seqused_k is not None,
        )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 0

    @property
    def softmax_scale(self) -> float:
        """The scale asked for, or ``1 / sqrt(head_dim)``."""
        scale = self.options.softmax_scale
        return 1.0 / math.sqrt(self.head_dim) if scale is None else scale

    @property
    def out_dtype(self) -> torch.dtype:
        return self.options.out_dtype or self.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of scores, softmax, LSE and accumulation: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def has_dropout(self) -> bool:
        return self.options.dropout_keep != dropout.KEEP_ALL

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability of the device, or the one that `explain` assumes; None for others."""
        if self.assumed_capability is not None or self.device.type != "cuda" or torch.version.hip is not None:
            return self.assumed_capability
        return torch.cuda.get_device_capability(self.device)

    def for_gradients(self, needs: Collection[str]) -> Problem:
        """The problem of a backward pass that is to return the gradients of the inputs named in `needs`.

        Which these are is known for certain only then: transforms hide it before, and callers may ask for fewer.
        """
        wanted = "bias" in needs or "alibi_slopes" in needs
        if wanted == self.options.needs_scores_grad:
            return self
        return replace(self, options=replace(self.options, needs_scores_grad=wanted))

    def offset(self, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The diagonal's offset for lengths in use (ints or tensors): key ``i + off`` lies on row i's diagonal."""
        return seqlen_k * 0 if self.options.align == TOP_LEFT else seqlen_k - seqlen_q

    def out_shape(self, q: torch.Tensor) -> tuple[int, ...]:
        return (*q.shape[:-1], self.head_dim_v)

    def lse_shape(self, q: torch.Tensor) -> tuple[int, ...]:
        """[B, Hq, Sq], or [Hq, total_q] when packed."""
        return (q.shape[1], q.shape[0]) if self.packed else (q.shape[0], q.shape[2], q.shape[1])
