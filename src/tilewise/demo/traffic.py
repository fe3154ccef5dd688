"""Memory and HBM traffic of the layers that were trained, standard attention beside tiled."""

from __future__ import annotations

import torch

from .. import roofline
from ..arguments import prepare
from .config import Plan
from .metrics import Traffic

# Where the machine's own rates are not in the table, times are stated for this one.
DEFAULT_DEVICE = "h200"
LONG_CONTEXT = 16_384


def device(plan: Plan) -> roofline.Device:
    """The device whose floor times are shown."""
    return roofline.device_of(plan.device) or roofline.device(DEFAULT_DEVICE)


def table(plan: Plan) -> list[Traffic]:
    """Each kind of layer at the shapes of the main run, and one sequence of long context with the same heads."""
    seqlens = ((plan.recipe.batch, plan.model.seqlen), (1, LONG_CONTEXT))
    return [
        row
        for batch, seqlen in seqlens
        for window in (None, plan.model.window)
        for row in layer(plan, batch, seqlen, window)
    ]


def layer(plan: Plan, batch: int, seqlen: int, window: int | None) -> list[Traffic]:
    """Forward and backward of one layer, by the closed forms of `tilewise.roofline`."""
    model, on = plan.model, device(plan)
    q = torch.empty(batch, seqlen, model.heads_q, model.head_dim, dtype=plan.dtype, device="meta")
    k = torch.empty(batch, seqlen, model.heads_kv, model.head_dim, dtype=plan.dtype, device="meta")
    problem, inputs, _ = prepare(q, k, k, causal=True, window=None if window is None else (window - 1, 0))
    pairs = roofline.visible_pairs(problem, inputs).number
    rows = []
    for pass_ in (roofline.FORWARD, roofline.BACKWARD):
        moved = roofline.hbm_bytes(problem, inputs, pass_)
        rows.append(
            Traffic(
                layer="causal" if window is None else f"window {window}",
                direction=pass_,
                batch=batch,
                seqlen=seqlen,
                score_bytes=2 * roofline.score_matrix_bytes(problem, inputs),
                standard_hbm_bytes=roofline.standard_hbm_bytes(problem, inputs, pass_),
                tiled_hbm_bytes=moved,
                flops=roofline.flops(problem, pairs, pass_),
                floor_us=1e3 * roofline.floor_ms(problem, pairs, moved, on, pass_),
                device=on.name,
            )
        )
    return rows
