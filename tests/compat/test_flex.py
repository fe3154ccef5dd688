"""tilewise.flex against PyTorch's flex_attention, and its gradients against autograd through the same functions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask

import tilewise
from flexible import DOCUMENTS, HEADS, KEYS, MASKS, ROWS, SCORES, alibi, causal
from tilewise import BlockMask, Causal, Predicate, Window
from tilewise.compat import flex as ours
from tilewise.errors import ArgumentError, ShapeError, UnsupportedError
from tilewise.masks import parts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's functions as they are, without its compiler, which would be left with warnings and seconds."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def operands(rows: int = ROWS, keys: int = KEYS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [randn(1, heads, n, d, dtype=dtype) for heads, n, d in ((HEADS, rows, 16), (1, keys, 16), (1, keys, 8))]


def block_mask(mask: Callable[..., Any], rows: int = ROWS, keys: int = KEYS, size: int = 16) -> Any:
    return create_block_mask(mask, None, HEADS, rows, keys, device="cpu", BLOCK_SIZE=size)


def assert_same_as_torch(tensors: list[torch.Tensor], **arguments: Any) -> None:
    with torch.no_grad():
        out, aux = torch_flex.flex_attention(*tensors, **arguments, enable_gqa=True, return_aux=AuxRequest(lse=True))
    got, lse = tilewise.flex(*tensors, **arguments, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, aux.lse, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name: str) -> None:
    assert_same_as_torch(operands(), score_mod=SCORES[name])


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    assert_same_as_torch(operands(), block_mask=block_mask(MASKS[name]))
    assert_same_as_torch(operands(KEYS, KEYS), block_mask=block_mask(MASKS[name], KEYS, KEYS, 128))


def by_autograd(tensors: list[torch.Tensor], score_mod: Any, mask_mod: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the whole matrix, whose scores autograd follows through the user's function."""
    q, k, v = tensors
    s = q @ k.mT * q.shape[-1] ** -0.5
    positions = [torch.arange(n, dtype=torch.int32) for n in s.shape]

    def everywhere(function: Any, *scores: torch.Tensor) -> torch.Tensor:
        for mapped in (3, 2, 1, 0):
            function = torch.vmap(function, (*[0] * len(scores), *(0 if i == mapped else None for i in range(4))))
        with TransformGetItemToIndex():
            return function(*scores, *positions)

    s = everywhere(score_mod, s).to(q.dtype).masked_fill(~everywhere(mask_mod), -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return p @ v, lse


@pytest.mark.parametrize("name", SCORES)
def test_gradients(name: str) -> None:
    mask = block_mask(MASKS["documents"])
    results = []
    for mine in (True, False):
        tensors = [x.requires_grad_() for x in operands(dtype=torch.float64)]
        if mine:
            out, lse = tilewise.flex(*tensors, SCORES[name], mask, enable_gqa=True, return_lse=True)
        else:
            out, lse = by_autograd(tensors, SCORES[name], MASKS["documents"])
        # The mask that a score function draws may leave a row without keys, where only ours is defined.
        seen = ~lse.isinf()
        loss = out[seen].square().sum() + lse[seen].sum()
        grads = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
        results.append([out, lse, *grads])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_causal_and_windows_are_no_element_test() -> None:
    def kinds(name: str, rows: int = KEYS) -> list[Any]:
        found = ours.as_mask(block_mask(MASKS[name], rows, KEYS), rows, KEYS, CPU)
        assert found is not None
        return [part for part in parts(found) if not isinstance(part, BlockMask)]

    assert kinds("causal") == kinds("causal", ROWS) == kinds("mirrored") == [Causal("top_left")]
    assert kinds("window") == kinds("window", ROWS) == [Causal("top_left"), Window(9, None)]
    assert kinds("band") == [Window(8, None), Window(None, 3), Window(6, None)]
    assert [type(part) for part in kinds("documents")] == [Causal, Predicate]
    # With fewer queries than keys a window alone would count from another diagonal.
    assert [type(part) for part in kinds("band", ROWS)] == [Predicate]
    assert kinds("everything") == []


def test_lists_decide_which_tiles_are_visible() -> None:
    """Tiles that a BlockMask leaves out are invisible, whatever its mask_mod says of them."""
    whole = block_mask(causal, KEYS, KEYS)
    fewer = torch_flex.BlockMask.from_kv_blocks(
        whole.kv_num_blocks.clamp(max=1), whole.kv_indices, None, None, 16, causal, (KEYS, KEYS)
    )
    q, k, v = operands(KEYS, KEYS)
    got = tilewise.flex(q, k, v, block_mask=fewer, enable_gqa=True)
    tiles = BlockMask(fewer.to_dense().bool(), 16, 16)
    expected = tilewise.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=tiles & Causal("top_left"))
    torch.testing.assert_close(got, expected.transpose(1, 2))


