"""Standard attention: three kernels with the score matrix in HBM between them, and their backward pass.

    S = scale Q K^T        P = softmax(S)        O = P V

Every kernel reads its inputs from HBM and writes its result there, so S and P, N^2 elements each, cross four times.

Source: FlashAttention (Dao et al., 2022), Algorithms 0 and 3 (appendix B) and Theorem 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..softmax import finite_max
from .memory import Hbm, Machine
from .tiling import Blocks, Grid, check, scale_of


class Saved(NamedTuple):
    """What the forward leaves for the backward: `o` [N_q, d_v] and `p` [N_q, N_k], both fp64."""

    o: torch.Tensor
    p: torch.Tensor


class Gradients(NamedTuple):
    """fp64 gradients in the shapes of q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def whole(q: torch.Tensor, k: torch.Tensor, causal: bool = False) -> Blocks:
    """One tile for the whole matrix of scores: every operand of a kernel is read once."""
    return Blocks(max(1, q.shape[0]), max(1, k.shape[0]), causal)


def forward(
    machine: Machine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks | None = None,
    *,
    softmax_scale: float | None = None,
) -> Saved:
    """``softmax(scale q k^T) v`` in three kernels.

    Traffic in elements, N = N_q = N_k: products read Q (P) once and K (V) once for each of the T_r row tiles,

        S = QK^T   reads Nd + T_r Nd     writes N^2
        softmax    reads N^2             writes N^2
        O = PV     reads N^2 + T_r Nd    writes Nd
        total      4 N^2 + 2 Nd + 2 T_r Nd

    which is **4 N^2 + 4 Nd** with one tile. A causal mask changes nothing: masked scores are computed, written and
    read. FLOPs: 4 N^2 d in products, N^2 exponentials, 5 N^2 others (scale, max, subtract, sum, divide), without the
    N d ceil(N/B_c) additions of partial products. HBM in use at the end: 2 N^2 + 4 Nd.

    Args:
        machine: counts. SRAM holds B_r rows of scores (N B_r elements) in the second kernel.
        q, k, v: fp64 [N_q, d], [N_k, d], [N_k, d_v], one head.
        blocks: tiles of the products, None for one tile (unlimited SRAM, the published figure); its `tiles` mask is
            refused.
        softmax_scale: default 1/sqrt(d).

    Returns:
        `Saved`: the output, and P for the backward. A row that sees no key is 0.

    Raises:
        tilewise.textbook.memory.SramError: a tile does not fit.
        tilewise.errors.ShapeError, DtypeError: inputs that do not go together.

    Source:
        FlashAttention (Dao et al., 2022), Algorithm 0; Theorem 2 gives Theta(Nd + N^2).

    Example:
        >>> q, k, v = torch.randn(3, 16, 4, dtype=torch.float64)
        >>> machine = Machine()
        >>> o, p = forward(machine, q, k, v)
        >>> machine.counts.traffic == 4 * 16**2 + 4 * 16 * 4
        True
    """
    check(q, k, v)
    n_q, n_k, d_v = q.shape[0], k.shape[0], v.shape[1]
    grid = (blocks or whole(q, k)).grid(n_q, n_k)
    scale = scale_of(q, softmax_scale)
    q_hbm, k_hbm, v_hbm = machine.put("q", q), machine.put("k", k), machine.put("v", v)
    s, p, o = machine.new("s", n_q, n_k), machine.new("p", n_q, n_k), machine.new("o", n_q, d_v)
    _scores(machine, grid, scale, q_hbm, k_hbm, s)
    _softmax(machine, grid, s, p)
    _values(machine, grid, p, v_hbm, o)
    return Saved(o.result(), p.result())


def _scores(machine: Machine, grid: Grid, scale: float, q: Hbm, k: Hbm, s: Hbm) -> None:
    for i, rows in enumerate(grid.rows):
        with machine.on_chip() as chip:
            q_i = chip.read(q, rows)  # [B_r, d]
            for j, columns in enumerate(grid.columns):
                with machine.on_chip() as tile:
                    s_ij = tile.keep(scale * (q_i @ tile.read(k, columns).T))  # [B_r, B_c]
                    tile.write(s, grid.mask(s_ij, i, j), rows, columns)


