"""Autograd around the call: what gets a gradient, in which dtype, and what is refused instead of being wrong."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import BlockMask, Causal, Document, Interval, Predicate, PrefixLM, ScoreMod, Window, reference
from tilewise.errors import UnsupportedError

NAMES = ("q", "k", "v")


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v with grouped heads and Dv != D."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in tensors(dtype)]


def gradients(function: Callable[..., Any], inputs: list[torch.Tensor], **arguments: Any) -> list[torch.Tensor]:
    out, lse = function(*inputs[:3], return_lse=True, **arguments)
    loss = out.double().square().sum() + lse.double().sum()
    return list(
        torch.autograd.grad(loss, [x for x in [*inputs, *arguments.values()] if torch.is_tensor(x) and x.requires_grad])
    )


def assert_same(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


SUBSETS = [subset for n in (1, 2, 3) for subset in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("subset", SUBSETS, ids="".join)
def test_every_subset_of_qkv(subset: tuple[str, ...], causal: Any) -> None:
    inputs = [x.requires_grad_(name in subset) for name, x in zip(NAMES, tensors(torch.float64), strict=True)]
    got = gradients(tilewise.attention, inputs, causal=causal)
    assert len(got) == len(subset)
    assert_same(got, gradients(reference.attention, inputs, causal=causal))
    tilewise.attention(*inputs).sum().backward()
    assert {name for name, x in zip(NAMES, inputs, strict=True) if x.grad is not None} == set(subset)


@pytest.mark.parametrize(
    "name, shape", [("bias", (1, 4, 7, 9)), ("bias", (9,)), ("alibi_slopes", (4,)), ("sinks", (4,))]
)
def test_modifiers_alone(name: str, shape: tuple[int, ...]) -> None:
    modifier = torch.linspace(0.1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()
    got = gradients(tilewise.attention, tensors(torch.float64), **{name: modifier})
    assert_same(got, gradients(reference.attention, tensors(torch.float64), **{name: modifier}))


def test_lse_alone_and_output_alone() -> None:
    inputs = leaves(torch.float64)
    for pick in (0, 1):
        pairs = []
        for function in (tilewise.attention, reference.attention):
            loss = function(*inputs, return_lse=True)[pick].square().sum()
            pairs.append(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))
        assert_same(*pairs)


def test_unused_outputs_give_no_gradient() -> None:
    inputs = leaves()
    out, lse = tilewise.attention(*inputs, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    unused = torch.zeros((), requires_grad=True)
    assert all(x is None for x in torch.autograd.grad(unused, inputs, allow_unused=True))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivative_is_refused() -> None:
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(
        UnsupportedError, match=r"second derivative.*supported: first derivatives.*Fix: use torch's math"
    ):
        torch.autograd.grad(dq.square().sum(), q)
    tilewise.attention(q, k, v).square().sum().backward(create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        (q.grad.square().sum() + k.grad.square().sum()).backward()  # type: ignore[union-attr]  # backward() has set them


def test_second_derivative_through_functional_hessian_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.functional.hessian(lambda x: tilewise.attention(x, k, v).square().sum(), q)


def test_gradient_twice_with_retained_graph() -> None:
    q, k, v = leaves()
    out = tilewise.attention(q, k, v)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), (q, k, v)), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(dtype: torch.dtype) -> None:
    inputs = leaves()
    with torch.autocast("cpu", dtype=dtype):
        out, lse = tilewise.attention(*inputs, softcap=20.0, return_lse=True)
        q, k, v = (x.transpose(1, 2) for x in inputs)
        sdpa = F.scaled_dot_product_attention(q, k, v[..., :6], enable_gqa=True)
        assert out.dtype == sdpa.dtype == dtype and lse.dtype == torch.float32
        # The backend's own products stay in fp32: the result is that of the same call without autocast, bit by bit.
        with torch.autocast("cpu", enabled=False):
            plain = tilewise.attention(*(x.to(dtype) for x in inputs), softcap=20.0)
        assert torch.equal(out, plain)
    inside = torch.autograd.grad(out.float().square().sum(), inputs)
    assert_same(list(inside), torch.autograd.grad(plain.float().square().sum(), inputs))
    assert all(x.dtype == torch.float32 for x in inside)


def test_backward_under_autocast_is_not_affected() -> None:
    inputs = leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tilewise.attention(*inputs, softcap=20.0)
        inside = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    outside = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_autocast_leaves_double_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tilewise.attention(*tensors(torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("seed", [None, 5], ids=["drawn", "given"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_checkpoint_replays_dropout(use_reentrant: bool, seed: int | None) -> None:
    def attend(*x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(*x, dropout_p=0.4, dropout_seed=seed)

    results = []
    for wrapped in (False, True):
        inputs = leaves()
        torch.manual_seed(3)
        out = checkpoint(attend, *inputs, use_reentrant=use_reentrant) if wrapped else attend(*inputs)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_checkpoint_of_a_call_that_no_earlier_one_is_like(use_reentrant: bool) -> None:
    def attend(*x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(*x, mask=Interval(hi=torch.arange(x[0].shape[1]) + 1))

    plain, kept = leaves(), leaves()
    attend(*plain).square().sum().backward()
    checkpoint(attend, *kept, use_reentrant=use_reentrant).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, kept, strict=True))


def test_manual_seed_repeats_dropout() -> None:
    def draw() -> torch.Tensor:
        return tilewise.attention(*tensors(), dropout_p=0.5)

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(first, draw()) and not torch.equal(first, second)
    state = torch.get_rng_state()
    tilewise.attention(*tensors(), dropout_p=0.5, dropout_seed=1)
    tilewise.attention(*tensors())
    assert torch.equal(state, torch.get_rng_state())


def test_torch_func_gradients() -> None:
    q, k, v = tensors(torch.float64)

    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x: function(*x, causal=True).square().sum()

    got = torch.func.grad(loss(tilewise.attention), argnums=(0, 1, 2))(q, k, v)
    expected = torch.func.grad(loss(reference.attention), argnums=(0, 1, 2))(q, k, v)
    assert_same(got, expected)
    pulled = []
    for function in (tilewise.attention, reference.attention):
        out, pull, *_ = torch.func.vjp(lambda x, function=function: function(x, k, v), q)
        pulled.append(pull(torch.ones_like(out)))
    assert_same(*pulled)


# torch.func.jvp loads parts of PyTorch that still use torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_torch_func_cannot_do_is_refused() -> None:
    q, k, v = tensors()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(x, k, v)

    for transform in (lambda: torch.func.jvp(attend, (q,), (q,)), lambda: torch.func.jacfwd(attend)(q)):
        with pytest.raises(UnsupportedError, match="tangent"):
            transform()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="k: got a tensor with a tangent"):
        tilewise.attention(q, forward_ad.make_dual(k, k), v)
    x = q.clone().requires_grad_()
    out = attend(x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for tilewise::backward"):
        torch.autograd.grad(out, x, torch.ones(3, 2, 7, 4, 6), is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_cache_takes_no_tangents_and_is_not_mapped() -> None:
    cache, x = torch.zeros(2, 8, 2, 8), torch.randn(2, 1, 2, 8)

    def decode(q: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([3, 4])
        return tilewise.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths, k_new=new, v_new=new)

    decode(x, x)
    with forward_ad.dual_level():
        for arguments, name in (((forward_ad.make_dual(x, x), x), "q"), ((x, forward_ad.make_dual(x, x)), "k_new")):
            with pytest.raises(UnsupportedError, match=f"{name}: got a tensor with a tangent"):
                decode(*arguments)
    with pytest.raises(UnsupportedError, match=r"under torch\.vmap.*Fix: fold the mapped dimension"):
        torch.vmap(decode, (0, None))(torch.stack([x, x]), x)


def test_values_changed_in_place_are_detected() -> None:
    for changed in range(3):
        inputs = [x * 1 for x in leaves()]
        out = tilewise.attention(*inputs)
        inputs[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_no_gradient_modes() -> None:
    inputs = leaves()
    with torch.no_grad():
        assert not tilewise.attention(*inputs).requires_grad
    with torch.inference_mode():
        out, lse = tilewise.attention(*inputs, return_lse=True)
        assert out.is_inference() and lse.is_inference()
    torch.testing.assert_close(out.clone(), tilewise.attention(*inputs).detach())


def test_saved_tensors_may_be_offloaded() -> None:
    inputs = leaves()
    with torch.autograd.graph.save_on_cpu():
        out = tilewise.attention(*inputs, causal=True)
    assert_same(
        torch.autograd.grad(out.sum(), inputs),
        torch.autograd.grad(tilewise.attention(*inputs, causal=True).sum(), inputs),
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_finds_no_nan_in_blind_rows() -> None:
    inputs = leaves()
    with torch.autograd.detect_anomaly(check_nan=True):
        out = tilewise.attention(*inputs, mask=torch.zeros(7, 9, dtype=torch.bool))
        out.sum().backward()
    assert all(not x.grad.any() for x in inputs if x.grad is not None)


def beyond(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def tenfold(s: Any, *position: Any) -> Any:
    return s * 10


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(2, None),
        Document.from_lengths([3, 4]),
        Interval(hi=torch.arange(7)),
        PrefixLM(torch.tensor([1, 2])),
        BlockMask.longformer(7, block=2),
        Predicate(beyond),
        (Causal("bottom_right") & Window(2, 0)) | PrefixLM(1),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_are_copied_and_pickled(mask: Any) -> None:
    x = tensors()[0]
    expected = tilewise.attention(x, x, x, mask=mask)
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(tilewise.attention(x, x, x, mask=copied), expected)


def test_score_mods_are_copied_and_pickled() -> None:
    x = tensors()[0]
    mod = ScoreMod(tenfold, tenfold)
    for copied in (copy.deepcopy(mod), pickle.loads(pickle.dumps(mod))):
        assert torch.equal(tilewise.attention(x, x, x, score_mod=copied), tilewise.attention(x, x, x, score_mod=mod))
