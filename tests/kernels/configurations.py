"""Every shipped tile, compiled offline from a call that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from offline import CLASSES, Compiled, catching

from tilewise import _triton, tiles
from tilewise.arguments import prepare

KERNELS = {
    "forward": "forward_kernel",
    "dq": "dq_kernel",
    "dq softcap": "dq_kernel",
    "dkv": "dkv_kernel",
    "dkv dropout": "dkv_kernel",
    "dkv softcap": "dkv_kernel",
    "dk": "dkv_kernel",
    "dv": "dkv_kernel",
    "dbias": "dbias_kernel",
}
_DTYPES = {"16bit": torch.bfloat16, "32bit": torch.float32}
# What a row is for, by what its pass is called beside the kernel.
_SPECIAL: dict[str, dict[str, Any]] = {
    "": {},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 0},
    "softcap": {"softcap": 50.0},
}
_NEEDS = {"dq": ("q",), "dkv": ("k", "v"), "dk": ("k",), "dv": ("v",), "dbias": ("bias",)}


class Row(NamedTuple):
    """One row of the table, for one compute capability."""

    arch: int
    pass_: str
    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return f"sm{self.arch}-{self.pass_}-{self.dtype}-{self.head_dim}"


def rows() -> Iterator[Row]:
    """All rows for GPUs that Triton has kernels of its own for."""
    for backend, pass_, architecture, dtype, head_dim in tiles.TABLE:
        if backend == "triton" and architecture in CLASSES.values() and pass_ in KERNELS:
            (arch,) = (arch for arch, name in CLASSES.items() if name == architecture)
            yield Row(arch, pass_, dtype, head_dim)


def compile_row(row: Row, **options: Any) -> Compiled:
    """The kernel of the row, as a causal call (or one with `options`) would launch it."""
    seqlen = 256
    q, k, v = (torch.empty(1, seqlen, heads, row.head_dim, dtype=_DTYPES[row.dtype]) for heads in (2, 2, 2))
    pass_, _, special = row.pass_.partition(" ")
    options |= _SPECIAL[special]
    if pass_ == "dbias":
        options["bias"] = torch.empty(1, 2, seqlen, seqlen)
    problem, inputs, _ = prepare(q, k, v, **{"causal": True, **options})
    with mock.patch.object(_triton, "_architecture", return_value=CLASSES[row.arch]), catching(row.arch) as caught:
        if pass_ == "forward":
            _triton.forward(problem, inputs)
        else:
            out, lse = torch.empty_like(q), torch.empty(1, 2, seqlen)
            _triton.backward(problem, inputs, out, lse, out, None, _NEEDS[pass_])
    # Above some head dim dk and dv have a launch each: the hungrier one counts.
    return max(
        (item for item in caught if item.kernel == KERNELS[row.pass_]), key=lambda item: (item.shared, item.spilled)
    )