def test_masks_that_differ_by_batch_and_head() -> None:
    lengths = torch.tensor([20, 33])
    mask = create_block_mask(
        lambda b, h, q, k: (k < lengths[b]) & (q >= k * (h + 1)), 2, HEADS, ROWS, KEYS, device="cpu", BLOCK_SIZE=(8, 16)
    )
    tensors = [x.repeat(2, 1, 1, 1) for x in operands()]
    assert_same_as_torch(tensors, block_mask=mask, score_mod=alibi, scale=0.3)
    keys_shared = [tensors[0], *operands()[1:]]
    assert_same_as_torch(keys_shared, block_mask=mask)


def test_strides_and_results() -> None:
    q, k, v = operands()
    for given in ((q, k, v), tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))):
        out = tilewise.flex(*given, enable_gqa=True)
        assert out.shape == (1, HEADS, ROWS, 8)
        torch.testing.assert_close(out, tilewise.flex(q, k, v, enable_gqa=True))
    out, aux = tilewise.flex(q, k, v, enable_gqa=True, return_aux=AuxRequest())
    assert aux.lse is None
    out, aux = tilewise.flex(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == (1, HEADS, ROWS)
    assert aux.max_scores is None


def test_captured_values_are_those_of_the_call() -> None:
    q, k, v = operands()
    table, scale = torch.ones(HEADS), [1.0]

    def shifted(factor: float) -> Any:
        return lambda s, b, h, q, k: s * table[h] * factor

    def listed(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * scale[0]

    def attend(mod: Any) -> torch.Tensor:
        return tilewise.flex(q, k, v, mod, enable_gqa=True)

    one = attend(None)
    torch.testing.assert_close(attend(shifted(1.0)), one)
    assert not torch.equal(attend(shifted(2.0)), one)
    torch.testing.assert_close(attend(listed), one)
    scale[0] = 2.0
    torch.testing.assert_close(attend(listed), attend(shifted(2.0)))
    table.fill_(2.0)
    torch.testing.assert_close(attend(shifted(1.0)), attend(listed))
    table = torch.full((HEADS,), 0.5)
    torch.testing.assert_close(attend(shifted(2.0)), one)


def test_equal_functions_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_recorded", {})
    made = [ours.as_score_mod(SCORES[name], CPU, torch.float32) for name in ("softcap", "alibi", "softcap")]
    assert made[0] is made[2] is not made[1]
    again = ours.as_score_mod(lambda s, b, h, q, k: alibi(s, b, h, q, k), CPU, torch.float32)
    assert again.fn is made[1].fn
    assert again.dfn is made[1].dfn
    for n in range(2 * ours._MOST):
        ours._remembered(lambda n=n: n, (), object)
    assert len(ours._recorded) <= ours._MOST


def test_a_block_mask_is_lowered_once_and_not_kept() -> None:
    mask = block_mask(causal)
    first = ours.as_mask(mask, ROWS, KEYS, CPU)
    assert ours.as_mask(mask, ROWS, KEYS, CPU) is first
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    assert ours.as_mask(mask, ROWS, KEYS, CPU) is not first
    q, k, v = operands()
    assert not tilewise.flex(q, k, v, block_mask=mask, enable_gqa=True).any()
    before = len(ours._masks)
    del mask
    gc.collect()
    assert len(ours._masks) < before


def test_compiled_regions_leave_it_alone() -> None:
    torch._dynamo.reset()
    q, k, v = operands()
    mask = block_mask(MASKS["window"])

    def block(q: torch.Tensor) -> torch.Tensor:
        return tilewise.flex(q * 2, k, v, alibi, mask, enable_gqa=True) + 1

    torch.testing.assert_close(torch.compile(block, backend="aot_eager")(q), block(q))
    flex = torch.compile(tilewise.flex, backend="aot_eager")
    torch.testing.assert_close(flex(q, k, v, alibi, mask, enable_gqa=True), (block(q / 2) - 1))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"tilewise\.flex runs as it is; with fullgraph=True call"):
        torch.compile(block, backend="aot_eager", fullgraph=True)(q)
    torch._dynamo.reset()


def branches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s if q > k else s * 2


LEARNED = torch.ones(HEADS, requires_grad=True)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (branches, r"branches: got a function that branches on a value.*torch\.where"),
    "learned": (lambda s, b, h, q, k: s * LEARNED[h], r"requires a gradient.*bias= or alibi_slopes="),
    "whole": (lambda s, b, h, q, k: s * SCALES, "captured tensor of 1 dimensions with 0 indices"),
    "converted": (lambda s, b, h, q, k: s + (s * 2).half(), "a conversion of torch.float32 to torch.float16"),
    "truncated": (lambda s, b, h, q, k: SCALES[(q / 2).long()] + s, "a conversion of torch.float32 to torch.int64"),
    "operation": (lambda s, b, h, q, k: torch.erf(s), r"the operation aten\.erf\.default"),
    "power": (lambda s, b, h, q, k: s**2.5, "a power of 2.5"),
    "base": (lambda s, b, h, q, k: s**s, "a power of a value"),
    "rounding": (lambda s, b, h, q, k: s + torch.div(q, 2, rounding_mode="trunc"), "rounding_mode='trunc'"),
    "reduction": (lambda s, b, h, q, k: s + SCALES.sum(), r"the operation aten\.sum"),
    "no_tensor": (lambda s, b, h, q, k: "score", "a result of str"),
}
SCALES = torch.ones(KEYS)


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        tilewise.flex(*operands(), function, enable_gqa=True)


