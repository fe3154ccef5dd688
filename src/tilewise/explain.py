"""What a call would do: which backend and why not the others, its tile, and what it must cost at least."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import dispatch, roofline
from .arguments import prepare
from .block_masks import BlockMask
from .mask_algebra import And, Mask, Or
from .masks import Window
from .problem import Inputs, Problem
from .tiles import TileConfig


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; prints as a table.

    Args:
        backend: who serves the call, or None.
        reasons: for each other backend, why not.
        tile: rows and keys of one step of that backend's forward.
        flops: of the forward's products; visible pairs only.
        hbm_bytes: each tensor over HBM once.
        floor_ms: no implementation is faster on `device`; None where the device's rates are unknown.
        device: the roofline's device, or None.
        exact: whether the visible pairs were counted, or bounded from above (a predicate is not run).
        call: the shapes and options in words.
    """

    backend: str | None
    reasons: dict[str, list[str]]
    tile: TileConfig | None
    flops: int
    hbm_bytes: int
    floor_ms: float | None
    device: roofline.Device | None
    exact: bool
    call: str
    standard_hbm_bytes: int = field(default=0)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the table."""
        bound = "" if self.exact else " (upper bound: the mask has parts that are decided element by element)"
        lines = [("call", self.call), ("backend", self.backend or "none")]
        lines += [(f"not {name}", "; ".join(why)) for name, why in self.reasons.items()]
        if self.tile is not None:
            lines.append(("tile", f"{self.tile.block_m} rows x {self.tile.block_n} keys"))
        lines.append(("FLOPs", f"{_si(self.flops)}FLOP{bound}"))
        lines.append(("HBM traffic", f"{_si(self.hbm_bytes)}B (standard attention: {_si(self.standard_hbm_bytes)}B)"))
        if self.hbm_bytes:
            lines.append(("intensity", f"{self.flops / self.hbm_bytes:,.0f} FLOP/B{bound}"))
        if self.device is not None and self.floor_ms is not None:
            lines.append(("floor", f"{self.floor_ms:.3g} ms on {self.device.name}"))
        else:
            lines.append(("floor", "unknown: the device is not in tilewise.roofline.DEVICES"))
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _si(x: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(x) < 1000:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} P"


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, device: str | None = None, **arguments: Any
) -> Explanation:
    """What `attention` (or, with cu_seqlens_* and max_seqlen_*, `attention_varlen`) would do with these arguments.

    Nothing is computed; tensors on the meta device will do.

    Args:
        q, k, v: as in `attention`.
        device: a name of `tilewise.roofline.DEVICES`, as if the tensors were there; None: where they are.
        **arguments: as in `attention`.

    Returns:
        An `Explanation`.

    Raises:
        tilewise.errors.TilewiseError: what the call itself would raise, except that no backend serves it.

    Example:
        >>> import torch, tilewise
        >>> q = torch.empty(1, 4096, 32, 128, dtype=torch.bfloat16, device="meta")
        >>> k = torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16, device="meta")
        >>> found = tilewise.explain(q, k, k, causal=True, device="h200")
        >>> f"{found.flops:.4g} FLOP, {found.hbm_bytes / 1e6:.0f} MB, {found.floor_ms:.3f} ms"
        '1.375e+11 FLOP, 84 MB, 0.139 ms'
    """
    problem, inputs, _ = prepare(q, k, v, **arguments)
    dispatch.check_name(problem.options.backend)
    on = roofline.device(device) if device is not None else roofline.device_of(problem.device)
    pairs = roofline.visible_pairs(problem, inputs)
    moved = roofline.hbm_bytes(problem, inputs)
    posed = problem
    if device is not None and on is not None:
        posed = replace(problem, device=torch.device("cuda"), assumed_capability=on.capability)
    backend, reasons = _backends(posed)
    return Explanation(
        backend=backend,
        reasons=reasons,
        tile=dispatch.module(backend).tile(posed, "forward") if backend is not None else None,
        flops=roofline.flops(problem, pairs.number),
        hbm_bytes=moved,
        floor_ms=None if on is None else roofline.floor_ms(problem, pairs.number, moved, on),
        device=on,
        exact=pairs.exact,
        call=_in_words(problem, inputs),
        standard_hbm_bytes=roofline.standard_hbm_bytes(problem, inputs),
    )


def _backends(problem: Problem) -> tuple[str | None, dict[str, list[str]]]:
    """Who serves the problem, and why the others do not."""
    chosen, reasons = None, {}
    for name in dispatch.BACKENDS:
        why = dispatch.reasons(name, problem)
        wanted = problem.options.backend
        if wanted not in (None, name):
            why = [f"backend={wanted!r} was asked for", *why]
        elif not why and chosen is not None:
            why = [f"{chosen} serves the call and comes first"]
        if why:
            reasons[name] = why
        else:
            chosen = name
    return chosen, reasons


def _in_words(problem: Problem, inputs: Inputs) -> str:
    dtype = str(problem.dtype).removeprefix("torch.")
    lengths = f"{problem.seqlen_q} x {problem.seqlen_k}"
    heads = f"{problem.heads_q}/{problem.heads_kv} heads"
    dims = f"head dim {problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    members = f"{problem.batch} packed, longest {lengths}" if problem.packed else f"batch {problem.batch}, {lengths}"
    return f"{members}, {heads}, {dims}, {dtype}, mask: {_mask_in_words(problem.options.mask)}"


def _mask_in_words(mask: Mask) -> str:
    if isinstance(mask, And):
        return f"{_mask_in_words(mask.a)} & {_mask_in_words(mask.b)}"
    if isinstance(mask, Or):
        return f"({_mask_in_words(mask.a)} | {_mask_in_words(mask.b)})"
    if isinstance(mask, Window):
        return f"window ({mask.left}, {mask.right})"
    return str(mask) if isinstance(mask, BlockMask) else type(mask).__name__.lower()
