"""FlashAttention-3 in 8 bits: what is rounded where, and what scales and rotations do about it.

e4m3 has 3 bits of mantissa between 2^-9 and 448, e5m2 has 2 between 2^-16 and 57344. A tensor is kept as ``x / scale``
with ``scale = max |x| / 448`` over the whole of it, over a head, or over a block of rows (the tile of the kernel), so
that one large value costs precision only where it shares the scale. Within a row, a rotation helps: for an orthogonal
M, ``(Q M)(K M)^T = Q K^T``, and a random one spreads an outlier over all of the head dim.

Measured here on the paper's inputs with outliers (N 2048, d 64, three seeds), root mean square error of the output:

    one scale for each tensor       1.8e-2 to 3.0e-2     (published, of other shapes: 2.4e-2)
    block scales                    1.6e-2 to 2.3e-2     (2.4e-2)
    rotation                        1.0e-2 to 1.5e-2     (9.3e-3)
    both                            1.0e-2 to 1.6e-2     (9.1e-3)

so the rotation is what counts there, as in the paper; block scales count where whole heads or regions differ in size.

Values here are fp64 that 8 bits can represent; products accumulate in fp64 (the hardware's fp32 is finer than anything
below). The error of the quantised inputs is then all there is.

Source: FlashAttention-3 (Shah et al., 2024), section 3.3 (block quantisation, incoherent processing) and table 3;
Micikevicius et al., "FP8 formats for deep learning" (2022); Chee et al., "QuIP" (2023) for incoherence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import errors
from ..softmax import EMPTY, finite_max
from .tiling import cut


class Format(NamedTuple):
    """An 8-bit floating-point format: its torch dtype and its largest finite value."""

    dtype: torch.dtype
    largest: float


E4M3 = Format(torch.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, 57344.0)

# What shares one scale.
GRANULARITIES = ("tensor", "head", "block")

# P lies in [0, 1], of which e4m3 resolves only what is above 2^-9. FlashAttention-3's kernels shift it up by this much.
P_SCALE = 2.0**8


def cast(x: torch.Tensor, to: Format) -> torch.Tensor:
    """`x` rounded to a format, values beyond its range to its largest; in x's dtype.

    >>> x = torch.tensor([1.06, 1.07, 1000.0, 0.001, 0.0009], dtype=torch.float64)
    >>> cast(x, E4M3).tolist()
    [1.0, 1.125, 448.0, 0.001953125, 0.0]
    """
    return x.clamp(-to.largest, to.largest).to(to.dtype).to(x.dtype)


class Quantized(NamedTuple):
    """`values` [H, N, d], each representable in 8 bits, and `scale` that broadcasts to them: x ~ values * scale."""

    values: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """values * scale, [H, N, d]."""
        return self.values * self.scale


def quantize(x: torch.Tensor, granularity: str = "tensor", *, block: int = 128, to: Format = E4M3) -> Quantized:
    """`x` in 8 bits, with one scale for the tensor, for each head, or for each block of rows of each head.

    ``scale = max |x| / largest`` over what shares it, so that nothing saturates; ``values = round(x / scale)``. Scales
    cost 1, H, or H ceil(N/block) numbers beside H N d bytes.

    Args:
        x: [H, N, d], fp64.
        granularity: "tensor", "head" or "block".
        block: rows that share a scale, for "block".
        to: `E4M3` or `E5M2`.

    Raises:
        tilewise.errors.ArgumentError: another granularity.

    Source:
        FlashAttention-3 (2024), section 3.3, "block quantization".

    Example:
        >>> x = torch.randn(2, 256, 64, dtype=torch.float64)
        >>> x[0, 0, 0] = 1e4  # spoils the scale of what it shares one with
        >>> per_tensor, per_head = (rmse(quantize(x, g).dequantize()[1], x[1]) for g in ("tensor", "head"))
        >>> per_head < per_tensor
        True
    """
    if granularity not in GRANULARITIES:
        errors.fail(errors.ArgumentError, "granularity", repr(granularity), ", ".join(GRANULARITIES), "name one")
    largest = x.abs().amax(dim=-1, keepdim=True)  # [H, N, 1]
    if granularity == "tensor":
        largest = largest.amax().expand(1, 1, 1)
    elif granularity == "head":
        largest = largest.amax(dim=1, keepdim=True)
    else:
        blocks = [
            largest[:, rows].amax(dim=1, keepdim=True).expand(-1, rows.stop - rows.start, 1)
            for rows in cut(x.shape[1], block)
        ]
        largest = torch.cat(blocks, dim=1)
    scale = largest / to.largest
    scale = scale.masked_fill(scale == 0, 1.0)
    return Quantized(cast(x / scale, to), scale)


def hadamard(size: int) -> torch.Tensor:
    """The Hadamard matrix of Sylvester, fp64 [size, size], over sqrt(size), which makes it orthogonal.

    Raises:
        tilewise.errors.ArgumentError: `size` is no power of two.

    Example:
        >>> h = hadamard(64)
        >>> bool(torch.allclose(h @ h.T, torch.eye(64, dtype=torch.float64)))
        True
    """
    if size < 1 or size & (size - 1):
        errors.fail(errors.ArgumentError, "head_dim", size, "a power of two", "pad q and k with zeros")
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h / size**0.5


def rotation(head_dim: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix ``diag(signs) H``, fp64 [d, d]; applied in O(d log d) by a kernel.

    Multiply both q and k by it: ``(q M)(k M)^T = q k^T``, while an outlier of one channel becomes 1/sqrt(d) of itself
    in every channel.

    Source:
        FlashAttention-3 (2024), section 3.3, "incoherent processing"; QuIP (2023).

    Example:
        >>> spike = torch.zeros(1, 64, dtype=torch.float64)
        >>> spike[0, 3] = 8.0
        >>> float((spike @ rotation(64, seed=0)).abs().max())
        1.0
    """
    signs = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs.double()[:, None] * hadamard(head_dim)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    granularity: str = "block",
    *,
    block: int = 128,
    rotate: int | None = None,
    p_scale: float = P_SCALE,
) -> torch.Tensor:
    """FlashAttention-3's forward in e4m3: q, k, v and P in 8 bits, softmax and accumulators in full precision.

    Key tile by key tile, as on the device: ``S = scale (q8 k8^T) s_q s_k``, ``P = exp(S - m)``, and
    ``acc += (round(P p_scale) v8) s_v / p_scale``, while the row sums take P before rounding. Moves version 2's
    elements at one byte each for q, k and v.

    Args:
        q, k, v: fp64 [H, N_q, d], [H, N_k, d], [H, N_k, d_v].
        granularity: what shares a scale: "tensor", "head" or "block" (of `block` rows).
        block: keys of a tile, and rows of a block.
        rotate: seed of the `rotation` of q and k before they are quantised; None for none.
        p_scale: factor on P before it is rounded.

    Returns:
        fp64 [H, N_q, d_v].

    Raises:
        tilewise.errors.ArgumentError: another granularity; a rotation of a head dim that is no power of two.

    Source:
        FlashAttention-3 (2024), section 3.3; its kernels for `p_scale` (hopper/softmax.h, Max_offset).

    Example:
        >>> q, k, v = outliers(3, 2, 512, 64, seed=0)
        >>> exact = attention_exact(q, k, v)
        >>> plain, rotated = (rmse(attention(q, k, v, rotate=seed), exact) for seed in (None, 1))
        >>> rotated < 0.8 * plain
        True
    """
    softmax_scale = q.shape[-1] ** -0.5
    if rotate is not None:
        turn = rotation(q.shape[-1], rotate)
        q, k = q @ turn, k @ turn
    q8, k8, v8 = (quantize(x, granularity, block=block) for x in (q, k, v))
    k_scale, v_scale = (x.scale.expand(k.shape[0], k.shape[1], 1) for x in (k8, v8))
    acc = q.new_zeros(*q.shape[:2], v.shape[2])
    m_i, l_i = q.new_full(q.shape[:2], EMPTY), q.new_zeros(q.shape[:2])
    for columns in cut(k.shape[1], block):
        s = softmax_scale * (q8.values @ k8.values[:, columns].mT) * q8.scale * k_scale[:, columns].mT
        m_new = torch.maximum(m_i, s.amax(dim=-1))
        p = torch.exp(s - finite_max(m_new)[..., None])
        alpha = torch.exp(m_i - finite_max(m_new))
        l_i = alpha * l_i + p.sum(dim=-1)
        # One scale for each block of keys, which is this tile's, or one for all of them.
        product = cast(p * p_scale, E4M3) @ v8.values[:, columns] * v_scale[:, columns][:, :1]
        acc = alpha[..., None] * acc + product / p_scale
        m_i = m_new
    return acc / l_i[..., None]