def test_arguments_that_are_refused() -> None:
    q, k, v = operands()
    for arguments, error, message in (
        ({}, ArgumentError, r"enable_gqa: got False with 2 query and 1 key/value heads.*pass enable_gqa=True"),
        ({"enable_gqa": 1}, ArgumentError, "enable_gqa: got 1"),
        ({"return_lse": 1}, ArgumentError, "return_lse: got 1"),
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ArgumentError, "together with return_aux"),
        ({"return_aux": AuxRequest(max_scores=True)}, UnsupportedError, "return_aux: got max_scores=True"),
        ({"kernel_options": {"BLOCK_M": 64}}, UnsupportedError, r"kernel_options: got \['BLOCK_M'\]"),
        ({"block_mask": torch.ones(3)}, ArgumentError, "block_mask: got Tensor.*create_block_mask"),
        ({"block_mask": block_mask(causal, 64, 64)}, ShapeError, r"one for lengths \(64, 64\).*_adjust"),
        ({"score_mod": 3}, ArgumentError, "score_mod: got int"),
        ({"scale": -1.0}, ArgumentError, "softmax_scale: got -1.0"),
    ):
        with pytest.raises(error, match=message):
            tilewise.flex(q, k, v, **({"enable_gqa": True} if arguments else {}) | arguments)
    with pytest.raises(ShapeError, match=r"query: got shape \[2, 37, 16\]"):
        tilewise.flex(q[0], k, v)


def test_modes_and_transforms() -> None:
    q, k, v = operands()
    mask = block_mask(causal)

    def attend(q: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        mod = lambda s, b, h, q, k: torch.exp(s * factor) - alibi(s, b, h, q, k)  # noqa: E731 - recorded in each mode
        return tilewise.flex(q, k, v, mod, mask, enable_gqa=True)

    with torch.inference_mode():
        first = attend(q, 0.5).clone()
    torch.testing.assert_close(first, attend(q, 0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = attend(q, 0.25)
    assert lowered.dtype == torch.bfloat16
    torch.testing.assert_close(lowered.float(), attend(q, 0.25), atol=0.05, rtol=0.05)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attend(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: attend(x).square().sum())(q), expected)
    mapped = torch.vmap(attend)(torch.stack([q, q * 2]))
    torch.testing.assert_close(mapped, torch.stack([attend(q), attend(q * 2)]))


def test_an_empty_list_of_options_is_none() -> None:
    q, k, v = operands()
    tilewise.flex(q, k, v, enable_gqa=True, kernel_options={})


def test_documents_of_the_example() -> None:
    mask = block_mask(and_masks(causal, lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]))
    assert_same_as_torch(operands(), block_mask=mask, score_mod=alibi)
