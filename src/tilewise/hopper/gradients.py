"""The backward pass on the host: descriptors, who works on which keys, and what is left to do around the kernel."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..kernels.call import Call, prepare
from ..kernels.placement import on, processors
from ..kernels.replay import Tape
from ..kernels.rows import rows_of
from ..kernels.score import Variant
from ..kernels.sinks import gradient_of_sinks
from ..problem import Inputs, Problem
from ..tiles import TileConfig, lookup
from . import launch
from .backward import backward_kernel
from .backward_apart import apart_kernel
from .key_tiles import Shape
from .launch import Tiles
from .query_gradient import HALF, WARPS
from .schedule import Bounds, Dealt, deal, deal_in_turn
from .statistics import first_stat, round_kernel, row_kernel
from .turns import Turns
from .variants import Blanked, Listed, by_length, by_plan, is_band, matrices, members_of

# Up to this head dim dk and dv fit into registers together, and all gradients come from one kernel.
_TOGETHER = 128
_WARPS = 8  # that share a tile of scores where gradients have kernels of their own
# Warps of the consumers, and the loading and the adding one, padded to four, share 64 Ki registers.
_REGISTERS = 168
# q, do and the sum of dq of the heads at work at once are to stay in this much of L2, in bytes.
_L2 = 32 << 20
_ROWS = 32  # of a program around the kernel
# Up to so many keys that the middle row sees, where others do not see all of them, dq is added up in turn; above head
# dim 64, where steps are shorter, up to an eighth (docs/tuning.md).
FEW_KEYS = 4608
_STAT_ROWS = 128  # of which a multiple fills every tile
_LINE = gl.NVMMASharedLayout(0, 32, rank=1)


class Stats(NamedTuple):
    """Of every row the lse in base 2 and delta, fp32 [pairs, rows]; and dq's sum, fp32 [B, Hq, Sq, D], if it is one."""

    lse2: torch.Tensor
    delta: torch.Tensor
    dq_sum: torch.Tensor | None


def _apart(problem: Problem) -> bool:
    """Whether every gradient has a kernel of its own."""
    return _is_wide(problem) or (problem.options.deterministic and not _in_turn(problem))


