"""flash-attn 2's functions: its signatures, its conventions, and that every argument counts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise import errors
from tilewise.compat import flash_attn, flash_attn_interface, flash_attn_probabilities
from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


def described(fn: Callable[..., Any]) -> str:
    """Parameters and defaults, without annotations."""
    parameters = inspect.signature(fn).parameters.values()
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert described(getattr(flash_attn, name)) == SIGNATURES[name]


def test_nothing_is_missing() -> None:
    assert set(SIGNATURES) == set(flash_attn.__all__)
    assert set(SIGNATURES) < set(flash_attn_interface.__all__)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(rows: int = 6, keys: int = 9, heads: int = 2) -> list[torch.Tensor]:
    return [draw(2, n, h, 16, seed=i) for i, (n, h) in enumerate(((rows, 4), (keys, heads), (keys, heads)))]


def grads(out: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, leaves, draw(*out.shape, seed=9))


CU_Q, CU_K = torch.tensor([0, 6, 6, 10], dtype=torch.int32), torch.tensor([0, 4, 9, 12], dtype=torch.int32)


def packed() -> list[torch.Tensor]:
    return [draw(n, h, 16, seed=i) for i, (n, h) in enumerate(((10, 4), (12, 2), (12, 2)))]


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "left": ({"window_size": (2, -1)}, {"window": (2, None)}),
    "causal_window": ({"causal": True, "window_size": (3, 4)}, {"causal": True, "window": (3, None)}),
    "tensor_window": ({"window_size": torch.tensor([2, 0])}, {"window": (2, 0)}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "no_softcap": ({"softcap": -1.0}, {}),
    "scale": ({"softmax_scale": 0.4}, {"softmax_scale": 0.4}),
    "alibi": (
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]), "causal": True},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]), "causal": True},
    ),
    "deterministic": ({"deterministic": True}, {"deterministic": True}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_dense_in_native_words(name: str) -> None:
    theirs, ours = OPTIONS[name]
    leaves = [x.requires_grad_() for x in qkv()]
    out, lse, s_dmask = flash_attn_func(*leaves, **theirs, return_attn_probs=True)
    native, native_lse = tilewise.attention(*leaves, **ours, return_lse=True)
    assert torch.equal(out, native) and torch.equal(lse, native_lse)
    assert s_dmask.shape == (0,)
    assert torch.equal(flash_attn_func(*leaves, **theirs), out)
    for x, y in zip(grads(out, *leaves), grads(native, *leaves), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_in_native_words(name: str) -> None:
    theirs, ours = OPTIONS[name]
    leaves = [x.requires_grad_() for x in packed()]
    out, lse, _ = flash_attn_varlen_func(*leaves, CU_Q, CU_K, 6, 5, **theirs, return_attn_probs=True)
    lengths = {"max_seqlen_q": 6, "max_seqlen_k": 5}
    native, native_lse = tilewise.attention_varlen(*leaves, CU_Q, CU_K, **lengths, **ours, return_lse=True)
    assert torch.equal(out, native) and torch.equal(lse, native_lse)
    assert lse.shape == (4, 10)


def test_packed_tensors_have_one_gradient() -> None:
    q, k, v = qkv(9, 9, 4)
    kv, whole = torch.stack([k, v], dim=2).requires_grad_(), torch.stack([q, k, v], dim=2).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True)
    dq, dk, dv = grads(out, *leaves)
    by_kv = flash_attn.flash_attn_kvpacked_func(leaves[0], kv, causal=True)
    by_qkv = flash_attn.flash_attn_qkvpacked_func(whole, causal=True)
    assert torch.equal(out, by_kv) and torch.equal(out, by_qkv)
    assert torch.equal(grads(by_kv, kv)[0], torch.stack([dk, dv], dim=2))
    assert torch.equal(grads(by_qkv, whole)[0], torch.stack([dq, dk, dv], dim=2))


def test_packed_tensors_of_packed_sequences() -> None:
    q, k, v = draw(10, 4, 16), draw(10, 4, 16, seed=1), draw(10, 4, 16, seed=2)
    out = flash_attn_varlen_func(q, k, v, CU_Q, CU_Q, 6, 6, causal=True)
    by_kv = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), CU_Q, CU_Q, 6, 6, causal=True)
    by_qkv = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), CU_Q, 6, causal=True)
    assert torch.equal(out, by_kv) and torch.equal(out, by_qkv)


def test_a_strided_last_dimension_is_taken() -> None:
    q, k, v = qkv()
    strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*strided), flash_attn_func(q, k, v))


def test_lengths_may_be_tensors() -> None:
    """Older `unpad_input`s, and models that compute it, hand on the longest length as one."""
    q, k, v = packed()
    out = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, torch.tensor(6), torch.tensor(5))
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 6, 5))


def counts(rows: int, keys: int, **options: Any) -> list[int]:
    """How many keys each row sees: with q = 0 all weigh the same."""
    q, k = torch.zeros(1, rows, 1, 8), draw(1, keys, 1, 8)
    _, lse, _ = flash_attn_func(q, k, k, **options, return_attn_probs=True)
    return [round(math.exp(x)) for x in lse.flatten().tolist()]


def test_causal_is_bottom_right() -> None:
    assert counts(3, 5, causal=True) == [3, 4, 5]
    assert counts(5, 2, causal=True) == [0, 0, 0, 1, 2]
    assert counts(3, 128, causal=True) == [126, 127, 128]


def test_windows_are_inclusive() -> None:
    """W tokens with the query's own are (W - 1, 0); a bound of the whole length, or of -1, is none."""
    assert counts(8, 8, causal=True, window_size=(2, 0)) == [1, 2, 3, 3, 3, 3, 3, 3]
    assert counts(4, 4, window_size=(0, 0)) == [1, 1, 1, 1]
    same = [{"window_size": (7, 0)}, {"window_size": (8, 0)}, {"window_size": (-1, 0)}, {"causal": True}]
    assert all(counts(8, 8, **options) == [1, 2, 3, 4, 5, 6, 7, 8] for options in same)
    assert counts(3, 5, window_size=(-1, -1)) == [5, 5, 5]


