"""Counters in device memory for kernels that begin at 0 and leave 0, so that nothing is launched to clear them.

Two calls that may run at the same time never have the same ones. Eager calls of a stream run one after the other, and
share theirs. What a graph captures runs whenever that is replayed, so each captured call has its own for good: out of a
pool that was cleared before, or if there are none left, such as the graph itself clears.
"""

from __future__ import annotations

from itertools import count

import torch
import triton

# Counters that a call has, and calls that a pool has some for.
SIZE, _POOL = 512, 512


class _Pool:
    """Counters that are 0 on all streams, handed out once. It must outlive every graph that has some of them."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_POOL, SIZE, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._next = count()
        self.scarce = False

    def take(self) -> torch.Tensor | None:
        """Some that nobody has; None: there are none left."""
        i = next(self._next)
        self.scarce = i >= _POOL // 2
        return self._memory[i] if i < _POOL else None


_pools: dict[torch.device, list[_Pool]] = {}
_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}


def take(device: torch.device) -> torch.Tensor:
    """Counters, int32 [SIZE], for the next launch on the device's current stream; the device is the current one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        pools = _pools.get(device)
        taken = pools[-1].take() if pools else None
        return torch.zeros(SIZE, dtype=torch.int32, device=device) if taken is None else taken
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
