"""Matrix products of a warpgroup: asked for, done some time later, and not to be read before they are waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from .memory import Shared, as_float, tensor


class Product:
    """``acc + a b``; `token` stands for the result, and holds NaN, until it is waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, before: Product | None) -> None:
        self._a = a if isinstance(a, Shared) else as_float(a.handle.data, a.dtype)
        self._b, self._acc, self._before = b, acc, before
        shape = [self._a.shape[0], b.shape[1]]
        if self._a.shape[1] != b.shape[0] or (acc is not None and list(acc.shape) != shape):
            raise RuntimeError(f"a product of {list(self._a.shape)} and {b.shape}, added to {acc and list(acc.shape)}")
        self.token = tensor(np.full(shape, np.nan, np.float32), tl.float32)
        self.value: np.ndarray | None = None

    def finish(self) -> None:
        """Read the operands, and multiply."""
        if self.value is not None:
            return
        a = as_float(self._a.seen(), self._a.dtype) if isinstance(self._a, Shared) else self._a
        self.value = a @ as_float(self._b.seen(), self._b.dtype)
        if self._before is not None:
            assert self._before.value is not None
            self.value = self.value + self._before.value
        elif self._acc is not None:
            self.value = self.value + self._acc.handle.data


class Products:
    """Of a task: those under way, oldest first, and whose token is whose."""

    def __init__(self) -> None:
        self._waiting: list[Product] = []
        self._of: dict[int, Product] = {}

    def ask(self, a: Any, b: Shared, acc: Any, at_once: bool) -> Any:
        """The token of a product; `at_once`: all that were asked for read their operands now."""
        before = None if acc is None else self._of.get(id(acc.handle))
        made = Product(a, b, acc, before if before in self._waiting else None)
        self._waiting.append(made)
        self._of[id(made.token.handle)] = made
        if at_once:
            for product in self._waiting:
                product.finish()
        return made.token

    def wait(self, outstanding: int, deps: Any) -> Any:
        """All but so many are done; what `deps` stood for."""
        while len(self._waiting) > outstanding:
            self._waiting.pop(0).finish()
        results = tuple(self._result(dep) for dep in deps)
        if not self._waiting:
            self._of.clear()
        return results[0] if len(results) == 1 else results

    def _result(self, dep: Any) -> Any:
        product = self._of.get(id(dep.handle)) if isinstance(dep, tl.tensor) else None
        if product is None or product in self._waiting or product.value is None:
            return dep
        return tensor(product.value, tl.float32)
