"""The demo: a byte-level decoder learns Python's standard library with tiled attention, beside torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import DemoConfig
from .extras import require

if TYPE_CHECKING:
    from rich.console import Console

    from .metrics import Metrics

__all__ = ["DemoConfig", "run"]


def run(config: DemoConfig, console: Console | None = None) -> Metrics:
    """Train, compare with torch SDPA, write text, check exactness and count memory traffic; report on the terminal.

    Args:
        config: what to do; `DemoConfig()` takes under two minutes on two CPU cores.
        console: where to print; default: the terminal.

    Returns:
        All figures; the same for the same config on the same CPU, apart from times.

    Raises:
        tilewise.errors.TilewiseError: before any work, if something asked for cannot be had.
        tilewise.demo.compare.Disagreement: at the end, after everything is printed and written, if training with torch
            SDPA gave other losses than rounding explains.
    """
    require("rich", "lays out what the demo prints")
    from . import pipeline

    return pipeline.run(config, console)
