"""How close is close: the one tolerance of the suite, for outputs, LSE and gradients alike.

``max |got - ref64| <= 2 * max |plain - ref64| + floor``: an error may be twice that of plain PyTorch code which keeps
its tensors in the same dtype, plus a few representable steps of the largest value. No test has a number of its own.
"""

from __future__ import annotations

import torch

# Steps of a dtype that count as none, relative to the largest value in play.
FLOORS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def assert_close(
    name: str, got: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor, scale: float, dtype: torch.dtype
) -> None:
    """Fail unless `got` is as close to `ref` as `dtype` allows.

    Args:
        name: what is compared, for the message.
        got: the result under test.
        ref: the oracle's, in fp64. Where it is infinite, `got` must be equal to it.
        plain: the oracle's computation with the roundings of the inputs' dtype.
        scale: the size of what `got` sums up, the largest |v| of the call as a rule; the floor is relative to it, or
            to the largest |ref| if that is larger.
        dtype: what the call computes in; a result of a shorter dtype is held to its own steps.
    """
    assert got.shape == ref.shape, f"{name}: shape {list(got.shape)}, expected {list(ref.shape)}"
    finite = torch.isfinite(ref)
    assert torch.equal(got[~finite].double(), ref[~finite]), f"{name}: infinities differ from the oracle's"
    if not bool(finite.any()):
        return
    wanted = ref[finite]
    error = float((got[finite].double() - wanted).abs().max())
    plain_error = float((plain[finite].double() - wanted).abs().max())
    floor = max(FLOORS[dtype], FLOORS[got.dtype]) * max(scale, float(wanted.abs().max()))
    limit = 2.0 * plain_error + floor
    assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g} (plain code: {plain_error:.3g})"


def assert_zero(name: str, got: torch.Tensor, where: torch.Tensor) -> None:
    """Fail unless `got` is exactly 0 at `where` (bool, over all but got's last dimension)."""
    stray = got[where].count_nonzero()
    assert not stray, f"{name}: {int(stray)} elements that must be exactly 0 are not"
