"""What stands underneath PyTorch's flash-attention operators: the functions themselves, and their registration.

On the CPU the operators are PyTorch's own, so the functions are called directly; tests/gpu has them in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import tilewise
from tilewise import errors
from tilewise.integrations import torch_sdpa

OURS = torch_sdpa.operators()
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch_attention.restore_flash_attention_impl(_raise_warn=False)


def bhsd(layout: str, heads: int = 4, seqlen: int = 9, seed: int = 0) -> torch.Tensor:
    """[2, heads, seqlen, 16] with the memory of that order, of [2, seqlen, heads, 16], or of a packed qkv."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "bhsd":
        return torch.randn(2, heads, seqlen, 16, generator=generator)
    if layout == "bshd":
        return torch.randn(2, seqlen, heads, 16, generator=generator).transpose(1, 2)
    return torch.randn(2, seqlen, 3, heads, 16, generator=generator)[:, :, 1].transpose(1, 2)


def same(got: tuple[Any, ...], fake: tuple[Any, ...]) -> None:
    """Hold results to those of PyTorch's meta function, but for values: compiled code counts on them."""
    assert len(got) == len(fake)
    for x, y in zip(got, fake, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        else:
            assert x == y


def meta(tensors: list[Any]) -> list[Any]:
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in tensors]


@pytest.mark.parametrize("name", OURS)
def test_schemas_are_covered(name: str) -> None:
    """Each argument of the operator is a parameter, by name and with its default."""
    schema = getattr(aten, name).default._schema
    parameters = inspect.signature(OURS[name]).parameters
    if "arguments" in parameters:  # the one that passes them on
        parameters = {"out": parameters["out"], **inspect.signature(OURS["_flash_attention_forward"]).parameters}
    for argument in schema.arguments:
        assert argument.name in parameters
        if argument.has_default_value():
            assert parameters[argument.name].default == argument.default_value


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense(layout: str, heads: int, is_causal: bool) -> None:
    q, k, v = bhsd(layout), bhsd(layout, heads, seed=1), bhsd(layout, heads, seed=2)
    got = OURS["_scaled_dot_product_flash_attention"](q, k, v, 0.0, is_causal, scale=0.3)
    out, lse = got[:2]
    reference = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.repeat_interleave(4 // heads, 1), v.repeat_interleave(4 // heads, 1), 0.0, is_causal, scale=0.3
    )
    assert torch.allclose(out, reference[0], atol=1e-5)
    assert torch.allclose(lse, reference[1], atol=1e-5)
    same(got, aten._scaled_dot_product_flash_attention(*meta([q, k, v]), 0.0, is_causal, scale=0.3))

    do = torch.randn(out.shape).expand_as(out)
    given = [do, q, k, v, out, lse, None, None, 9, 9, 0.0, is_causal, *got[6:8]]
    grads = OURS["_scaled_dot_product_flash_attention_backward"](*given, scale=0.3)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    whole = [leaves[0], *(x.repeat_interleave(4 // heads, 1) for x in leaves[1:])]
    plain = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=is_causal, scale=0.3)
    for x, y in zip(grads, torch.autograd.grad(plain, leaves, do), strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    # (PyTorch's meta function of this one wants all heads alike.)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.stride() == torch.empty_like(x).stride()


def test_causal_of_the_operator_is_bottom_right() -> None:
    """As in the kernels that are replaced: `causal_lower_right` is what calls it with other lengths."""
    q, k, v = bhsd("bhsd", seqlen=3), bhsd("bhsd", seqlen=8, seed=1), bhsd("bhsd", seqlen=8, seed=2)
    out = OURS["_scaled_dot_product_flash_attention"](q, k, v, 0.0, True)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 8))
    assert torch.allclose(out, expected, atol=1e-5)


def _packed(heads: int = 2) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    cu_q, cu_k = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 7, 12], dtype=torch.int32)
    return [torch.randn(n, h, 16) for n, h in ((10, 4), (12, heads), (12, heads))], cu_q, cu_k


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1), (None, None)])
def test_packed(window: tuple[int | None, int | None]) -> None:
    (q, k, v), cu_q, cu_k = _packed()
    is_causal = window == (-1, 0)  # as varlen_attn calls it
    bounds = {"window_size_left": window[0], "window_size_right": window[1]}
    got = OURS["_flash_attention_forward"](q, k, v, cu_q, cu_k, 7, 5, 0.0, is_causal, False, scale=0.5, **bounds)
    native = tuple(None if bound == -1 else bound for bound in window)
    options = {"max_seqlen_q": 7, "max_seqlen_k": 5, "window": native, "softmax_scale": 0.5}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attention_varlen(*leaves, cu_q, cu_k, **options, return_lse=True)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    same(got, aten._flash_attention_forward(*meta([q, k, v, cu_q, cu_k]), 7, 5, 0.0, False, False))
    do = torch.randn_like(out)
    given = [do, q, k, v, got[0], got[1], cu_q, cu_k, 7, 5, 0.0, is_causal, *got[2:4]]
    grads = OURS["_flash_attention_backward"](*given, scale=0.5, **bounds)
    for x, y in zip(grads, torch.autograd.grad(out, leaves, do), strict=True):
        assert torch.allclose(x, y, atol=1e-6)
    same(grads, aten._flash_attention_backward(*meta(given)))


