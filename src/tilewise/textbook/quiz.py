"""Questions about attention whose answers are computed: by closed forms, by counting, by running the algorithm.

Each question is made from random sizes. Its wrong choices are what common mistakes give: bytes for elements, a rounding
in the wrong direction, a forgotten factor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .. import errors, softmax
from ..roofline import BACKWARD, DEVICES, forms, tile_rules
from . import flash_v1, flash_v2, fp8, softmax_passes, standard
from .decode import Load
from .dropout import Replayed, Stored
from .memory import Machine
from .tiling import Blocks

FP16 = torch.float16


class Question(NamedTuple):
    """A question with choices, the index of the right one, and the reason."""

    text: str
    choices: tuple[str, ...]
    right: int
    why: str

    @property
    def answer(self) -> str:
        """The right choice."""
        return self.choices[self.right]


def questions(count: int = 10, seed: int = 0) -> list[Question]:
    """So many questions, the same ones for the same seed; no kind comes twice before all have come once.

    Raises:
        tilewise.errors.ArgumentError: `count` is no positive integer.

    Example:
        >>> [question.answer for question in questions(3, seed=1)] == [q.answer for q in questions(3, seed=1)]
        True
    """
    if count < 1:
        errors.fail(errors.ArgumentError, "count", count, "a positive integer", "ask for one question at least")
    rng = random.Random(seed)
    made: list[Question] = []
    while len(made) < count:
        made += [make(rng) for make in rng.sample(MAKERS, len(MAKERS))]
    return made[:count]


def _ask(rng: random.Random, text: str, answer: str, mistakes: Iterable[str], why: str) -> Question:
    """The question with up to three mistakes that are not the answer, in random order."""
    wrong = [mistake for mistake in dict.fromkeys(mistakes) if mistake != answer][:3]
    choices = rng.sample([answer, *wrong], 1 + len(wrong))
    return Question(text, tuple(choices), choices.index(answer), why)


def _head(n: int, d: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one head; what they hold does not matter for counts."""
    q, k, v = torch.ones(3, n, d, dtype=torch.float64).unbind()
    return q, k, v


def standard_traffic(rng: random.Random) -> Question:
    n, d = rng.choice([64, 128, 256]), rng.choice([16, 32, 64])
    machine = Machine()
    standard.forward(machine, *_head(n, d))
    mistakes = (4 * n * d, 2 * n * n + 4 * n * d, 4 * n * n, forms.flash_v2_forward(n, d, n).total)
    return _ask(
        rng,
        f"How many elements does standard attention (three kernels) move over HBM, forward, N {n}, d {d}?",
        f"{machine.counts.traffic:,}",
        (f"{mistake:,}" for mistake in mistakes),
        f"4N² + 4Nd: S and P are written and read, N² each time, and Q, K, V, O cross once; S is {n * n:,} elements",
    )


