"""What may compile a kernel anew, and what must not: lengths, strides, batch sizes and values.

Nothing is compiled here. The keys under which Triton would look kernels up are read at each launch and compared. A new
key is right only where the code differs: another option, dtype, head dim or number of heads. Beside those, Triton tells
a stride or address that is a multiple of 16 (which wide loads need) from one that is not; docs/testing.md says what
follows from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from offline import Key, keys
from test_hopper import elsewhere  # noqa: F401 - a fixture

import tilewise
from tilewise import _triton, masks
from tilewise.arguments import prepare
from tilewise.hopper import launch
from tilewise.score_mods import ScoreMod

HEADS, HEADS_KV, HEAD_DIM = 16, 4, 64


class Size(NamedTuple):
    """Lengths of a call, its batch, and `turn`, which tells calls with other values apart."""

    seqlen_q: int
    seqlen_k: int
    batch: int
    turn: int


# Multiples of 16, odd ones, powers of two, and 1, which Triton would make a constant.
SIZES = [Size(200, 333, 2, 0), Size(256, 512, 3, 1), Size(1, 77, 1, 2), Size(1024, 16, 16, 3)]
NUMBERS = [5, 16, 1, 4096]
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_architecture", lambda problem: "hopper")


def tensors(size: Size, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = [(size.seqlen_q, HEADS), (size.seqlen_k, HEADS_KV), (size.seqlen_k, HEADS_KV)]
    return [torch.empty(size.batch, seqlen, heads, HEAD_DIM, dtype=dtype) for seqlen, heads in shapes]


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


def table_curve(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return s + table[h, (q - k) % 7]


def table_curve_backward(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return ds


def striped(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k) % 3 != 0


def block_mask(s: Size) -> tilewise.BlockMask:
    grid = -(-s.seqlen_q // 128), -(-s.seqlen_k // 128)
    return tilewise.BlockMask(torch.ones(s.batch, HEADS, *grid, dtype=torch.bool), 128, 128)


def documents(s: Size) -> masks.Document:
    lengths = ([s.seqlen_q // 3, s.seqlen_q - s.seqlen_q // 3], [s.seqlen_k // 2, s.seqlen_k - s.seqlen_k // 2])
    q, k = (masks.Document.from_lengths(x) for x in lengths)
    return masks.Document(q.q_ids, k.q_ids, contiguous=True)


FEATURES: dict[str, Callable[[Size], Options]] = {
    "plain": lambda s: {},
    "causal": lambda s: {"causal": True},
    "scale": lambda s: {"softmax_scale": float(NUMBERS[s.turn])},
    "window": lambda s: {"window": (NUMBERS[s.turn], NUMBERS[-1 - s.turn])},
    "window_left": lambda s: {"window": (NUMBERS[s.turn], None)},
    "alibi": lambda s: {"alibi_slopes": torch.rand(HEADS), "causal": True},
    "alibi_per_batch": lambda s: {"alibi_slopes": torch.rand(s.batch, HEADS)},
    "bias_per_key": lambda s: {"bias": torch.empty(1, 1, 1, s.seqlen_k)},
    "dropout_seed": lambda s: {"dropout_p": 0.1, "dropout_seed": NUMBERS[s.turn]},
    "softcap": lambda s: {"softcap": float(NUMBERS[s.turn])},
    "block_mask": lambda s: {"mask": block_mask(s)},
    "block_mask_causal": lambda s: {"mask": block_mask(s), "causal": True},
    "documents": lambda s: {"mask": documents(s), "causal": True},
    "predicate": lambda s: {"mask": striped},
    "score_mod": lambda s: {"score_mod": ScoreMod(table_curve, table_curve_backward, (torch.rand(HEADS, 7),))},
    "sinks": lambda s: {"sinks": torch.rand(HEADS), "causal": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_lengths_batches_and_values(name: str) -> None:
    assert_one_key([launched(*tensors(size), **FEATURES[name](size)) for size in SIZES])


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


def packed(lengths_q: list[int], lengths_k: list[int], used: list[int] | None = None, **options: Any) -> list[Key]:
    """The keys of a packed call."""
    cu_q, cu_k = (torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    q = torch.empty(sum(lengths_q), HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k = torch.empty(sum(lengths_k), HEADS_KV, HEAD_DIM, dtype=torch.bfloat16)
    lengths = {
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
    }
    seqused = None if used is None else torch.tensor(used, dtype=torch.int32)
    return launched(q, k, k, **lengths, seqused_k=seqused, **options)


PACKED: dict[str, Options] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (16, 0)},
    "alibi_dropout": {"alibi_slopes": torch.rand(HEADS), "dropout_p": 0.1, "dropout_seed": 1},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_lengths(name: str) -> None:
    lengths = [([7, 0, 200], [64, 1, 31]), ([16], [16]), ([1], [1]), ([32] * 16, [128] * 16)]
    assert_one_key([packed(*pair, **PACKED[name]) for pair in lengths])


def test_lengths_in_use() -> None:
    calls = [([7, 9], [64, 31], [64, 0]), ([16], [16], [1]), ([1] * 16, [128] * 16, [128] * 16)]
    assert_one_key([packed(*call, causal=True) for call in calls])


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


def hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[Key]:
    """The keys of the Hopper forward."""
    problem, inputs, _ = prepare(q, k, v, **options)
    with keys() as caught:
        launch.forward(problem, inputs)
    return caught


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["plain", "causal", "scale"])
def test_hopper_lengths_batches_and_values(name: str) -> None:
    assert_one_key([hopper(*tensors(size), **FEATURES[name](size)) for size in SIZES])


@pytest.mark.usefixtures("elsewhere")
def test_hopper_windows() -> None:
    # A bound past every key is none, so each side has two kernels; these bounds are all inside.
    assert_one_key([hopper(*tensors(size), window=(1 + size.turn, 16)) for size in SIZES])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_hopper_strides_and_heads(options: Options) -> None:
    calls = [hopper(*x, **options) for x in views(Size(200, 200, 2, 0)).values()]
    calls.append(hopper(*(torch.empty(2, 200, 3, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3)), **options))
    assert_one_key(calls)
