"""What the order of a packed call's tiles costs on Hopper, before anyone times it.

    python tools/order.py --lengths 4096,4096,300 --heads 16 --head-dim 128 --causal --backward

The list is made by the kernel itself, interpreted. A model of the processor takes the tiles: a tile of scores takes 1,
and each tile of the list 0.7 beside; L2 keeps what was met last. Printed is how long after the mean the last program
ends, and how many of the tiles that are met (of keys, or backward of rows with their sum of dq) are not in L2. Of two
orders the one with less of both was the faster one by a fifth (docs/tuning.md); what programs do to each other by doing
the same at once is not in the model.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Triton reads it when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

import torch

from tilewise.hopper import packed

BLOCK = 128
BESIDE = 0.7  # what a tile of the list costs beside its tiles of scores


class Asked(NamedTuple):
    """A packed call: lengths of members, heads, head dim; backward or not, causal or not; who takes the tiles."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    causal: bool
    backward: bool
    programs: int

    def met(self, member: int, m: int) -> list[int]:
        """The tiles that tile m of a member meets, in their order."""
        count = -(-self.lengths[member] // BLOCK)
        if not self.backward:
            return list(range(m + 1 if self.causal else count))[::-1]
        first = m if self.causal else 0
        # Programs that share rows begin at different ones.
        return [first + (m + j) % (count - first) for j in range(count - first)]

    @property
    def tile_bytes(self) -> int:
        """Of K and V, or of q, do and the fp32 sum of dq."""
        return BLOCK * self.head_dim * (10 if self.backward else 4)


def shares(call: Asked) -> list[list[tuple[int, int, int]]]:
    """Of every program member, head and number of its tiles, as the kernel lists them."""
    members, total = len(call.lengths), sum(call.lengths)
    most, start, size = packed.room(total, members, call.heads, BLOCK)
    table = torch.zeros(size, dtype=torch.int32)
    cu = torch.tensor([0, *call.lengths]).cumsum(0).int()
    before, after = (0, None) if call.backward else (None, 0)
    if not call.causal:
        before, after = None, None
    nothing = torch.zeros(total, 1)
    packed.list_kernel[(members,)](
        cu, cu, None, None, members, total, max(call.lengths), max(call.lengths), before, after, table, most,
        call.heads, call.programs, nothing, None, None, 0, 0, 0, False, BLOCK,
    )  # fmt: skip
    records, order = table[:start].view(-1, packed.RECORD.value).tolist(), table[start:].tolist()
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(call.programs)]
    for at, number in enumerate(order[: records[0][0] * call.heads]):
        n, program = divmod(at, call.programs)
        record, head = divmod(number, call.heads)
        member, first = records[1 + record][:2]
        found[program if n % 2 == 0 else call.programs - 1 - program].append((member, head, first // BLOCK))
    return found


def visits(call: Asked, tiles: Sequence[tuple[int, int, int]]) -> Iterator[tuple[float, tuple[int, int, int]]]:
    """When a program meets which tile."""
    now = 0.0
    for member, head, m in tiles:
        now += BESIDE
        for other in call.met(member, m):
            yield now, (member, head, other)
            now += 1.0


def outcome(call: Asked, l2: float) -> tuple[float, float]:
    """How much later than the mean the last program ends, and which share of visits misses L2, of so many bytes."""
    each = [list(visits(call, tiles)) for tiles in shares(call)]
    ends = [programs[-1][0] if programs else 0.0 for programs in each]
    kept: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    missed = 0
    for _, tile in sorted(visit for programs in each for visit in programs):
        missed += tile not in kept
        kept[tile] = None
        kept.move_to_end(tile)
        if len(kept) * call.tile_bytes > l2:
            kept.popitem(last=False)
    return max(ends) * len(ends) / sum(ends) - 1, missed / sum(map(len, each))


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", required=True, help="of the members, with commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--programs", type=int, default=132, help="that take turns; 132 on an H200")
    parser.add_argument("--l2", type=float, default=40, help="MiB; 40 of an H200's 50")
    given = parser.parse_args()
    lengths = tuple(map(int, given.lengths.split(",")))
    call = Asked(lengths, given.heads, given.head_dim, given.causal, given.backward, given.programs)
    late, missed = outcome(call, given.l2 * 2**20)
    print(f"the last program ends {late:.1%} after the mean; {missed:.1%} of the tiles met are not in L2")


if __name__ == "__main__":
    main()
