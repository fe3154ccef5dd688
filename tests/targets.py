"""A backend on a device, as the tests run it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

# What a backend may decline, by a piece of its stated reason; a backend without a row declines nothing.
MAY_REFUSE: dict[str, tuple[str, ...]] = {
    "triton": ("torch.float64 inputs",),
    "hopper": (
        "inputs; it takes float16 and bfloat16",
        "a head dim above 256",
        "a backward pass",
        "which is not q's dtype",
        "TMA takes",
        "an assumed maximum",
        "whose rows do not begin at multiples of 16 bytes",
        "has not been held to the oracle on a GPU yet",
    ),
}


@dataclass(frozen=True)
class Target:
    """The backend `name` with tensors on `device`; `interpreted`: it runs Triton's programs in Python, slowly."""

    name: str
    device: str
    interpreted: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def forward_only(self) -> bool:
        """Whether another backend makes the gradients of some calls."""
        return "a backward pass" in MAY_REFUSE.get(self.name, ())

    @property
    def dtype(self) -> torch.dtype:
        """What to test with where any dtype shows the point: float32, or what comes closest."""
        return torch.float16 if self.name == "hopper" else torch.float32

    def may_refuse(self, reason: str) -> bool:
        """Whether the backend is known to decline for this reason."""
        return any(piece in reason for piece in MAY_REFUSE.get(self.name, ()))


def target(name: str) -> Target:
    """The target for a backend on this machine.

    Raises:
        ValueError: the backend cannot run here, with how to change that.
    """
    if name == "cpu":
        return Target(name, "cpu")
    if torch.cuda.is_available():
        return Target(name, "cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"--backend {name} without a GPU runs in an interpreter: set TRITON_INTERPRET=1")
    return Target(name, "cpu", interpreted=True)
