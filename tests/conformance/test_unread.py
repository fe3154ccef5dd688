"""What nobody may see may hold anything: NaN or infinity there gives, bit for bit, what zeros give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from targets import Target
from tilewise import masks

from .calls import Call, Draw, Result, Shape, cotangents, dense, packed
from .verify import assert_same, compute, declines

SHAPE = Shape(2, 29, 83, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=16)
FILLS = [float("nan"), pytest.param(float("inf"), marks=pytest.mark.large)]


def _holes(n: int, device: str) -> torch.Tensor:
    """Keys with every third one missing, and a run of them longer than a small tile."""
    keys = torch.arange(n, device=device)
    return (keys % 3 != 0) & ~((keys > 20) & (keys < 60))


def _tiles(device: str) -> tilewise.BlockMask:
    tiles = torch.ones(1, 1, 4, 6, dtype=torch.bool, device=device)
    tiles[..., 1:3], tiles[..., 5] = False, False
    return tilewise.BlockMask(tiles, 8, 16)


def _documents(device: str) -> masks.Document:
    ids = torch.arange(83, device=device) // 10
    return masks.Document(ids[:29] + 2, ids)


def odd_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Half of the keys, whoever asks."""
    return k % 2 == 1


# Options, and which keys no row sees.
HIDDEN: dict[str, Callable[[str], tuple[dict[str, Any], torch.Tensor]]] = {
    "before_the_window": lambda d: ({"window": (7, 0)}, torch.arange(83, device=d) < 83 - 29 - 7),
    "after_the_window": lambda d: ({"causal": "top_left", "window": (None, 4)}, torch.arange(83, device=d) >= 29),
    "padding": lambda d: ({"mask": _holes(83, d).expand(2, 1, 1, 83)}, ~_holes(83, d)),
    "padding_and_causal": lambda d: ({"mask": _holes(83, d), "causal": True}, ~_holes(83, d)),
    "inactive_tiles": lambda d: ({"mask": _tiles(d)}, ~_tiles(d).tiles[0, 0, 0].repeat_interleave(16)[:83]),
    "other_documents": lambda d: ({"mask": _documents(d)}, ~torch.isin(_documents(d).keys, _documents(d).q_ids)),
    "predicate": lambda d: ({"mask": odd_keys}, torch.arange(83, device=d) % 2 == 0),
    "beyond_the_prefix": lambda d: (
        {"mask": masks.PrefixLM(40), "causal": "top_left"},
        torch.arange(83, device=d) >= 40,
    ),
}


def _filled(call: Call, hidden: torch.Tensor, value: float, names: str) -> Call:
    """`call` with `value` in the hidden rows (second-to-last but one dimension) of the tensors named."""
    return call.with_tensors(**{n: call.tensors()[n].masked_fill(hidden[:, None, None], value) for n in names})


def _compute_with(target: Target, call: Call, hidden: torch.Tensor, value: float, names: str = "kv") -> Result:
    return compute(target, _filled(call, hidden, value, names), cotangents(call, Draw(target.device, seed=1)))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("names", [*(pytest.param(name, marks=pytest.mark.large) for name in "kv"), "kv"])
@pytest.mark.parametrize("what", HIDDEN)
def test_keys_that_nobody_sees(target: Target, what: str, names: str, fill: float) -> None:
    options, hidden = HIDDEN[what](target.device)
    call = dense(SHAPE, target.dtype, Draw(target.device), deterministic=True, **options)
    if declines(target, call):
        return
    got = _compute_with(target, call, hidden, fill, names)
    assert_same(got, _compute_with(target, call, hidden, 0.0, names))
    assert bool(torch.isfinite(got.out).all())
    assert target.forward_only or not got.grads["k"][:, hidden].count_nonzero()