def test_alibi_is_the_true_bias_in_the_lse_too() -> None:
    """flash-attn adds a bias that is shifted by row where causal: the same output, and another LSE."""
    slope, n = 0.3, 6
    q, k = torch.zeros(1, n, 1, 8), draw(1, n, 1, 8)
    slopes = torch.tensor([slope])
    _, lse, _ = flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    expected = [math.log(sum(math.exp(-slope * (i - j)) for j in range(i + 1))) for i in range(n)]
    assert lse.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_members_of_one_query_and_of_none() -> None:
    q, k, v = draw(2, 9, 64), draw(8, 3, 64), draw(8, 3, 64, seed=1)
    cu_q, cu_k = torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1, 5, causal=True, softmax_scale=1.0)
    for row, (first, last) in enumerate([(0, 3), (3, 8)]):
        alone = flash_attn_func(q[None, row : row + 1], k[None, first:last], v[None, first:last], softmax_scale=1.0)
        assert torch.allclose(out[row], alone[0, 0], atol=1e-6)


def test_members_with_fewer_keys_than_queries() -> None:
    """The rows without a key are 0, and so are their gradients."""
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    leaves = [(3 * draw(n, 1, 32, seed=n)).requires_grad_() for n in (256, 3, 3)]
    out = flash_attn_varlen_func(*leaves, cu_q, cu_k, 256, 3, causal=True)
    last = [75, 109, 255]
    assert torch.equal(out[last], leaves[2]) and int(out.any(dim=-1).sum()) == 3
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert set(dq.any(dim=-1).nonzero()[:, 0].tolist()) <= set(last) and torch.equal(dv, torch.ones_like(dv))
    assert float(dk.abs().max()) < 1e-5 and float(dq.abs().max()) < 1e-5


def test_an_empty_batch() -> None:
    q, k = torch.zeros(0, 5, 4, 16), torch.zeros(0, 3, 2, 16)
    out, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (0, 4, 5)


def test_the_lse_has_a_gradient() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    _, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves)
    s = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1].repeat_interleave(2, 2)) / 4
    expected = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), leaves[1].repeat_interleave(2, 2)) / 4
    assert torch.allclose(dq, expected, atol=1e-5)
    assert dk.any() and not dv.any()


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (40, 0)}, {"softcap": 2.0}], ids=str)
def test_the_signs_of_dropout(kind: str, options: dict[str, Any]) -> None:
    """Weights, kept and dropped, give the output back; both lengths are padded to whole tiles."""
    q, k, v = draw(2, 70, 4, 16), draw(2, 140, 2, 16, seed=1), draw(2, 140, 2, 16, seed=2)
    p, common = 0.25, {**options, "dropout_p": 0.25, "return_attn_probs": True}
    torch.manual_seed(0)
    if kind == "dense":
        out, lse, s_dmask = flash_attn_func(q, k, v, **common)
    else:
        cu_q, cu_k = torch.tensor([0, 70, 140]), torch.tensor([0, 140, 280])
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse, s_dmask = flash_attn_varlen_func(*flat, cu_q, cu_k, 70, 140, **common)
        out, lse = out.view(2, 70, 4, 16), lse.view(4, 2, 70).transpose(0, 1)
    assert s_dmask.shape == (2, 4, 128, 256) and s_dmask.dtype == q.dtype
    assert not s_dmask[:, :, 70:].any() and not s_dmask[..., 140:].any()
    unnormalised = s_dmask[:, :, :70, :140]
    weights = unnormalised.abs() / unnormalised.abs().sum(dim=-1, keepdim=True)
    kept = weights.masked_fill(unnormalised < 0, 0.0) / (1 - p)
    expected = torch.einsum("bhqk,bkhd->bqhd", kept, v.repeat_interleave(2, dim=2))
    assert torch.allclose(out, expected, atol=1e-4)
    dropped = float((unnormalised < 0).sum() / (unnormalised != 0).sum())
    assert abs(dropped - p) < 0.01
    assert torch.allclose(unnormalised.abs().amax(dim=-1), torch.ones(2, 4, 70))
    assert lse.isfinite().all()


