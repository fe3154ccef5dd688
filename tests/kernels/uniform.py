"""Uniform registers that a kernel reads and never writes: what ptxas got wrong, for no source can ask for that.

ptxas 12.8 loses the first part of a sum of 64 bits by which wgmma finds a tile in shared memory, where two tiles of
different orders take turns at one place: the product then reads anywhere. Where products before a loop are in a branch,
it takes parts of their sums for products of the same tile behind it, also where that branch was not taken.
"""

from __future__ import annotations

import re

from loops import followers, instructions

_NAME = re.compile(r"\bUR(\d+)\b")
_PAIRED = re.compile(r"^(UIADD3\.64|ULDC\.64|UIMAD\.WIDE|USHF\.\w+\.[SU]64|UMOV\.64|UIMAD\.\w*WIDE)")
_FAR = re.compile(r"^(ULDC\.128)")


def _of(text: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction writes, and those that it reads."""
    text = re.sub(r"^@!?U?P\w+ +", "", text)
    operation, _, rest = text.partition(" ")
    operands = [part.strip() for part in rest.split(",")]
    written: set[int] = set()
    # Predicates come before or behind the register that is written.
    while operands and re.fullmatch(r"!?U?P(\d+|T)", operands[0]):
        operands.pop(0)
    if operands and not operation.startswith("HGMMA") and (name := re.fullmatch(r"UR(\d+)", operands[0])):
        first = int(name.group(1))
        width = 4 if _FAR.match(operation) else 2 if _PAIRED.match(operation) else 1
        written = set(range(first, first + width))
        operands.pop(0)
    read = {int(n) for part in operands for n in _NAME.findall(part)}
    if products := re.match(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", text):
        # Two descriptors of 64 bits; with rows from registers the first is not there.
        first = int(products.group(2))
        read = set(range(first + 2 if products.group(1) else first, first + 4))
    return written, read


# Sums of 64 bits, in two halves or one instruction, and products.
_FINDS = re.compile(r"UIADD3 UR\d+, UP\d+, UR\d+|UIADD3\.X|UIADD3\.64|HGMMA")


def unwritten(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register which nothing on any way to them writes; of those that find a tile for
    a product, also such that something does not write on every way.
    """
    body, labels = instructions(cubin)
    after = followers(body, labels)
    effects = [_of(text) for text in body]
    some, every = _written(body, after, effects, every=False), _written(body, after, effects, every=True)
    found = []
    for i, text in enumerate(body):
        surely = every[i] if _FINDS.search(text) else some[i]
        if surely is not None and effects[i][1] - surely:
            found.append(f"{16 * i:#x}: {text}")
    return found


def _written(
    body: list[str], after: list[list[int]], effects: list[tuple[set[int], set[int]]], every: bool
) -> list[set[int] | None]:
    """What is written before each instruction, on some way to it or on every way; None: there is no way."""
    known: list[set[int] | None] = [None] * len(body)
    known[0] = set()
    left = [0]
    while left:
        i = left.pop()
        skipped = every and body[i].startswith("@")
        now = (known[i] or set()) | (set() if skipped else effects[i][0])
        for j in after[i]:
            before = known[j]
            new = now if before is None else now & before if every else now | before
            if new != before:
                known[j] = new
                left.append(j)
    return known
