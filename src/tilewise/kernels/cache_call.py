"""A call with a key/value cache as kernels of both dialects take it: records, the append, the merge of what was cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from .. import tiles
from ..decode.plan import Plan
from ..kvcache import PER_PAGE, CacheInputs, CacheProblem
from ..mask_algebra import Frame
from ..masks import Full
from ..problem import Inputs
from ..tiles import TileConfig
from . import append, combine, compiled, decode_plan
from . import cache as cache_slots
from .cache import Scales, Slots
from .call import Call, prepare
from .decode_plan import Parts
from .placement import on, processors
from .replay import Tape
from .rotary import Rope
from .rows import rows_of

# Tokens times dims that a program appends, a head at a time.
_APPENDED = 2048
_INTEGERS = (
    "cache_seqlens", "cache_leftpad", "cache_batch_idx", "page_table", "cu_seqlens_q", "rotary_positions",
)  # fmt: skip


Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Attend: TypeAlias = "Callable[[CacheCall, Results, Tape], None]"


class AppendShape(NamedTuple):
    """Compile-time sizes of `append`."""

    HEADS_KV: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_T: Any
    PAGE: Any
    K_SCALES: Any
    V_SCALES: Any


@dataclass(frozen=True)
class CacheCall:
    """A call, as its kernels are launched.

    Args:
        problem, inputs: the call.
        tile: of the kernel that attends.
        plan: of its work.
    """

    problem: CacheProblem
    inputs: CacheInputs
    tile: TileConfig
    plan: Plan

    @property
    def slots(self) -> Slots:
        x = self.inputs
        return Slots(x.cache_seqlens, x.cache_leftpad, x.cache_batch_idx, x.page_table, x.cu_seqlens_q)

    @property
    def scales(self) -> Scales:
        fields: list[Any] = []
        for scale in (self.inputs.k_scale, self.inputs.v_scale):
            row = 0 if scale is None or scale.ndim == 1 else scale.stride(0)
            fields += [None] * 3 if scale is None else [scale, row, scale.stride(-1)]
        return Scales(*fields)

    @property
    def rope(self) -> Rope:
        x, static = self.inputs, self.problem.static
        if x.rotary_cos is None or x.rotary_sin is None:
            return Rope(*[None] * len(Rope._fields))
        rows = (x.rotary_cos.stride(0), x.rotary_sin.stride(0))
        sizes = (tl.constexpr(self.problem.rotary_dim), tl.constexpr(static.rotary_interleaved))
        return Rope(x.rotary_cos, x.rotary_sin, *rows, x.rotary_positions, *sizes)

    @property
    def early(self) -> bool:
        """Whether a kernel is launched while the one before it ends (programmatic dependent launch, from sm_90 on).

        It begins by waiting until all of that one's writes are there, so only the time of a launch is saved. Each one
        waits, whatever it has to do: that it is complete then says the same of all before it. The one after it is let
        in first, which cannot be before all programs of this one are there, so none waits for room that another has.
        """
        capability = self.problem.attention.capability
        return capability is not None and capability >= (9, 0)

    @property
    def early_options(self) -> dict[str, bool]:
        """What such a launch takes; not every compiler knows the option."""
        return {"launch_pdl": True} if self.early else {}

    @property
    def rope_length(self) -> int:
        return 0 if self.inputs.rotary_cos is None else self.inputs.rotary_cos.shape[0]

    @property
    def limits(self) -> tuple[int, ...]:
        """The fields of `cache.Limits`."""
        problem, call = self.problem, self.problem.attention
        new = -1 if problem.appends and call.packed else problem.seqlen_new or 0
        total = self.inputs.q.shape[0] if call.packed else 0
        table = self.inputs.page_table
        row = 0 if table is None else table.stride(0)
        tree = self.inputs.tree
        tree_batch = 0 if tree is None or tree.shape[0] == 1 else call.seqlen_q**2
        return (call.batch, call.seqlen_q, total, new, problem.capacity, problem.rows, row, tree_batch)

    @property
    def work(self) -> tuple[int, ...]:
        """The fields of `decode_plan.Work`."""
        plan, static = self.plan, self.problem.static
        # A cut past the capacity is none; kept below it, no sum passes an int32.
        cut = min(static.split_size or static.num_splits or 0, _round_up(max(plan.capacity, 1), 128))
        return (max(1, plan.row_tiles), plan.splits if not plan.balanced else 0, cut, plan.whole)

    @property
    def mode(self) -> tl.constexpr:
        static = self.problem.static
        if static.split_size is not None:
            return decode_plan.BY_SIZE
        return decode_plan.BALANCED if static.num_splits is None else decode_plan.BY_NUMBER

    @property
    def scale_kinds(self) -> tuple[Any, Any]:
        static = self.problem.static
        kinds: dict[Any, Any] = {None: tl.constexpr(0), PER_PAGE: cache_slots.PER_PAGE}
        return kinds.get(static.k_scale, cache_slots.PER_ITEM), kinds.get(static.v_scale, cache_slots.PER_ITEM)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _append(call: CacheCall, tape: Tape) -> None:
    """Launch `append`."""
    problem, inputs = call.problem, call.inputs
    if inputs.k_new is None or inputs.v_new is None:
        return
    attention = problem.attention
    blocks = [max(32, triton.next_power_of_2(dim)) for dim in (attention.head_dim, attention.head_dim_v)]
    tokens = min(16, _APPENDED // max(blocks))
    token_tiles = -(-(problem.seqlen_new or 0) // tokens)
    programs = attention.batch * token_tiles * attention.heads_kv
    if not programs:
        return
    dims = (attention.head_dim, attention.head_dim_v)
    sizes = (attention.heads_kv, *dims, *blocks, tokens, problem.page_size or 0)
    shape = AppendShape._make((*map(tl.constexpr, sizes), *call.scale_kinds))
    arguments = (
        *(rows_of(x, attention.packed) for x in (inputs.k_new, inputs.v_new)), rows_of(inputs.k_cache),
        rows_of(inputs.v_cache), call.slots, call.scales, call.rope, shape, *call.limits, token_tiles, call.rope_length,
    )  # fmt: skip
    tape.launch(append.append_kernel, programs, arguments, num_warps=4)


def variant_of(call: CacheCall) -> tuple[Any, tuple[Any, ...], int | None, int | None]:
    """The variant of the score tile, what its functions read, and the band."""
    problem = call.problem
    options, inputs = problem.options, call.inputs
    plain = replace(problem.attention, options=replace(options, mask=Full()))
    like = Inputs(inputs.q, inputs.k_cache, inputs.v_cache, alibi_slopes=inputs.alibi_slopes, sinks=inputs.sinks)
    found: Call = prepare(plain, like)
    lowered = options.mask.lower(Frame(0, problem.attention.batch, 1, 1, 0, problem.device))
    band = [None if side is None or side >= compiled.UNBOUNDED else side for side in (lowered.left, lowered.right)]
    variant, extra = found.base, found.extra
    if lowered.residual is not None or lowered.row_lo is not None or lowered.row_hi is not None:
        # Whatever is no band is asked of each element: bounds of rows would be out of date in a replay of the call.
        predicate, data = compiled.predicate(options.mask, problem.device, len(extra))
        variant, extra = variant._replace(predicate=predicate), (*extra, *data)
    return variant, extra, band[0], band[1]


def _dense(inputs: CacheInputs) -> CacheInputs:
    """The inputs with lengths and tables whose elements are neighbours in memory."""
    given = {name: getattr(inputs, name) for name in _INTEGERS}
    spaced = {name: x for name, x in given.items() if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1}
    return inputs._replace(**{name: x.contiguous() for name, x in spaced.items()})


def stat_rows(call: CacheCall) -> int:
    """Rows of a statistic of all heads: those of a sequence, or of all of a ragged call."""
    attention = call.problem.attention
    return call.inputs.q.shape[0] if attention.packed else attention.seqlen_q


def read_only(call: CacheCall, tape: Tape) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tree, in bytes, and the sinks, as kernels address them."""
    tree, sinks = call.inputs.tree, call.inputs.sinks
    bits = None if tree is None else tape.part(tree.contiguous().view(torch.uint8), tree)
    return bits, None if sinks is None else sinks.contiguous()