def _softmax(machine: Machine, grid: Grid, s: Hbm, p: Hbm) -> None:
    for rows in grid.rows:
        with machine.on_chip() as chip:
            s_i = chip.read(s, rows)  # [B_r, N]
            e_i = torch.exp(s_i - finite_max(s_i.amax(dim=1))[:, None])
            l_i = e_i.sum(dim=1)
            chip.write(p, e_i / l_i.masked_fill(l_i == 0, 1.0)[:, None], rows)


def _values(machine: Machine, grid: Grid, p: Hbm, v: Hbm, o: Hbm) -> None:
    for rows in grid.rows:
        with machine.on_chip() as chip:
            acc = chip.new(rows.stop - rows.start, v.shape[1])  # [B_r, d_v]
            for columns in grid.columns:
                with machine.on_chip() as tile:
                    acc = acc + tile.read(p, rows, columns) @ tile.read(v, columns)
            chip.write(o, acc, rows)


def backward(
    machine: Machine,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    saved: Saved,
    do: torch.Tensor,
    *,
    softmax_scale: float | None = None,
) -> Gradients:
    """Gradients in five kernels, with P read from HBM and dP, dS written to it.

    Traffic in elements, N = N_q = N_k, every operand of a kernel read once:

        dV = P^T dO            reads N^2 + Nd    writes Nd
        dP = dO V^T            reads 2 Nd        writes N^2
        dS = P (dP - rowsum)   reads 2 N^2       writes N^2
        dQ = scale dS K        reads N^2 + Nd    writes Nd
        dK = scale dS^T Q      reads N^2 + Nd    writes Nd
        total                  7 N^2 + 8 Nd

    FLOPs: 8 N^2 d in products (four of them: S is not computed again).

    Args:
        machine: counts; SRAM holds a whole kernel (3 N^2 elements).
        qkv: q, k, v as in `forward`.
        saved: what `forward` returned.
        do: fp64 [N_q, d_v], gradient of the output.
        softmax_scale: as in `forward`.

    Raises:
        tilewise.textbook.memory.SramError: a kernel does not fit.

    Source:
        FlashAttention (Dao et al., 2022), Algorithm 3.

    Example:
        >>> q, k, v, do = torch.randn(4, 16, 4, dtype=torch.float64)
        >>> saved = forward(Machine(), q, k, v)
        >>> machine = Machine()
        >>> dq, dk, dv = backward(machine, (q, k, v), saved, do)
        >>> machine.counts.traffic == 7 * 16**2 + 8 * 16 * 4
        True
    """
    q, k, v = qkv
    check(q, k, v)
    scale = scale_of(q, softmax_scale)
    names = {"q": q, "k": k, "v": v, "p": saved.p, "do": do}
    hbm = {name: machine.put(name, x) for name, x in names.items()}
    out = {f"d{name}": machine.new(f"d{name}", *names[name].shape) for name in ("q", "k", "v", "p")}
    ds = machine.new("ds", *saved.p.shape)
    with machine.on_chip() as chip:
        chip.write(out["dv"], chip.read(hbm["p"]).T @ chip.read(hbm["do"]))
    with machine.on_chip() as chip:
        chip.write(out["dp"], chip.read(hbm["do"]) @ chip.read(hbm["v"]).T)
    with machine.on_chip() as chip:
        p, dp = chip.read(hbm["p"]), chip.read(out["dp"])
        chip.write(ds, p * (dp - (p * dp).sum(dim=1, keepdim=True)))
    with machine.on_chip() as chip:
        chip.write(out["dq"], scale * (chip.read(ds) @ chip.read(hbm["k"])))
    with machine.on_chip() as chip:
        chip.write(out["dk"], scale * (chip.read(ds).T @ chip.read(hbm["q"])))
    return Gradients(out["dq"].result(), out["dk"].result(), out["dv"].result())
