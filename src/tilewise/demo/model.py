"""A byte-level decoder whose attention function is an argument.

Pre-norm blocks `x += attention(norm(x)); x += swiglu(norm(x))` with rotary positions, grouped-query attention and tied
embeddings. Even layers see the whole past, odd layers a sliding window. Everything around attention is plain torch, so
two models that differ only in `attend` differ only in attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Attend, AttentionCall
from .config import ModelConfig

VOCABULARY = 256
# Tied embeddings of unit gain would make a new model sure that each byte repeats.
EMBEDDING_GAIN = 0.5


@lru_cache(maxsize=4)
def rotary_tables(head_dim: int, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[S,1,D/2]` for positions `start … stop - 1` (Su et al. 2021, Eq. 34)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(start, stop, dtype=torch.float64), frequency)[:, None]
    # fp32 whatever the model's dtype: a run in fp64 then differs from one in fp32 by its arithmetic alone.
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of `x [B,S,H,D]`, element `d` paired with `d + D/2`."""
    cos, sin = (table.to(x.dtype) for table in tables)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Cache:
    """Keys and values of the past, one pair a layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new keys and values of `layer`; all of them come back."""
        if layer in self.layers:
            past_k, past_v = self.layers[layer]
            k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
        self.layers[layer] = k, v
        return k, v


@dataclass(frozen=True)
class Pass:
    """What one forward pass gives to every layer beside the activations."""

    tables: tuple[Tensor, Tensor]
    dropout_seed: int | None = None
    cache: Cache | None = None


class Attention(nn.Module):
    """Projections and rotary positions around one injected attention call."""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        self.config, self.layer, self.attend = config, layer, attend
        self.window = (config.window - 1, 0) if layer % 2 else None
        q_width, kv_width = config.heads_q * config.head_dim, config.heads_kv * config.head_dim
        self.widths = [q_width, kv_width, kv_width]
        self.qkv = nn.Linear(config.width, sum(self.widths), bias=False)
        self.out = nn.Linear(q_width, config.width, bias=False)

    def call(self, at: Pass) -> AttentionCall:
        """This layer's wishes; with a cache even the full layers look no further back than they did in training."""
        window = (self.config.seqlen - 1, 0) if at.cache is not None and self.window is None else self.window
        if at.dropout_seed is None:
            return AttentionCall(window)
        return AttentionCall(window, self.config.dropout_p, at.dropout_seed + self.layer)

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.config.head_dim)) for t in self.qkv(x).split(self.widths, dim=-1))
        q, k = rotate(q, at.tables), rotate(k, at.tables)
        if at.cache is not None:
            k, v = at.cache.append(self.layer, k, v)
        return self.out(self.attend(q, k, v, self.call(at)).flatten(2))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer 2020), gate and up in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config, layer, attend)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        x = x + self.attention(self.attention_norm(x), at)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes `[B,S]` → logits `[B,S,256]`. The same `seed` gives the same weights whatever `attend` is.

    Dropout is on exactly where `dropout_seed` is given: layer `l` draws its mask from `dropout_seed + l`.
    """

    def __init__(self, config: ModelConfig, attend: Attend, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, layer, attend) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Unit-gain matrices; those that write to the residual stream shrink with depth (Radford et al. 2019)."""
        shrink = {"embedding": EMBEDDING_GAIN, "out": (2 * self.config.layers) ** -0.5}
        shrink["down"] = shrink["out"]
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = shrink.get(name.split(".")[-2], 1.0) * weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor, dropout_seed: int | None = None, cache: Cache | None = None) -> Tensor:
        start = 0 if cache is None else len(cache)
        tables = rotary_tables(self.config.head_dim, start, start + tokens.shape[1], tokens.device)
        x = self.embedding(tokens) * math.sqrt(self.config.width)
        for block in self.blocks:
            x = block(x, Pass(tables, dropout_seed, cache))
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, batch: Tensor, dropout_seed: int | None = None) -> Tensor:
        """Mean cross-entropy in nats per byte of `batch [B,S+1]`, each byte predicted from those before it."""
        logits = self(batch[:, :-1], dropout_seed).flatten(0, 1)
        # Never below fp32, where a loss is small beside its logits.
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch[:, 1:].flatten())