def parts_of(call: CacheCall, tape: Tape, counted: bool = False) -> Parts:
    """Memory for partial results: a kernel is the same whether there is anything to merge or not.

    `counted`: of a kernel that merges itself, and counts pieces.
    """
    plan, device = call.plan, call.inputs.q.device
    cuts = tape.counters(device) if counted else None
    if plan.balanced and not counted:
        cuts = tape.empty((plan.programs, 4), torch.int32, device)
    of_slots = (max(1, plan.slots), plan.block_m)
    return Parts(
        tape.empty((*of_slots, plan.head_dim_v), torch.float32, device),
        tape.empty(of_slots, torch.float32, device),
        cuts,
    )


def merge(
    call: CacheCall, results: Results, parts: Parts, sizes: Any, band: tuple[int | None, int | None], tape: Tape
) -> None:
    """Launch `combine`, if an item may have more than one piece."""
    plan, attention = call.plan, call.problem.attention
    if not plan.balanced and plan.splits == 1:
        return
    rows = min(plan.block_m, max(1, attention.seqlen_q * attention.group_size))
    arguments = (
        rows_of(results[0], attention.packed), results[1], parts, call.slots, sizes, *call.limits, *call.work,
        stat_rows(call), rows, *band, call.early,
    )  # fmt: skip
    items = plan.programs if plan.balanced else plan.items
    tape.launch(combine.combine_kernel, items * rows, arguments, num_warps=4, **call.early_options)


def serve(problem: CacheProblem, inputs: CacheInputs, tile: TileConfig, tape: Tape, attend: Attend) -> Results:
    """Append, and have `attend` fill ``out``, in `out_dtype`, and ``lse``, fp32, where they have rows."""
    inputs = _dense(inputs)
    attention, q = problem.attention, inputs.q
    whole = max(1, tiles.WHOLE_KEYS // tile.block_n)
    plan = Plan.of(problem, tile.block_m, tile.block_n, tile.programs * processors(inputs.q.device), whole)
    call = CacheCall(problem, inputs, tile, plan)
    out = tape.empty(attention.out_shape(q), attention.out_dtype, q.device)
    lse = tape.empty(attention.lse_shape(q), torch.float32, q.device)
    with on(q.device):
        _append(call, tape)
        if lse.numel():
            attend(call, (out, lse), tape)
    return out, lse
