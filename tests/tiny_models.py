"""Tiny models of every family, each twice with the same weights: on transformers' eager attention and on tilewise's."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tilewise.integrations import transformers as integration

integration.register()

VOCABULARY = 64
WINDOW = 5
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {**COMMON, "num_attention_heads": 4, "pad_token_id": 0, "max_position_embeddings": 64}
DECODER = {**HEADS, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "head_dim": 12}
GEMMA = {**DECODER, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}

# Every decoder with a window has layers of both kinds, if its family does.
DECODERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**DECODER)),
    "mistral": (MistralForCausalLM, MistralConfig(**DECODER, sliding_window=WINDOW)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**DECODER, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**DECODER)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GEMMA, attn_logit_softcapping=2.0)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        # Experts one token at a time: how others are routed changes no bit, and it compiles on the CPU.
        GptOssConfig(
            **DECODER, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=YARN,
            experts_implementation="batched_mm",
        ),
    ),
}  # fmt: skip
MARKS = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
ENCODERS: dict[str, tuple[Any, Any]] = {
    "bert": (BertModel, BertConfig(**HEADS)),
    "roberta": (RobertaModel, RobertaConfig(**HEADS)),
    "modernbert": (
        ModernBertModel,
        ModernBertConfig(**HEADS, **MARKS, local_attention=6, global_attn_every_n_layers=2),
    ),
}
T5 = (
    T5ForConditionalGeneration,
    T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=12, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=VOCABULARY,
    ),
)  # fmt: skip


class Pair(NamedTuple):
    """One model on both kinds of attention."""

    eager: Any
    ours: Any


def build(family: tuple[Any, Any], **changes: Any) -> Pair:
    """Both models of a family, in eval mode, with the same weights, large enough for attention to be far from even."""
    kind, config = family
    torch.manual_seed(0)
    # A config is shared by all that is made from it, so each gets its own.
    eager, ours = (
        kind._from_config(_changed(config, changes), attn_implementation=name).eval()
        for name in ("eager", integration.NAME)
    )
    with torch.no_grad():
        for weight in eager.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    ours.load_state_dict(eager.state_dict())
    for model, name in ((eager, "eager"), (ours, integration.NAME)):
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {name}
    return Pair(eager, ours)


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# One row is padded, the other is not; `gaps` are no run of keys.
PADDING = {
    "none": None,
    "full": torch.ones(2, 13, dtype=torch.long),
    "left": torch.tensor([[0] * 4 + [1] * 9, [1] * 13]),
    "right": torch.tensor([[1] * 9 + [0] * 4, [1] * 13]),
    "both": torch.tensor([[0] * 2 + [1] * 8 + [0] * 3, [1] * 13]),
    "gaps": torch.tensor([[1] * 3 + [0] * 2 + [1] * 8, [0] * 2 + [1] * 11]),
}
LENGTHS = (4, 1, 5, 3)
OFFSETS = torch.tensor([0, 4, 5, 10, 13], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