CHANGES: dict[str, Any] = {
    "dropout_p": 0.5,
    "softmax_scale": 0.9,
    "causal": True,
    "window_size": (1, 1),
    "softcap": 0.5,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]),
    "return_attn_probs": True,
}


def called(name: str, **options: Any) -> Any:
    q, k, v = packed()
    same = draw(10, 4, 16, seed=5)
    if name in ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"):
        q, k, v = (x[None] for x in (q, k, v))
        same = same[None]
    lengths = (CU_Q, CU_K, 6, 5) if "varlen" in name else ()
    fn = getattr(flash_attn, name)
    if "qkvpacked" in name:
        return fn(torch.stack([same, same, same], -3), *((CU_Q, 6) if lengths else ()), **options)
    if "kvpacked" in name:
        return fn(q, torch.stack([k, v], -3), *lengths, **options)
    return fn(q, k, v, *lengths, **options)


@pytest.mark.parametrize("argument", CHANGES)
@pytest.mark.parametrize("name", [name for name in SIGNATURES if "kvcache" not in name])
def test_every_argument_counts(name: str, argument: str) -> None:
    plain, changed = called(name), called(name, **{argument: CHANGES[argument]})
    if argument == "return_attn_probs":
        assert isinstance(changed, tuple) and torch.equal(changed[0], plain)
    else:
        assert not torch.allclose(plain, changed)


@pytest.mark.parametrize("name", [name for name in SIGNATURES if "kvcache" not in name])
def test_deterministic_arrives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no value on the CPU, where gradients always repeat."""
    seen = []
    for entry in ("attention", "attention_varlen"):
        real = getattr(flash_attn_probabilities, entry)
        monkeypatch.setattr(
            flash_attn_probabilities, entry, lambda *a, real=real, **o: seen.append(o["deterministic"]) or real(*a, **o)
        )
    called(name)
    called(name, deterministic=True)
    assert seen == [False, True]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window_below": ({"window_size": (-2, 0)}, r"window_size: got \(-2, 0\)"),
    "window_none": ({"window_size": None}, "window_size: got None"),
    "window_of_three": ({"window_size": (1, 2, 3)}, r"window_size: got \(1, 2, 3\)"),
    "window_of_none": ({"window_size": (None, 0)}, r"window_size: got \(None, 0\)"),
    "causal": ({"causal": "top_left"}, "causal: got 'top_left'"),
    "softcap": ({"softcap": "30"}, "softcap: got '30'"),
    "scale": ({"softmax_scale": 0.0}, "softmax_scale: got 0.0"),
    "dropout": ({"dropout_p": 1.0}, "dropout_p: got 1.0"),
    "deterministic": ({"deterministic": None}, "deterministic: got None"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes: got shape \[3\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(errors.ArgumentError, match=message):
        flash_attn_func(*qkv(), **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: flash_attn.flash_attn_qkvpacked_func(torch.ones(1, 4, 2, 2, 8)), r"qkv: got shape \[1, 4, 2, 2, 8\]"),
        (lambda: flash_attn.flash_attn_kvpacked_func(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8)), "kv: got shape"),
        (lambda: flash_attn.flash_attn_varlen_qkvpacked_func(torch.ones(1, 4, 3, 2, 8), CU_Q, 4), "qkv: got shape"),
        (lambda: flash_attn_varlen_func(*packed(), CU_Q, CU_K, 6.5, 5), "max_seqlen_q: got float"),
        (lambda: flash_attn_varlen_func(*packed(), CU_Q, CU_K, 6, 4), "max_seqlen_k: got 4, but member 1 has 5"),
    ],
)
def test_refused_shapes_and_lengths(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        call()


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"])
def test_compiled_is_eager(name: str) -> None:
    """In one graph, with the gradients."""
    torch._dynamo.reset()
    fn = getattr(flash_attn, name)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    lengths = (CU_Q, CU_K, 6, 5) if "varlen" in name else ()
    tensors = packed() if lengths else qkv()
    leaves = [torch.stack([tensors[0]] * 3, dim=2)] if "qkvpacked" in name else tensors
    leaves = [x.requires_grad_() for x in leaves]
    options = {"causal": True, "window_size": (4, 0), "softcap": 2.0}
    eager, got = (f(*leaves, *lengths, **options) for f in (fn, compiled))
    assert torch.equal(eager, got)
    for x, y in zip(grads(eager, *leaves), grads(got, *leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)
