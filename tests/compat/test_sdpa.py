"""`compat.sdpa` beside PyTorch's own function: values, gradients, layouts, and what is said to what cannot be taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tilewise import errors
from tilewise.compat.sdpa import scaled_dot_product_attention as sdpa
from tolerance import assert_close

torch_sdpa = functional.scaled_dot_product_attention
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
SHAPES = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def inputs(shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [draw(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def with_grads(fn: Callable[..., Any], tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The output, then the gradient of each tensor, for cotangents that are the same whatever the dtype."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    out = fn(*leaves, **options)
    learned = [x for x in leaves if x.requires_grad]
    return [out, *torch.autograd.grad(out, learned, draw(*out.shape, seed=9).to(out.dtype), allow_unused=True)]


def compare(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """Hold both to PyTorch's function in fp64; the output."""
    exact = with_grads(torch_sdpa, [x.double() if x.is_floating_point() else x for x in tensors], **options)
    plain = with_grads(torch_sdpa, tensors, **options)
    got = with_grads(sdpa, tensors, **options)
    # (The mask is added to scores, not summed up.)
    scale = 2.0 * max(float(x.abs().max()) if x.numel() else 0.0 for x in tensors[:3])
    for name, x, ref, other in zip(("out", "dq", "dk", "dv", "dmask"), got, exact, plain, strict=False):
        assert x.dtype == other.dtype
        assert_close(name, x.detach(), ref.detach(), other.detach(), scale * max(1.0, scale), x.dtype)
    return got[0].detach()


def test_the_signature_is_pytorchs() -> None:
    parameters = inspect.signature(sdpa).parameters
    assert tuple(parameters) == NAMES
    assert [p.default for p in parameters.values()][3:] == [None, 0.0, False, None, False]
    assert [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values()] == [False] * 6 + [True] * 2
    assert all(name in (torch_sdpa.__doc__ or "") for name in NAMES)
    with pytest.raises(TypeError, match="positional"):
        sdpa(*inputs(), None, 0.0, False, 1.0)  # type: ignore[misc]  # what PyTorch refuses as well


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes_and_causal(dtype: torch.dtype, is_causal: bool) -> None:
    compare(inputs(dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("rows, keys", [(5, 7), (7, 5), (1, 9), (9, 1)])
def test_causal_is_top_left(rows: int, keys: int) -> None:
    compare(inputs(((1, 2, rows, 8), (1, 2, keys, 8), (1, 2, keys, 8))), is_causal=True)


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (7, 8), (7, 8)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
        ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)),
        ((2, 4, 5, 8), (2, 4, 7, 8), (1, 4, 7, 8)),
        ((2, 4, 5, 8), (4, 7, 8), (4, 7, 8)),
        ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((5, 8), (4, 7, 8), (4, 7, 8)),
        ((2, 3, 4, 5, 8), (3, 1, 7, 8), (2, 1, 4, 7, 8)),
        ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)),
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
        ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
        ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 8)),
    ],
    ids=str,
)
def test_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = inputs(shapes)
    assert compare(tensors).shape == torch_sdpa(*tensors).shape


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 4, 7, 8)),
        ((6, 5, 8), (2, 7, 8), (3, 7, 8)),
        ((3, 2, 4, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 8)),
        ((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    ],
    ids=str,
)
def test_grouped_queries(shapes: tuple[tuple[int, ...], ...]) -> None:
    compare(inputs(shapes), enable_gqa=True)


@pytest.mark.parametrize(
    "shape", [(5, 7), (5, 1), (1, 7), (4, 5, 7), (2, 1, 5, 7), (1, 4, 5, 7), (1, 1, 1, 7)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    mask = draw(*shape, seed=3)
    compare([*inputs(), mask > 0 if kind == "bool" else mask.float()])


@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 4, 5, 7), (3, 1, 1, 7), (1, 1, 1, 5, 7), (2, 3, 4, 5, 7)], ids=str)
def test_masks_of_more_batch_dimensions(shape: tuple[int, ...]) -> None:
    tensors = inputs(((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)))
    compare([*tensors, draw(*shape, seed=3).float()])
    compare([*tensors, draw(*shape, seed=4) > 0])


def test_a_mask_without_heads() -> None:
    compare([*inputs(((5, 8), (7, 8), (7, 8))), draw(5, 7) > 0])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_a_visible_key_are_zero(kind: str) -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[0], mask[1, 2] = False, False
    if kind == "float":
        mask = torch.zeros(5, 7).masked_fill(~mask, float("-inf"))
    out = compare([*inputs(), mask])
    assert not out[:, :, 0].any()


@pytest.mark.parametrize("scale", [0.3, 1, 0.0, -0.7])
def test_scales(scale: float) -> None:
    compare(inputs(), scale=scale)


