"""Benchmarks: tilewise and every installed peer on the same tensors, checked first, timed in interleaved rounds.

Figures of two runs are never comparable, for clock and power drift by more than most kernels differ. So the figure that
counts is a ratio: in each round every contestant has one short burst, and the ratio of two contestants is the median
over rounds of the ratio of their bursts.

``tilewise bench`` and ``python -m tilewise.bench`` are the same; the latter needs neither typer nor rich.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command-line `arguments` ask for; the exit status (1: a kernel of ours is wrong).

    Raises:
        tilewise.errors.ArgumentError: a filter that leaves nothing to run, or a name that does not exist.
    """
    from .command import run

    return run(arguments)