def attention_exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same in fp64 throughout: what errors are measured against."""
    return (q.shape[-1] ** -0.5 * (q @ k.mT)).softmax(dim=-1) @ v


def rmse(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the error."""
    return float((x - exact).square().mean().sqrt())


def outliers(tensors: int, heads: int, seqlen: int, head_dim: int, seed: int) -> list[torch.Tensor]:
    """Inputs as FlashAttention-3 tests them: ``N(0, 1) + N(0, 100) Bernoulli(0.001)``, fp64 [H, N, d] each.

    Source:
        FlashAttention-3 (2024), section 4.3: 0.1 % of the entries with a standard deviation of 10, as in activations
        of large models (Dettmers et al., "LLM.int8()", 2022).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (tensors, heads, seqlen, head_dim)
    usual, large = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    chosen = torch.rand(shape, generator=generator) < 0.001
    return list((usual + 10.0 * large * chosen).unbind())


def outlier_channels(x: torch.Tensor, channels: int, gain: float) -> torch.Tensor:
    """`x` with its first channels `gain` times as large, as in the keys of many models: every row has them.

    e4m3 rounds relatively, so that a large channel does not coarsen the others until they are 2^-15 of it: a rotation
    gains less here than where an integer format would be used, and less than with scattered outliers. Measured with two
    of 64 key channels (N 512, block scales), error over the output's size: gain 10, 0.11 without a rotation and 0.09
    with one; gain 30, 0.19 and 0.16; gain 100, 0.27 and 0.30, where softmax is all but a choice of one key.
    """
    scaled = x.clone()
    scaled[..., :channels] *= gain
    return scaled


def flushed(x: torch.Tensor, to: Format) -> float:
    """The share of the values of x that are not 0 and become 0 in a format.

    >>> x = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float64)
    >>> flushed(x, E4M3), flushed(x, E5M2)
    (0.5, 0.0)
    """
    nonzero = x != 0
    return float(((cast(x, to) == 0) & nonzero).sum() / nonzero.sum().clamp(min=1))


class Gradients(NamedTuple):
    """fp64 gradients in the shapes of q, k and v, and the rounded dS [H, N_q, N_k]."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    ds: torch.Tensor


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, to: Format | None, *, scaled: bool = False
) -> Gradients:
    """Attention's gradients with dO and dS in 8 bits, everything else in fp64: what the choice of format costs.

    Gradients span more orders of magnitude than activations: e5m2 keeps 32 octaves, e4m3 18, with one bit of mantissa
    more. Without a scale e4m3 flushes to 0 what is below 2^-10; with one (`scaled`, the largest value on the largest
    of the format) the small ones of a tensor still go, which its root mean square hardly shows.

    Args:
        q, k, v, do: fp64 [H, N, d] each.
        to: the format of dO and dS; None for no rounding.
        scaled: whether each is divided by its own scale for the whole tensor.

    Source:
        Micikevicius et al. (2022), section 3 (e5m2 for gradients); FlashAttention-2 (2023), Algorithm 2.

    Example:
        >>> q, k, v, do = torch.randn(4, 1, 32, 16, dtype=torch.float64)
        >>> exact = gradients(q, k, v, 1e-3 * do, None).dq
        >>> e4m3, e5m2 = (rmse(gradients(q, k, v, 1e-3 * do, to).dq, exact) for to in (E4M3, E5M2))
        >>> e5m2 < e4m3
        True
    """

    def store(x: torch.Tensor) -> torch.Tensor:
        if to is None:
            return x
        return quantize(x, "tensor", to=to).dequantize() if scaled else cast(x, to)

    scale = q.shape[-1] ** -0.5
    p = (scale * (q @ k.mT)).softmax(dim=-1)
    do8 = store(do)
    dp = do8 @ v.mT
    ds = store(p * (dp - (p * dp).sum(dim=-1, keepdim=True)))
    return Gradients(scale * (ds @ k), scale * (ds.mT @ q), p.mT @ do8, ds)
