"""What a call would do: which backend and why not the others, its tile, and the ledger of what it costs at least."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import TextWrapper
from typing import Any

import torch

from . import dispatch, roofline
from .arguments import prepare
from .block_masks import BlockMask
from .mask_algebra import And, Mask, Or
from .masks import Window
from .problem import Inputs, Problem
from .roofline.forms import Floor, floor
from .roofline.tile_rules import Tile
from .tiles import TileConfig

_WIDTH = 110  # of the printed table


@dataclass(frozen=True)
class Ledger:
    """What one pass of a call costs at least.

    Args:
        products: FLOPs of each matrix product; visible pairs only.
        exponentials: one for each visible pair (the backward computes P again).
        tensors: bytes of each tensor that is read or written, once.
        standard_hbm_bytes: of standard attention, which writes S and P and reads them back.
        floor: times that the device needs for products and bytes; None where its rates are unknown.
    """

    products: dict[str, int]
    exponentials: int
    tensors: dict[str, int]
    standard_hbm_bytes: int
    floor: Floor | None

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(self.products.values())

    @property
    def hbm_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensors.values())

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 where nothing moves."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    def rows(self, device: roofline.Device | None, bound: str) -> list[tuple[str, str]]:
        """Label and value of each line of the table."""
        products = ", ".join(f"{name} {_si(count)}" for name, count in self.products.items())
        tensors = ", ".join(f"{name} {_si(size)}B" for name, size in self.tensors.items())
        lines = [
            ("FLOPs", f"{_si(self.flops)}FLOP{bound}: {products}; {_si(self.exponentials).strip()} exponentials"),
            ("HBM traffic", f"{_si(self.hbm_bytes)}B (standard attention: {_si(self.standard_hbm_bytes)}B): {tensors}"),
        ]
        if self.hbm_bytes:
            lines.append(("intensity", f"{self.intensity:,.0f} FLOP/B{bound}"))
        if device is None or self.floor is None:
            return [*lines, ("floor", "unknown: the device is not in tilewise.roofline.DEVICES")]
        arithmetic, memory = (f"{ms:.3g} ms" for ms in self.floor[:2])
        times = f"arithmetic {arithmetic}, memory {memory}"
        return [*lines, ("floor", f"{self.floor.ms:.3g} ms on {device.name}, bound by {self.floor.bound} ({times})")]


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; prints as a table.

    Args:
        backend: who serves the call, or None.
        reasons: for each other backend, why not.
        tile: rows and keys of one step of that backend's forward.
        tile_bytes: of the tiles of Q, K, V and O of that step.
        forward, backward: what the passes cost at least.
        score_bytes: of one matrix of scores, which standard attention keeps twice (S and P).
        device: the roofline's device, or None.
        exact: whether the visible pairs were counted, or bounded from above (a predicate is not run).
        call: the shapes and options in words.
    """

    backend: str | None
    reasons: dict[str, list[str]]
    tile: TileConfig | None
    tile_bytes: int
    forward: Ledger
    backward: Ledger
    score_bytes: int
    device: roofline.Device | None
    exact: bool
    call: str

    @property
    def flops(self) -> int:
        """Of the forward's products; visible pairs only."""
        return self.forward.flops

    @property
    def hbm_bytes(self) -> int:
        """Of the forward, each tensor over HBM once."""
        return self.forward.hbm_bytes

    @property
    def standard_hbm_bytes(self) -> int:
        """Of standard attention's forward."""
        return self.forward.standard_hbm_bytes

    @property
    def floor_ms(self) -> float | None:
        """No forward is faster on `device`; None where the device's rates are unknown."""
        return None if self.forward.floor is None else self.forward.floor.ms

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the table."""
        bound = "" if self.exact else " (upper bound: the mask has parts that are decided element by element)"
        lines = [("call", self.call), ("backend", self.backend or "none")]
        lines += [(f"not {name}", "; ".join(why)) for name, why in self.reasons.items()]
        if self.tile is not None:
            held = f"Q, K, V and O of one take {self.tile_bytes / 1024:,.0f} KiB"
            if self.device is not None:
                held += f", a block of {self.device.name} can have {self.device.sram_kib} KiB of SRAM"
            lines.append(("tile", f"{self.tile.block_m} rows x {self.tile.block_n} keys; {held}"))
        lines += self.forward.rows(self.device, bound)
        lines.append(("memory", self._memory()))
        return lines + [(f"backward {label}", value) for label, value in self.backward.rows(self.device, bound)]

    def _memory(self) -> str:
        held = self.hbm_bytes
        standard = held + 2 * self.score_bytes
        full = self.device is not None and standard > self.device.hbm_gb * 1e9
        beyond = f", more than {self.device.name} has" if full and self.device is not None else ""
        return f"{_si(held)}B: inputs and results (standard attention, with S and P: {_si(standard)}B{beyond})"

    def __str__(self) -> str:
        rows = self.rows()
        margin = max(len(label) for label, _ in rows) + 2
        wrap = TextWrapper(width=_WIDTH, subsequent_indent=" " * margin, break_long_words=False, break_on_hyphens=False)
        return "\n".join(wrap.fill(f"{label:<{margin}}{value}") for label, value in rows)


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
        An `Explanation`; FLOPs, bytes and floors are of the forward, `backward` has those of the backward.

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
    posed = problem
    if device is not None and on is not None:
        posed = replace(problem, device=torch.device("cuda"), assumed_capability=on.capability)
    backend, reasons = _backends(posed)
    tile = dispatch.module(backend).tile(posed, "forward") if backend is not None else None
    return Explanation(
        backend=backend,
        reasons=reasons,
        tile=tile,
        tile_bytes=_tile_bytes(problem, tile),
        forward=_ledger(problem, inputs, pairs.number, on, roofline.FORWARD),
        backward=_ledger(problem, inputs, pairs.number, on, roofline.BACKWARD),
        score_bytes=roofline.score_matrix_bytes(problem, inputs),
        device=on,
        exact=pairs.exact,
        call=_in_words(problem, inputs),
    )


def _tile_bytes(problem: Problem, tile: TileConfig | None) -> int:
    if tile is None:
        return 0
    return Tile(tile.block_m, tile.block_n).tensors(max(problem.head_dim, problem.head_dim_v)) * problem.dtype.itemsize


def _ledger(problem: Problem, inputs: Inputs, pairs: int, on: roofline.Device | None, pass_: str) -> Ledger:
    products = roofline.products(problem, pairs, pass_)
    tensors = roofline.tensor_bytes(problem, inputs, pass_)
    elements = sum(tensors.values()) / problem.dtype.itemsize
    return Ledger(
        products=products,
        exponentials=pairs,
        tensors=tensors,
        standard_hbm_bytes=roofline.standard_hbm_bytes(problem, inputs, pass_),
        floor=None if on is None else floor(sum(products.values()), elements, on, problem.dtype),
    )


def _backends(problem: Problem) -> tuple[str | None, dict[str, list[str]]]:
    """Who serves the problem, and why the others do not."""
    wanted, reasons = problem.options.backend, {}
    refusals = {name: dispatch.reasons(name, problem) for name in dispatch.BACKENDS}
    can = [name for name, why in refusals.items() if not why and wanted in (None, name)]
    chosen = dispatch.best(can, problem)
    for name, why in refusals.items():
        if wanted not in (None, name):
            why = [f"backend={wanted!r} was asked for", *why]
        elif not why and name != chosen:
            why = [dispatch.drawback(name, problem) or f"{chosen} serves the call and comes first"]
        if why:
            reasons[name] = why
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
