"""What compiled kernels may take: what was measured, and a little more. Whoever changes one on purpose records it anew.

Each record is for Triton 3.6 and for 3.9. Triton 3.9 compiles for Hopper with ptxas 13.4 instead of 12.8, and tells it
to allocate registers at level 2, around a defect of that one: so it spills several times what it does unasked.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import triton

T = TypeVar("T")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


class Budget(NamedTuple):
    """Instructions of a whole key tile in the loop, accesses of local memory there, and bytes spilled in the kernel."""

    instructions: int
    spills: int = 0
    spilled: int = 256


def of(records: tuple[T, T]) -> T:
    """The record for this Triton."""
    return records[VERSION >= (3, 9)]


# Bytes spilled by the kernels in plain Triton, by dtype class.
TRITON: dict[str, tuple[int, int]] = {"16bit": (640, 1350), "32bit": (800, 1800)}
# Of dk and dv of 64 keys in four warps at head dim 128, which are fastest with dropout and softcap nevertheless.
TRITON_SPECIAL = (1600, 3500)

# Bytes spilled by the kernels for caches: up to head dim 128, and above it, where a tile's output fills the registers.
CACHES: dict[bool, tuple[int, int]] = {False: (720, 1500), True: (4900, 9000)}

# Of tiles of a latent on Hopper whose output takes half of the registers, by slots of a page (0: rows); and bytes that
# those of few rows spill. Told to save registers, ptxas 12.8 computes descriptors of q anew instead of spilling them.
LATENT: dict[int, tuple[Budget, Budget]] = {
    0: (Budget(640, 16, 950), Budget(780, 48, 2300)),
    16: (Budget(1060, 18, 1350), Budget(1215, 72, 2350)),
    64: (Budget(730, 20, 950), Budget(825, 72, 2350)),
}
FEW_LATENT = (64, 160)

# Hopper's, by head dim: of calls without a mask, and of causal ones and windows.
PLAIN: dict[int, tuple[Budget, Budget]] = {
    64: (Budget(335), Budget(335)),
    96: (Budget(370), Budget(410)),
    128: (Budget(360), Budget(365)),
    192: (Budget(295), Budget(310)),
    256: (Budget(350, 1), Budget(310, 1, 512)),
}
BAND: dict[int, tuple[Budget, Budget]] = {
    64: (Budget(340), Budget(340)),
    96: (Budget(385), Budget(470, 8, 2400)),
    128: (Budget(365), Budget(380, 5, 1950)),
    192: (Budget(300, 1), Budget(350, 5, 1350)),
    256: (Budget(350, 1, 520), Budget(320, 5, 1300)),
}
# Of calls with many keys a row, at head dim 64, with three consumers; all but the first are causal.
LONG_ROWS: dict[str, tuple[Budget, Budget]] = {
    "full": (Budget(335), Budget(355, 24, 1500)),
    "causal": (Budget(345, 0, 270), Budget(390, 42, 1300)),
    "softcap": (Budget(600, 24, 560), Budget(585, 4, 560)),
    "alibi": (Budget(445, 2, 700), Budget(430, 4, 650)),
}
# At head dim 128.
VARIANTS: dict[str, tuple[Budget, Budget]] = {
    "packed": (Budget(350), Budget(345)),
    "packed_causal": (Budget(365), Budget(385, 10, 2100)),
    "packed_window": (Budget(360), Budget(375, 4, 2000)),
    "softcap": (Budget(455), Budget(480)),
    "alibi": (Budget(445), Budget(575, 0, 820)),
    "sinks": (Budget(355), Budget(365)),
    "bias": (Budget(880, 2, 350), Budget(945, 16, 1000)),
    "dropout": (Budget(535), Budget(760, 30, 680)),
    "score_mod": (Budget(945), Budget(955, 0, 1350)),
    "documents": (Budget(375, 0, 270), Budget(380, 0, 380)),
    "block_mask": (Budget(365, 0, 270), Budget(385, 0, 440)),
    "predicate": (Budget(1700, 53, 850), Budget(1850, 60, 2200)),
    "out_dtype": (Budget(355), Budget(345)),
}
# Digests of both consumers' loops without a mask, as Triton 3.6.0 compiles them. An option that is absent must not
# change them.
LOOPS = {
    64: ["e79a47b73556", "1c4453689a66"],
    128: ["49bf3c5b8eb2", "d3461749fd70"],
    256: ["f71c898e6f6e", "0e146b12eff9"],
}

# Of the backward pass, by head dim: without a mask, and causal ones and windows; of the warpgroup that has more.
BACKWARD: dict[int, tuple[Budget, Budget]] = {
    64: (Budget(650, 4, 300), Budget(710, 24, 600)),
    128: (Budget(465, 0, 100), Budget(520, 24, 800)),
}
BACKWARD_BAND: dict[int, tuple[Budget, Budget]] = {
    64: (Budget(650, 8, 600), Budget(730, 60, 1600)),
    128: (Budget(460, 1, 400), Budget(540, 40, 1300)),
}
# Of what is computed anew: causal ALiBi and softcap, and dropout, whose numbers are drawn once P is packed.
BACKWARD_VARIANTS: dict[str, dict[int, tuple[Budget, Budget]]] = {
    "alibi": {64: (Budget(750, 20, 700), Budget(870, 60, 1500)), 128: (Budget(560, 16, 480), Budget(620, 40, 1300))},
    "dropout": {
        64: (Budget(1185, 20, 800), Budget(1290, 60, 1500)),
        128: (Budget(765, 8, 350), Budget(860, 60, 1300)),
    },
    "softcap": {64: (Budget(940, 36, 1100), Budget(965, 4, 400)), 128: (Budget(610, 8, 800), Budget(670, 14, 700))},
}
# Of calls that take turns, with a mask or without.
BACKWARD_IN_TURN: dict[int, tuple[Budget, Budget]] = {
    64: (Budget(650, 8, 600), Budget(750, 60, 1600)),
    128: (Budget(475, 4, 300), Budget(550, 40, 1300)),
}
# Digests of the loops without a mask, as Triton 3.6.0 compiles them, of each warpgroup; the same PTX may become either
# of two. An option that is absent must not change them.
BACKWARD_LOOPS = {
    64: [{"2b2a0fadbb65"}, {"46ee4c365706"}],
    128: [{"902ed6214072"}, {"af236769e9ad"}],
}
# Of dq, dk and dv apart, at head dim 256.
APART: list[tuple[Budget, Budget]] = [
    (Budget(355, 8), Budget(400, 30, 1500)),
    (Budget(385, 2), Budget(430, 30, 1500)),
    (Budget(245), Budget(290, 10, 800)),
]
# Of caches: by rows of a tile, and head dim.
DECODE: dict[tuple[int, int], tuple[Budget, Budget]] = {
    (64, 64): (Budget(520), Budget(495, 1)),
    (64, 128): (Budget(395), Budget(380)),
    (64, 256): (Budget(520, 0, 340), Budget(495, 1)),
    (128, 64): (Budget(510), Budget(495)),
    (128, 128): (Budget(560, 1, 360), Budget(545, 1, 350)),
    (128, 256): (Budget(515, 6, 920), Budget(510, 12, 700)),
}
# Of latents on Hopper: a tile that a warpgroup has scored, and of warpgroup 1 what the other has.
HOPPER_LATENT: tuple[Budget, Budget] = (Budget(555, 2), Budget(680, 8, 670))
