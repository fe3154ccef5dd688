"""The online-softmax state: a row's running maximum, sum and weighted values, built key tile by key tile.

For a row with scores s_j and values v_j the state is ``m = max s``, ``l = sum exp(s_j - m)``, ``acc = sum exp(s_j - m)
v_j``. States of disjoint key sets merge associatively, and the state of no keys is the identity, so tiles may come in
any order and from anywhere: a loop, split-KV decoding, another device.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithm 3 and section 3.1;
FlashAttention-2 (Dao, 2023), Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import errors
from .products import masked_product

EMPTY = float("-inf")


class State(NamedTuple):
    """Per row: `m` [..., M] running maximum (natural-log units), `l` [..., M] sum, `acc` [..., M, Dv] values."""

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 - the papers' name
    acc: torch.Tensor


def init(shape: tuple[int, ...], head_dim_v: int, like: torch.Tensor, sink: torch.Tensor | None = None) -> State:
    """The state of no keys, or, with `sink` (logits that broadcast to `shape`), of one virtual key of value 0."""
    acc = like.new_zeros((*shape, head_dim_v))
    if sink is None:
        return State(like.new_full(shape, EMPTY), like.new_zeros(shape), acc)
    m = sink.to(like.dtype).expand(shape)
    return State(m, (m > EMPTY).to(like.dtype), acc)


def finite_max(m: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 where there is none, so that exp(-inf - m) is 0 and not NaN."""
    return m.masked_fill(m == EMPTY, 0.0)


def update(
    state: State,
    s: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None = None,
    dropped: torch.Tensor | None = None,
) -> State:
    """The state after one more tile of keys. Overwrites `s` and `state.acc`.

    Args:
        state: of [..., M] rows.
        s: scores [..., M, N]; -inf where invisible.
        v: values [..., N, Dv].
        visible: bool [..., M, N], None for all: where False, v counts for nothing, whatever it holds.
        dropped: bool [..., M, N], None for none: weights that P V leaves out, while the normaliser counts them.
    """
    m = torch.maximum(state.m, s.amax(dim=-1))
    shift = finite_max(m)
    alpha = torch.exp(state.m - shift)
    p = s.sub_(shift[..., None]).exp_()
    l = state.l * alpha + p.sum(dim=-1)  # noqa: E741 - the papers' name
    if dropped is not None:
        p.masked_fill_(dropped, 0.0)
    return State(m, l, state.acc.mul_(alpha[..., None]).add_(masked_product(p, v, visible)))


def accumulate(state: State, s: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None = None) -> State:
    """The state after one more tile of keys with `state.m` for the maximum, true or not: nothing is rescaled.

    States with the same m add (Flash-Decoding++ section 3). Weights of scores far above m overflow and those far below
    it vanish, which the caller has to notice. Arguments as of `update`; overwrites `s` and `state.acc`.
    """
    p = s.sub_(state.m[..., None]).exp_()
    return State(state.m, state.l + p.sum(dim=-1), state.acc.add_(masked_product(p, v, visible)))


def finalize(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., M, Dv] and natural-log LSE [..., M]; a row without keys has output 0 and LSE -inf."""
    empty = state.l == 0
    out = state.acc / state.l.masked_fill(empty, 1.0)[..., None]
    return out.masked_fill_(empty[..., None], 0.0), state.m + state.l.log()


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two finalized states over disjoint keys as one; total, associative, differentiable, with the empty state as 1.

    Args:
        o_a, o_b: outputs [..., M, Dv].
        lse_a, lse_b: natural-log LSE [..., M]; where it is -inf, the output of that side is ignored, NaN included.

    Returns:
        ``o [..., M, Dv]`` in o_a's dtype and ``lse [..., M]``.
    """
    shift = finite_max(torch.maximum(lse_a, lse_b)).detach()
    w_a, w_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = w_a + w_b
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    parts = []
    for o, w in ((o_a, w_a), (o_b, w_b)):
        seen = o.to(w.dtype).masked_fill((w == 0)[..., None], 0.0)
        parts.append(seen * (w / safe)[..., None])
    lse = (shift + safe.log()).masked_fill(empty, EMPTY)
    return (parts[0] + parts[1]).to(o_a.dtype), lse


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b``.

    Args:
        o_a, o_b: outputs [B, Sq, Hq, Dv], or packed [T, Hq, Dv]; any floating dtype, the same for both.
        lse_a, lse_b: natural-log LSE [B, Hq, Sq], or packed [Hq, T]; -inf for rows that saw no key.

    Returns:
        ``(o, lse)``, in o_a's dtype and the LSE's dtype. Merging two empty rows is an empty row (0, -inf).

    Raises:
        tilewise.errors.ShapeError: the shapes do not go together.
        tilewise.errors.DtypeError: outputs of different dtypes.

    Numerics:
        In the LSE's dtype; differentiable in all four. Ask for ``out_dtype=torch.float32`` partial results to merge
        without a second rounding.

    Source:
        FlashAttention-2 section 3.1.1; Flash-Decoding; the same merge serves split-KV, cascades and rings.

    Example:
        >>> import torch, tilewise
        >>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
        >>> left = tilewise.attention(q, k[:, :3], v[:, :3], return_lse=True)
        >>> right = tilewise.attention(q, k[:, 3:], v[:, 3:], return_lse=True)
        >>> o, lse = tilewise.merge_states(*left, *right)
        >>> torch.allclose(o, tilewise.attention(q, k, v), atol=1e-5)
        True
    """
    _check_states(o_a=o_a, o_b=o_b, lse_a=lse_a, lse_b=lse_b)
    expected = lse_shape(o_a)
    for name, got, want in (
        ("o_b", o_b.shape, o_a.shape),
        ("lse_a", lse_a.shape, expected),
        ("lse_b", lse_b.shape, expected),
    ):
        if tuple(got) != tuple(want):
            errors.fail(
                errors.ShapeError,
                name,
                f"shape {list(got)}",
                f"{list(want)} beside o_a {list(o_a.shape)}",
                "pass o and lse as attention(..., return_lse=True) returns them",
            )
    o, lse = merge(o_a.transpose(-2, -3), lse_a, o_b.transpose(-2, -3), lse_b)
    return o.transpose(-2, -3).contiguous(), lse


def _check_states(**states: torch.Tensor) -> None:
    """Raise unless all are floating tensors on one device, outputs of one dtype, LSEs of one and in full precision."""
    for name, x in states.items():
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            got = str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
            errors.fail(errors.DtypeError, name, got, "a floating tensor", "pass what attention(...) returned")
        like = states[name[:-1] + "a"]
        if x.dtype != like.dtype:
            errors.fail(errors.DtypeError, name, x.dtype, f"{name[:-1]}a's dtype {like.dtype}", "cast one of them")
        if x.device != states["o_a"].device:
            errors.fail(
                errors.DeviceError, name, x.device, f"o_a's device {states['o_a'].device}", "move it with .to()"
            )
        if name == "lse_a" and x.dtype.itemsize < 4:
            errors.fail(errors.DtypeError, name, x.dtype, "float32 or float64", "keep the LSE as attention returned it")
    if states["o_a"].ndim not in (3, 4):
        got = f"rank {states['o_a'].ndim}"
        errors.fail(errors.ShapeError, "o_a", got, "rank 4 [B, S, H, D], or packed 3 [T, H, D]", "reshape it")


def lse_shape(o: torch.Tensor) -> tuple[int, ...]:
    """The shape of the LSE beside outputs [B, S, H, D] or [T, H, D]."""
    return tuple(o.transpose(-2, -3).shape[:-1])
