"""Flash-Decoding: the keys of one query split over processors, the parts combined, and when that pays.

While decoding there are few query rows (one, or the heads of a group), so the tasks of `flash_v2`, one for each row
tile, leave most of a GPU idle. Splitting the keys makes more tasks, which read the same keys and values in all, and
costs partial results and a second kernel that merges them.

Source: "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov, 2023); the merge: `monoid`; the
published rule: flash-attention 2, csrc/flash_attn/flash_api.cpp, num_splits_heuristic.
"""

from __future__ import annotations

from functools import reduce
from itertools import count
from typing import NamedTuple

import torch

from .. import errors, softmax
from .flash_v2 import Operands, Output
from .memory import Machine
from .tiling import Blocks, Grid, check, cut, scale_of


def forward(
    machine: Machine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    num_splits: int,
    block_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Output:
    """``softmax(scale q k^T) v`` of R rows over N keys in independent parts, then combined.

    The T_c key tiles are dealt in runs of ``ceil(T_c / num_splits)``, which makes S <= num_splits parts. Traffic in
    elements, d_v = d, all tiles visible:

        parts      each reads Q and its K, V; writes O_s, L_s     2 Nd + 2S Rd + S R
        combine    reads all O_s, L_s; writes O, L                (S + 1) (Rd + R)
        total      2 Nd + (3S + 1) Rd + (2S + 1) R

    and ``2 Nd + 2 Rd + R`` for S = 1, which writes its result without a second kernel. HBM in use: ``2 Nd + (S + 2) Rd
    + (S + 1) R`` (S = 1: ``2 Nd + 2 Rd + R``). On chip: ``2d (R + block_k)`` in the parts, ``S Rd`` in the combine.

    Args:
        machine: counts.
        q, k, v: fp64 [R, d], [N, d], [N, d_v], one head.
        num_splits: parts to make at most, >= 1.
        block_k: keys of a tile.
        causal: bottom-right aligned: the rows are the last R positions.
        softmax_scale: default 1/sqrt(d).

    Returns:
        `flash_v2.Output`.

    Raises:
        tilewise.errors.ArgumentError: `num_splits` < 1.
        tilewise.textbook.memory.SramError: a part does not fit.

    Source:
        Flash-Decoding (2023), its three steps: split, FlashAttention with its log-sum-exp in parallel, reduce.

    Example:
        >>> q, k, v = torch.randn(1, 4).double(), torch.randn(64, 4).double(), torch.randn(64, 4).double()
        >>> whole, split = Machine(), Machine()
        >>> o = forward(whole, q, k, v, num_splits=1, block_k=8).o
        >>> bool(torch.allclose(o, forward(split, q, k, v, num_splits=4, block_k=8).o))
        True
        >>> split.counts.traffic - whole.counts.traffic == (3 * 4 - 1) * 4 + 2 * 4
        True
    """
    check(q, k, v)
    if num_splits < 1:
        errors.fail(errors.ArgumentError, "num_splits", num_splits, "an integer >= 1", "pass 1 for no split")
    rows, d_v = q.shape[0], v.shape[1]
    grid, scale = Blocks(max(1, rows), block_k, causal).grid(rows, k.shape[0]), scale_of(q, softmax_scale)
    parts = cut(len(grid.columns), max(1, -(-len(grid.columns) // num_splits))) or [slice(0, 0)]
    q_hbm, k_hbm, v_hbm = machine.put("q", q), machine.put("k", k), machine.put("v", v)
    o, lse = machine.new("o", rows, d_v), machine.new("lse", rows)
    if len(parts) == 1:
        _part(machine, Operands(q_hbm, k_hbm, v_hbm, o, lse), grid, parts[0], scale)
        return Output(o.result(), lse.result())
    part_o = [machine.new(f"o_{s}", rows, d_v) for s in range(len(parts))]
    part_lse = [machine.new(f"lse_{s}", rows) for s in range(len(parts))]
    for s, tiles in enumerate(parts):
        _part(machine, Operands(q_hbm, k_hbm, v_hbm, part_o[s], part_lse[s]), grid, tiles, scale)
    with machine.on_chip() as chip:
        states = [(chip.read(o_s), chip.read(lse_s)) for o_s, lse_s in zip(part_o, part_lse, strict=True)]
        merged = reduce(lambda a, b: softmax.merge(*a, *b), states)
        chip.write(o, merged[0])
        chip.write(lse, merged[1])
    return Output(o.result(), lse.result())


def _part(machine: Machine, hbm: Operands, grid: Grid, tiles: slice, scale: float) -> None:
    """Output and LSE over a run of key tiles: an independent task."""
    with machine.on_chip() as chip:
        q = chip.read(hbm.q)  # [R, d]
        chip.new(q.shape[0], hbm.v.shape[1])  # the space of the state's accumulator
        state = softmax.init((q.shape[0],), hbm.v.shape[1], q)
        for j in range(tiles.start, tiles.stop):
            if q.shape[0] and grid.visits(0, j):
                with machine.on_chip() as tile:
                    k_j, v_j = tile.read(hbm.k, grid.columns[j]), tile.read(hbm.v, grid.columns[j])
                    state = softmax.update(state, tile.keep(grid.mask(scale * (q @ k_j.T), 0, j)), v_j)
        o, lse = softmax.finalize(state)
        chip.write(hbm.o, o)
        chip.write(hbm.lse, lse)


class Load(NamedTuple):
    """A decoding step on a GPU, in units of the time in which one processor takes one key tile.

    Args:
        tasks: independent row tiles: batch times kv heads (times row tiles).
        blocks: key tiles of each, T_c.
        processors: how many tasks run at once.
        combine: time of the second kernel, its launch included.
    """

    tasks: int
    blocks: int
    processors: int
    combine: float = 2.0

    def time(self, splits: int) -> float:
        """Waves of tasks, each as long as the longest part, and the combine where there is one.

        >>> [Load(tasks=32, blocks=64, processors=132).time(s) for s in (1, 2, 4, 8)]
        [64.0, 34.0, 18.0, 18.0]
        """
        waves = -(-self.tasks * splits // self.processors)
        return float(waves * -(-self.blocks // splits)) + (self.combine if splits > 1 else 0.0)

    def best(self) -> int:
        """The number of splits of the least time, the smaller of equals: what an adaptive rule is after."""
        return min(range(1, max(1, self.blocks) + 1), key=self.time)

    def pays(self) -> bool:
        """Whether any split is faster than none.

        >>> Load(32, 64, 132).pays(), Load(132, 64, 132).pays(), Load(32, 2, 132).pays()
        (True, False, False)
        """
        return self.best() > 1


def published_rule(load: Load, max_splits: int = 128) -> int:
    """The rule of flash-attention 2: fill the processors, with the fewest splits that do so almost as well as any.

    No split where the tasks fill 80 % of the processors. Else, of the numbers of splits that make parts of another
    length than one less does, the smallest whose waves are filled at least 85 % as well as the best filled.

    Source:
        flash-attention 2, csrc/flash_attn/flash_api.cpp, num_splits_heuristic.

    Example:
        >>> published_rule(Load(tasks=32, blocks=64, processors=132)), published_rule(Load(120, 64, 132))
        (4, 1)
    """
    if load.tasks >= 0.8 * load.processors:
        return 1

    def filled(splits: int) -> float:
        waves = load.tasks * splits / load.processors
        return waves / -(-load.tasks * splits // load.processors)

    def length(splits: int) -> int:
        return -(-load.blocks // splits)

    most = min(max_splits, load.processors, load.blocks)
    eligible = [s for s in range(1, most + 1) if s == 1 or length(s) != length(s - 1)]
    enough = 0.85 * max((filled(s) for s in eligible), default=0.0)
    return next((s for s in eligible if filled(s) >= enough), 1)


def threshold(tasks: int, processors: int, combine: float = 2.0) -> int | None:
    """Key tiles from which on splitting pays, for a number of tasks; None where it never does.

    Where s = floor(processors / tasks) >= 2 parts fit side by side, the time falls from T_c to ceil(T_c / s) + combine,
    and the threshold is about ``combine s / (s - 1)``. Where only a part of the last wave is idle it takes long
    sequences to gain from cutting finer, and where none is, nothing is to be gained.

    >>> threshold(1, 132), threshold(66, 132), threshold(120, 132), threshold(132, 132)
    (4, 6, 33, None)
    """
    if tasks % processors == 0:
        return None
    return next(blocks for blocks in count(1) if Load(tasks, blocks, processors, combine).pays())
