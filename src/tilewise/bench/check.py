"""Nothing wrong is timed: every contestant is first held against the fp64 oracle on the very tensors of the case.

The oracle keeps every score in memory, so it looks at single key/value heads with the query heads that read them, some
rows at a time: rows are independent, and what they add to dk and dv adds up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..mask_algebra import Positions
from ..masks import Full
from ..problem import Problem
from .cases import Case
from .data import Data, problem
from .peers import Calls

# An error may be twice that of plain PyTorch code in the same dtype, plus this share of the result.
FLOORS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-12}
# Rows whose error is judged together: few enough that one wrong tile, or row, stands out.
ROWS = 64
# Scores that the oracle holds at a time: 256 MB in fp64, and a dozen tensors of that size.
CELLS = 1 << 25
# Dropout's mask is the oracle's own only where rows, heads and sequences are counted from 0.
DROPOUT_ROWS = 1024


class Part(NamedTuple):
    """One key/value head of one sequence and its query heads; `lines` rows of it are checked."""

    b: int
    kv: int
    lines: int


class Results(NamedTuple):
    """out and dq [rows, group, D], dk and dv [keys, 1, D] of one part; gradients only in the backward pass."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class Expected(NamedTuple):
    """The oracle's results of one part, and the errors that are allowed."""

    part: Part
    truth: Results
    limits: dict[str, float]


def _sequence(data: Data, x: Tensor, b: int) -> Tensor:
    """[S, H, D] of one sequence, dense or packed."""
    if data.offsets is None:
        return x[b]
    start, stop = data.offsets[b : b + 2].tolist()
    return x[start:stop]


def _group(case: Case, kv: int) -> slice:
    size = case.heads // case.heads_kv
    return slice(kv * size, (kv + 1) * size)


