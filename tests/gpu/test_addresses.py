"""Tensors of more than 2**31 elements: a few rows, placed where offsets pass that, against the oracle for them alone.

Cotangents are 0 but for those rows, so their gradients are the whole gradients, and everything else must be exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from subjects import BACKENDS

import tilewise
from conformance.calls import Call, Cotangents, Result, Shape, run
from conformance.verify import compare

ROWS = 3  # of each sample


class Case(NamedTuple):
    """A self-attention call: `left` keys before each row are visible, all keys if it is None.

    `by_head`: memory holds one head after the other. `bias`: one of shape [1, 1, Sq, Sk].
    """

    shape: Shape
    left: int | None
    by_head: bool = False
    bias: bool = False


class Sample(NamedTuple):
    """Rows ``row .. row + ROWS`` of one head."""

    b: int
    h: int
    row: int


# What passes 2**31 elements: q, k and v by their row, head or batch entry; the output alone; a bias; the LSE.
CASES = {
    "rows": Case(Shape(1, 1_050_003, 1_050_003, 8, 8, 256, 256), 200),
    "heads": Case(Shape(1, 530_009, 530_009, 32, 32, 128, 128), 200, by_head=True),
    "batches": Case(Shape(4_111, 128, 128, 32, 32, 128, 128), None),
    "output": Case(Shape(1, 131_101, 131_101, 64, 1, 16, 256), 200),
    "bias": Case(Shape(1, 50_021, 50_021, 2, 1, 64, 64), None, bias=True),
}
LSE = Case(Shape(1, 131_101, 131_101, 16_384, 1, 1, 1), 100)


def largest(call: Call) -> int:
    """Elements of the largest tensor of the call, its output and LSE included."""
    rows = call.q[..., 0].numel()
    return max(rows, rows * call.v.shape[-1], *(x.numel() for x in call.tensors().values()))


def make(case: Case, device: str) -> Call:
    """The call, drawn on the device: elsewhere so many numbers take minutes."""
    s, generator = case.shape, torch.Generator(device).manual_seed(0)

    def draw(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
        sizes = (s.batch, heads, seqlen, head_dim) if case.by_head else (s.batch, seqlen, heads, head_dim)
        x = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        return x.transpose(1, 2) if case.by_head else x

    q, k = draw(s.seqlen_q, s.heads_q, s.head_dim), draw(s.seqlen_k, s.heads_kv, s.head_dim)
    options: dict[str, object] = {} if case.left is None else {"window": (case.left, 0)}
    if case.bias:
        bias = torch.empty(1, 1, s.seqlen_q, s.seqlen_k, dtype=torch.bfloat16, device=device)
        options["bias"] = bias.normal_(generator=generator)
    return Call(q, k, draw(s.seqlen_k, s.heads_kv, s.head_dim_v), options)


def samples(case: Case) -> Iterator[Sample]:
    """The last rows, and where no two samples see the same key, the first that see a whole window and some between."""
    s, first = case.shape, case.left or 0
    yield Sample(s.batch - 1, s.heads_q - 1, s.seqlen_q - ROWS)
    if s.batch > 1 or case.left is not None:
        yield Sample(0, 0, first)
        yield Sample(s.batch // 2, s.heads_q // 2, (first + s.seqlen_q) // 2)


class Part(NamedTuple):
    """Where a sample's rows are, and the keys that they see, whose heads are those of q over the group's size."""

    q: tuple[int, slice, int]
    kv: tuple[int, slice, int]

    @classmethod
    def of(cls, case: Case, at: Sample) -> Part:
        group = case.shape.heads_q // case.shape.heads_kv
        keys = slice(0 if case.left is None else at.row - case.left, None if case.left is None else at.row + ROWS)
        return cls((at.b, slice(at.row, at.row + ROWS), at.h), (at.b, keys, at.h // group))

    def stat(self) -> tuple[int, int, slice]:
        """The place in an LSE."""
        b, rows, h = self.q
        return b, h, rows

    def places(self) -> dict[str, tuple[int, slice, int] | tuple[int, int, slice, slice]]:
        """The place in each differentiable input."""
        return {"q": self.q, "k": self.kv, "v": self.kv, "bias": (0, 0, self.q[1], self.kv[1])}


def cut(x: torch.Tensor) -> torch.Tensor:
    """One head's part [rows, D] or LSE [rows] in the layout of a call with one batch entry and one head."""
    return (x[None, :, None] if x.ndim == 2 else x[None, None]).contiguous()


def sampled(case: Case, call: Call, got: Result, wanted: Cotangents, part: Part) -> tuple[Call, Result, Cotangents]:
    """The call of a sample alone, its results and its cotangents."""
    do, dlse = wanted
    assert do is not None and dlse is not None
    places = part.places()
    q, k, v = (cut(x[places[name]]) for name, x in (("q", call.q), ("k", call.k), ("v", call.v)))
    options = dict(call.options)
    if case.bias:
        options["bias"] = call.options["bias"][places["bias"]][None, None]
    grads = {name: grad[places[name]] for name, grad in got.grads.items()}
    shaped = {name: x[None, None] if name == "bias" else cut(x) for name, x in grads.items()}
    result = Result(cut(got.out[part.q]), cut(got.lse[part.stat()]), shaped)
    return Call(q, k, v, options), result, (cut(do[part.q]), cut(dlse[part.stat()]))


def check(case: Case, device: str, backend: str | None) -> Call:
    """Compare the samples of a case; the call that was made."""
    call = make(case, device)
    parts = [Part.of(case, at) for at in samples(case)]
    do = torch.zeros(*call.q.shape[:-1], call.v.shape[-1], dtype=call.q.dtype, device=device)
    dlse = torch.zeros(call.q.shape[0], call.q.shape[2], call.q.shape[1], device=device)
    for part in parts:
        do[part.q], dlse[part.stat()] = torch.randn_like(do[part.q]), torch.randn_like(dlse[part.stat()])
    got = run(lambda c: c.attend(tilewise, backend=backend), call, (do, dlse))
    for part in parts:
        compare(*sampled(case, call, got, (do, dlse), part))
    for part in parts:
        for name, grad in got.grads.items():
            grad[part.places()[name]] = 0
    stray = {name: int(grad.count_nonzero()) for name, grad in got.grads.items()}
    assert not any(stray.values()), f"gradients where no row of the loss sees anything: {stray}"
    assert bool(got.lse.isfinite().all()), "rows that were left out"
    return call


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_offsets(name: str, backend: str | None) -> None:
    assert largest(check(CASES[name], "cuda", backend)) > 2**31


def test_offsets_of_the_lse() -> None:
    call = check(LSE, "cuda", "triton")
    assert call.q[..., 0].numel() > 2**31