def _is_wide(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > _TOGETHER


def _width(problem: Problem) -> int:
    """Columns of dq's sum, and of all tiles of the kernel that adds to it."""
    return launch.block(max(problem.head_dim, problem.head_dim_v))


def _in_turn(problem: Problem) -> bool:
    """Whether tiles of keys add to dq one after the other: the host must know who sees whom, and some must.

    Their sum needs no zeros before. With few keys, and tiles of unequal length, that saves more than waiting costs.
    """
    options = problem.options
    if _is_wide(problem) or problem.packed or not is_band(options.mask):
        return False
    band = launch.bounds(problem)[0]
    some = band.left is None or (band.right is not None and band.left + band.right >= 0)
    few = band.middle_keys() <= (FEW_KEYS if _width(problem) < _TOGETHER else FEW_KEYS // 8)
    uneven = band.left is not None or band.right is not None
    return some and ((few and uneven) or options.deterministic)


def unsupported_reasons(problem: Problem) -> list[str]:
    """Why the backward pass does not serve a problem that the forward does."""
    p = problem
    lines, rows = (1, p.batch * p.seqlen_q) if p.packed else (p.batch, p.seqlen_q)
    places = lines * p.heads_q * _stat_rows(p, rows)
    refused = {
        "a backward pass with gradients of bias or ALiBi slopes": p.options.needs_scores_grad,
        # TMA counts the statistics of all of them in one line.
        f"a backward pass of 2**31 rows of all heads, or more (each head's padded to {_STAT_ROWS})": places >= 1 << 31,
    }
    return [reason for reason, holds in refused.items() if holds]


def tile_of(problem: Problem, pass_: str = "backward") -> TileConfig:
    """The table's tile, of all gradients together, or of dq, dk or dv."""
    if pass_ == "backward" and _apart(problem):
        pass_ = "dq"
    return lookup("hopper", pass_, problem.dtype, max(problem.head_dim, problem.head_dim_v))


def backward(
    problem: Problem, inputs: Inputs, forward: tuple[torch.Tensor, torch.Tensor], grads: tuple[Any, Any],
    needs: tuple[str, ...], tape: Tape | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients named in `needs`; `forward` is ``out`` and ``lse``, `grads` are ``do`` and ``dlse``."""
    tape = tape or Tape()
    call, (out, lse), (do, dlse) = prepare(problem, inputs), forward, grads
    if do is None:
        do = torch.zeros_like(out)
    do = do.to(problem.dtype)
    if do.stride(-1) != 1:
        do = do.contiguous()
    dlse = None if dlse is None else dlse.float().contiguous()
    names = tuple(name for name in ("q", "k", "v") if name in needs)
    result: dict[str, torch.Tensor] = {
        name: tape.empty(x.shape, x.dtype, x.device) for name, x in zip("qkv", inputs[:3], strict=True)
    }
    if not (out.numel() and inputs.k.numel() and problem.batch and problem.seqlen_q and problem.seqlen_k):
        result = {name: x.zero_() for name, x in result.items()}
        stats = None
    else:
        with on(problem.device):
            stats = _statistics(call, (out, lse), (do, dlse), tape)
            if stats.dq_sum is None:
                for name in names:
                    _gather_one(name, call, inputs, do, stats, result[name], tape)
            else:
                turns = _turns(call, tape)
                _gather(call, inputs, do, (stats, stats.dq_sum, turns), result, tape)
                _round(call, stats.dq_sum, turns, result["q"], tape)
    wanted: dict[str, torch.Tensor] = {name: result[name] for name in names}
    if "sinks" in needs:
        assert inputs.sinks is not None
        delta = _without_keys(lse, dlse) if stats is None else _of_rows(stats.delta, lse, inputs.cu_seqlens_q)
        wanted["sinks"] = gradient_of_sinks(inputs.sinks, lse, delta)
    return {name: wanted[name] for name in needs}


def _without_keys(lse: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """Delta of rows whose output is 0 whatever the sinks are."""
    return torch.zeros_like(lse) if dlse is None else -dlse


def _of_rows(stats: torch.Tensor, lse: torch.Tensor, cu_q: torch.Tensor | None) -> torch.Tensor:
    """A statistic as `lse` has it: without what lies between members of a packed call, and after the last row."""
    if cu_q is None:
        return stats[:, : lse.shape[-1]].view(lse.shape)
    rows = torch.arange(lse.shape[-1], device=lse.device)
    member = torch.searchsorted(cu_q[1:].contiguous(), rows, right=True).clamp_(max=len(cu_q) - 2)
    q_start = cu_q[member].to(rows.dtype)
    # Rows after the last member see nothing, so any place will do.
    places = first_stat.fn(q_start, member) + rows - q_start
    return stats[:, places.clamp_(max=stats.shape[-1] - 1)]


def _stat_rows(problem: Problem, rows: int) -> int:
    """How many places a head has in a statistic of so many rows: they fill tiles.

    Members of a packed call begin at multiples of 4.
    """
    places = rows + (4 * problem.batch if problem.packed else 0)
    return -(-places // _STAT_ROWS) * _STAT_ROWS


def _statistics(call: Call, forward: tuple[torch.Tensor, torch.Tensor], grads: tuple[Any, Any], tape: Tape) -> Stats:
    p, (out, lse), (do, dlse) = call.problem, forward, grads
    rows = lse.shape[-1]
    cu_q, members, stat_rows = call.base.cu_q, p.batch if p.packed else 0, _stat_rows(p, rows)
    pairs = lse.numel() // rows
    width = _width(p)
    lse2 = tape.empty((pairs, stat_rows), torch.float32, lse.device)
    delta = tape.empty((pairs, stat_rows), torch.float32, lse.device)
    dq_sum = None
    if not _apart(p):
        dq_sum = tape.empty((pairs // p.heads_q, p.heads_q, rows, width), torch.float32, lse.device)
    arguments = (
        rows_of(out, p.packed), rows_of(do, p.packed), lse.contiguous(), dlse, cu_q, lse2, delta,
        None if _in_turn(p) else dq_sum, rows, p.heads_q, stat_rows, members, max(0, members - 1).bit_length(),
        _ROWS, p.head_dim_v, triton.next_power_of_2(p.head_dim_v), width,
    )  # fmt: skip
    tape.launch(row_kernel, pairs * stat_rows // _ROWS, arguments, num_warps=4)
    return Stats(lse2, delta, dq_sum)


def _round(call: Call, dq_sum: torch.Tensor, turns: Turns | None, dq: torch.Tensor, tape: Tape) -> None:
    p, (batch, heads, rows, width) = call.problem, dq_sum.shape
    arguments = (
        dq_sum, None if turns is None else turns.added, rows_of(dq, p.packed), p.softmax_scale, rows, heads, _ROWS,
        tile_of(p).block_m, p.head_dim, width,
    )  # fmt: skip
    tape.launch(round_kernel, batch * heads * -(-rows // _ROWS), arguments, num_warps=4)


def _line(x: torch.Tensor, block: int) -> TensorDescriptor:
    return TensorDescriptor(x, [x.numel()], [1], [block], _LINE)


def _sum_descriptor(x: torch.Tensor) -> TensorDescriptor:
    tile = [1, 1, HALF.value, HALF.value]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile, layout)


def _gradient_descriptor(x: torch.Tensor, columns: int, tape: Tape) -> TensorDescriptor:
    return launch.descriptor(matrices(x, x, tape), HALF.value, columns)


def _listed(
    call: Call, variant: Variant, inputs: Inputs, grads: Blanked, tile: TileConfig, tape: Tape, of_rows: bool = False
) -> Listed:
    """Who works on which keys, or rows; `grads` are the gradients that they write."""
    p = call.problem
    programs = processors(p.device)
    if of_rows:
        tiles, length, others = Tiles(p.heads_q, tile.block_m, tile.block_n), p.seqlen_q, p.seqlen_k
    else:
        tiles, length, others = Tiles(p.heads_kv, tile.block_n, tile.block_m), p.seqlen_k, p.seqlen_q
    if p.packed:
        return by_length(call, members_of(call, inputs, of_rows), grads, tiles, programs, tape)
    number = -(-length // tiles.block_m)
    if variant.plan is not None:
        l2, each = launch.near_keys(p) if of_rows else (_L2, _row_bytes(p))
        sizes = (p.batch, tiles.heads, number)
        return by_plan(variant.plan, sizes, programs, tiles.heads // p.heads_kv, others * each, l2)
    left, right = call.sizes[3:]
    off = int(p.offset(p.seqlen_q, p.seqlen_k))
    if of_rows:
        seen = Bounds(length, others, off, left, right)
        dealt = launch.deal_rows(p, seen, tiles)
    else:
        dealt, _ = _keys_dealt(call, tile)
    return Listed(tape.constant(dealt.table), dealt.rounds, dealt.programs)


def _row_bytes(problem: Problem) -> int:
    """Of q, do and the sum of dq, in a row of the heads of one group."""
    return problem.group_size * (8 * problem.head_dim + 2 * problem.head_dim_v)


def _keys_dealt(call: Call, tile: TileConfig) -> tuple[Dealt, torch.Tensor | None]:
    """Who works on which keys of a dense call with a band, and the waves where they take turns."""
    p, (left, right) = call.problem, call.sizes[3:]
    programs = processors(p.device)
    seen = Bounds(p.seqlen_k, p.seqlen_q, -int(p.offset(p.seqlen_q, p.seqlen_k)), right, left)
    together = max(1, _L2 // (p.seqlen_q * _row_bytes(p)), -(-programs // -(-p.seqlen_k // tile.block_n)))
    how = (seen, tile.block_n, tile.block_m, p.batch * p.heads_kv, programs, p.device, together)
    return deal_in_turn(*how) if _in_turn(p) else (deal(*how), None)


def _turns(call: Call, tape: Tape) -> Turns | None:
    """In which order dq is added up; None: in any."""
    p, tile = call.problem, tile_of(call.problem)
    if not _in_turn(p):
        return None
    _, waves = _keys_dealt(call, tile)
    assert waves is not None
    tiles = -(-p.seqlen_q // tile.block_m)
    added = tape.empty((p.batch, p.heads_q, tiles), torch.int32, p.device, 0.0)
    return Turns(tape.constant(waves), added)


def _variant(call: Call, tile: TileConfig, transposed: bool) -> tuple[Variant, tuple[Any, ...]]:
    """The variant and what it reads. Where all gradients come from one kernel, and it has more to do than
    `recompute.capped`, exponentials make a softcap's tanh faster than the GPU's own instruction for it does: what is
    saved of instructions goes into spills (docs/tuning.md).
    """
    variant, extra = call.variant(tile, transposed=transposed)
    if variant.rough is not None and not (variant.capped.value or _apart(call.problem)):
        variant = variant._replace(rough=gl.constexpr(False))
    return variant, extra


def _shape(problem: Problem, variant: Variant, band: tuple[Any, ...], tile: TileConfig) -> Shape:
    """Compile-time sizes; where all gradients come from one kernel, dims have one width."""
    dims = problem.head_dim, problem.head_dim_v
    blocks, warps = (_width(problem),) * 2, WARPS.value
    if _apart(problem):
        blocks, warps = (launch.block(dims[0]), launch.block(dims[1])), _WARPS
    sizes = (tile.block_m, tile.block_n, *blocks, *dims, warps)
    # (A modification's derivative need not be finite where nothing is.)
    tested = any(x is not None for x in (variant.plan, variant.predicate, variant.mod, *band))
    other = (variant.mod, variant.cap, variant.bias)
    straight = (
        variant.slopes is not None and not any(x is not None for x in other) and band[1] is not None and band[1] <= 0
    )
    direct = any(dim % 8 for dim in dims)
    return Shape(*map(gl.constexpr, (*sizes, problem.packed, problem.packed or tested, straight, direct)))


def _gather(
    call: Call, inputs: Inputs, do: torch.Tensor, sums: tuple[Stats, torch.Tensor, Turns | None],
    result: dict[str, torch.Tensor], tape: Tape,
) -> None:  # fmt: skip
    """dk, dv and the sum of dq."""
    p, tile, (stats, dq_sum, turns) = call.problem, tile_of(call.problem), sums
    variant, extra = _variant(call, tile, True)
    band = call.sizes[3:]
    shape = _shape(p, variant, band, tile)
    listed = _listed(call, variant, inputs, Blanked(result["k"], result["v"]), tile, tape)
    q, k, v, do = (matrices(x, x, tape) for x in (inputs.q, inputs.k, inputs.v, do))
    d, d_v = shape.BLOCK_D.value, shape.BLOCK_DV.value
    lengths = (0, 0) if p.packed else (p.seqlen_q, p.seqlen_k)
    arguments = (
        launch.descriptor(q, tile.block_m, d),
        launch.descriptor(k, tile.block_n, d),
        launch.descriptor(v, tile.block_n, d_v),
        launch.descriptor(do, tile.block_m, d_v),
        _sum_descriptor(dq_sum),
        _line(stats.lse2, tile.block_m),
        _line(stats.delta, tile.block_m),
        *(result[name] if p.packed or shape.DIRECT.value else None for name in "kv"),
        *(
            None if shape.DIRECT.value else _gradient_descriptor(result[name], columns, tape)
            for name, columns in (("k", d), ("v", HALF.value))
        ),
        listed.table,
        turns,
        p.softmax_scale * math.log2(math.e),
        p.softmax_scale,
        listed.rounds,
        stats.lse2.shape[-1],
        -(-p.seqlen_k // tile.block_n),
        p.heads_kv,
        p.group_size,
        int(p.offset(*lengths)),
        *band,
        *lengths,
        variant,
        extra,
        shape,
        3 if d < _TOGETHER and variant.seed is None else 2,
        tile.num_stages,
    )
    # Who takes turns must be at work at once, which a cooperative launch sees to.
    tape.launch(
        backward_kernel, listed.programs, arguments, num_warps=WARPS.value, maxnreg=_REGISTERS,
        launch_cooperative_grid=turns is not None,
    )  # fmt: skip


def _gather_one(
    name: str, call: Call, inputs: Inputs, do: torch.Tensor, stats: Stats, grad: torch.Tensor, tape: Tape
) -> None:
    """dq, dk or dv."""
    p, tile, of_rows = call.problem, tile_of(call.problem, "d" + name), name == "q"
    variant, extra = _variant(call, tile, not of_rows)
    shape = _shape(p, variant, call.sizes[3:], tile)
    listed = _listed(call, variant, inputs, Blanked(grad), tile, tape, of_rows)
    d, d_v = shape.BLOCK_D.value, shape.BLOCK_DV.value
    q, k, v, do = (matrices(x, x, tape) for x in (inputs.q, inputs.k, inputs.v, do))
    rows = launch.descriptor(q, tile.block_m, d), launch.descriptor(do, tile.block_m, d_v)
    keys = launch.descriptor(k, tile.block_n, d), launch.descriptor(v, tile.block_n, d_v)
    lines: tuple[Any, ...] = (stats.lse2, stats.delta)
    if not of_rows:
        lines = tuple(_line(x, tile.block_m) for x in lines)
    lengths = (0, 0) if p.packed else (p.seqlen_q, p.seqlen_k)
    tiles = -(-p.seqlen_q // tile.block_m) if of_rows else -(-p.seqlen_k // tile.block_n)
    arguments = (
        *(rows + keys if of_rows else keys + rows),
        *lines,
        grad,
        listed.table,
        p.softmax_scale * math.log2(math.e),
        1.0 if name == "v" else p.softmax_scale,
        listed.rounds,
        stats.lse2.shape[-1],
        tiles,
        p.heads_q if of_rows else p.heads_kv,
        p.group_size,
        int(p.offset(*lengths)),
        *call.sizes[3:],
        *lengths,
        variant,
        extra,
        shape,
        name,
    )
    tape.launch(apart_kernel, listed.programs, arguments, num_warps=_WARPS, maxnreg=_REGISTERS)
