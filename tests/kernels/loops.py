"""The hot loops of a compiled kernel: what runs for a key tile when no branch to rarely needed code is taken."""

from __future__ import annotations

import hashlib
import heapq
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from triton.backends.nvidia import compiler

_TOOLS = Path(compiler.__file__).parent / "bin"
_TARGET = re.compile(r"\bBRA(?:\.\w+)* .*?(\.L_x_\d+)")


@lru_cache(maxsize=8)
def instructions(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """SASS, one instruction an entry, and where its labels are."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        command = [_TOOLS / "nvdisasm", "-c", binary.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    body: list[str] = []
    labels = {}
    for line in listing.splitlines():
        if label := re.match(r"^(\.L_\w+):", line):
            labels[label.group(1)] = len(body)
        elif instruction := re.match(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            body.append(instruction.group(1).strip())
    return body, labels


def followers(body: list[str], labels: dict[str, int]) -> list[list[int]]:
    """The instructions that may come after each one."""
    found: list[list[int]] = []
    for i, text in enumerate(body):
        target = _TARGET.search(text)
        conditional = text.startswith("@")
        after = [labels[target.group(1)]] if target else []
        stops = target or re.search(r"\b(EXIT|BRX|RET)\b", text)
        if (conditional or not stops) and i + 1 < len(body):
            after.append(i + 1)
        found.append(after)
    return found


def _shortest(after: list[list[int]], first: int, last: int) -> list[int] | None:
    """The fewest instructions from `first` to `last` without going back before `first`."""
    distance, before, queue = {first: 0}, {}, [(0, first)]
    while queue:
        steps, i = heapq.heappop(queue)
        if i == last:
            path = [last]
            while path[-1] != first:
                path.append(before[path[-1]])
            return path[::-1]
        for j in after[i]:
            if j >= first and steps + 1 < distance.get(j, len(after)):
                distance[j], before[j] = steps + 1, i
                heapq.heappush(queue, (steps + 1, j))
    return None


def hot_loops(cubin: bytes, products: int) -> list[list[str]]:
    """The shortest way around each loop that has exactly so many matrix instructions."""
    body, labels = instructions(cubin)
    after = followers(body, labels)
    found = []
    for last, text in enumerate(body):
        target = _TARGET.search(text)
        if target and labels[target.group(1)] <= last:
            path = _shortest(after, labels[target.group(1)], last)
            if path is not None and sum("HGMMA" in body[i] for i in path) == products:
                found.append([body[i] for i in path])
    return found


def spills(loop: list[str]) -> int:
    """Accesses of local memory."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in loop)


def digest(loop: list[str]) -> str:
    """A hash of a loop but for labels and where arguments lie."""
    lines = (re.sub(r"c\[0x0\]\[\w+\]", "c", re.sub(r"\.L_x_\d+", "L", text)) for text in loop)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
