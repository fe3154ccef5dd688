"""Closed forms, tile rules and the device table: identities among them, bounds, and what bad sizes are told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import errors
from tilewise.roofline import BACKWARD, DEVICES, device, forms, tile_rules
from tilewise.roofline.tile_rules import Tile

SIZES = st.integers(1, 1 << 20)
DIMS = st.integers(1, 512)
FP16, FP8 = torch.float16, torch.float8_e4m3fn


@given(m=SIZES, d=DIMS)
def test_the_quarter_rule_fits_and_rounding_up_overflows(m: int, d: int) -> None:
    """B = ⌊M/4d⌋ is the largest B whose four tiles fit; ⌈M/4d⌉ overflows wherever it is another number."""
    if m < 4 * d:
        with pytest.raises(
            errors.ArgumentError, match=f"m: got {m} elements of SRAM; supported: at least 4·d = {4 * d}"
        ):
            tile_rules.quarter_tile(m, d)
        return
    block = tile_rules.quarter_tile(m, d).block_k
    assert Tile(block, block).tensors(d) <= m < Tile(block + 1, block + 1).tensors(d)
    up = tile_rules.quarter_tile_rounded_up(m, d).block_k
    assert (Tile(up, up).tensors(d) > m) == (up != block) == (m % (4 * d) > 0)


@given(m=SIZES, d=DIMS)
def test_the_square_tile_is_the_largest(m: int, d: int) -> None:
    if m < 2 * d + 1:
        with pytest.raises(errors.ArgumentError, match="a row of Q, a row of K and their score"):
            tile_rules.square_tile(m, d)
        return
    block, _ = tile_rules.square_tile(m, d)
    assert Tile(block, block).with_scores(d) <= m < Tile(block + 1, block + 1).with_scores(d)


@given(m=st.integers(1, 1 << 17), d=st.integers(1, 256), multiple=st.sampled_from([1, 16, 64]))
def test_tiles_fill_the_sram(m: int, d: int, multiple: int) -> None:
    if m < Tile(multiple, multiple).with_scores(d):
        with pytest.raises(errors.ArgumentError, match=f"{multiple} rows of Q and K and their scores"):
            tile_rules.tiles(m, d, multiple)
        return
    found = tile_rules.tiles(m, d, multiple)
    assert [tile.block_k for tile in found] == [multiple * step for step in range(1, len(found) + 1)]
    for block_q, block_k in found:
        assert Tile(block_q, block_k).with_scores(d) <= m < Tile(block_q + multiple, block_k).with_scores(d)
    assert Tile(multiple, found[-1].block_k + multiple).with_scores(d) > m
    assert found[0].block_q == max(tile.block_q for tile in found)


def test_the_quarter_rule_leaves_the_scores_to_registers() -> None:
    """Four tiles of ⌊M/4d⌋ rows fit into 192 KB of fp16 at d = 128; with the scores beside them they do not."""
    m = device("a100-40gb").sram_elements(FP16)
    block = tile_rules.quarter_tile(m, 128).block_k
    tile = Tile(block, block)
    assert tile.tensors(128) <= m < tile.resident(128)
    assert tile_rules.square_tile(m, 128).with_scores(128) <= m


@given(n=st.integers(1, 4096), d=DIMS, block=st.integers(1, 4096))
def test_forms_agree_with_each_other(n: int, d: int, block: int) -> None:
    assert forms.standard_forward(n, d).total == 4 * n * n + 4 * n * d
    assert forms.standard_memory(n, d) - forms.flash_memory(n, d) == 2 * n * n - n
    assert forms.matmul_flops(n, d, BACKWARD) == 2.5 * forms.matmul_flops(n, d)
    # Rounding T_r = N/B_r up costs at most one more pass over K and V; L costs N.
    m = 4 * d * block
    exact, leading = forms.flash_v2_forward(n, d, block).total, forms.flash_v2_leading(n, d, m)
    assert leading <= exact <= leading + 2 * n * d + n
    assert leading == pytest.approx(8 * forms.flash_order(n, d, m) + 2 * n * d)


@given(n=st.integers(1, 1 << 16), d=st.integers(1, 256), m=st.integers(1, 1 << 20))
def test_no_tile_goes_below_the_lower_bound(n: int, d: int, m: int) -> None:
    """With one row of K and V at a time, Q and O can have M/2d rows: the least that version 2 ever moves."""
    if block := m // (2 * d):
        assert forms.lower_bound(n, d, m) <= forms.flash_v2_forward(n, d, block).total


def test_version_2_is_within_twice_the_lower_bound_for_long_sequences() -> None:
    n, d, m = 1 << 20, 64, 98_304
    ratio = forms.flash_v2_forward(n, d, m // (2 * d)).total / forms.lower_bound(n, d, m)
    assert 2 < ratio < 2.1 * (1 + d * d / m)


def test_the_speedup_is_the_ratio_of_traffic_for_long_sequences() -> None:
    d, m = 64, 98_304
    for n, within in ((1024, 0.5), (16_384, 0.05), (1 << 20, 0.001)):
        ratio = forms.standard_forward(n, d).total / forms.flash_v2_leading(n, d, m)
        assert ratio == pytest.approx(forms.speedup_leading(d, m), rel=within)


def test_standard_attention_has_intensity_of_half_the_head_dim() -> None:
    for d in (32, 64, 128):
        n = 1 << 20
        assert forms.intensity(forms.matmul_flops(n, d), forms.standard_forward(n, d).total) == pytest.approx(
            d / 2, rel=1e-3
        )


def test_floors_say_what_bounds_an_algorithm() -> None:
    on, n, d = device("h200"), 16_384, 128
    work = forms.matmul_flops(n, d)
    standard = forms.floor(work, forms.standard_forward(n, d).total, on)
    # Intensity is about B_r FLOP/B in fp16, so that tiles of 128 rows live by the L2 cache where the balance is 206.
    assert forms.floor(work, forms.flash_v2_forward(n, d, 128).total, on).bound == "memory"
    flash = forms.floor(work, forms.flash_v2_forward(n, d, 256).total, on)
    assert (standard.bound, flash.bound) == ("memory", "arithmetic")
    assert standard.arithmetic_ms == flash.arithmetic_ms == flash.ms == pytest.approx(1e3 * work / 989.4e12)
    assert standard.ms == pytest.approx(1e3 * 2 * forms.standard_forward(n, d).total / 4.8e12)
    assert forms.floor(work, 1, on, FP8).arithmetic_ms == pytest.approx(flash.ms * 989.4 / 1978.9)


@pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)
def test_the_device_table_is_consistent(on: Any) -> None:
    assert on.source
    assert re.search(r"\b20\d\d\b", on.source), "a source has a year"
    assert on.sram_kib < on.sram_sm_kib
    assert on.sms * on.sram_sm_kib * 1024 < on.l2_mb * 1e6 < on.hbm_gb * 1e9
    assert on.balance(FP16) == pytest.approx(on.tflops_16bit / on.hbm_tb_s)
    if on.tflops_fp8 is not None:
        assert on.tflops(FP8) == pytest.approx(2 * on.tflops(FP16), rel=1e-3)


def test_fp8_is_refused_where_the_tensor_cores_have_none() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"float8_e4m3fn on a100-40gb; supported: fp8 on rtx4090, h100"):
        device("a100-40gb").tflops(FP8)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: forms.standard_forward(0, 64), "n"),
        (lambda: forms.flash_v2_forward(1024, 64, -1), "block_q"),
        (lambda: forms.flash_v2_leading(1024, 64, 0), "m"),
        (lambda: forms.lower_bound(1024, 6.5, 100), "d"),  # type: ignore[arg-type]  # the point of the test
        (lambda: forms.matmul_flops(True, 64), "n"),
        (lambda: tile_rules.tiles(1024, 64, 0), "multiple"),
        (lambda: tile_rules.square_tile(1024, 0), "d"),
        (lambda: tile_rules.rows_beside(0, 1024, 64), "block_k"),
    ],
)
def test_sizes_that_are_no_sizes_are_refused(call: Any, name: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^{name}: got .*; supported: a positive integer"):
        call()
