"""Shipped kernels, compiled without a GPU: they fit the shared memory, and hot loops stay in registers.

The default run takes one row for each pass and class of GPU; ``TILEWISE_ALL_TILES=1 pytest tests/kernels`` takes all,
which is many minutes of compilation.
"""

from __future__ import annotations

import os
from typing import Any

import budgets
import pytest
import torch
from configurations import Row, compile_row, rows
from offline import SHARED, catching

import tilewise
from tilewise import _triton, masks
from tilewise.arguments import prepare
from tilewise.cache_arguments import prepare as prepare_cache

ALL = os.environ.get("TILEWISE_ALL_TILES") == "1"
SAMPLE = {
    "sm90-forward-16bit-128",
    "sm90-dkv-16bit-64",
    "sm90-dkv dropout-16bit-128",
    "sm89-forward-16bit-64",
    "sm80-dq-16bit-64",
}


@pytest.mark.parametrize("row", [row for row in rows() if ALL or str(row) in SAMPLE], ids=str)
def test_tile(row: Row) -> None:
    kernel = compile_row(row)
    assert kernel.shared <= SHARED[row.arch], "more shared memory than a program may use"
    assert kernel.spilled <= budgets.of(budgets.TRITON_SPECIAL if " " in row.pass_ else budgets.TRITON[row.dtype])
    if row.arch == 90 and row.dtype == "16bit" and row.head_dim <= 256 and row.pass_ != "dbias":
        assert "wgmma.mma_async" in kernel.ptx
        assert "serialized" not in kernel.log


def _curve(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return s + table[h, (q - k) % 7]


# What compiles differently from what the interpreter runs: compile-time values inside records.
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": torch.empty(1, 1, 1, 128)},
    "score_mod": {"score_mod": tilewise.ScoreMod(_curve, lambda ds, s, b, h, q, k, table: ds, (torch.empty(2, 7),))},
    "masks": {"mask": masks.PrefixLM(4) | masks.Window(1, 1) | masks.Predicate(lambda b, h, q, k: k % 2 == h)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.empty(1, 128, 2, 16, dtype=torch.float16) for _ in range(3))
    problem, inputs, _ = prepare(q, k, v, **OPTIONS[name])
    monkeypatch.setattr(_triton, "_architecture", lambda device: "small")
    with catching(89) as caught:
        out, lse = _triton.forward(problem, inputs)
        _triton.backward(problem, inputs, out, lse, out, lse, ("q", "k", "v"))
    assert [kernel.kernel for kernel in caught] == ["forward_kernel", "delta_kernel", "dq_kernel", "dkv_kernel"]


def test_narrow_values_beside_wide_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for sm_90 reads no register that it never writes (`offline.compile_launch` looks)."""
    monkeypatch.setattr(_triton, "_architecture", lambda problem: "hopper")
    with catching(90) as caught:
        q, k, v = (torch.empty(2, 128, 2, dim, dtype=torch.float16) for dim in (100, 100, 20))
        _triton.forward(*prepare(q, k, v, causal=True)[:2])
        q, k, v = (torch.empty(2, 128, 2, dim, dtype=torch.float16) for dim in (40, 40, 16))
        _triton.attend_cache(*prepare_cache(q, k, v, cache_seqlens=torch.tensor([128, 5]), causal=True))
    assert [kernel.kernel for kernel in caught][:2] == ["forward_kernel", "decode_kernel"]
