"""flash-attn 3's functions: what they have beyond 2's, and what they refuse or only hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise import errors
from tilewise.compat import flash_attn_3
from tilewise.compat.flash_attn_3 import flash_attn_combine, flash_attn_func, flash_attn_varlen_func

from .test_flash_attn import CU_K, CU_Q, described, grads, packed, qkv

_TAIL = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
    f"attention_chunk=0, softcap=0.0, {_TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {_DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
    f"attention_chunk=0, softcap=0.0, {_TAIL}",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert described(getattr(flash_attn_3, name)) == SIGNATURES[name]


def test_nothing_is_missing() -> None:
    assert {*SIGNATURES, "get_scheduler_metadata"} == set(flash_attn_3.__all__)


def in_chunk(rows: int, keys: int, chunk: int) -> torch.Tensor:
    """Which keys each row sees: those in the chunk of its own position, which the last key's is the last row's."""
    position = torch.arange(rows)[:, None] + keys - rows
    return (position.div(chunk, rounding_mode="floor")) == (torch.arange(keys) // chunk)


@pytest.mark.parametrize("rows, keys", [(6, 9), (9, 6), (8, 8), (1, 7)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}], ids=str)
def test_chunks(rows: int, keys: int, chunk: int, options: dict[str, Any]) -> None:
    leaves = [x.requires_grad_() for x in qkv(rows, keys)]
    out, lse = flash_attn_func(*leaves, **options, attention_chunk=chunk, return_attn_probs=True)
    native = {"causal": options.get("causal", False), "window": options.get("window_size")}
    ref, ref_lse = tilewise.attention(*leaves, **native, mask=in_chunk(rows, keys, chunk), return_lse=True)
    assert torch.allclose(out, ref, atol=1e-6) and torch.allclose(lse, ref_lse, atol=1e-6)
    for x, y in zip(grads(out, *leaves), grads(ref, *leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("used", [(None, None), ([4, 0, 3], None), (None, [4, 2, 3]), ([6, 0, 1], [1, 5, 0])], ids=str)
@pytest.mark.parametrize("chunk", [0, 3])
def test_rows_and_keys_in_use(used: tuple[list[int] | None, list[int] | None], chunk: int) -> None:
    leaves = [x.requires_grad_() for x in packed()]
    tensors = {
        name: None if n is None else torch.tensor(n, dtype=torch.int32)
        for name, n in zip(("seqused_q", "seqused_k"), used, strict=True)
    }
    common = {"causal": True, "attention_chunk": chunk, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(*leaves, CU_Q, CU_K, 6, 5, **tensors, **common)
    assert torch.equal(
        flash_attn_varlen_func(*leaves, CU_Q, CU_K, 6, 5, **tensors, **{**common, "return_attn_probs": False}), out
    )
    rows, keys = used[0] or CU_Q.diff().tolist(), used[1] or CU_K.diff().tolist()
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    for q0, k0, n, m in zip(CU_Q.tolist(), CU_K.tolist(), rows, keys, strict=False):
        member = (leaves[0][None, q0 : q0 + n], leaves[1][None, k0 : k0 + m], leaves[2][None, k0 : k0 + m])
        alone, alone_lse = flash_attn_func(*member, **common)
        expected[q0 : q0 + n], expected_lse[:, q0 : q0 + n] = alone[0], alone_lse[0]
    assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(lse, expected_lse, atol=1e-6)
    for x, y in zip(grads(out, *leaves), grads(expected, *leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_queries_of_grouped_heads_in_one_tensor() -> None:
    q, k, v = qkv(6, 6)
    whole = torch.cat([q, k, v], dim=2).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, expected = (
        flash_attn_3.flash_attn_qkvpacked_func(whole, causal=True, num_heads_q=4),
        flash_attn_func(*leaves, causal=True),
    )
    assert torch.equal(out, expected)
    assert torch.equal(grads(out, whole)[0], torch.cat(grads(expected, *leaves), dim=2))
    alike = torch.stack([q, q, q], dim=2)
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(alike), flash_attn_func(q, q, q))


def partial(splits: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Results over parts of the keys, in flash-attn's layouts, which are no contiguous ones."""
    q, k, v = qkv(5, 3 * splits)
    found = [
        tilewise.attention(q, x, y, return_lse=True) for x, y in zip(k.split(3, dim=1), v.split(3, dim=1), strict=True)
    ]
    return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found]).transpose(-1, -2)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_combine(splits: int) -> None:
    q, k, v = qkv(5, 3 * splits)
    out, lse = flash_attn_combine(*partial(splits))
    whole, whole_lse = tilewise.attention(q, k, v, return_lse=True)
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(lse, whole_lse.transpose(-1, -2), atol=1e-5)


