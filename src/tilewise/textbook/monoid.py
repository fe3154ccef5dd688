"""Attention over a set of keys as a monoid: states merge associatively, and the state of no keys is the identity.

A row's state is ``(m, l, acc)`` with ``m = max s_j``, ``l = sum exp(s_j - m)`` and ``acc = sum exp(s_j - m) v_j``.
States of disjoint sets of keys merge by

    m = max(m_a, m_b)
    l = exp(m_a - m) l_a + exp(m_b - m) l_b
    acc = exp(m_a - m) acc_a + exp(m_b - m) acc_b

which is associative and commutative, with ``(-inf, 0, 0)`` as the identity. Hence tiles may come in any order, be split
over blocks (Flash-Decoding), devices (ring attention) or requests (shared prefixes). `tilewise.merge_states` merges
finished states ``(acc / l, m + log l)`` likewise.

Source: Milakov and Gimelshein (2018), section 3.1, equation 4; FlashAttention (Dao et al., 2022), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch

from .. import softmax
from ..softmax import State, finite_max


def identity(rows: int, head_dim_v: int) -> State:
    """The state of no keys, of `rows` rows: ``(-inf, 0, 0)`` in fp64."""
    return softmax.init((rows,), head_dim_v, torch.empty(0, dtype=torch.float64))


def of(s: torch.Tensor, v: torch.Tensor) -> State:
    """The state of one tile of keys.

    Args:
        s: fp64 [R, N] scores, -inf where invisible; N may be 0.
        v: fp64 [N, d] values.
    """
    if s.shape[1] == 0:
        return identity(s.shape[0], v.shape[1])
    m = s.amax(dim=1)
    p = torch.exp(s - finite_max(m)[:, None])
    return State(m, p.sum(dim=1), p @ v)


def merge(a: State, b: State) -> State:
    """The state of the keys of both; a, b: [R] rows over disjoint sets of keys.

    Example:
        >>> s, v = torch.tensor([[1.0, 3.0, 2.0]]).double(), torch.eye(3).double()
        >>> ab_c = merge(merge(of(s[:, :1], v[:1]), of(s[:, 1:2], v[1:2])), of(s[:, 2:], v[2:]))
        >>> o, lse = softmax.finalize(ab_c)
        >>> bool(torch.allclose(o, s.softmax(dim=1))), bool(torch.allclose(lse, s.logsumexp(dim=1)))
        (True, True)
    """
    m = torch.maximum(a.m, b.m)
    shift = finite_max(m)
    w_a, w_b = torch.exp(a.m - shift), torch.exp(b.m - shift)
    return State(m, w_a * a.l + w_b * b.l, w_a[:, None] * a.acc + w_b[:, None] * b.acc)


def fold(states: Iterable[State], empty: State) -> State:
    """All states merged from left to right, starting at the identity."""
    return reduce(merge, states, empty)
