"""Calls with a cache in flash-attn's words, beside what they say: append, rotate, attend, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import tilewise
from tilewise import errors
from tilewise.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tilewise.compat.flash_attn_3 import flash_attn_with_kvcache as flash_attn_3_with_kvcache
from tilewise.compat.flash_attn_rotary import apply_rotary_emb

from .test_flash_attn import draw

FP8 = torch.float8_e4m3fn
BATCH, HEADS_Q, HEADS_K, DIM, CAPACITY, PAGE = 3, 4, 2, 16, 24, 4


@dataclass(frozen=True)
class Case:
    """One call, in flash-attn 3's words; `run` is flash-attn 2 or 3."""

    rows_q: list[int]
    rows_new: list[int] = field(default_factory=list)
    used: tuple[int, ...] = (5, 0, 11)
    options: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    ragged_new: bool = False
    rotary: bool = False
    paged: bool = False
    indexed: bool = False
    leftpad: bool = False
    positions: bool = False

    def tensors(self) -> dict[str, Any]:
        """The arguments."""
        rows = 2 * BATCH if self.indexed else BATCH
        found: dict[str, Any] = {
            "k_cache": draw(rows, CAPACITY, HEADS_K, DIM, seed=1),
            "v_cache": draw(rows, CAPACITY, HEADS_K, DIM, seed=2),
            "cache_seqlens": torch.tensor(self.used, dtype=torch.int32),
        }
        found.update(self._rows("q", self.rows_q, HEADS_Q, self.ragged))
        if self.rows_new:
            found.update(self._rows("k", self.rows_new, HEADS_K, self.ragged_new))
            found.update(self._rows("v", self.rows_new, HEADS_K, self.ragged_new))
        if self.ragged:
            found |= {"cu_seqlens_q": offsets(self.rows_q), "max_seqlen_q": max(self.rows_q)}
        if self.ragged_new:
            same = self.ragged and self.rows_new == self.rows_q
            found["cu_seqlens_k_new"] = found["cu_seqlens_q"] if same else offsets(self.rows_new)
        if self.rotary:
            angle = draw(CAPACITY + 8, DIM // 4, seed=3)
            found |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
        if self.positions:
            found["rotary_seqlens"] = found["cache_seqlens"] // 2
        if self.indexed:
            found["cache_batch_idx"] = torch.tensor([4, 0, 3], dtype=torch.int32)
        if self.leftpad:
            found["cache_leftpad"] = torch.tensor([2, 0, 7], dtype=torch.int32)
        if self.paged:
            table = torch.randperm(rows * CAPACITY // PAGE, generator=torch.Generator().manual_seed(4))
            table = table.view(rows, -1).int()
            for name in ("k_cache", "v_cache"):
                pages = torch.empty(table.numel(), PAGE, HEADS_K, DIM)
                pages[table.flatten().long()] = found[name].view(-1, PAGE, HEADS_K, DIM)
                found[name] = pages
            found["page_table"] = table
        return found

    def _rows(self, name: str, rows: list[int], heads: int, ragged: bool) -> dict[str, torch.Tensor]:
        whole = draw(BATCH, max(rows), heads, DIM, seed=ord(name))
        if ragged:
            whole = torch.cat([x[:n] for x, n in zip(whole, rows, strict=True)])
        return {name: whole}


def offsets(rows: list[int]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(rows).cumsum(0), (1, 0)).int()


def sequence(x: torch.Tensor, b: int, cu: torch.Tensor | None) -> torch.Tensor:
    return x[b] if cu is None else x[int(cu[b]) : int(cu[b + 1])]


def slots(tensors: dict[str, Any], name: str, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the slots of sequence b lie in the cache: the first and the second index."""
    row = int(tensors["cache_batch_idx"][b]) if "cache_batch_idx" in tensors else b
    slot = torch.arange(CAPACITY)
    if "page_table" in tensors:
        return tensors["page_table"][row].long()[slot // PAGE], slot % PAGE
    return torch.full_like(slot, row), slot


def expected(tensors: dict[str, Any], options: dict[str, Any], interleaved: bool) -> tuple[list[Any], list[Any]]:
    """Output and LSE of each sequence; the caches in `tensors` are appended to."""
    outs, lses = [], []
    moves = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
    for b in range(BATCH):
        q, used = sequence(tensors["q"], b, tensors.get("cu_seqlens_q")), int(tensors["cache_seqlens"][b])
        first = int(tensors.get("rotary_seqlens", tensors["cache_seqlens"])[b])
        new = 0
        where = slots(tensors, "k_cache", b)
        if "k" in tensors:
            k, v = (sequence(tensors[name], b, tensors.get("cu_seqlens_k_new")) for name in ("k", "v"))
            new = k.shape[0]
            if "rotary_cos" in tensors:
                tables = (tensors["rotary_cos"], tensors["rotary_sin"])
                k = apply_rotary_emb(k[None], *tables, interleaved, seqlen_offsets=first)[0]
                if moves:
                    q = apply_rotary_emb(q[None], *tables, interleaved, seqlen_offsets=first)[0]
                else:
                    q = apply_rotary_emb(q.flatten(0, 1)[None, None], *tables, interleaved, seqlen_offsets=first).view(
                        q.shape
                    )
            for cache, x in (("k_cache", k), ("v_cache", v)):
                tensors[cache][where[0][used : used + new], where[1][used : used + new]] = x
        pad = int(tensors["cache_leftpad"][b]) if "cache_leftpad" in tensors else 0
        keys, values = (tensors[name][where][None, pad : used + new] for name in ("k_cache", "v_cache"))
        native = {
            "causal": options.get("causal", False),
            "window": tuple(None if n < 0 else n for n in options.get("window_size", (-1, -1))),
            "softcap": options.get("softcap") or None, "softmax_scale": options.get("softmax_scale"),
            "alibi_slopes": options.get("alibi_slopes"),
        }  # fmt: skip
        if options.get("attention_chunk"):
            chunk, off = options["attention_chunk"], keys.shape[1] - q.shape[0]
            position = torch.arange(q.shape[0])[:, None] + off
            native["mask"] = position.div(chunk, rounding_mode="floor") == torch.arange(keys.shape[1]) // chunk
        out, lse = tilewise.attention(q[None], keys, values, **native, return_lse=True)
        outs.append(out[0])
        lses.append(lse[0])
    return outs, lses


CAUSAL, WINDOW = {"causal": True}, {"window_size": (3, 1)}
SLOPES = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]), "causal": True}
ONE, THREE = [1, 1, 1], [3, 3, 3]

# What flash-attn 2 can say.
CASES = {
    "decode": Case(ONE, ONE, options=CAUSAL),
    "decode_no_mask": Case(ONE, ONE),
    "no_append": Case(THREE, options=CAUSAL),
    "append_as_many": Case(THREE, THREE, options=CAUSAL),
    "append_more": Case(ONE, THREE, options=CAUSAL),
    "append_fewer": Case(THREE, ONE, options=WINDOW),
    "softcap": Case(THREE, options={"softcap": 1.5}),
    "scale": Case(ONE, options={"softmax_scale": 0.6}),
    "alibi": Case(THREE, THREE, options=SLOPES),
    "rotary": Case(THREE, THREE, options=CAUSAL, rotary=True),
    "rotary_window": Case(THREE, THREE, options=WINDOW, rotary=True),
    "rotary_no_mask": Case(THREE, THREE, rotary=True),
    "rotary_no_mask_one": Case(ONE, ONE, rotary=True),
    "rotary_more": Case(ONE, THREE, options=CAUSAL, rotary=True),
    "rotary_fewer": Case(THREE, ONE, options=CAUSAL, rotary=True),
    "paged": Case(THREE, THREE, options=CAUSAL, paged=True, rotary=True),
    "indexed": Case(THREE, THREE, options=CAUSAL, indexed=True, rotary=True),
    "leftpad": Case(THREE, THREE, options=CAUSAL, leftpad=True, rotary=True),
    "leftpad_no_mask": Case(THREE, ONE, leftpad=True, rotary=True, paged=True),
}
# What flash-attn 3 adds.
CASES_3 = {
    **{name: case for name, case in CASES.items() if name != "alibi"},
    "ragged": Case([2, 1, 4], options=CAUSAL, ragged=True),
    "ragged_append": Case([2, 1, 4], [2, 1, 4], options=CAUSAL, ragged=True, ragged_new=True, rotary=True),
    "ragged_append_others": Case([2, 1, 4], [3, 0, 1], options=CAUSAL, ragged=True, ragged_new=True, rotary=True),
    "ragged_append_plain": Case([2, 1, 4], [3, 0, 1], options=CAUSAL, ragged=True, ragged_new=True),
    "ragged_no_mask": Case([2, 1, 4], [3, 0, 1], ragged=True, ragged_new=True, rotary=True, paged=True),
    "ragged_queries": Case([2, 1, 4], THREE, options=WINDOW, ragged=True, rotary=True),
    "ragged_keys": Case(THREE, [3, 0, 1], options=CAUSAL, ragged_new=True, rotary=True),
    "positions": Case(THREE, THREE, options=CAUSAL, rotary=True, positions=True),
    "positions_no_mask": Case(THREE, ONE, rotary=True, positions=True, indexed=True),
    "pages_by_index": Case(THREE, THREE, options=CAUSAL, paged=True, indexed=True, rotary=True),
    "chunk": Case(THREE, THREE, options={"causal": True, "attention_chunk": 4}),
    "chunk_leftpad": Case(THREE, ONE, options={"attention_chunk": 3}, leftpad=True),
    "chunk_ragged": Case([2, 1, 4], [3, 0, 1], options={"attention_chunk": 5}, ragged=True, ragged_new=True),
}


def check(case: Case, version: int, interleaved: bool = True) -> None:
    tensors, ours = case.tensors(), case.tensors()
    outs, lses = expected(tensors, case.options, interleaved)
    given = {**ours, "rotary_interleaved": interleaved}
    if version == 2:
        given["block_table"] = given.pop("page_table", None)
    fn = flash_attn_with_kvcache if version == 2 else flash_attn_3_with_kvcache
    out, lse = fn(**given, **case.options, return_softmax_lse=True)
    for b in range(BATCH):
        cu = ours.get("cu_seqlens_q")
        assert torch.allclose(sequence(out, b, cu), outs[b], atol=1e-5)
        here = lse[b] if cu is None else lse[:, int(cu[b]) : int(cu[b + 1])]
        assert torch.allclose(here, lses[b], atol=1e-5)
    for name in ("k_cache", "v_cache"):
        assert torch.allclose(ours[name], tensors[name], atol=1e-6)
        untouched = tensors[name] == case.tensors()[name]
        assert torch.equal(ours[name][untouched], tensors[name][untouched])


@pytest.mark.parametrize("name", CASES)
def test_flash_attn_2(name: str) -> None:
    check(CASES[name], 2)


@pytest.mark.parametrize("name", CASES_3)
def test_flash_attn_3(name: str) -> None:
    check(CASES_3[name], 3)


@pytest.mark.parametrize("name", ["rotary", "rotary_no_mask", "rotary_fewer"])
def test_pairs_of_halves(name: str) -> None:
    check(CASES[name], 2, interleaved=False)


def plain(**options: Any) -> Any:
    """A call of three rows with nothing appended, for each version's common part."""
    tensors = CASES["no_append"].tensors()
    return flash_attn_with_kvcache(**{**tensors, **options})


def test_lengths_may_be_one_number_or_all() -> None:
    as_tensor = plain(cache_seqlens=torch.full((BATCH,), 7, dtype=torch.int32))
    assert torch.equal(plain(cache_seqlens=7), as_tensor)
    whole = plain(cache_seqlens=torch.full((BATCH,), CAPACITY, dtype=torch.int32))
    assert torch.equal(plain(cache_seqlens=None), whole)
    paged = replace(CASES["no_append"], paged=True).tensors()
    del paged["cache_seqlens"]
    paged["block_table"] = paged.pop("page_table")
    assert torch.allclose(flash_attn_with_kvcache(**paged), whole, atol=1e-6)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_splits(num_splits: int) -> None:
    assert torch.allclose(plain(num_splits=num_splits), plain(), atol=1e-6)


def test_garbage_beyond_the_lengths_is_not_read() -> None:
    tensors, clean = CASES["no_append"].tensors(), CASES["no_append"].tensors()
    for name in ("k_cache", "v_cache"):
        for b, n in enumerate(CASES["no_append"].used):
            tensors[name][b, n:] = float("nan")
    assert torch.equal(flash_attn_with_kvcache(**tensors), flash_attn_with_kvcache(**clean))


def test_positions_alone_rotate_nothing() -> None:
    """flash-attn's own tests pass them so."""
    tensors = CASES_3["decode"].tensors()
    positions = {"rotary_seqlens": tensors["cache_seqlens"]}
    again = CASES_3["decode"].tensors()
    assert torch.equal(flash_attn_3_with_kvcache(**tensors, **positions), flash_attn_3_with_kvcache(**again))


def test_no_graph_is_kept() -> None:
    tensors = CASES["decode"].tensors()
    tensors["q"].requires_grad_()
    assert not flash_attn_with_kvcache(**tensors).requires_grad


def test_an_fp8_cache() -> None:
    tensors = CASES["no_append"].tensors()
    scale = torch.full((BATCH, HEADS_K), 0.25)
    cached = {name: (tensors[name] / 0.25).to(FP8) for name in ("k_cache", "v_cache")}
    whole = {name: x.float() * 0.25 for name, x in cached.items()}
    out = flash_attn_3_with_kvcache(**{**tensors, **cached}, k_descale=scale, v_descale=scale)
    assert torch.allclose(out, flash_attn_3_with_kvcache(**{**tensors, **whole}), atol=1e-5)


@pytest.mark.parametrize("name", ["append_as_many", "ragged_append_others", "ragged_append"])
@pytest.mark.parametrize("scaled", [False, True])
def test_everything_in_fp8(name: str, scaled: bool) -> None:
    """As the same values in bf16, in a cache of that; what is appended is stored as the codes that were passed."""
    case = replace(CASES_3[name], rotary=False)
    tensors = case.tensors()
    codes = {n: tensors[n].to(FP8) for n in ("q", "k", "v", "k_cache", "v_cache")}
    scales = {
        n: 0.5 + draw(BATCH, HEADS_K, seed=i).abs() if scaled else torch.ones(BATCH, HEADS_K)
        for i, n in enumerate("qkv")
    }
    whole = {**tensors, **{n: x.float() for n, x in codes.items()}}
    for b in range(BATCH):
        for n, group in (("q", 2), ("k", 1), ("v", 1)):
            sequence(whole[n], b, whole.get("cu_seqlens_q" if n == "q" else "cu_seqlens_k_new")).mul_(
                scales[n][b].repeat_interleave(group)[:, None]
            )
        for n in ("k", "v"):
            whole[f"{n}_cache"][b] *= scales[n][b][:, None]
    whole = {n: x.bfloat16() if x.is_floating_point() else x for n, x in whole.items() if isinstance(x, torch.Tensor)}
    whole |= {n: x for n, x in tensors.items() if not isinstance(x, torch.Tensor)}
    given = {f"{n}_descale": x for n, x in scales.items()} if scaled else {}
    stored = {n: codes[n].clone() for n in ("k_cache", "v_cache")}
    out = flash_attn_3_with_kvcache(**{**tensors, **codes, **stored}, **given, **case.options)
    expected_out = flash_attn_3_with_kvcache(**whole, **case.options)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), expected_out.float(), atol=0.03, rtol=0.02)
    first, n = int(tensors["cache_seqlens"][0]), case.rows_new[0]
    new = sequence(codes["k"], 0, tensors.get("cu_seqlens_k_new"))
    assert torch.equal(stored["k_cache"][0, first : first + n].float(), new.float())


@pytest.mark.parametrize("name", ["rotary", "rotary_fewer"])
def test_tables_in_fp8(name: str) -> None:
    """flash-attn 3 wants them beside fp8 queries."""
    first, second = CASES[name].tensors(), CASES[name].tensors()
    codes = {n: first[n].to(FP8) for n in ("rotary_cos", "rotary_sin")}
    out = flash_attn_3_with_kvcache(**{**first, **codes}, causal=True)
    expected = flash_attn_3_with_kvcache(**{**second, **{n: x.float() for n, x in codes.items()}}, causal=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 2.0}], ids=str)