def test_keys_in_use() -> None:
    (q, k, v), cu_q, cu_k = _packed()
    used = torch.tensor([4, 0, 5], dtype=torch.int32)
    got = OURS["_flash_attention_forward"](q, k, v, cu_q, cu_k, 7, 5, 0.0, False, False, seqused_k=used)
    lengths = {"max_seqlen_q": 7, "max_seqlen_k": 5, "seqused_k": used}
    assert torch.equal(got[0], tilewise.attention_varlen(q, k, v, cu_q, cu_k, **lengths))


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_pages(num_splits: int | None) -> None:
    (q, *_), cu_q, _ = _packed()
    pages = [torch.randn(6, 4, 2, 16) for _ in range(2)]
    table, used = torch.tensor([[0, 3], [1, 5], [4, 2]], dtype=torch.int32), torch.tensor([5, 2, 8], dtype=torch.int32)
    more = {"seqused_k": used, "block_table": table, "num_splits": num_splits}
    out = OURS["_flash_attention_forward"](q, *pages, cu_q, None, 7, 8, 0.0, True, False, **more)[0]
    k, v = (torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table, used, strict=True)]) for x in pages)
    cu_k = torch.tensor([0, 5, 7, 15])
    native = tilewise.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=7, max_seqlen_k=8, causal=True)
    assert torch.allclose(out, native, atol=1e-6)


