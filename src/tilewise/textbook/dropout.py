"""Dropout in tiled attention: the keep mask written to HBM and read back, or drawn again from its seed.

Forward and backward need the same N^2 bits. A stored mask crosses HBM twice, N^2 elements each time, and stays in HBM
in between; a replayed one costs no traffic and two numbers, the seed and the threshold, since an element's bit is a
function of its position alone (see `tilewise.dropout`):

=========== ================= ================== ===========
            forward writes    backward reads     HBM between
=========== ================= ================== ===========
`Stored`    N^2               N^2                N^2
`Replayed`  0                 0                  0
=========== ================= ================== ===========

(of all tiles; in general the elements of the visited tiles.) These are elements: in a stored mask a byte or a bit each.

Source: FlashAttention (Dao et al., 2022), Algorithm 2 line 1 and Algorithm 4 line 1 (the generator's state is saved by
the forward and set again by the backward); Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from typing import Protocol

import torch

from .. import dropout as philox
from .. import errors
from .memory import Chip, Hbm, Machine


class Dropout(Protocol):
    """What decides which weights are dropped."""

    def factors(self, chip: Chip, rows: slice, columns: slice) -> torch.Tensor:
        """The papers' Z of one tile, fp64 [B_r, B_c]: 0 where a weight is dropped, 1/(1 - p) where it is kept."""


class Replayed:
    """The mask drawn from the seed wherever it is needed.

    Args:
        seed: any integer of 64 bits.
        dropout_p: drop probability in [0, 1), rounded to 1/65536.

    Raises:
        tilewise.errors.ArgumentError: `dropout_p` is outside [0, 1).

    Example:
        >>> dropped = Replayed(seed=7, dropout_p=0.5)
        >>> with Machine().on_chip() as chip:
        ...     dropped.factors(chip, slice(0, 2), slice(0, 4))
        tensor([[2., 2., 0., 2.],
                [2., 2., 2., 0.]], dtype=torch.float64)
    """

    def __init__(self, seed: int, dropout_p: float) -> None:
        if not 0.0 <= dropout_p < 1.0:
            errors.fail(errors.ArgumentError, "dropout_p", dropout_p, "0 <= dropout_p < 1", "pass a probability")
        self.seed = seed
        self.keep = philox.keep_threshold(dropout_p)
        self.scale = philox.scale(self.keep)

    def kept(self, rows: slice, columns: slice) -> torch.Tensor:
        """bool [B_r, B_c]: which weights of a tile survive (batch entry 0, head 0)."""
        head, positions = torch.zeros(1, 1, dtype=torch.int64), torch.arange(rows.start, rows.stop)
        return philox.keep_mask(self.seed, head, positions, (columns.start, columns.stop), self.keep)

    def factors(self, chip: Chip, rows: slice, columns: slice) -> torch.Tensor:
        kept = self.kept(rows, columns)
        return torch.full(kept.shape, self.scale, dtype=torch.float64).masked_fill(~kept, 0.0)


class Stored:
    """The mask as an [N_q, N_k] tensor in HBM: drawn and written by the forward, read by the backward.

    Example:
        >>> forward, backward = Machine(), Machine()
        >>> written = Stored.written(forward, Replayed(7, 0.5), 2, 4)
        >>> with forward.on_chip() as chip:
        ...     z = written.factors(chip, slice(0, 2), slice(0, 4))
        >>> with backward.on_chip() as chip:
        ...     torch.equal(written.read_by(backward).factors(chip, slice(0, 2), slice(0, 4)), z)
        True
        >>> forward.counts.writes["mask"], backward.counts.reads["mask"]
        (8, 8)
    """

    def __init__(self, draw: Replayed, mask: Hbm, writing: bool) -> None:
        self._draw, self._mask, self._writing = draw, mask, writing

    @classmethod
    def written(cls, machine: Machine, draw: Replayed, seqlen_q: int, seqlen_k: int) -> Stored:
        """For a forward on `machine`: bits from `draw`, each tile written where it is used."""
        return cls(draw, machine.new("mask", seqlen_q, seqlen_k), writing=True)

    def read_by(self, machine: Machine) -> Stored:
        """The mask that a forward wrote, for a backward on `machine`."""
        return Stored(self._draw, machine.put("mask", self._mask.result()), writing=False)

    def factors(self, chip: Chip, rows: slice, columns: slice) -> torch.Tensor:
        if not self._writing:
            return chip.read(self._mask, rows, columns)
        z = self._draw.factors(chip, rows, columns)
        chip.write(self._mask, z, rows, columns)
        return z
