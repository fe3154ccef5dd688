"""Packed sequences: members attend alone, empty ones and slack rows included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from targets import Target

from .calls import Call, Draw, cotangents, offsets, packed
from .features import CURVE, near, striped
from .verify import assert_same, attend, compute, verify

SHORT = [pytest.param(dtype, marks=pytest.mark.large) for dtype in (torch.float16, torch.bfloat16)]
LENGTHS = ([10, 0, 23, 37, 1], [20, 5, 0, 50, 33])

OPTIONS: dict[str, Any] = {
    "plain": lambda d: {},
    "causal": lambda d: {"causal": True},
    "causal_top_left": lambda d: {"causal": "top_left"},
    "window": lambda d: {"window": (7, 2)},
    "alibi": lambda d: {"alibi_slopes": d.uniform(4), "causal": True},
    "alibi_per_batch": lambda d: {"alibi_slopes": d.uniform(5, 4), "window": (9, 4)},
    "softcap_score_mod": lambda d: {"softcap": 2.0, "score_mod": CURVE},
    "sinks": lambda d: {"sinks": d.normal(4), "causal": True},
    "dropout": lambda d: {"dropout_p": 0.3, "dropout_seed": 9, "causal": True},
    "predicate": lambda d: {"mask": striped},
    "predicate_aux": lambda d: {"mask": tilewise.Predicate(near, (6, d.integers(9, 4))), "causal": True},
    "prefix_int": lambda d: {"mask": tilewise.PrefixLM(4)},
    "prefix_tensor": lambda d: {"mask": tilewise.PrefixLM(d.integers(12, 5))},
    "documents": lambda d: {"mask": tilewise.Document(d.integers(3, 5, 37), d.integers(3, 5, 50))},
    "documents_shared": lambda d: {"mask": tilewise.Document(d.integers(3, 50)), "causal": True},
    "or": lambda d: {"mask": tilewise.Window(2, 1) | tilewise.Predicate(striped), "causal": True},
    "seqused": lambda d: {"seqused_k": torch.tensor([3, 5, 0, 50, 0], device=d.device), "causal": True},
    "seqused_window": lambda d: {
        "seqused_k": torch.tensor([20, 0, 0, 17, 33], device=d.device).int(),
        "window": (6, 3),
        "alibi_slopes": d.uniform(4),
    },
    "deterministic": lambda d: {"deterministic": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT], ids=str)
@pytest.mark.parametrize("feature", OPTIONS)
def test_feature(target: Target, feature: str, dtype: torch.dtype) -> None:
    draw = Draw(target.device)
    verify(target, packed(*LENGTHS, draw, dtype, **OPTIONS[feature](draw)))


@pytest.mark.parametrize(
    "lengths",
    [
        ([], []),
        ([0], [0]),
        ([0, 0, 0], [4, 0, 3]),
        ([3, 2], [0, 0]),
        ([1, 0, 1], [3, 0, 5]),
        ([0, 0, 0, 1], [0, 0, 0, 1]),
        ([76, 34, 146], [1, 1, 1]),
        ([5], [9]),
        ([1] * 9, [7] * 9),
    ],
    ids=["no_member", "one_empty", "no_queries", "no_keys", "one_query", "last_alone", "few_keys", "single", "many"],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["plain", "causal"])
def test_lengths(target: Target, lengths: tuple[list[int], list[int]], options: dict[str, Any]) -> None:
    verify(target, packed(*lengths, Draw(target.device, dtype=target.dtype), **options))


@pytest.mark.parametrize("kind", ["out", "lse"])
def test_one_gradient_alone(target: Target, kind: str) -> None:
    verify(target, packed(*LENGTHS, Draw(target.device, dtype=target.dtype), causal=True), kind=kind)


@pytest.mark.parametrize("where", ["cpu", "target", "apart"])
def test_offsets_of_either_dtype_anywhere(target: Target, where: str) -> None:
    call = packed(*LENGTHS, Draw(target.device, dtype=target.dtype), causal=True, deterministic=True)
    wanted = cotangents(call, Draw(target.device, seed=1))
    expected = compute(target, call, wanted)
    device = "cpu" if where == "cpu" else target.device
    wide = tuple(offsets(lengths, device, torch.int64) for lengths in LENGTHS)
    if where == "apart":
        wide = tuple(torch.stack([x, torch.full_like(x, -1)], 1)[:, 0] for x in wide)
    moved = Call(call.q, call.k, call.v, call.options, (wide[0], wide[1]))
    assert_same(compute(target, moved, wanted), expected)


def test_overstated_longest_member_changes_nothing(target: Target) -> None:
    call = packed(*LENGTHS, Draw(target.device, dtype=target.dtype), causal=True)
    verify(
        target, Call(call.q, call.k, call.v, {**call.options, "max_seqlen_q": 91, "max_seqlen_k": 101}, call.offsets)
    )


def _with_slack(call: Call, rows: int) -> Call:
    """`call` in tensors with `rows` more rows, which hold NaN."""
    tensors = {n: torch.cat([x, x.new_full((rows, *x.shape[1:]), float("nan"))]) for n, x in call.tensors().items()}
    return call.with_tensors(**tensors)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.2, "dropout_seed": 1}], ids=str)
def test_slack_rows_are_zero_and_unread(target: Target, options: dict[str, Any]) -> None:
    call = packed(*LENGTHS, Draw(target.device, dtype=target.dtype), deterministic=True, **options)
    rows = call.q.shape[0]
    do, dlse = cotangents(call, Draw(target.device, seed=1))
    assert do is not None and dlse is not None
    expected = compute(target, call, (do, dlse))
    # The loss may touch the slack rows of the output: what comes back for them is ignored.
    longer = torch.cat([do, torch.full_like(do[:3], float("nan"))]), torch.nn.functional.pad(dlse, (0, 3), value=1.0)
    got = compute(target, _with_slack(call, 3), longer)
    for name, x in got.items():
        if name == "lse":
            assert torch.equal(x[:, rows:], torch.full_like(x[:, rows:], float("-inf")))
            assert torch.equal(x[:, :rows], expected.lse)
            continue
        used = call.k.shape[0] if name in ("dk", "dv") else rows
        assert not x[used:].count_nonzero(), f"{name}: slack rows are not 0"
        assert torch.equal(x[:used], dict(expected.items())[name]), name


def test_members_attend_as_if_alone(target: Target) -> None:
    """Bit for bit what a dense call of each member gives, where both see the same tiles."""
    call = packed(*LENGTHS, Draw(target.device, dtype=target.dtype), causal=True)
    got = compute(target, call, (None, None), needs=())
    cu_q, cu_k = (x.tolist() for x in call.offsets or ())
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        alone = Call(call.q[None, q0:q1], call.k[None, k0:k1], call.v[None, k0:k1], {"causal": True})
        out, lse = attend(target, alone)
        torch.testing.assert_close(got.out[q0:q1], out[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse[:, q0:q1], lse[0], rtol=1e-5, atol=1e-6)


def test_many_keys_few_rows_closed_form(target: Target) -> None:
    """Only each member's last row sees its single key: P = 1 there, all else is exactly 0."""
    draw = Draw(target.device, dtype=target.dtype)
    q, k, v = draw.normal(256, 1, 32) * 3, draw.normal(3, 1, 32), draw.normal(3, 1, 32)
    cu = offsets([76, 34, 146], target.device), offsets([1, 1, 1], target.device)
    call = Call(q, k, v, {"max_seqlen_q": 146, "max_seqlen_k": 1, "causal": True}, cu)
    live = torch.tensor([75, 109, 255], device=target.device)
    got = compute(target, call, (torch.ones_like(q), None))
    torch.testing.assert_close(got.out[live], v)
    torch.testing.assert_close(got.grads["v"], torch.ones_like(v))
    dead = torch.ones(256, dtype=torch.bool, device=target.device).index_fill(0, live, False)
    assert not got.out[dead].count_nonzero() and not got.grads["q"][dead].count_nonzero()
    assert bool((got.lse[0, dead] == float("-inf")).all()) and bool(torch.isfinite(got.lse[0, live]).all())