def test_varlen_over_pages(options: dict[str, Any]) -> None:
    case = Case([2, 1, 4], ragged=True, paged=True, options=options)
    tensors = case.tensors()
    outs, lses = expected(case.tensors(), options, True)
    cu_q, cu_k = tensors["cu_seqlens_q"], offsets(list(case.used))
    given = (tensors["q"], tensors["k_cache"], tensors["v_cache"], cu_q, cu_k, 4, 11)
    out, lse, s_dmask = flash_attn_varlen_func(
        *given, **options, block_table=tensors["page_table"], return_attn_probs=True
    )
    assert torch.allclose(out, torch.cat(outs), atol=1e-5) and torch.allclose(lse, torch.cat(lses, -1), atol=1e-5)
    assert s_dmask.shape == (0,)
    with pytest.raises(errors.UnsupportedError, match=r"dropout_p: got 0\.5"):
        flash_attn_varlen_func(*given, dropout_p=0.5, block_table=tensors["page_table"])
    with pytest.raises(errors.ArgumentError, match="max_seqlen_k: got 25"):
        flash_attn_varlen_func(*given[:-1], 25, block_table=tensors["page_table"])


REFUSED: dict[str, tuple[int, str, dict[str, Any], str]] = {
    "rotary_alone": (2, "no_append", dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 4)), "rotary_cos: got"),
    "one_table": (2, "decode", {"rotary_cos": torch.ones(9, 4)}, "rotary_cos, rotary_sin: got one"),
    "no_lengths": (2, "decode", {"cache_seqlens": None}, "cache_seqlens: got None"),
    "lengths": (2, "decode", {"cache_seqlens": torch.ones(2).int()}, r"cache_seqlens: got shape \[2\]"),
    "keys_alone": (2, "decode", {"v": None}, "k_new alone"),
    "splits": (2, "decode", {"num_splits": -1}, "num_splits: got -1"),
    "window": (2, "decode", {"window_size": (-3, 0)}, "window_size: got"),
    "interleaved": (2, "rotary", {"rotary_interleaved": 2}, "interleaved: got 2"),
    "qv": (3, "decode", {"qv": torch.ones(1)}, "qv: got Tensor"),
    "q_descale": (3, "decode", {"q_descale": torch.ones(3, 2)}, "q_descale: got Tensor.*float8_e4m3fn q"),
    "k_descale": (3, "decode", {"k_descale": torch.ones(3, 2)}, "k_scale"),
    "sm_margin": (3, "decode", {"sm_margin": 1}, "sm_margin: got 1"),
    "metadata": (3, "decode", {"scheduler_metadata": torch.ones(1)}, "scheduler_metadata: got Tensor"),
    "max_seqlen_q": (3, "decode", {"max_seqlen_q": 3}, "max_seqlen_q: got 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    version, case, changed, message = REFUSED[name]
    given = {**CASES[case].tensors(), **changed}
    fn = flash_attn_with_kvcache if version == 2 else flash_attn_3_with_kvcache
    with pytest.raises((errors.ArgumentError, errors.UnsupportedError), match=message):
        fn(**given)


CHANGES: dict[str, Any] = {
    "softmax_scale": 0.9,
    "causal": True,
    "window_size": (1, 0),
    "softcap": 0.5,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]),
    "cache_seqlens": 9,
    "cache_batch_idx": torch.tensor([1, 0, 2]),
    "cache_leftpad": torch.tensor([2, 0, 3]),
    "block_table": torch.tensor([[1], [2], [0]]),
}


@pytest.mark.parametrize("argument", CHANGES)
def test_every_argument_counts(argument: str) -> None:
    assert not torch.allclose(plain(**{argument: CHANGES[argument]}), plain())


def test_interleaving_counts() -> None:
    tensors = CASES["rotary"].tensors(), CASES["rotary"].tensors()
    outs = [
        flash_attn_with_kvcache(**x, causal=True, rotary_interleaved=how)
        for x, how in zip(tensors, (True, False), strict=True)
    ]
    assert not torch.allclose(*outs)
