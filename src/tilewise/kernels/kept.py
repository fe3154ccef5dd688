"""Device tensors made once from a tensor that callers hold, and shared by later calls as long as that one lives.

A later call may run on another stream than the one that fills them: it waits for them there. While a graph is captured
nothing is kept, since what is made then holds nothing before the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class _Made:
    tensor: torch.Tensor
    ready: torch.cuda.Event | None
    stream: torch.cuda.Stream | None


class Kept:
    """Tensors by the tensor that they are made from and a key.

    >>> kept, mask = Kept(), torch.tensor([True, False])
    >>> count = kept.get(mask, "count", lambda: mask.sum())
    >>> kept.get(mask, "count", lambda: mask.sum()) is count
    True
    """

    def __init__(self) -> None:
        self._made: Any = WeakTensorKeyDictionary()

    def get(self, source: torch.Tensor, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` returned for this source and key the first time."""
        by_key = self._made.setdefault(source, {})
        if key not in by_key:
            tensor = make()
            if not tensor.is_cuda:
                by_key[key] = _Made(tensor, None, None)
            elif torch.cuda.is_current_stream_capturing():
                return tensor
            else:
                stream = torch.cuda.current_stream(tensor.device)
                by_key[key] = _Made(tensor, stream.record_event(), stream)
        return _here(by_key[key])


def _here(made: _Made) -> torch.Tensor:
    """The tensor, ready for work on the current stream."""
    if made.ready is not None and made.stream is not None:
        current = torch.cuda.current_stream(made.tensor.device)
        if current != made.stream:
            if not made.ready.query():
                current.wait_event(made.ready)
            # Its memory must not go to others before this stream is done with it.
            made.tensor.record_stream(current)
    return made.tensor