def test_into_a_tensor() -> None:
    """PyTorch has the operator from 2.12 on."""
    (q, k, v), cu_q, cu_k = _packed()
    out = torch.full_like(q, float("nan"))
    given = (q, k, v, cu_q, cu_k, 7, 5, 0.0, True, False)
    lse = torch_sdpa._flash_forward_into(out, *given)
    expected = OURS["_flash_attention_forward"](*given)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_dropout_is_replayed() -> None:
    """The gradient of dV hangs on nothing but the weights that were kept."""
    q, k = bhsd("bhsd", seqlen=24), bhsd("bhsd", seqlen=32, seed=1)
    eye = torch.eye(32).expand(2, 4, 32, 32)
    got = OURS["_scaled_dot_product_flash_attention"](q, k, eye, 0.25, False)
    weights, lse, rng_state, unused = got[0], got[1], *got[6:8]
    again = OURS["_scaled_dot_product_flash_attention"](q, k, eye, 0.25, False)
    assert not torch.equal(weights, again[0])
    do = torch.randn(2, 4, 24, 32)
    given = (do, q, k, eye, weights, lse, None, None, 24, 32, 0.25, False, rng_state, unused)
    _, _, dv = OURS["_scaled_dot_product_flash_attention_backward"](*given)
    assert torch.allclose(dv, weights.transpose(-1, -2) @ do, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "return_debug_mask": ({"return_debug_mask": True}, "return_debug_mask: got True"),
    "seqused_k": ({"seqused_k": torch.tensor([3, 3])}, "seqused_k: got Tensor"),
    "num_splits": ({"num_splits": 4}, "num_splits: got 4.*attention_with_kvcache"),
    "block_table": ({"block_table": torch.tensor([[0]])}, "block_table: got pages without lengths"),
    "cum_seq_k": ({"cum_seq_q": torch.tensor([0, 4])}, "got cum_seq_q alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changed, message = REFUSED[name]
    x = torch.randn(2, 4, 1, 8)
    given = {
        "query": x, "key": x, "value": x, "cum_seq_q": None, "cum_seq_k": None, "max_q": 4, "max_k": 4,
        "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False,
    }  # fmt: skip
    with pytest.raises(errors.UnsupportedError, match=message):
        OURS["_flash_attention_forward"](**{**given, **changed})


def test_slopes_count() -> None:
    x = torch.randn(1, 6, 2, 8)
    given = (x, x, x, None, None, 6, 6, 0.0, False, False)
    got = OURS["_flash_attention_forward"](*given, alibi_slopes=torch.tensor([0.5, 0.1]))[0]
    assert torch.equal(got, tilewise.attention(x, x, x, alibi_slopes=torch.tensor([0.5, 0.1])))


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """The functions as kernels for CPU tensors, for which PyTorch has none: its dispatcher and autograd call them."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, fn in OURS.items():
        library.impl(name, fn, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_autograd_leads_from_one_operator_to_the_other(on_the_cpu: None, layout: str) -> None:
    leaves = [bhsd(layout, seed=i).detach().requires_grad_() for i in range(3)]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*leaves, 0.0, True, scale=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    do = torch.randn(out.shape)
    assert torch.allclose(out, expected, atol=1e-5) and not lse.requires_grad
    for x, y in zip(torch.autograd.grad(out, leaves, do), torch.autograd.grad(expected, leaves, do), strict=True):
        assert torch.allclose(x, y, atol=1e-5)


def test_dropout_goes_through_autograd(on_the_cpu: None) -> None:
    q, k, v = (bhsd("bhsd", seqlen=n, seed=n).detach().requires_grad_() for n in (24, 32, 32))
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.25, False)[0]
    do = torch.randn(out.shape)
    (dv,) = torch.autograd.grad(out, v, do)
    # Linear in v, through the weights that were kept: both sides are the same sum.
    assert float(((out * do).sum() - (dv * v).sum()).detach().abs()) < 1e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_varlen_attn(on_the_cpu: None, window: tuple[int, int], compiled: bool) -> None:
    (q, k, v), cu_q, cu_k = _packed(4)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(*tensors: torch.Tensor) -> Any:
        return varlen_attn(*tensors, cu_q, cu_k, 7, 5, window_size=window, return_aux=AuxRequest(lse=True))

    torch._dynamo.reset()
    out, lse = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*leaves)
    native = tuple(None if bound == -1 else bound for bound in window)
    options = {"max_seqlen_q": 7, "max_seqlen_k": 5, "window": native, "return_lse": True}
    expected, expected_lse = tilewise.attention_varlen(*leaves, cu_q, cu_k, **options)
    assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(lse, expected_lse, atol=1e-6)
    do = torch.randn(out.shape)
    for x, y in zip(torch.autograd.grad(out, leaves, do), torch.autograd.grad(expected, leaves, do), strict=True):
        assert torch.allclose(x, y, atol=1e-5)


def on_cuda(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


def test_activation_and_restoration() -> None:
    before = {name: on_cuda(name) for name in OURS}
    torch_sdpa.register()
    assert "tilewise" in torch_attention.list_flash_attention_impls()
    assert torch_attention.current_flash_attention_impl() is None
    torch_sdpa.activate()
    assert torch_attention.current_flash_attention_impl() == "tilewise"
    assert all(on_cuda(name) for name in OURS)
    torch_sdpa.restore()
    assert torch_attention.current_flash_attention_impl() is None
    assert {name: on_cuda(name) for name in OURS} == before


def test_pytorchs_own_function_activates_it() -> None:
    torch_sdpa.register()
    torch_attention.activate_flash_attention_impl("tilewise")
    assert torch_attention.current_flash_attention_impl() == "tilewise"


class _Another:
    def remove(self) -> None:
        """Nothing to take away."""


def test_activated_gives_back_what_was_there() -> None:
    torch_attention.register_flash_attention_impl("another", register_fn=_Another)
    torch_attention.activate_flash_attention_impl("another")
    with torch_sdpa.activated():
        assert torch_attention.current_flash_attention_impl() == "tilewise"
    assert torch_attention.current_flash_attention_impl() == "another"
    torch_sdpa.restore()
    assert torch_attention.current_flash_attention_impl() == "another"
    with torch_sdpa.activated(), torch_sdpa.activated():
        pass
    assert torch_attention.current_flash_attention_impl() == "another"


def test_activated_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="stop"), torch_sdpa.activated():
        raise RuntimeError("stop")
    assert torch_attention.current_flash_attention_impl() is None
