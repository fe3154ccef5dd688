"""Hopper's kernels on a CPU: Gluon run as Python, with the processor's concurrency and without its layouts.

Triton interprets its own dialect (``TRITON_INTERPRET=1``) and not Gluon. Here partitions are threads that take turns in
an order drawn at random, TMA and matrix products happen at any moment between being asked for and being waited for, and
memory is NaN until written: what a kernel computes is right only if its barriers, fences and waits are. What a layout
decides, and so what a thread may hold, is for the compiler to say (tests/kernels).
"""

from __future__ import annotations

from .language import mend

__all__ = ["mend"]
