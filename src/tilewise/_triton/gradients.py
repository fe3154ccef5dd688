"""The backward pass on the host: which kernels a set of gradients needs, and the small sums behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ..kernels.call import Call, prepare
from ..kernels.placement import on
from ..kernels.replay import Tape
from ..kernels.rows import Rows, rows_of
from ..kernels.sinks import gradient_of_sinks
from ..problem import Inputs, Problem
from ..tiles import TileConfig
from . import launch
from .backward import delta_kernel, dkv_kernel, dq_kernel
from .bias import dbias

# Above this head dim dk and dv do not fit into registers together, and computing the scores once more costs less.
TOGETHER = 128


def backward(
    problem: Problem, inputs: Inputs, forward: tuple[torch.Tensor, torch.Tensor], grads: tuple[Any, Any],
    needs: tuple[str, ...], tile: Callable[[str], TileConfig], tape: Tape | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients named in `needs`.

    Args:
        problem, inputs: the call.
        forward: its ``out`` and ``lse``.
        grads: ``do`` and ``dlse``; one of them may be None.
        needs: names of inputs.
        tile: the tile of a pass.
        tape: writes down what this takes, if anyone wants to know.
    """
    tape = tape or Tape()
    call, (out, lse), (do, dlse) = prepare(problem, inputs), forward, grads
    if do is None:
        do = torch.zeros_like(out)
    if do.stride(-1) != 1:
        do = do.contiguous()
    dlse = None if dlse is None else dlse.float().contiguous()
    result: dict[str, torch.Tensor] = {}
    with on(problem.device):
        stats = statistics(call, (out, lse), (do, dlse), tile("delta"), tape)
        operands = tuple(rows_of(x, problem.packed) for x in (inputs.q, inputs.k, inputs.v, do.to(problem.dtype)))
        if "q" in needs or "alibi_slopes" in needs:
            result["q"], slopes = gradient_of_q(call, operands, stats, tile("dq"), (inputs, dlse), needs, tape)
            if slopes is not None:
                result["alibi_slopes"] = slopes
        wanted = tuple(name for name in ("k", "v") if name in needs)
        apart = max(problem.head_dim, problem.head_dim_v) > TOGETHER
        for names in [(name,) for name in wanted] if apart else [wanted] if wanted else []:
            shape = tile("d" + names[0] if apart else "dkv")
            result |= zip(names, gradient_of_kv(call, operands, stats, shape, names, tape), strict=True)
        if "bias" in needs:
            assert inputs.bias is not None
            result["bias"] = dbias(inputs.bias, call, operands, stats, tile("dbias"))
    if "sinks" in needs:
        assert inputs.sinks is not None
        result["sinks"] = gradient_of_sinks(inputs.sinks, lse, stats[1])
    return {name: result[name] for name in needs}


def _empty(like: torch.Tensor, written: bool, tape: Tape) -> torch.Tensor:
    """A gradient of `like`, contiguous; zeros where kernels do not write every row."""
    return tape.empty(like.shape, like.dtype, like.device, None if written else 0.0)


def statistics(
    call: Call, forward: tuple[torch.Tensor, torch.Tensor], grads: tuple[torch.Tensor, Any], tile: TileConfig,
    tape: Tape,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The lse in base 2, and delta."""
    problem, (out, lse), (do, dlse) = call.problem, forward, grads
    lse2, delta = _empty(lse, True, tape), _empty(lse, not problem.packed, tape)
    programs = triton.cdiv(problem.seqlen_q, tile.block_m) * problem.heads_q * problem.batch
    if programs:
        arguments = (
            rows_of(out, problem.packed), rows_of(do, problem.packed), lse.contiguous(), dlse, lse2, delta,
            call.base, launch.shape(call.problem, tile), *call.sizes[:3],
        )  # fmt: skip
        tape.launch(delta_kernel, programs, arguments, **tile.launch_options)
    return lse2, delta


def gradient_of_q(
    call: Call, operands: tuple[Rows, ...], stats: tuple[torch.Tensor, ...], tile: TileConfig,
    given: tuple[Inputs, torch.Tensor | None], wanted: tuple[str, ...], tape: Tape,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """dq, and the gradient of the slopes if it is wanted; `given` are the inputs and dlse."""
    problem, (inputs, dlse) = call.problem, given
    slopes = inputs.alibi_slopes if "alibi_slopes" in wanted else None
    dq = _empty(inputs.q, not problem.packed, tape)
    tiles_m = triton.cdiv(problem.seqlen_q, tile.block_m)
    partial = None
    if slopes is not None:
        partial = torch.zeros(problem.batch, problem.heads_q, tiles_m, dtype=torch.float32, device=problem.device)
    programs = tiles_m * problem.heads_q * problem.batch
    if programs:
        arguments = (
            *operands, rows_of(dq, problem.packed), partial, None if partial is None else dlse, *stats,
            *call.variant(tile), launch.shape(call.problem, tile, wanted), *call.sizes,
        )  # fmt: skip
        tape.launch(dq_kernel, programs, arguments, **tile.launch_options)
    if partial is None or slopes is None:
        return dq, None
    dslopes = partial.sum(2)
    return dq, (dslopes if slopes.ndim == 2 else dslopes.sum(0)).to(slopes.dtype)


def gradient_of_kv(
    call: Call, operands: tuple[Rows, ...], stats: tuple[torch.Tensor, ...], tile: TileConfig,
    wanted: tuple[str, ...], tape: Tape,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dk, dv or both, as `wanted` names them."""
    problem = call.problem
    written = not problem.packed and not problem.has_seqused
    grads = {name: _empty(x.ptr, written, tape) for name, x in zip("kv", operands[1:3], strict=True) if name in wanted}
    dk, dv = (rows_of(grads[name], problem.packed) if name in grads else None for name in "kv")
    programs = triton.cdiv(problem.seqlen_k, tile.block_n) * problem.heads_kv * problem.batch
    if programs:
        arguments = (
            *operands, dk, dv, *stats, *call.variant(tile, transposed=True),
            launch.shape(call.problem, tile, wanted), *call.sizes,
        )  # fmt: skip
        tape.launch(dkv_kernel, programs, arguments, **tile.launch_options)
    return tuple(grads[name] for name in wanted)
