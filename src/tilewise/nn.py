"""Layers: multi-head attention with projections, rotary positions and a cache for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import errors
from .api import attention
from .cache_api import attention_with_kvcache
from .decode.rotary import rotate
from .kvcache import Rotary

__all__ = ["KVCache", "MultiHeadAttention", "RoPE"]


@dataclass(frozen=True)
class RoPE:
    """Rotary positions of a layer.

    Args:
        max_positions: rows of the tables: the longest sequence, cached tokens included.
        theta: base of the frequencies ``theta^(-2r / dims)``.
        dims: of each head that are rotated, an even number; None: all.
        interleaved: pairs are dims (2r, 2r + 1) (GPT-J); False: (r, r + dims/2) (GPT-NeoX, Llama).

    Source:
        Su et al., "RoFormer" (2021), equation 34.
    """

    max_positions: int
    theta: float = 10_000.0
    dims: int | None = None
    interleaved: bool = False


class KVCache:
    """Keys and values of earlier tokens of one layer; `MultiHeadAttention.new_cache` makes an empty one.

    Attributes:
        k, v: [batch, capacity, heads_kv, head_dim].
        lengths: int32 [batch], tokens of each sequence. After a prompt that was padded on the right, set them to the
            true lengths: what lies behind is not read, and overwritten by the next tokens.
        used: tokens that every call so far has appended, a Python int: no sequence has more.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v
        self.lengths = torch.zeros(k.shape[0], dtype=torch.int32, device=k.device)
        self.used = 0

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    def clear(self) -> None:
        """Forget every token; the memory stays."""
        self.lengths.zero_()
        self.used = 0