def _strided() -> dict[str, list[torch.Tensor]]:
    q, k, v = inputs()
    return {
        "bhsd": [q, k, v],
        "bshd": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        "last_dimension": [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)],
        "sliced": [torch.cat([x, x], dim=-1)[..., :8] for x in (q, k, v)],
    }


@pytest.mark.parametrize("layout", _strided())
def test_the_result_lies_in_memory_as_the_query(layout: str) -> None:
    tensors = _strided()[layout]
    assert compare(tensors).stride() == torch_sdpa(*tensors).stride()


def test_dropout_is_applied_and_replayed() -> None:
    tensors = inputs(((1, 2, 32, 8), (1, 2, 64, 8), (1, 2, 64, 8)))
    eye = torch.eye(64).expand(1, 2, 64, 64)
    torch.manual_seed(0)
    first = sdpa(tensors[0], tensors[1], eye, dropout_p=0.25)
    torch.manual_seed(0)
    assert torch.equal(first, sdpa(tensors[0], tensors[1], eye, dropout_p=0.25))
    assert not torch.equal(first, sdpa(tensors[0], tensors[1], eye, dropout_p=0.25))
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.03
    weights = torch_sdpa(tensors[0], tensors[1], eye)
    assert torch.allclose(first[first != 0], (weights / 0.75)[first != 0], atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True)
    for shapes in (SHAPES, ((3, 4, 6, 8), (3, 4, 9, 8), (3, 4, 9, 8))):
        tensors = inputs(shapes)
        for options in ({"is_causal": True}, {"attn_mask": draw(shapes[0][2], shapes[1][2]) > 0}):
            for x, y in zip(
                with_grads(sdpa, tensors, **options), with_grads(compiled, tensors, **options), strict=True
            ):
                assert torch.equal(x, y) and x.stride() == y.stride()


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "one_dimension": (((8,), (7, 8), (7, 8)), {}, r"query: got shape \[8\]"),
    "gqa_without_heads": (((5, 8), (7, 8), (7, 8)), {"enable_gqa": True}, r"query: got shape \[5, 8\]"),
    "heads": (((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), {}, "4 query, 2 key and 2 value heads.*enable_gqa=True"),
    "gqa_heads": (((2, 4, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), {"enable_gqa": True}, "a multiple of both"),
    "batch": (((2, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)), {}, r"batch: got query \[2\], key \[3\]"),
    "head_dim": (((2, 4, 5, 8), (2, 4, 7, 6), (2, 4, 7, 8)), {}, "key: got head dim 6, query's is 8"),
    "length": (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 6, 8)), {}, "value: got 6 rows, key has 7"),
    "dropout": (SHAPES, {"dropout_p": 1.0}, "dropout_p: got 1.0"),
    "causal_flag": (SHAPES, {"is_causal": 1}, "is_causal: got 1"),
    "gqa_flag": (SHAPES, {"enable_gqa": None}, "enable_gqa: got None"),
    "scale": (SHAPES, {"scale": float("nan")}, "softmax_scale: got nan"),
    "mask_dtype": (SHAPES, {"attn_mask": torch.ones(5, 7).int()}, "attn_mask: got torch.int32"),
    "mask_rank": (SHAPES, {"attn_mask": torch.ones(7)}, r"attn_mask: got shape \[7\]"),
    "mask_shape": (SHAPES, {"attn_mask": torch.ones(5, 6)}, r"\[1, 1, 5, 6\]"),
    "mask_batch": (SHAPES, {"attn_mask": torch.ones(3, 2, 1, 5, 7)}, r"attn_mask: got shape \[3, 2, 1, 5, 7\]"),
    "mask_and_causal": (SHAPES, {"attn_mask": torch.ones(5, 7), "is_causal": True}, "attn_mask: got a mask together"),
    "no_mask": (SHAPES, {"attn_mask": "causal"}, "attn_mask: got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    shapes, options, message = REFUSED[name]
    with pytest.raises(errors.ArgumentError, match=message):
        sdpa(*inputs(shapes), **options)


def test_mixed_dtypes_are_named() -> None:
    q, k, v = inputs()
    with pytest.raises(errors.DtypeError, match=r"k torch\.float16"):
        sdpa(q, k.half(), v)


@pytest.mark.parametrize(
    "name, value",
    [
        ("attn_mask", torch.zeros(5, 7).index_fill(1, torch.tensor([2]), 1.0)),
        ("dropout_p", 0.5),
        ("is_causal", True),
        ("scale", 0.5),
    ],
)
def test_every_argument_counts(name: str, value: Any) -> None:
    """`enable_gqa` decides between an error and a result: see the refusals."""
    tensors = inputs()
    assert not torch.allclose(sdpa(*tensors), sdpa(*tensors, **{name: value}))
