"""From a problem that is more than a causal, windowed or full dense call to what `forward.variant_kernel` takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
import triton.experimental.gluon.language as gl

from ..kernels.call import Call, prepare
from ..kernels.kept import Kept
from ..kernels.placement import on, processors
from ..kernels.replay import Tape
from ..kernels.score import Variant
from ..mask_algebra import TOP_LEFT, And, Mask
from ..masks import Causal, Full, Window
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import launch, packed
from .forward import variant_kernel
from .launch import Tiles
from .schedule import Bounds
from .work import Shape

Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
_orders = Kept()
# Beyond this no bound of a band matters to the order of tiles.
_FAR = 1 << 28
# Of a packed call, in rounds of all programs: work that is not divided, and the least that is worked on at once.
_FEW_ROUNDS, _LEAST_ROUNDS = 8, 4


def is_band(mask: Mask) -> bool:
    """Whether a mask is causal, a window, or several of these."""
    if isinstance(mask, And):
        return is_band(mask.a) and is_band(mask.b)
    return isinstance(mask, (Full, Causal, Window))


def needed(problem: Problem) -> bool:
    """Whether the plain kernel does not serve a problem that this backend does."""
    options = problem.options
    return (
        problem.packed
        or not is_band(options.mask)
        or options.softcap is not None
        or options.score_mod is not None
        or any((problem.has_alibi, problem.has_bias, problem.has_sinks, problem.has_dropout))
        or problem.out_dtype != problem.dtype
        or any(d % 8 for d in (problem.head_dim, problem.head_dim_v))
        or stack(problem) > 1
    )


def stack(problem: Problem) -> int:
    """How many heads of a group share a tile: all where their few rows fit one, so that K and V are read once."""
    group = problem.group_size
    fits = problem.seqlen_q * group <= launch.tile_of(problem).block_m
    return group if fits and group & (group - 1) == 0 and group <= launch.ROWS else 1


def tile_of(problem: Problem) -> TileConfig:
    """That of short rows; of calls that need few registers beside a plain one's, its tile, for the longest member."""
    options = problem.options
    some = options.softcap is not None or problem.has_alibi
    many = options.score_mod is not None or not is_band(options.mask) or problem.has_bias or problem.has_dropout
    few = not many and not (some and (problem.packed or problem.dtype != torch.bfloat16)) and stack(problem) == 1
    return launch.plain_tile(problem) if few else launch.tile_of(problem)


class Listed(NamedTuple):
    """How tiles come to programs: `work.Work`'s table and rounds, and how many programs."""

    table: torch.Tensor
    rounds: int
    programs: int