class MultiHeadAttention(nn.Module):
    """Multi-head attention with projections: ``out_proj(attention(q_proj(x), k_proj(context), v_proj(context)))``.

    Args:
        embed_dim: width of x and of the output.
        heads: query heads.
        heads_kv: key/value heads, a divisor of `heads`; None: as many.
        head_dim: None: ``embed_dim // heads``.
        context_dims: widths of the keys' and of the values' source, where it is another sequence; None: embed_dim.
        bias: whether projections have one.
        rope: a `RoPE`, or None: no positions.
        qk_norm: normalise each head of q and k by its root mean square, with a learned scale, before `rope`.
        sinks: learn the logit of a virtual key for each query head.
        dropout_p: of attention weights, while training.
        causal, window, softcap, softmax_scale: as in `tilewise.attention`.
        device, dtype: of the parameters.

    Raises:
        tilewise.errors.ArgumentError: sizes that do not go together. What `tilewise.attention` takes is checked by it.

    Example:
        >>> import torch, tilewise
        >>> from tilewise.nn import MultiHeadAttention, RoPE
        >>> layer = MultiHeadAttention(64, 4, heads_kv=2, rope=RoPE(128), causal=True).eval()
        >>> x = torch.randn(2, 10, 64)
        >>> with torch.no_grad():
        ...     whole = layer(x)
        ...     cache = layer.new_cache(batch=2, capacity=16)
        ...     parts = [layer(part, cache=cache) for part in x.split([7, 1, 1, 1], dim=1)]
        >>> torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
        True
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        *,
        heads_kv: int | None = None,
        head_dim: int | None = None,
        context_dims: tuple[int, int] | None = None,
        bias: bool = True,
        rope: RoPE | None = None,
        qk_norm: bool = False,
        sinks: bool = False,
        dropout_p: float = 0.0,
        causal: bool | str = False,
        window: Any = None,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.heads_kv = heads, heads if heads_kv is None else heads_kv
        self.head_dim = _head_dim(embed_dim, heads, self.heads_kv, head_dim)
        self.rope, self.dropout_p = rope, dropout_p
        self.options = {"causal": causal, "window": window, "softcap": softcap, "softmax_scale": softmax_scale}
        k_dim, v_dim = (embed_dim, embed_dim) if context_dims is None else context_dims
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, heads * self.head_dim, bias=bias, **where)
        self.k_proj = nn.Linear(k_dim, self.heads_kv * self.head_dim, bias=bias, **where)
        self.v_proj = nn.Linear(v_dim, self.heads_kv * self.head_dim, bias=bias, **where)
        self.out_proj = nn.Linear(heads * self.head_dim, embed_dim, bias=bias, **where)
        self.q_norm = nn.RMSNorm(self.head_dim, **where) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, **where) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(heads, **where)) if sinks else None
        if rope is not None:
            cos, sin = _tables(rope, self.head_dim, device)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        mask: Any = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            x: [batch, seqlen, embed_dim].
            context: where keys and values come from, [batch, seqlen_k, dim], or two of these; None: x.
            mask: as in `tilewise.attention`; True is visible. With `cache` as in `tilewise.attention_with_kvcache`.
            cache: append x's keys and values to it, and attend to all that it holds; no gradient, no dropout.

        Returns:
            [batch, seqlen, embed_dim].
        """
        key, value = (x, x) if context is None else context if isinstance(context, tuple) else (context, context)
        # As many heads as the projections give: with tensor parallelism those of this process.
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(key).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(value).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast projections are in another dtype than the norms' scales.
            q, k = (norm(y.to(norm.weight.dtype)).to(v.dtype) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        sinks = None if self.sinks is None else self.sinks.to(torch.float32 if v.dtype != torch.float64 else v.dtype)
        if cache is not None:
            out = self._decode((q, k, v), cache, sinks=sinks, mask=mask, cross=context is not None)
        else:
            if self.rope is not None:
                q, k = self._rotated(q), self._rotated(k)
            dropout_p = self.dropout_p if self.training else 0.0
            out = attention(q, k, v, mask=mask, sinks=sinks, dropout_p=dropout_p, **self.options)
        result: torch.Tensor = self.out_proj(out.flatten(-2))
        return result

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, on the layer's device.

        Args:
            batch: sequences.
            capacity: tokens of the longest one, at its end.
            dtype: of keys and values; None: the weights'.
        """
        weight: Any = self.k_proj.weight
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        shape = (batch, capacity, weight.shape[0] // self.head_dim, self.head_dim)
        k, v = (torch.zeros(shape, device=weight.device, dtype=dtype or weight.dtype) for _ in range(2))
        return KVCache(k, v)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        if x.shape[1] > self.rope.max_positions:
            _too_long(f"a sequence of {x.shape[1]} tokens", self.rope.max_positions)
        positions = torch.arange(x.shape[1], device=x.device)
        return rotate(x, self.cos, self.sin, positions, self.rope.interleaved)

    def _decode(self, qkv: tuple[torch.Tensor, ...], cache: KVCache, *, sinks: Any, mask: Any, cross: bool) -> Any:
        """Append to the cache and attend to it."""
        q, k, v = qkv
        new = k.shape[1]
        if cross:
            fix = "pass x alone, or attend to the context without a cache"
            errors.fail(errors.ArgumentError, "cache", "a cache together with a context", "one of the two", fix)
        if self.training and self.dropout_p:
            fix = "call .eval() for decoding"
            errors.fail(errors.ArgumentError, "cache", f"a cache while training with dropout_p={self.dropout_p}",
                        "caches without dropout", fix)  # fmt: skip
        if cache.used + new > cache.capacity:
            got = f"{new} tokens on top of {cache.used}"
            fix = "make a larger one with new_cache, or clear() it"
            errors.fail(errors.ArgumentError, "cache", got, f"up to its capacity of {cache.capacity}", fix)
        rotary = None
        if self.rope is not None:
            if cache.used + new > self.rope.max_positions:
                _too_long(f"{new} tokens on top of {cache.used}", self.rope.max_positions)
            rotary = Rotary(self.cos, self.sin, self.rope.interleaved)
        out = attention_with_kvcache(
            q, cache.k, cache.v, cache_seqlens=cache.lengths, k_new=k, v_new=v, rotary=rotary, mask=mask, sinks=sinks,
            **self.options,
        )  # fmt: skip
        cache.lengths += new
        cache.used += new
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and conversions. Tables are made anew: exact ones in fp32, also after a move away from meta tensors."""
        super()._apply(fn, recurse)
        if self.rope is not None:
            self.cos, self.sin = _tables(self.rope, self.head_dim, self.cos.device)
        return self

    def extra_repr(self) -> str:
        """What the sizes of the projections do not say."""
        said: dict[str, Any] = {
            "heads": self.heads,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "rope": self.rope,
        }
        said |= {"dropout_p": self.dropout_p or None, **self.options}
        return ", ".join(f"{name}={value}" for name, value in said.items() if value is not None and value is not False)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiHeadAttention:
        """The layer that computes what a PyTorch one does, with a copy of its weights.

        Inputs have the batch first, whatever `module.batch_first` says, and masks say True for visible.

        Args:
            module: any but those with ``add_bias_kv=True``.
            **options: causal, window, softcap, rope, qk_norm, softmax_scale, to change what it computes.
        """
        if module.bias_k is not None:
            fix = "append the learned key and value to the context yourself"
            errors.fail(errors.UnsupportedError, "module", "add_bias_kv=True", "add_bias_kv=False", fix)
        weight = module.out_proj.weight
        # A key and a value of zeros are a virtual key of logit 0 and value 0: a sink that stays at 0.
        layer = cls(
            module.embed_dim, module.num_heads, context_dims=(module.kdim, module.vdim), dropout_p=module.dropout,
            bias=module.in_proj_bias is not None, sinks=module.add_zero_attn, device=weight.device, dtype=weight.dtype,
            **options,
        )  # fmt: skip
        together = module.in_proj_weight
        apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = apart if together is None else together.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        with torch.no_grad():
            for projection, w, b in zip((layer.q_proj, layer.k_proj, layer.v_proj), weights, biases, strict=True):
                projection.weight.copy_(w)
                if b is not None:
                    projection.bias.copy_(b)
        layer.out_proj.load_state_dict(module.out_proj.state_dict())
        if layer.sinks is not None:
            layer.sinks.requires_grad_(False)
        return layer.train(module.training)


def _head_dim(embed_dim: int, heads: int, heads_kv: int, head_dim: int | None) -> int:
    if heads < 1 or heads_kv < 1 or heads % heads_kv:
        got = f"{heads} query heads with {heads_kv} key/value heads"
        fix = "choose heads_kv among the divisors of heads"
        errors.fail(errors.ArgumentError, "heads_kv", got, "heads a positive multiple of heads_kv", fix)
    if head_dim is None and embed_dim % heads:
        got = f"None with embed_dim {embed_dim} and {heads} heads"
        errors.fail(errors.ArgumentError, "head_dim", got, "embed_dim a multiple of heads", "pass head_dim=")
    return embed_dim // heads if head_dim is None else head_dim


def _tables(rope: RoPE, head_dim: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines fp32 [max_positions, dims / 2]."""
    dims = head_dim if rope.dims is None else rope.dims
    if dims % 2 or not 0 < dims <= head_dim:
        fix = "rotate an even number of dims"
        errors.fail(errors.ArgumentError, "RoPE.dims", dims, f"an even number, 2 to head_dim {head_dim}", fix)
    frequency = rope.theta ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.outer(torch.arange(rope.max_positions, dtype=torch.float64), frequency)
    return angle.cos().to(device, torch.float32), angle.sin().to(device, torch.float32)


def _too_long(got: str, most: int) -> None:
    fix = "pass a larger max_positions"
    errors.fail(errors.ArgumentError, "RoPE.max_positions", got, f"up to {most} positions", fix)
