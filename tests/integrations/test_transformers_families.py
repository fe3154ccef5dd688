"""Families beside those of `test_transformers`: whatever goes through the attention interface gives eager's outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tiny_models import DECODER, HEADS, PADDING, VOCABULARY, WINDOW, build, tokens

KEPT = PADDING["left"]
MLA = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 2,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
CHUNKS = {"attention_chunk_size": 4, "num_local_experts": 1, "no_rope_layers": [1, 0], "intermediate_size_mlp": 40}
TEXT: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {**DECODER, "sliding_window": WINDOW},
    "DeepseekV3ForCausalLM": {**DECODER, **MLA},
    "DistilBertModel": {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
    "EsmModel": HEADS,
    "GPT2LMHeadModel": DECODER,
    "GPTNeoXForCausalLM": DECODER,
    "Llama4ForCausalLM": {**DECODER, **CHUNKS},
    "MixtralForCausalLM": {**DECODER, "sliding_window": WINDOW},
    "OPTForCausalLM": DECODER,
    "Olmo3ForCausalLM": {**DECODER, "sliding_window": WINDOW},
    "Phi3ForCausalLM": DECODER,
}
DEPTH = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))}
BOTH = {
    **DEPTH, "vocab_size": VOCABULARY, "d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def outputs(name: str, sizes: dict[str, Any], **inputs: Any) -> list[torch.Tensor]:
    """What a tiny model returns first, on eager attention and on ours."""
    kind = getattr(transformers, name)
    with torch.no_grad():
        return [model(**inputs)[0] for model in build((kind, kind.config_class(**sizes)))]


@pytest.mark.parametrize("name", TEXT)
def test_text(name: str) -> None:
    expected, got = outputs(name, TEXT[name], input_ids=tokens(2, 13), attention_mask=KEPT)
    torch.testing.assert_close(got[KEPT.bool()], expected[KEPT.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "MarianMTModel"])
def test_encoder_and_decoder(name: str) -> None:
    decoded = tokens(2, 7, seed=1)
    expected, got = outputs(name, BOTH, input_ids=tokens(2, 13), attention_mask=KEPT, decoder_input_ids=decoded)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_speech() -> None:
    sizes = {**BOTH, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": sound, "decoder_input_ids": tokens(2, 7)}
    expected, got = outputs("WhisperForConditionalGeneration", sizes, **inputs)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ViTModel", "SiglipVisionModel", "CLIPVisionModel"])
def test_vision(name: str) -> None:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected, got = outputs(name, VISION, pixel_values=pixels)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