def score_memory(rng: random.Random) -> Question:
    n, heads = rng.choice([4096, 8192, 16_384, 32_768]), rng.choice([1, 16, 32])
    mib = n * n * FP16.itemsize * heads // 2**20
    return _ask(
        rng,
        f"How much memory does the score matrix S take in fp16, N {n:,}, {heads} head(s), batch 1?",
        f"{mib:,} MiB",
        (f"{mistake:,} MiB" for mistake in (mib // 2, 2 * mib, n * 128 * 2 * heads // 2**20)),
        f"N² elements of two bytes a head: {n:,}² · 2 · {heads} bytes; FlashAttention keeps N numbers a head instead",
    )


def flash_traffic(rng: random.Random) -> Question:
    n, d, block = rng.choice([64, 96, 128]), rng.choice([8, 16]), rng.choice([16, 32])
    machine = Machine()
    flash_v2.forward(machine, *_head(n, d), Blocks(block, 8))
    wrong = (forms.flash_v2_forward(n, d, 8), forms.flash_v1_forward(n, d, block), forms.standard_forward(n, d))
    return _ask(
        rng,
        f"FlashAttention-2, forward, N {n}, d {d}, tiles of {block} queries by 8 keys: how many elements cross HBM?",
        f"{machine.counts.traffic:,}",
        (f"{traffic.total:,}" for traffic in wrong),
        f"2Nd + N + 2Nd·⌈N/B_r⌉: each of {-(-n // block)} tiles of queries reads all of K and V; B_c does not matter",
    )


def first_version(rng: random.Random) -> Question:
    n, d, block = rng.choice([64, 96]), rng.choice([8, 16]), rng.choice([16, 32])
    machine = Machine()
    flash_v1.forward(machine, *_head(n, d), Blocks(block, block))
    written = machine.counts.writes["o"]
    return _ask(
        rng,
        f"FlashAttention, version 1, N {n}, d {d}, tiles of {block} by {block}: how many elements of O are written?",
        f"{written:,}",
        (f"{mistake:,}" for mistake in (n * d, written - n * d, 2 * written, n * n)),
        f"Nd zeros at the start, Nd again for each of T_c = {-(-n // block)} tiles of keys; version 2 writes Nd once",
    )


def quarter_rule(rng: random.Random) -> Question:
    kib, d = rng.choice([48, 64, 99, 163, 192, 227]), rng.choice([64, 80, 96, 128])
    m = kib * 1024 // FP16.itemsize
    block = tile_rules.quarter_tile(m, d).block_k
    up = tile_rules.quarter_tile_rounded_up(m, d).block_k
    mistakes = (up, kib * 1024 // (4 * d), m // (2 * d), block - 1)
    overflow = f"; {up} would take {tile_rules.Tile(up, up).tensors(d):,}" if up > block else ""
    return _ask(
        rng,
        f"SRAM of {kib} KiB, fp16, d {d}: the largest B for which tiles of B rows of Q, K, V and O fit?",
        f"{block}",
        (f"{mistake}" for mistake in mistakes),
        f"M = {m:,} elements, ⌊M/4d⌋ = ⌊{m / (4 * d):.2f}⌋{overflow}",
    )


def speedup(rng: random.Random) -> Question:
    m, d = rng.choice([49_152, 96_000, 100_000, 116_224]), rng.choice([64, 100, 128])
    ratio = forms.speedup_leading(d, m)
    return _ask(
        rng,
        f"M = {m:,} elements, d = {d}, B_r = M/4d, long sequences: how many times less than standard attention does "
        "FlashAttention-2 move?",
        f"{ratio:.1f}×",
        (f"{mistake:.1f}×" for mistake in (2 * ratio, ratio / 2, m / (2 * d), 4 * ratio)),
        "4N² over 8N²d²/M is M/2d²",
    )


def balance(rng: random.Random) -> Question:
    on = rng.choice(list(DEVICES.values()))
    point = on.balance(FP16)
    return _ask(
        rng,
        f"From how many FLOPs a byte on does arithmetic decide on the {on.name}, in fp16 ({on.tflops_16bit} TFLOP/s, "
        f"{on.hbm_tb_s} TB/s)?",
        f"{point:.0f}",
        (f"{mistake:.0f}" for mistake in (2 * point, point / 2, on.tflops_fp32 / on.hbm_tb_s)),
        "TFLOP/s over TB/s: the two then take equally long",
    )


def bound(rng: random.Random) -> Question:
    on, rows, n, d = rng.choice(list(DEVICES.values())), rng.choice([64, 128, 256, 512]), 1 << 16, 128
    floor = forms.floor(forms.matmul_flops(n, d), forms.flash_v2_forward(n, d, rows).total, on)
    return _ask(
        rng,
        f"FlashAttention-2 with tiles of {rows} queries on the {on.name}, fp16, long sequences, no L2: what bounds it?",
        floor.bound,
        ("arithmetic", "memory"),
        f"4N²d FLOPs over 2Nd·N/B_r elements of two bytes are B_r = {rows} FLOPs a byte; the balance is "
        f"{on.balance(FP16):.0f}",
    )


def causal_tiles(rng: random.Random) -> Question:
    block, t = rng.choice([64, 128]), rng.randint(3, 9)
    visited = Blocks(block, block, causal=True).grid(block * t, block * t).visited
    return _ask(
        rng,
        f"Causal attention, N {block * t}, tiles of {block} by {block}: how many tiles of S are computed?",
        f"{visited}",
        (f"{mistake}" for mistake in (t * t, visited - t, t * t // 2, t * t - t)),
        f"T(T + 1)/2 with T = {t}: the diagonal tiles are needed too, so it is more than half",
    )


def last_keys(rng: random.Random) -> Question:
    rows, keys = rng.randint(2, 6), rng.randint(8, 16)
    row = rng.randrange(rows)
    seen = len(Blocks(1, 1, causal=True).grid(rows, keys).keys_seen(row))
    return _ask(
        rng,
        f"Causal, {rows} queries, {keys} keys, bottom-right aligned: how many keys does query {row} (from 0) see?",
        f"{seen}",
        (f"{mistake}" for mistake in (row + 1, seen - 1, seen + 1, keys)),
        f"key j is seen iff j <= i + seqlen_k - seqlen_q = {row} + {keys - rows}",
    )


def merging(rng: random.Random) -> Question:
    a, b = rng.randint(1, 4), rng.randint(5, 9)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    lse_a, lse_b = (torch.tensor([math.log(weight)], dtype=torch.float64) for weight in (a, b))
    merged, _ = softmax.merge(zero, lse_a, one, lse_b)
    return _ask(
        rng,
        f"Two parts of a row: output 0 with lse = ln {a}, output 1 with lse = ln {b}. What is the output of both?",
        f"{merged.item():.3f}",
        (f"{mistake:.3f}" for mistake in (0.5, a / (a + b), math.log(b) / (math.log(a) + math.log(b)))),
        f"parts weigh exp(lse): {b}/({a} + {b})",
    )


def passes(rng: random.Random) -> Question:
    rows, n, name = rng.choice([4, 8]), rng.choice([32, 64]), rng.choice(["three_pass", "two_pass"])
    machine = Machine()
    getattr(softmax_passes, name)(machine, torch.ones(rows, n, dtype=torch.float64), block=16)
    online = ", online" if name == "two_pass" else ""
    return _ask(
        rng,
        f"Softmax of a {rows} × {n} matrix in {name.removesuffix('_pass')} passes{online}: how many elements are read?",
        f"{machine.counts.read:,}",
        (f"{times * rows * n:,}" for times in (1, 2, 3, 4)),
        "each pass reads all: maximum, sum, normalise; online, maximum and sum share a pass",
    )


def recomputation(rng: random.Random) -> Question:
    n, d = rng.choice([1024, 2048]), rng.choice([64, 128])
    with_s, without = (forms.matmul_flops(n, d, BACKWARD, recompute=again) for again in (True, False))
    forward = forms.matmul_flops(n, d)
    kind, more = rng.choice(
        [("the backward pass", with_s / without), ("both passes", (forward + with_s) / (forward + without))]
    )
    return _ask(
        rng,
        f"Computing S again in the backward: how many more FLOPs in the products of {kind}?",
        f"{100 * (more - 1):.1f} %",
        ("25.0 %", "16.7 %", "50.0 %", "100.0 %"),
        "forward 4N²d, backward 8N²d, and 2N²d more for S",
    )


def stored_mask(rng: random.Random) -> Question:
    n, stored = rng.choice([32, 64]), rng.choice([True, False])
    draw, machine = Replayed(seed=0, dropout_p=0.5), Machine()
    dropped = Stored.written(machine, draw, n, n) if stored else draw
    flash_v2.forward(machine, *_head(n, 8), Blocks(16, 16), dropout=dropped)
    extra = machine.counts.traffic - forms.flash_v2_forward(n, 8, 16).total
    how = "written to HBM for the backward" if stored else "drawn again from its seed in the backward"
    return _ask(
        rng,
        f"Dropout, N {n}, its mask {how}: how many elements more does the forward move?",
        f"{extra:,}",
        (f"{mistake:,}" for mistake in (0, n * n, 2 * n * n, n)),
        "a stored mask is N² elements; a replayed one is a function of the seed and the position",
    )


def rounding(rng: random.Random) -> Question:
    x = rng.choice([0.3, 1.06, 1.2, 2.9, 17.5, 90.0, 250.0, 500.0])
    stored = fp8.cast(torch.tensor(x, dtype=torch.float64), fp8.E4M3).item()
    step = 2.0 ** (math.floor(math.log2(stored)) - 3)
    return _ask(
        rng,
        f"Which number does FP8 E4M3 hold for {x:g} (to nearest, saturating)?",
        f"{stored:g}",
        (f"{mistake:g}" for mistake in (stored + step, stored - step, x)),
        f"three bits of mantissa: steps of {step:g} there, and 448 at most",
    )


def splitting(rng: random.Random) -> Question:
    tasks, blocks = rng.choice([8, 32, 132, 264]), rng.choice([1, 64, 256])
    load = Load(tasks, blocks, processors=132)
    return _ask(
        rng,
        f"Decoding on 132 SMs: {tasks} tasks (batch × heads) of {blocks} key tile(s) each. Does splitting keys pay?",
        "yes" if load.pays() else "no",
        ("yes", "no"),
        f"best are {load.best()} split(s): {load.time(load.best()):g} against {load.time(1):g} tile times; it takes "
        "idle SMs and more than a few tiles",
    )


MAKERS: list[Callable[[random.Random], Question]] = [
    standard_traffic,
    score_memory,
    flash_traffic,
    first_version,
    quarter_rule,
    speedup,
    balance,
    bound,
    causal_tiles,
    last_keys,
    merging,
    passes,
    recomputation,
    stored_mask,
    rounding,
    splitting,
]