@pytest.mark.parametrize(
    "modifier",
    [
        {"softcap": 2.0},
        {"dropout_p": 0.4, "dropout_seed": 3},
        {"alibi_slopes": [0.5, 0.1]},
        {"sinks": [0.0, -1.0]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_keys_that_nobody_sees_beside_modifiers(target: Target, modifier: dict[str, Any]) -> None:
    options = {n: torch.tensor(x, device=target.device) if isinstance(x, list) else x for n, x in modifier.items()}
    hidden = torch.arange(83, device=target.device) < 83 - 29 - 7
    call = dense(SHAPE, target.dtype, Draw(target.device), deterministic=True, window=(7, 3), **options)
    assert_same(_compute_with(target, call, hidden, float("nan")), _compute_with(target, call, hidden, 0.0))


@pytest.mark.parametrize("dtype, softcap", [(None, None), (torch.bfloat16, 2.0)], ids=["plain", "softcap"])
def test_keys_that_earlier_rows_do_not_see(target: Target, dtype: torch.dtype | None, softcap: float | None) -> None:
    """Under a causal mask, a poisoned last key reaches the last row alone."""
    options: dict[str, Any] = {"causal": True, "window": (30, None), "softcap": softcap}
    call = dense(Shape(1, 41, 41, 4, 2), dtype or target.dtype, Draw(target.device), **options)
    last = torch.arange(41, device=target.device) == 40
    got, expected = (_compute_with(target, call, last, value) for value in (float("nan"), 0.0))
    assert torch.equal(got.out[:, :40], expected.out[:, :40]) and torch.equal(got.lse[..., :40], expected.lse[..., :40])
    assert bool(got.out[:, 40].isnan().all())
    assert target.forward_only or torch.equal(got.grads["q"][:, :40], expected.grads["q"][:, :40])


def test_hidden_bias(target: Target) -> None:
    """A bias may hold anything where the mask hides the score."""
    draw = Draw(target.device)
    bias = draw.normal(2, 1, 29, 83)
    rows, keys = torch.arange(29, device=target.device)[:, None], torch.arange(83, device=target.device)
    hidden = keys > rows + 83 - 29
    results = []
    for value in (float("nan"), 0.0):
        filled = bias.masked_fill(hidden, value)
        call = dense(SHAPE, target.dtype, Draw(target.device), causal=True, bias=filled, deterministic=True)
        results.append(compute(target, call, cotangents(call, Draw(target.device, seed=1))))
    assert_same(*results)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 0)}], ids=["plain", "causal", "window"])
def test_packed_keys_not_in_use(target: Target, options: dict[str, Any], fill: float) -> None:
    used = torch.tensor([3, 5, 0, 20, 0], dtype=torch.int32, device=target.device)
    call = packed([10, 0, 23, 37, 1], [20, 5, 7, 50, 33], Draw(target.device), target.dtype, seqused_k=used, **options)
    call.options["deterministic"] = True
    assert call.offsets is not None
    starts = call.offsets[1].long()
    row = torch.arange(call.k.shape[0], device=target.device)
    member = torch.searchsorted(starts, row, right=True) - 1
    hidden = row >= starts[member] + used.long()[member]
    assert_same(_compute_with(target, call, hidden, fill), _compute_with(target, call, hidden, 0.0))


def test_packed_keys_before_a_window(target: Target) -> None:
    call = packed([5, 9], [40, 60], Draw(target.device), target.dtype, window=(4, 0), deterministic=True)
    row = torch.arange(100, device=target.device)
    hidden = (row < 40 - 5 - 4) | ((row >= 40) & (row < 100 - 9 - 4))
    assert_same(_compute_with(target, call, hidden, float("nan")), _compute_with(target, call, hidden, 0.0))


def test_fresh_memory_is_poisoned() -> None:
    """The suite rests on it: what the package allocates and does not write is NaN."""
    code = "found = [torch.empty(3), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (1,))]"
    package: dict[str, Any] = {"__name__": "tilewise.somewhere", "torch": torch, "x": torch.zeros(4)}
    exec(code, package)
    assert all(bool(x.isnan().all()) for x in package["found"])


def test_inputs_are_never_written(target: Target) -> None:
    draw = Draw(target.device)
    call = dense(SHAPE, target.dtype, draw, causal=True, bias=draw.normal(2, 29, 83), sinks=draw.normal(2))
    before = {name: x.clone() for name, x in call.tensors().items()}
    wanted = cotangents(call, Draw(target.device, seed=1))
    kept = [x.clone() for x in wanted if x is not None]
    compute(target, call, wanted)
    assert all(torch.equal(x, before[name]) for name, x in call.tensors().items())
    assert all(torch.equal(x, y) for x, y in zip((x for x in wanted if x is not None), kept, strict=True))