def _parts(case: Case) -> list[Part]:
    """The first and the last head, and the longest sequence."""
    lengths = case.lengths or (case.seqlen,) * case.batch
    if case.dropout_p:
        return [Part(0, 0, min(DROPOUT_ROWS, lengths[0]))]
    last, longest = len(lengths) - 1, max(range(len(lengths)), key=lengths.__getitem__)
    places = dict.fromkeys([(0, 0), (longest, case.heads_kv // 2), (last, case.heads_kv - 1)])
    return [Part(b, kv, lengths[b]) for b, kv in places]


def expected(case: Case, data: Data) -> list[Expected]:
    """What the oracle says about each part, and how far plain code in the case's dtype is from it."""
    posed, _ = problem(case, data)
    found = []
    for part in _parts(case):
        truth = _oracle(case, data, posed, part, torch.float64)
        plain = _oracle(case, data, posed, part, case.torch_dtype)
        floor = FLOORS[case.torch_dtype]
        limits = {name: 2 * error + floor for name, error in errors(plain, truth).items()}
        found.append(Expected(part, truth, limits))
    return found


def _oracle(case: Case, data: Data, posed: Problem, part: Part, dtype: torch.dtype) -> Results:
    """One part by the oracle, in chunks of rows; rows past `part.lines` count as having no gradient."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    heads, keys = _group(case, part.kv), slice(part.kv, part.kv + 1)
    q, do = (_sequence(data, x, part.b)[: part.lines, heads].to(wide) for x in (data.q, data.do))
    k, v = (_sequence(data, x, part.b)[:, keys].to(wide) for x in (data.k, data.v))
    step = max(1, CELLS // (q.shape[1] * max(1, k.shape[0])))
    # Dropout counts rows from the oracle's first one.
    step = part.lines if case.dropout_p else step
    outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, part.lines, step):
        rows = slice(first, min(first + step, part.lines))
        chunk = [x.detach()[None].requires_grad_(case.backward) for x in (q[rows], k, v)]
        out = reference.attention(*chunk, dtype=dtype, **_options(case, data, posed, part, rows))
        outs.append(out.detach()[0])
        if case.backward:
            grads = torch.autograd.grad(out, chunk, do[rows][None].to(out.dtype))
            dqs.append(grads[0][0])
            dk += grads[1][0]
            dv += grads[2][0]
    kept = case.torch_dtype if dtype != torch.float64 else torch.float64
    results = [torch.cat(outs)] + ([torch.cat(dqs), dk, dv] if case.backward else [])
    return Results(*(x.to(kept) for x in results))


def _options(case: Case, data: Data, posed: Problem, part: Part, rows: slice) -> dict[str, Any]:
    """The oracle's arguments for some rows: what depends on positions is written out for the rows' true ones."""
    seqlen, heads = _sequence(data, data.q, part.b).shape[0], _group(case, part.kv)
    device = data.q.device
    b = torch.full((1, 1, 1, 1), part.b, device=device)
    h = torch.arange(heads.start, heads.stop, device=device).view(1, -1, 1, 1)
    i = torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1)
    j = torch.arange(seqlen, device=device).view(1, 1, 1, -1)
    mask = posed.options.mask
    bias = None
    if data.slopes is not None:
        bias = -data.slopes[heads].double().view(1, -1, 1, 1) * (i - j).abs()
    return {
        "mask": None if isinstance(mask, Full) else mask.visible(Positions(b, h, i, j, 0)),
        "bias": bias,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "dropout_seed": data.seed,
    }


def errors(got: Results, truth: Results) -> dict[str, float]:
    """Relative error of each result: the largest over heads and groups of `ROWS` rows; infinite for NaN."""
    return {
        name: relative_error(x, y)
        for name, x, y in zip(Results._fields, got, truth, strict=True)
        if x is not None and y is not None
    }


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest ``‖got - truth‖ / ‖truth‖`` over heads and blocks of `ROWS` rows of [rows, heads, D] tensors.

    >>> truth = torch.ones(128, 1, 4)
    >>> got = truth.clone()
    >>> got[100] = 0.0
    >>> relative_error(got, truth)
    0.125
    """
    if got.shape != truth.shape:
        return float("inf")
    difference, size = (_block_norms(x) for x in (got.double() - truth.double(), truth.double()))
    # Where nothing is due, nothing may come.
    relative = torch.where(size > 0, difference / size, torch.where(difference > 0, float("inf"), 0.0))
    return float(relative.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if relative.numel() else 0.0


def _block_norms(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % ROWS))
    return padded.unflatten(0, (-1, ROWS)).square().sum(dim=(1, 3)).sqrt()


class Verdict(NamedTuple):
    """The largest relative error, and what is wrong, or None."""

    error: float
    complaint: str | None


def verdict(case: Case, data: Data, calls: Calls, wanted: list[Expected]) -> Verdict:
    """Hold a contestant's results against the oracle's."""
    out = calls.layout(calls.forward()).detach()
    worst, complaints = 0.0, []
    for part, truth, limits in wanted:
        got = _take(case, data, part, out, _gradients(case, data, calls, part))
        for name, error in errors(got, truth).items():
            worst = max(worst, error)
            if not error <= limits[name]:
                where = f"sequence {part.b}, key/value head {part.kv}"
                complaints.append(f"{name} is off by {error:.2g} of its size, {limits[name]:.2g} is allowed ({where})")
    return Verdict(worst, "; ".join(complaints) or None)


def _gradients(case: Case, data: Data, calls: Calls, part: Part) -> tuple[Tensor, ...]:
    if calls.backward is None:
        return ()
    do = data.do
    if part.lines < _sequence(data, do, part.b).shape[0]:
        do = do.clone()
        _sequence(data, do, part.b)[part.lines :] = 0
    return calls.backward(calls.layout(do))


def _take(case: Case, data: Data, part: Part, out: Tensor, grads: tuple[Tensor, ...]) -> Results:
    rows, keys = slice(part.lines), slice(None)
    heads, kv_head = _group(case, part.kv), slice(part.kv, part.kv + 1)
    places = ((rows, heads), (rows, heads), (keys, kv_head), (keys, kv_head))
    return Results(*(_sequence(data, x, part.b)[at] for x, at in zip((out, *grads), places, strict=False)))
