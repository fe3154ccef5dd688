"""Block-sparse FlashAttention: tiles whose flag is off are neither read nor computed, so that the cost is the density.

With T^2 s of the T^2 tiles on (B = B_r = B_c dividing N), traffic in elements:

    version 1    N d + 2N + 2 N d c + s T (3 N d + 4N)      c: share of key tiles that any row tile sees
    version 2    2 N d + N + 2 N d s T

and ``4 N^2 d s`` FLOPs in products: the part that is Theta(N^2) scales with s, what every row and key costs once stays.

Source: FlashAttention (Dao et al., 2022), section 3.3, Algorithm 5, Proposition 4: Theta(Nd + N^2 d^2 s / M).
"""

from __future__ import annotations

import torch

from . import flash_v1, flash_v2
from .memory import Machine
from .tiling import Blocks


def forward(
    machine: Machine,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tiles: torch.Tensor,
    blocks: Blocks,
    *,
    softmax_scale: float | None = None,
) -> flash_v1.Output:
    """Algorithm 5: version 1's loops over the tiles that are on.

    Args:
        machine: counts.
        qkv: fp64 [N_q, d], [N_k, d], [N_k, d_v], one head.
        tiles: bool [T_r, T_c], True where visible; the patterns of `tilewise.BlockMask` have them.
        blocks: tile sizes, and `causal`.
        softmax_scale: default 1/sqrt(d).

    Returns, raises: as `flash_v1.forward`.

    Source:
        FlashAttention (Dao et al., 2022), Algorithm 5.

    Example:
        >>> from tilewise import BlockMask
        >>> q, k, v = torch.randn(3, 64, 4, dtype=torch.float64)
        >>> machine, mask = Machine(), BlockMask.longformer(64, block=8)
        >>> o = forward(machine, (q, k, v), mask.tiles[0, 0], Blocks(8, 8)).o
        >>> mask.density, machine.counts.flops.matmul / (4 * 64 * 64 * 4)
        (0.53125, 0.53125)
    """
    return flash_v1.forward(machine, *qkv, _only(blocks, tiles), softmax_scale=softmax_scale)


def forward_v2(
    machine: Machine,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tiles: torch.Tensor,
    blocks: Blocks,
    *,
    softmax_scale: float | None = None,
) -> flash_v2.Output:
    """The same with version 2's loops; arguments as in `forward`."""
    return flash_v2.forward(machine, *qkv, _only(blocks, tiles), softmax_scale=softmax_scale)


def _only(blocks: Blocks, tiles: torch.Tensor) -> Blocks:
    return Blocks(blocks.block_q, blocks.block_k, blocks.causal, tiles)
