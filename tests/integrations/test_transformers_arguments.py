"""What layers pass to the attention function: every argument changes the result, or an error names it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface

from tilewise import errors
from tilewise.integrations import transformers as integration
from tiny_models import OFFSETS, POSITIONS

integration.register()


class Layer(torch.nn.Module):
    """A layer that asks for attention."""

    is_causal = True


Q = torch.randn(1, 4, 13, 8, generator=torch.Generator().manual_seed(1))
K, V = torch.randn(2, 1, 2, 13, 8, generator=torch.Generator().manual_seed(2)).unbind()
GRID = torch.linspace(-1, 1, 4 * 13 * 13).view(1, 4, 13, 13)


def attend(layer: torch.nn.Module | None = None, **arguments: Any) -> torch.Tensor:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    out, weights = integration.attention(layer or Layer().eval(), q, k, v, **arguments)
    assert weights is None and out.shape == (1, 13, 4, 8) and out.is_contiguous()
    return out


# What each argument may be, so that it changes the result.
CHANGES: dict[str, dict[str, Any]] = {
    "module": {"layer": Layer().train(), "dropout": 0.5},
    "attention_mask": {"attention_mask": GRID > 0},
    "dropout": {"layer": Layer().train(), "dropout": 0.5},
    "scaling": {"scaling": 0.1},
    "is_causal": {"is_causal": False},
    "sliding_window": {"sliding_window": 3},
    "softcap": {"softcap": 0.5},
    "s_aux": {"s_aux": torch.ones(4, dtype=torch.bfloat16)},
    "position_bias": {"position_bias": GRID},
    "position_ids": {"position_ids": POSITIONS},
    "seq_idx": {"seq_idx": (torch.arange(13) > 5)[None].int()},
    "cu_seq_lens_q": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS},
    "cu_seq_lens_k": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS},
}
# And those that cannot, with what says that they are heard.
REFUSALS: dict[str, dict[str, Any]] = {
    "max_length_q": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 3},
    "max_length_k": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_k": 3},
    "others": {"block_indices": torch.zeros(1)},
}


def test_every_argument_counts() -> None:
    plain = attend()
    for name, arguments in CHANGES.items():
        assert not torch.allclose(attend(**arguments), plain, atol=1e-5, rtol=1e-5), name
    for arguments in REFUSALS.values():
        with pytest.raises(errors.TilewiseError):
            attend(**arguments)
    names = set(inspect.signature(integration.attention).parameters) - {"query", "key", "value"}
    # On the CPU gradients repeat bit by bit whether asked or not.
    assert names == {*CHANGES, *REFUSALS, "deterministic"}
    assert torch.equal(attend(deterministic=True), plain)


def test_arguments_that_do_not_concern_attention() -> None:
    plain = attend()
    assert torch.equal(attend(use_cache=True, num_items_in_batch=3, output_attentions=False, head_mask=None), plain)
    # Positions of images, or along several axes, are no positions in a text.
    assert torch.equal(attend(position_ids=POSITIONS[None].expand(3, 1, 13)), plain)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_without_a_mask_counts_the_query_itself(causal: bool) -> None:
    rows, keys = torch.arange(13)[:, None], torch.arange(13)
    seen = (rows - keys < 3) & ((keys <= rows) if causal else (keys - rows < 3))
    expected = attend(attention_mask=seen[None, None])
    torch.testing.assert_close(attend(is_causal=causal, sliding_window=3), expected)


def test_position_ids_that_change_in_place_are_read_again() -> None:
    ids = torch.arange(13)[None]
    plain = attend(position_ids=ids)
    assert torch.equal(plain, attend())
    ids.copy_(POSITIONS)
    assert torch.equal(attend(position_ids=ids), attend(position_ids=POSITIONS))
    with torch.inference_mode():
        out, _ = integration.attention(Layer().eval(), Q, K, V, position_ids=POSITIONS.clone())
    torch.testing.assert_close(out, attend(position_ids=POSITIONS))


def test_position_bias_of_packed_documents() -> None:
    bias = GRID[:, :, :5, :5].contiguous()
    whole = torch.zeros(1, 4, 13, 13)
    whole[:, :, 5:10, 5:10] = bias
    got = attend(position_bias=whole, cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS)[:, 5:10]
    q, k, v = (x[:, :, 5:10] for x in (Q, K, V))
    torch.testing.assert_close(got, integration.attention(Layer().eval(), q, k, v, position_bias=bias)[0])


def test_offsets_of_cross_attention() -> None:
    """Of seven queries in two documents, and thirteen keys in as many; the row's last query is in none."""
    q, cu_q, cu_k = Q[:, :, :7], torch.tensor([0, 2, 6]), torch.tensor([0, 9, 13])
    offsets = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k}
    seen = torch.zeros(1, 1, 7, 13, dtype=torch.bool)
    seen[:, :, :2, :9], seen[:, :, 2:6, 9:] = True, True
    layer = Layer().eval()
    expected, _ = integration.attention(layer, q, K, V, attention_mask=seen)
    everything = torch.ones(1, 1, 7, 13, dtype=torch.bool)
    for mask in (None, everything):
        got, _ = integration.attention(layer, q, K, V, attention_mask=mask, is_causal=False, **offsets)
        torch.testing.assert_close(got, expected)
    assert not expected[:, 6].any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"output_attentions": True}, "output_attentions: got True.*attn_implementation='eager'"),
    "paged": ({"cache": object()}, "cache: got <object.*continuous batching is not served"),
    "blocks": ({"block_indices": torch.zeros(2)}, "block_indices: got a Tensor.*UNRELATED"),
    "padding": ({"attention_mask": torch.ones(1, 13)}, r"attention_mask: got shape \[1, 13\].*give padding masks"),
    "object": ({"attention_mask": "causal"}, "attention_mask: got str"),
    "integers": ({"attention_mask": (GRID > 0).int()}, r"attention_mask: got torch.int32.*mask.bool\(\)"),
    "shape": ({"attention_mask": GRID[..., :4] > 0}, r"mask: got shape \[1, 4, 13, 4\]"),
    "one_sided": ({"cu_seq_lens_q": OFFSETS}, "cu_seq_lens_k: got None.*pass both"),
    "documents": ({"seq_idx": torch.zeros(1, 12)}, r"seq_idx: got shape \[1, 12\] for 13 queries and 13 keys"),
    "softcap": ({"softcap": 0.0}, "softcap: got 0.0"),
    "window": ({"sliding_window": 0}, "window left bound: got -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(errors.TilewiseError, match=message):
        attend(**arguments)


def test_stale_offsets_and_masks_are_refused() -> None:
    last = Q[:, :, -1:]
    with pytest.raises(errors.UnsupportedError, match="cu_seq_lens_q: got offsets for 1 queries and 13 keys"):
        integration.attention(Layer(), last, K, V, cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS)
    mask, (q, k, v) = torch.ones(1, 1, 13, 13, dtype=torch.bool), (x.expand(2, -1, -1, -1) for x in (Q, K, V))
    offsets = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
    with pytest.raises(errors.UnsupportedError, match="cu_seq_lens_q: got offsets beside a mask or a position bias"):
        integration.attention(Layer(), q, k, v, attention_mask=mask, **offsets)
    mask = AttentionMaskInterface()[integration.NAME](batch_size=1, q_length=13, kv_length=13)
    with pytest.raises(
        errors.ShapeError, match=r"got a mask of 13 queries and 13 keys; supported: .* layer's 1 queries"
    ):
        integration.attention(Layer(), last, K, V, attention_mask=mask)
