"""A call with a key/value cache on this backend: append, attend to shares of the keys, merge what was cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from .. import tiles
from ..decode.plan import Plan
from ..kernels import append, compiled, decode_plan
from ..kernels import cache as cache_slots
from ..kernels.cache import Scales, Slots
from ..kernels.call import Call, prepare
from ..kernels.placement import on
from ..kernels.replay import Tape
from ..kernels.rotary import Rope
from ..kernels.rows import rows_of
from ..kvcache import PER_PAGE, CacheInputs, CacheProblem
from ..mask_algebra import TOP_LEFT, Frame
from ..masks import Full
from ..problem import Inputs
from ..tiles import TileConfig
from . import combine, decode, launch
from .decode import Parts, Shape

# Rows from which the warps of a tile have rows of their own.
_WIDE = 64
# Tokens times dims that a program appends, a head at a time.
_APPENDED = 2048
_INTEGERS = (
    "cache_seqlens", "cache_leftpad", "cache_batch_idx", "page_table", "cu_seqlens_q", "rotary_positions",
)  # fmt: skip
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


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
class Launch:
    """What the kernels of one call share.

    Args:
        problem, inputs: the call.
        tile: of `decode`.
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


def shared(inputs: CacheInputs) -> bool:
    """Whether the values are the first dims of the keys, so that they need no loads of their own."""
    k, v = inputs.k_cache, inputs.v_cache
    dim = v.shape[3]
    same = v.data_ptr() == k.data_ptr() and v.stride()[:3] == k.stride()[:3]
    return same and dim >= 32 and dim & (dim - 1) == 0 and dim <= k.shape[3] and inputs.v_scale is inputs.k_scale


def _alike(inputs: CacheInputs) -> bool:
    """Whether offsets into one cache serve for the other."""
    return inputs.k_cache.stride() == inputs.v_cache.stride()


def _blocks(head_dim: int, shared_dim: int) -> tuple[int, int]:
    """Two powers of two that hold a head dim, the second perhaps 0; the first is `shared_dim` if that is not 0."""
    first = shared_dim or min(launch.block(head_dim), 512)
    return first, launch.block(head_dim - first) if head_dim > first else 0


def shape(call: Launch) -> Shape:
    """Compile-time sizes."""
    problem, attention, tile = call.problem, call.problem.attention, call.tile
    one = shared(call.inputs)
    blocks = _blocks(attention.head_dim, attention.head_dim_v if one else 0)
    page = problem.page_size or 0
    whole = page > 0 and page % tile.block_n == 0 and not problem.has_leftpad
    kinds = call.scale_kinds
    own = _TYPES[attention.dtype]
    # An fp8 cache is multiplied in fp16, which holds e4m3 exactly; scaled values may need the range of q's own dtype.
    product = tl.float16 if problem.quantized and attention.dtype != torch.float32 else own
    value = own if kinds[1] is cache_slots.PER_PAGE else product
    sizes = (
        attention.heads_q, attention.heads_kv, attention.group_size, attention.options.align == TOP_LEFT,
        attention.packed, attention.head_dim, attention.head_dim_v, *blocks, launch.block(attention.head_dim_v),
        tile.block_m, tile.block_n, page, whole, one, _alike(call.inputs),
    )  # fmt: skip
    scaled = product != own or kinds[0] is cache_slots.PER_ITEM
    lanes = tile.block_n if tile.block_m < _WIDE else 1
    given = (*map(tl.constexpr, sizes), call.mode, *kinds, *map(tl.constexpr, (product, value, scaled, lanes)))
    return Shape._make(given)


def _append(call: Launch, tape: Tape) -> None:
    """Launch `append`."""
    problem, inputs = call.problem, call.inputs
    if inputs.k_new is None or inputs.v_new is None:
        return
    attention = problem.attention
    blocks = [launch.block(dim) for dim in (attention.head_dim, attention.head_dim_v)]
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


def _variant(call: Launch) -> tuple[Any, tuple[Any, ...], int | None, int | None]:
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


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter counts as one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _dense(inputs: CacheInputs) -> CacheInputs:
    """The inputs with lengths and tables whose elements are neighbours in memory."""
    given = {name: getattr(inputs, name) for name in _INTEGERS}
    spaced = {name: x for name, x in given.items() if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1}
    return inputs._replace(**{name: x.contiguous() for name, x in spaced.items()})


def attend_cache(
    problem: CacheProblem, tile: TileConfig, inputs: CacheInputs, tape: Tape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and attend: ``out`` in `out_dtype` and ``lse`` fp32."""
    inputs = _dense(inputs)
    attention, q = problem.attention, inputs.q
    programs = tile.programs * multiprocessors(q.device)
    plan = Plan.of(problem, tile.block_m, tile.block_n, programs, max(1, tiles.WHOLE_KEYS // tile.block_n))
    call = Launch(problem, inputs, tile, plan)
    out = tape.empty(attention.out_shape(q), attention.out_dtype, q.device)
    lse = tape.empty(attention.lse_shape(q), torch.float32, q.device)
    with on(q.device):
        _append(call, tape)
        if lse.numel():
            _attend(call, out, lse, tape)
    return out, lse


def _attend(call: Launch, out: torch.Tensor, lse: torch.Tensor, tape: Tape) -> None:
    """Launch `decode`, and `combine` if an item may have more than one piece."""
    plan, inputs, attention = call.plan, call.inputs, call.problem.attention
    # A kernel is the same whether there is anything to merge or not.
    of_slots = (max(1, plan.slots), plan.block_m)
    parts = Parts(
        tape.empty((*of_slots, plan.head_dim_v), torch.float32, out.device),
        tape.empty(of_slots, torch.float32, out.device),
        tape.empty((plan.programs, 4), torch.int32, out.device) if plan.balanced else None,
    )
    variant, extra, left, right = _variant(call)
    sizes, rows_out = shape(call), rows_of(out, attention.packed)
    stat_rows = out.shape[0] if attention.packed else attention.seqlen_q
    sinks = None if inputs.sinks is None else inputs.sinks.contiguous()
    tree = None if inputs.tree is None else tape.part(inputs.tree.contiguous().view(torch.uint8), inputs.tree)
    arguments = (
        rows_of(inputs.q, attention.packed), rows_of(inputs.k_cache), rows_of(inputs.v_cache), rows_out, lse, parts,
        call.slots, call.scales, call.rope, tree, sinks, variant, extra, sizes, *call.limits, *call.work,
        stat_rows, call.rope_length, left, right, call.problem.static.softmax_max,
    )  # fmt: skip
    tape.launch(decode.decode_kernel, plan.programs, arguments, **call.tile.launch_options)
    if plan.balanced or plan.splits > 1:
        rows = min(plan.block_m, max(1, attention.seqlen_q * attention.group_size))
        arguments = (
            rows_out, lse, parts, call.slots, sizes, *call.limits, *call.work, stat_rows, rows, left, right,
        )  # fmt: skip
        items = plan.programs if plan.balanced else plan.items
        tape.launch(combine.combine_kernel, items * rows, arguments, num_warps=4)
