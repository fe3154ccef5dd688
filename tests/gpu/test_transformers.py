"""Models of transformers on a GPU: kernels serve them, and give what eager attention gives there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.integrations import transformers as integration
from tiny_models import DECODERS, LENGTHS, OFFSETS, PADDING, POSITIONS, T5, Pair, build, tokens

FAMILIES = {**DECODERS, "t5": T5}
IDS = tokens(2, 13).cuda()
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
PACKED = {"cu_seq_lens_q": OFFSETS.cuda(), "cu_seq_lens_k": OFFSETS.cuda(), "max_length_q": 5, "max_length_k": 5}


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {name: Pair(*(model.cuda() for model in build(family))) for name, family in FAMILIES.items()}


def kept(padding: str) -> torch.Tensor | None:
    return None if PADDING[padding] is None else PADDING[padding].cuda()


@pytest.mark.parametrize("padding", ["none", "left", "gaps"])
@pytest.mark.parametrize("family", DECODERS)
def test_logits(pairs: dict[str, Pair], family: str, padding: str) -> None:
    mask = kept(padding)
    with torch.no_grad():
        expected, got = (model(IDS, attention_mask=mask).logits for model in pairs[family])
    shown = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(got[shown], expected[shown], **TOLERANCE)


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["positions", "offsets"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_documents_that_share_a_row(pairs: dict[str, Pair], family: str, packing: dict[str, Any]) -> None:
    plain, ours = pairs[family]
    with torch.no_grad():
        got = ours(IDS[:1], position_ids=POSITIONS.cuda(), use_cache=False, **packing).logits
        alone = [plain(document, use_cache=False).logits for document in IDS[:1].split(LENGTHS, dim=1)]
    torch.testing.assert_close(got, torch.cat(alone, dim=1), **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "t5"])
def test_gradients(pairs: dict[str, Pair], family: str) -> None:
    gradients = []
    for model in pairs[family]:
        model.zero_grad()
        model(IDS, attention_mask=kept("right"), labels=IDS).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore")  # of the compiler, in every version other ones
@pytest.mark.parametrize("padding", ["full", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_generate(pairs: dict[str, Pair], family: str, cache: str, padding: str) -> None:
    """With a static cache transformers compiles each step into a CUDA graph."""
    arguments: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    plain, ours = pairs[family]
    expected = plain.generate(IDS, attention_mask=kept(padding), disable_compile=True, **arguments)
    torch._dynamo.reset()
    assert torch.equal(ours.generate(IDS, attention_mask=kept(padding), **arguments), expected)


def test_half_precision_at_length() -> None:
    """Long enough for every kind of tile, in bf16: as near to fp64 as eager attention, within a factor of two."""
    positions = {"max_position_embeddings": 1024}
    plain, ours = (model.cuda() for model in build(DECODERS["gemma2"], sliding_window=300, head_dim=64, **positions))
    ids = tokens(2, 1000).cuda()
    mask = torch.ones_like(ids)
    mask[0, :333] = 0
    with torch.no_grad():
        exact = build(DECODERS["gemma2"], sliding_window=300, head_dim=64, **positions).ours.double()
        reference = exact(ids.cpu(), attention_mask=mask.cpu()).logits.cuda()[mask.bool()]
        errors = [
            float((model.bfloat16()(ids, attention_mask=mask).logits[mask.bool()] - reference).abs().max())
            for model in (plain, ours)
        ]
    assert errors[1] <= 2 * errors[0]


def test_kernels_serve_models(monkeypatch: pytest.MonkeyPatch, pairs: dict[str, Pair]) -> None:
    calls = []
    real = integration.api.attention
    monkeypatch.setattr(integration.api, "attention", lambda *x, **y: calls.append(x[0].is_cuda) or real(*x, **y))
    pairs["llama"].ours(IDS)
    assert calls == [True, True]