def test_combine_ignores_parts_without_keys() -> None:
    outs, lses = partial()
    outs, lses = (
        torch.cat([outs, torch.full_like(outs[:1], float("nan"))]),
        torch.cat([lses, torch.full_like(lses[:1], -torch.inf)]),
    )
    assert torch.equal(flash_attn_combine(outs, lses)[0], flash_attn_combine(outs[:3], lses[:3])[0])
    out, lse = flash_attn_combine(outs[3:], lses[3:])
    assert not out.any() and torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_combine_of_packed_sequences_into_a_tensor() -> None:
    outs, lses = (x.flatten(1, 2) for x in partial())
    out, lse = flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16 and out.shape == outs.shape[1:] and lse.shape == lses.shape[1:]
    into = torch.empty(out.shape, dtype=torch.bfloat16)
    assert flash_attn_combine(outs, lses, into)[0] is into and torch.equal(into, out)


FP8 = torch.float8_e4m3fn
ONE = torch.ones(2, 2)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qv": ({"qv": torch.ones(2, 6, 4, 16)}, r"qv: got Tensor.*torch\.cat\(\[q, qv\], -1\)"),
    "q_descale": ({"q_descale": ONE}, "q_descale: got Tensor.*attention_fp8"),
    "k_descale": ({"k_descale": ONE}, "k_descale: got Tensor.*attention_fp8"),
    "v_descale": ({"v_descale": ONE}, "v_descale: got Tensor.*attention_fp8"),
    "sm_margin": ({"sm_margin": 4}, "sm_margin: got 4"),
}


# (flash-attn 3 has no qv for a packed tensor.)
_REFUSING = [(x, kind) for kind in ("dense", "varlen", "packed") for x in REFUSED if (x, kind) != ("qv", "packed")]


@pytest.mark.parametrize("name, kind", _REFUSING)
def test_refusals(name: str, kind: str) -> None:
    options, message = REFUSED[name]
    fn, given = {
        "dense": (flash_attn_func, tuple(qkv())),
        "varlen": (flash_attn_varlen_func, (*packed(), CU_Q, CU_K, 6, 5)),
        "packed": (flash_attn_3.flash_attn_qkvpacked_func, (torch.ones(2, 6, 3, 4, 16),)),
    }[kind]
    with pytest.raises(errors.UnsupportedError, match=message):
        fn(*given, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: flash_attn_func(*[x.to(FP8) for x in qkv()]), r"q: got torch\.float8_e4m3fn.*attention_fp8"),
        (lambda: flash_attn_func(*qkv(), attention_chunk=-1), "attention_chunk: got -1"),
        (lambda: flash_attn_func(*qkv(), attention_chunk=2.5), "attention_chunk: got float"),
        (lambda: flash_attn_3.flash_attn_qkvpacked_func(torch.ones(1, 4, 8, 16)), "num_heads_q=None"),
        (lambda: flash_attn_3.flash_attn_qkvpacked_func(torch.ones(1, 4, 7, 16), num_heads_q=4), "num_heads_q=4"),
        (lambda: flash_attn_3.flash_attn_qkvpacked_func(torch.ones(1, 4, 3, 2, 16), num_heads_q=2), "num_heads_q=2"),
        (lambda: flash_attn_combine(*[x.bfloat16() for x in partial()]), r"out_partial: got torch\.bfloat16"),
        (lambda: flash_attn_combine(partial()[0], partial()[1].transpose(-1, -2)), r"lse_partial \[3, 2, 4, 5\]"),
        (lambda: flash_attn_combine(*partial(), out=torch.empty(1)), r"out: got torch\.float32 \[1\]"),
        (lambda: flash_attn_combine(*partial(), torch.empty(2, 5, 4, 16), torch.float16), r"out_dtype=torch\.float16"),
    ],
)
def test_refused_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((errors.ArgumentError, errors.UnsupportedError), match=message):
        call()


@pytest.mark.parametrize("hint", [{"num_splits": 3}, {"pack_gqa": True}, {"pack_gqa": False}], ids=str)
def test_hints_are_heard_and_change_nothing(hint: dict[str, Any]) -> None:
    plain = flash_attn_func(*qkv())
    with pytest.warns(UserWarning, match=f"{next(iter(hint))}=.* steers flash-attn's kernels"):
        assert torch.equal(flash_attn_func(*qkv(), **hint), plain)


CHANGES = {
    "softmax_scale": 0.9,
    "causal": True,
    "window_size": (1, 1),
    "attention_chunk": 2,
    "softcap": 0.5,
    "seqused_q": torch.tensor([3, 0, 2]),
    "seqused_k": torch.tensor([3, 2, 1]),
    "return_attn_probs": True,
}


@pytest.mark.parametrize("argument", CHANGES)
def test_every_argument_counts(argument: str) -> None:
    plain = flash_attn_varlen_func(*packed(), CU_Q, CU_K, 6, 5)
    changed = flash_attn_varlen_func(*packed(), CU_Q, CU_K, 6, 5, **{argument: CHANGES[argument]})
    if argument == "return_attn_probs":
        assert torch.equal(changed[0], plain) and len(changed) == 2
    else:
        assert not torch.allclose(plain, changed)


def test_work_is_planned_in_the_call() -> None:
    assert flash_attn_3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, torch.tensor([3, 4]), causal=True) is None
