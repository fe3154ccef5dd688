"""Counters in device memory for kernels that begin at 0 and leave 0, so that nothing is launched to clear them.

Two calls that may run at the same time never have the same one. Eager calls of a stream run one after the other, and
share one. What a graph captures runs whenever that is replayed, so each captured call has one for good: out of a pool
that was cleared before, or if there is none left, one that the graph itself clears.
"""

from __future__ import annotations

from itertools import count

import torch
import triton

# Counters of a pool; each has a line of the cache for itself, as so many numbers have.
_POOL, _LINE = 1024, 32


class _Pool:
    """Counters that are 0 on all streams, each handed out once. It must outlive every graph that has one of them."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_POOL, _LINE, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._next = count()
        self.scarce = False

    def take(self) -> torch.Tensor | None:
        """One that nobody has; None: there is none left."""
        i = next(self._next)
        self.scarce = i >= _POOL // 2
        return self._memory[i, :1] if i < _POOL else None


_pools: dict[torch.device, list[_Pool]] = {}
_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}


def counter(device: torch.device) -> torch.Tensor:
    """A counter, int32 [1], for the next launch on the device's current stream; the device is the current one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        pools = _pools.get(device)
        taken = pools[-1].take() if pools else None
        return torch.zeros(1, dtype=torch.int32, device=device) if taken is None else taken
    stream = triton.runtime.driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
    # Calls that are captured later are to find enough.
    pools = _pools.setdefault(device, [])
    if not pools or pools[-1].scarce:
        pools.append(_Pool(device))
    found = _of_streams.get((device, stream))
    if found is None:
        taken = pools[-1].take()
        assert taken is not None, "other streams have taken all of a new pool"
        found = _of_streams.setdefault((device, stream), taken)
    return found