def matrices(x: torch.Tensor, source: torch.Tensor, tape: Tape) -> torch.Tensor:
    """`x` as [B, S, H, D], packed ones [1, T, H, D], in memory that TMA can address."""
    if x.shape[-1] % 8:
        # TMA fills what is missing in a row, but rows must start at multiples of 16 bytes.
        wide = x.new_empty(*x.shape[:-1], -(-x.shape[-1] // 8) * 8)
        x = wide[..., : x.shape[-1]].copy_(x)
    x = launch.addressable(x)
    return tape.part(x[None] if x.ndim == 3 else x, source)


def _nothing_to_see(problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill the results of a call without keys: a sink is all that its rows see."""
    out.zero_()
    lse.fill_(float("-inf"))
    if inputs.sinks is None or not lse.numel():
        return
    seen = inputs.sinks.float()[:, None].expand(problem.heads_q, lse.shape[-1])
    if inputs.cu_seqlens_q is not None:
        rows = torch.arange(lse.shape[-1], device=lse.device)
        seen = torch.where(rows < inputs.cu_seqlens_q[-1], seen, float("-inf"))
    lse.copy_(seen)


def by_plan(plan: torch.Tensor, sizes: tuple[int, int, int], programs: int, sharing: int, seen: int, l2: int) -> Listed:
    """Tiles in the order of how long the plan's lists for them are, there and back again, in blocks as of `packed`.

    Args:
        plan: its lists.
        sizes: batch entries, heads and places of tiles.
        programs: that take them in turns.
        sharing: heads that see the same rows.
        seen: bytes of these rows.
        l2: bytes that may be seen at once.
    """
    number, places = math.prod(sizes), sizes[2]
    rounds = -(-number // programs)
    pairs = sizes[0] * sizes[1]
    together = sharing * max(1, l2 // max(1, seen), -(-_LEAST_ROUNDS * programs // max(1, places * sharing)))
    if number < _FEW_ROUNDS * programs:
        together = pairs

    def order() -> torch.Tensor:
        lengths = plan[..., 1].expand(sizes).reshape(pairs, places).long()
        block = (torch.arange(pairs, device=plan.device) // together)[:, None]
        falls = (block[-1:] - block) % 2 == 0
        most = lengths.max() + 1
        keys = block * most + torch.where(falls, most - 1 - lengths, lengths)
        numbers = keys.flatten().argsort(stable=True).int()
        table = torch.nn.functional.pad(numbers, (0, (rounds + 1) * programs - number), value=-1).view(-1, programs)
        table[1::2] = table[1::2].flip(1)
        return table

    return Listed(_orders.get(plan, (*sizes[:2], programs, together), order), rounds, programs)


class Members(NamedTuple):
    """Of a packed call whose tiles are listed: offsets of their own rows and of what they see, how much of each is in
    use, the longest of both, and the band's bounds before and after a row.
    """

    own: torch.Tensor | None
    others: torch.Tensor | None
    own_used: torch.Tensor | None
    others_used: torch.Tensor | None
    longest: tuple[int, int]
    bounds: tuple[int | None, int | None]


def members_of(call: Call, inputs: Inputs, of_rows: bool = True) -> Members:
    """Whose tiles of rows, or of keys, a packed call lists."""
    p, (left, right) = call.problem, call.sizes[3:]
    offsets, longest = (inputs.cu_seqlens_q, inputs.cu_seqlens_k), (p.seqlen_q, p.seqlen_k)
    if of_rows:
        return Members(*offsets, None, inputs.seqused_k, longest, (left, right))
    # Keys see rows as rows see keys.
    return Members(*offsets[::-1], inputs.seqused_k, None, longest[::-1], (right, left))


class Blanked(NamedTuple):
    """Results whose rows that belong to no member become 0, and perhaps an LSE, which becomes -inf."""

    out: torch.Tensor
    also: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Of `packed.list_kernel`."""
        width, also_width = (0 if x is None else x.stride(0) for x in self[:2])
        return (*self, width, also_width, 0 if self.lse is None else len(self.lse))


def by_length(
    call: Call, members: Members, blanked: Blanked, tiles: Tiles, programs: int, tape: Tape, paired: bool = True
) -> Listed:
    """Tiles of a packed call in an order of `packed`, listed on the device."""
    p, total, device = call.problem, len(blanked.out), blanked.out.device
    most, order, size = packed.room(total, p.batch, tiles.heads, tiles.block_m)
    table = tape.empty((size,), torch.int32, device)
    paired = paired and total * tiles.heads >= _FEW_ROUNDS * programs * tiles.block_m
    arguments = (
        *members[:4], p.batch, total, *members.longest,
        *(None if bound is None else min(bound, _FAR) for bound in members.bounds),
        table, most, tiles.heads, programs if paired else 0, *blanked.arguments(), p.options.align == TOP_LEFT,
        tiles.block_m,
    )  # fmt: skip
    tape.launch(packed.list_kernel, max(p.batch, programs), arguments, num_warps=4)
    return Listed(table, order, min(programs, most * tiles.heads))


def _listed(
    call: Call, plan: torch.Tensor | None, inputs: Inputs, results: Results, tiles: Tiles, tape: Tape
) -> Listed:
    """Who works on what."""
    p, (out, lse) = call.problem, results
    programs = processors(p.device)
    if p.packed:
        # With short steps and a causal mask pairs took 7 % longer (docs/tuning.md).
        paired = max(p.head_dim, p.head_dim_v) > 64 or call.sizes[4] is None
        return by_length(call, members_of(call, inputs), Blanked(out, lse=lse), tiles, programs, tape, paired)
    if plan is not None:
        sizes = (p.batch, tiles.heads, -(-p.seqlen_q // tiles.block_m))
        l2, each = launch.near_keys(p)
        return by_plan(plan, sizes, programs, tiles.heads // p.heads_kv, p.seqlen_k * each, l2)
    left, right = call.sizes[3:]
    band = Bounds(p.seqlen_q, p.seqlen_k, int(p.offset(p.seqlen_q, p.seqlen_k)), left, right)
    dealt = launch.deal_rows(p, band, tiles)
    return Listed(tape.constant(dealt.table), dealt.rounds, dealt.programs)


def _shape(problem: Problem, variant: Variant, band: tuple[Any, ...], tile: TileConfig, stacked: int) -> Shape:
    tested = any(x is not None for x in (variant.plan, variant.predicate, *band))
    values = {
        "HEAD_DIM_V": problem.head_dim_v,
        "PACKED": problem.packed,
        "DIRECT_O": problem.out_dtype != problem.dtype or problem.head_dim_v % 8 != 0,
        "CLEAN": problem.packed or tested,
        "STACK": stacked,
    }
    rest = {name: gl.constexpr(value) for name, value in values.items()}
    return Shape(*map(gl.constexpr, launch.sizes(problem, tile)), **rest)


def _busy(variant: Variant) -> bool:
    """Whether scores, masks or weights take far more than a product does."""
    return any(x is not None for x in (variant.mod, variant.bias, variant.seed, variant.predicate))


def _scalars(call: Call, tiles: Tiles, stacked: int) -> tuple[int | None, ...]:
    """Tiles of rows, heads and group, then the band."""
    p = call.problem
    lengths = (0, 0) if p.packed else (p.seqlen_q, p.seqlen_k)
    tiles_m = -(-p.seqlen_q // tiles.block_m)
    return (tiles_m, tiles.heads, p.group_size // stacked, int(p.offset(*lengths)), *call.sizes[3:], *lengths)


def forward(problem: Problem, inputs: Inputs, tape: Tape | None = None) -> Results:
    """Launch: ``out`` and ``lse``."""
    tape = tape or Tape()
    out = tape.empty(problem.out_shape(inputs.q), problem.out_dtype, inputs.q.device)
    lse = tape.empty(problem.lse_shape(inputs.q), torch.float32, inputs.q.device)
    if not (out.numel() and inputs.k.numel() and problem.batch and problem.seqlen_q and problem.seqlen_k):
        _nothing_to_see(problem, inputs, out, lse)
        return out, lse
    tile = tile_of(problem)
    call = prepare(problem, inputs)
    variant, extra = call.variant(tile)
    # A plan may differ from head to head.
    stacked = 1 if variant.plan is not None else stack(problem)
    tiles = Tiles(problem.heads_q // stacked, tile.block_m // stacked, tile.block_n)
    shape = _shape(problem, variant, call.sizes[3:], tile, stacked)
    q, k, v = (matrices(x, x, tape) for x in (inputs.q, inputs.k, inputs.v))
    d, d_v = shape.BLOCK_D.value, shape.BLOCK_DV.value
    rows = launch.ROWS // stacked
    with on(q.device):
        listed = _listed(call, variant.plan, inputs, (out, lse), tiles, tape)
        arguments = (
            launch.descriptor(q, rows, d, stacked),
            launch.descriptor(k, tile.block_n, d),
            launch.descriptor(v, tile.block_n, d_v),
            None
            if shape.DIRECT_O.value
            else launch.descriptor(matrices(out, out, tape), rows, d_v // shape.O_PARTS.value, stacked),
            out,
            lse,
            listed.table,
            None if inputs.sinks is None else inputs.sinks.contiguous(),
            problem.softmax_scale * math.log2(math.e),
            listed.rounds,
            lse.shape[-1],
            *_scalars(call, tiles, stacked),
            variant,
            extra,
            shape,
            *launch.compile_time(tile, shape, _busy(variant)),
        )
        tape.launch(variant_kernel, listed.programs, arguments, num_warps=4, maxnreg=launch.entry_registers(tile))
    return out, lse
