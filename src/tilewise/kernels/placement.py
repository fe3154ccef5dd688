"""Where kernels run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

# Of the interpreter: enough for programs to meet each other, and to have several tiles each.
_INTERPRETED = 3


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels run on the tensors' device, whichever is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; of another device, how many the interpreter takes it to have."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED
