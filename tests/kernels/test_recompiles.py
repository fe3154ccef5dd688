"""What may compile a kernel anew, and what must not: lengths, strides, batch sizes and values.

Nothing is compiled here. The keys under which Triton would look kernels up are read at each launch and compared. A new
key is right only where the code differs: another option, dtype, head dim or number of heads. Beside those, Triton tells
a stride or address that is a multiple of 16 (which wide loads need) from one that is not; docs/testing.md says what
follows from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from offline import Key, keys
from test_hopper import elsewhere  # noqa: F401 - a fixture

from tilewise import Document, _triton, hopper
from tilewise.arguments import prepare
from variations import (
    FEATURES,
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    PACKED,
    PACKED_LENGTHS,
    SIZES,
    Options,
    Size,
    packed,
    tensors,
)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_architecture", lambda problem: "hopper")


def launched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[Key]:
    """The keys of forward and backward, every gradient wanted."""
    problem, inputs, _ = prepare(q, k, v, **options)
    given = ("bias", "alibi_slopes", "sinks")
    needs = ("q", "k", "v", *(name for name in given if getattr(inputs, name) is not None))
    with keys() as caught:
        out, lse = _triton.forward(problem, inputs)
        _triton.backward(problem, inputs, out, lse, torch.empty_like(out), torch.empty_like(lse), needs)
    return caught


def assert_one_key(calls: Sequence[list[Key]]) -> None:
    """Fail unless all calls launch the same kernels, with the argument that differs."""
    first, *others = calls
    assert first, "nothing was launched"
    for number, other in enumerate(others, 1):
        for a, b in zip(first, other, strict=True):
            assert (a.kernel, a.options) == (b.kernel, b.options)
            differs = {name: (a.arguments[name], b.arguments[name]) for name in a.arguments}
            differs = {name: pair for name, pair in differs.items() if pair[0] != pair[1]}
            assert not differs, f"call {number} compiles {a.kernel} anew because of {differs}"


@pytest.mark.parametrize("name", FEATURES)
def test_lengths_batches_and_values(name: str) -> None:
    assert_one_key([launched(*tensors(size), **FEATURES[name](size)) for size in SIZES])


def test_unsorted_documents() -> None:
    # (One position would broadcast.)
    longer = [size for size in SIZES if size.seqlen_q > 1]
    ids = [[torch.arange(n) % 3 for n in (size.seqlen_q, size.seqlen_k)] for size in longer]
    assert_one_key([launched(*tensors(size), mask=Document(q, k)) for size, (q, k) in zip(longer, ids, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    assert_one_key([launched(*tensors(size, dtype), causal=True) for size in SIZES])


# Rows of such a bias start at multiples of 16 elements, or none does.
ALIGNED = [Size(32, 48, 2, 0), Size(256, 512, 1, 1), Size(1024, 64, 3, 2)]
RAGGED = [Size(201, 333, 2, 0), Size(77, 55, 1, 1), Size(35, 1001, 3, 2)]


def bias_of(s: Size) -> torch.Tensor:
    return torch.empty(1, HEADS, s.seqlen_q, s.seqlen_k, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [ALIGNED, RAGGED], ids=["aligned", "ragged"])
@pytest.mark.parametrize("causal", [False, True])
def test_bias(sizes: list[Size], causal: bool) -> None:
    assert_one_key([launched(*tensors(size), bias=bias_of(size), causal=causal) for size in sizes])


def launched_packed(lengths_q: list[int], lengths_k: list[int], **options: Any) -> list[Key]:
    """The keys of a packed call."""
    (q, k, v, cu_q, cu_k), longest = packed(lengths_q, lengths_k)
    return launched(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **longest, **options)


@pytest.mark.parametrize("name", PACKED)
def test_packed_lengths(name: str) -> None:
    assert_one_key([launched_packed(*lengths, **PACKED[name]()) for lengths in PACKED_LENGTHS])


def test_lengths_in_use() -> None:
    calls = [([7, 9], [64, 31], [64, 0]), ([16], [16], [1]), ([1] * 16, [128] * 16, [128] * 16)]
    used = [torch.tensor(lengths, dtype=torch.int32) for *_, lengths in calls]
    assert_one_key([launched_packed(*call[:2], seqused_k=x, causal=True) for call, x in zip(calls, used, strict=True)])


def views(size: Size) -> dict[str, list[torch.Tensor]]:
    """The same call from memory laid out in other ways, every stride a multiple of 16."""
    b, n, _, _ = size
    fused = torch.empty(b, n, HEADS + 2 * HEADS_KV, HEAD_DIM, dtype=torch.bfloat16)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(size)]
    padded = [torch.nn.functional.pad(x, (0, 16))[..., :HEAD_DIM] for x in tensors(size)]
    return {
        "contiguous": tensors(size),
        "fused": list(fused.split([HEADS, HEADS_KV, HEADS_KV], dim=2)),
        "by_head": by_head,
        "padded": padded,
        "repeated": [x[:1].expand(b, -1, -1, -1) for x in tensors(size)],
    }


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}], ids=str)
def test_strides(options: Options) -> None:
    assert_one_key([launched(*x, **options) for x in views(Size(200, 200, 2, 0)).values()])


def test_what_wide_loads_need_is_told_apart_and_no_more() -> None:
    def cut(extra: int, start: int) -> list[torch.Tensor]:
        return [
            torch.empty(*x.shape[:-1], HEAD_DIM + extra, dtype=x.dtype)[..., start : start + HEAD_DIM]
            for x in tensors(Size(200, 333, 2, 0))
        ]

    # Rows one element longer, so that most of them start off a multiple of 16 bytes; or all begin off one.
    odd, shifted = [cut(1, 0), cut(3, 0), cut(11, 0)], [cut(16, 1), cut(32, 3)]
    assert_one_key([launched(*x) for x in odd])
    assert_one_key([launched(*x) for x in shifted])
    assert_one_key([launched(*cut(16, 0)), launched(*cut(16, 8)), launched(*tensors(Size(200, 333, 2, 0)))])
    with pytest.raises(AssertionError, match="compiles forward_kernel anew because of"):
        assert_one_key([launched(*cut(16, 0)), launched(*odd[0])])


def test_where_small_tensors_lie_does_not_count() -> None:
    q, k, v = tensors(Size(64, 64, 1, 0))
    problem, inputs, _ = prepare(q, k, v, sinks=torch.rand(HEADS), alibi_slopes=torch.rand(HEADS))
    sinks, dlse = torch.rand(HEADS + 1), torch.rand(1 + HEADS * 64)

    def at(start: int) -> list[Key]:
        moved = inputs._replace(sinks=sinks[start:][:HEADS])
        with keys() as caught:
            out, lse = _triton.forward(problem, moved)
            _triton.backward(
                problem, moved, out, lse, out, dlse[start:][: HEADS * 64].view_as(lse), ("q", "alibi_slopes")
            )
        return caught

    assert_one_key([at(0), at(1)])


def launched_on_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[Key]:
    """The keys of the Hopper forward."""
    problem, inputs, _ = prepare(q, k, v, **options)
    with keys() as caught:
        hopper.forward(problem, inputs)
    return caught


# A group whose few queries fit one tile has a kernel of its own.
MANY = [size for size in SIZES if size.seqlen_q * HEADS // HEADS_KV > 128]
FEW = [Size(1, 77, 1, 2), Size(16, 16, 3, 0), Size(7, 1024, 16, 3)]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many", "few"])
@pytest.mark.parametrize("name", [name for name in FEATURES if "window" not in name])
def test_hopper_lengths_batches_and_values(name: str, sizes: list[Size]) -> None:
    assert_one_key([launched_on_hopper(*tensors(size), **FEATURES[name](size)) for size in sizes])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", PACKED)
def test_hopper_packed_lengths(name: str) -> None:
    calls = {True: [], False: []}
    for lengths in PACKED_LENGTHS:
        (q, k, v, cu_q, cu_k), longest = packed(*lengths)
        options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest, **PACKED[name]()}
        few = longest["max_seqlen_q"] * HEADS // HEADS_KV <= 128
        calls[few].append(launched_on_hopper(q, k, v, **options))
    for alike in calls.values():
        if alike:
            assert_one_key(alike)


@pytest.mark.usefixtures("elsewhere")
def test_hopper_windows() -> None:
    # A bound past every key is none, so each side has two kernels; these bounds are all inside.
    assert_one_key([launched_on_hopper(*tensors(size), window=(1 + size.turn, 16)) for size in MANY])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_hopper_strides_and_heads(options: Options) -> None:
    calls = [launched_on_hopper(*x, **options) for x in views(Size(200, 200, 2, 0)).values()]
    calls.append(
        launched_on_hopper(*(torch.empty(2, 200, 3, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3)), **options)
    )
    assert_one_key(calls)
