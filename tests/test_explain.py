"""What explain says: backends and reasons, counts against closed forms, and the floor on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise import errors, reference, roofline
from tilewise.arguments import prepare
from tilewise.roofline import BACKWARD, FORWARD


def described(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that takes no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def pairs(q: torch.Tensor, k: torch.Tensor, **options: Any) -> roofline.Pairs:
    problem, inputs, _ = prepare(q, k, k, **options)
    return roofline.visible_pairs(problem, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"window": (3, 2)},
        {"window": (0, None), "causal": True},
        {"mask": tilewise.PrefixLM(4)},
        {"mask": tilewise.Document.from_lengths([5, 6])},
    ],
    ids=str,
)
def test_visible_pairs_are_those_that_the_oracle_weighs(options: dict[str, Any]) -> None:
    q, k = torch.zeros(2, 11, 4, 8, dtype=torch.float64), torch.zeros(2, 11, 2, 8, dtype=torch.float64)
    # With q = 0 every visible key weighs the same, so exp(lse) counts them.
    _, lse = reference.attention(q, k, k, return_lse=True, **options)
    found = pairs(q, k, **options)
    assert found == roofline.Pairs(round(float(lse.exp().sum())), True)


def test_what_a_predicate_decides_is_bounded_from_above() -> None:
    x = torch.zeros(1, 8, 1, 8)
    assert pairs(x, x, mask=lambda b, h, q, k: k % 2 == 0, causal=True) == roofline.Pairs(36, False)


def test_packed_members_count_apart() -> None:
    x, offsets = torch.zeros(9, 2, 8), torch.tensor([0, 4, 4, 9])
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 5, "max_seqlen_k": 5}
    assert pairs(x, x, causal=True, **lengths).number == 2 * (10 + 15)


def test_flops_and_bytes_of_the_papers() -> None:
    """4 B H S² D forward and 2.5 times that backward; every tensor once; S and P twice each in standard attention."""
    batch, seqlen, heads, dim = 2, 64, 4, 32
    x = described(batch, seqlen, heads, dim)
    problem, inputs, _ = prepare(x, x, x)
    count = roofline.visible_pairs(problem, inputs).number
    assert count == batch * heads * seqlen**2
    assert roofline.flops(problem, count) == 4 * count * dim
    assert roofline.flops(problem, count, BACKWARD) == 10 * count * dim
    tensor, lse = 2 * x.numel(), 4 * batch * heads * seqlen
    assert roofline.hbm_bytes(problem, inputs) == 4 * tensor + lse
    assert roofline.hbm_bytes(problem, inputs, BACKWARD) == 8 * tensor + lse
    assert roofline.standard_hbm_bytes(problem, inputs) == 4 * tensor + lse + 4 * 2 * count
    assert roofline.score_matrix_bytes(problem, inputs) == 2 * count


def test_the_floor_is_the_longer_of_arithmetic_and_memory() -> None:
    h200 = roofline.device("H200")
    assert h200.balance(torch.bfloat16) == pytest.approx(989.4 / 4.8)
    long, short = described(1, 16384, 16, 128), described(1, 1, 16, 128)
    for q, bound in ((long, "arithmetic"), (short, "memory")):
        problem, inputs, _ = prepare(q, long, long)
        count = roofline.visible_pairs(problem, inputs).number
        moved = roofline.hbm_bytes(problem, inputs)
        times = {"arithmetic": 4 * count * 128 / 989.4e12, "memory": moved / 4.8e12}
        assert max(times, key=times.__getitem__) == bound
        assert roofline.floor_ms(problem, count, moved, h200, FORWARD) == pytest.approx(1e3 * times[bound])


def test_every_other_backend_gives_its_reason() -> None:
    x = torch.randn(1, 8, 2, 16)
    found = tilewise.explain(x, x, x)
    assert found.backend == "cpu"
    assert set(found.reasons) == {"hopper", "triton"}
    assert all(found.reasons.values())
    asked = tilewise.explain(x, x, x, backend="triton")
    assert "backend='triton' was asked for" in asked.reasons["cpu"]


@pytest.mark.parametrize(
    ("device", "options", "backend"),
    [("h200", {"causal": True}, "hopper"), ("h200", {"softcap": 30.0}, "hopper"), ("rtx4090", {}, "triton")],
)
def test_a_call_is_explained_for_a_device_that_is_not_here(device: str, options: dict[str, Any], backend: str) -> None:
    q, k = described(1, 4096, 32, 128), described(1, 4096, 8, 128)
    found = tilewise.explain(q, k, k, device=device, **options)
    assert found.backend == backend
    assert found.device is roofline.DEVICES[device]
    assert found.tile is not None
    assert "tensors are on cuda" in found.reasons["cpu"][0]
    shown = str(found)
    assert all(label in shown for label in ("call", "backend", "tile", "FLOPs", "HBM traffic", "intensity", "floor"))
    assert device in shown


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    x = described(1, 8, 2, 16)
    with pytest.raises(errors.ArgumentError, match=r"device: got 'h300'; supported: a100-40gb, .*h200"):
        tilewise.explain(x, x, x, device="h300")
    with pytest.raises(errors.ArgumentError, match="backend: got 'cuda'; supported: one of cpu, "):
        tilewise.explain(x, x, x, backend="cuda")


def test_the_ledger_has_every_product_and_tensor_of_both_passes() -> None:
    q, k, v = described(2, 64, 4, 32), described(2, 48, 2, 32), described(2, 48, 2, 16)
    sinks = torch.empty(4, device="meta")
    found = tilewise.explain(q, k, v, sinks=sinks, device="a100-80gb")
    pairs = 2 * 4 * 64 * 48
    forward, backward = found.forward, found.backward
    assert forward.products == {"S = QKᵀ": 2 * pairs * 32, "O = PV": 2 * pairs * 16}
    assert sum(backward.products.values()) == 2 * pairs * (3 * 32 + 2 * 16)
    assert forward.exponentials == backward.exponentials == pairs
    sizes = {name: 2 * x.numel() for name, x in (("q", q), ("k", k), ("v", v))}
    sizes |= {"sinks": 4 * 4, "o": 2 * (2 * 64 * 4 * 16), "lse": 4 * (2 * 64 * 4)}
    assert forward.tensors == sizes
    gradients = {"do": sizes["o"], **{f"d{name}": sizes[name] for name in ("q", "k", "v", "sinks")}}
    assert backward.tensors == sizes | gradients
    assert (found.flops, found.hbm_bytes) == (forward.flops, sum(sizes.values()))
    assert found.score_bytes == 2 * pairs
    for ledger in (forward, backward):
        assert ledger.floor is not None
        assert ledger.floor.arithmetic_ms == pytest.approx(1e3 * ledger.flops / 312e12)
        assert ledger.floor.memory_ms == pytest.approx(1e3 * ledger.hbm_bytes / 2.039e12)
        assert ledger.intensity == ledger.flops / ledger.hbm_bytes


def test_what_standard_attention_would_keep_is_held_against_the_memory() -> None:
    x = described(1, 131_072, 32, 128)
    shown = " ".join(str(tilewise.explain(x, x, x, causal=True, device="h200")).split())
    assert "standard attention, with S and P: 2.2 TB, more than h200 has" in shown
    assert "bound by arithmetic" in shown
    assert "a block of h200 can have 227 KiB of SRAM" in shown
    one = described(1, 1, 32, 128)
    assert "bound by memory" in " ".join(str(tilewise.explain(one, x, x, device="h200")).split())


@pytest.mark.parametrize("device", roofline.DEVICES)
def test_every_device_of_the_table_has_a_ledger(device: str) -> None:
    x = described(1, 1024, 8, 64)
    found = tilewise.explain(x, x, x, device=device)
    assert found.floor_ms == pytest.approx(found.forward.floor.ms)  # type: ignore[union-attr]  # a named device has one
    assert f"ms on {device}" in str(found)
    assert all(len(line) <= 110 for line in str(found).splitlines())
