"""Who takes part in the benchmarks of calls with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

from .. import dispatch
from .decode_cases import DecodeCase, DecodeData, options, posed
from .peers import FA3, first_module, version_of

FLASHINFER = ("flashinfer",)
# FlashInfer's partial results of one call, at any time.
WORKSPACE_BYTES = 256 << 20
# Query heads of a key head from which vLLM has FlashInfer use tensor cores.
TENSOR_CORE_GROUP = 4

# What a contestant makes of a call: a function that does it and returns the output [batch, rows, heads, Dv].
Make = Callable[[DecodeCase, DecodeData], "Callable[[], Tensor] | str"]


def _here() -> str | None:
    return None


@dataclass(frozen=True)
class Contestant:
    """One contestant.

    Args:
        name: in tables, files and ``--peers``.
        ours: whether it is one of tilewise's backends.
        make: how it does a call, or why it does not.
        available: the reason why it is not here, or None.
        package: the distribution that its version is of; None: PyTorch.
    """

    name: str
    ours: bool
    make: Make
    available: Callable[[], str | None] = _here
    package: str | None = None

    def version(self) -> str:
        """Of the package that it comes in."""
        return version_of(self.package, self.ours)


def _missing(names: Iterable[str]) -> str | None:
    found = first_module(names)
    return found if isinstance(found, str) else None


def _lacks(case: DecodeCase, *has: str) -> str | None:
    """Why a contestant with these features cannot serve the case; the size of parts is everyone's own affair."""
    asked = {
        "pages": case.page_size is not None,
        "an fp8 cache for 16-bit queries": case.fp8,
        "a latent cache": case.latent is not None,
        "several rows": case.rows > 1,
    }
    missing = [name for name, wanted in asked.items() if wanted and name not in has]
    return f"has no {', '.join(missing)}" if missing else None


def _ours(backend: str, case: DecodeCase, data: DecodeData) -> Callable[[], Tensor] | str:
    if why := dispatch.cache_reasons(backend, posed(case, data)[0]):
        return "; ".join(why)
    entry = tilewise.attention_with_kvcache
    return partial(entry, data.q, data.k, data.v, backend=backend, **options(case, data))


def _sdpa(backend: SDPBackend, case: DecodeCase, data: DecodeData) -> Callable[[], Tensor] | str:
    if why := _lacks(case):
        return why
    q, k, v = (x.transpose(1, 2) for x in (data.q, data.k, data.v))
    attend = partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=case.heads != case.heads_kv)

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return attend().transpose(1, 2)

    return call


def _fa3(case: DecodeCase, data: DecodeData) -> Callable[[], Tensor] | str:
    module = first_module(FA3)
    paged = () if module.__name__ == FA3[0] else ("pages",)  # the wheel on PyPI is built without
    if why := _lacks(case, "several rows", *paged):
        return why
    arguments: dict[str, Any] = {"cache_seqlens": data.seqlens, "causal": case.rows > 1}
    if data.table is not None:
        arguments["page_table"] = data.table

    def call() -> Tensor:
        out = module.flash_attn_with_kvcache(data.q, data.k, data.v, **arguments)
        found: Tensor = out[0] if isinstance(out, (tuple, list)) else out
        return found

    return call


@lru_cache(maxsize=1)
def _workspace(device: torch.device) -> Tensor:
    """For every call, as they follow each other on one stream."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer(case: DecodeCase, data: DecodeData) -> Callable[[], Tensor] | str:
    if why := _lacks(case, "pages"):
        return why
    device, size = data.q.device, case.page_size or case.seqlen
    pages = case.seqlen // size
    # To it every cache is paged: one that is not has a page for each sequence.
    table = torch.arange(case.batch, dtype=torch.int32, device=device) if data.table is None else data.table.flatten()
    starts = torch.arange(0, case.batch * pages + 1, pages, dtype=torch.int32)
    last = torch.full((case.batch,), size, dtype=torch.int32)
    wrapper = first_module(FLASHINFER).BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=case.heads // case.heads_kv >= TENSOR_CORE_GROUP,
        paged_kv_indptr_buffer=starts.to(device),
        paged_kv_indices_buffer=table.clone(),
        paged_kv_last_page_len_buffer=last.to(device),
    )
    dtypes = {"q_data_type": data.q.dtype, "kv_data_type": data.k.dtype}
    wrapper.plan(starts, table, last, case.heads, case.heads_kv, case.head_dim, size, **dtypes)

    def call() -> Tensor:
        out: Tensor = wrapper.run(data.q[:, 0], (data.k, data.v))
        return out[:, None]

    return call


def contestants(device: torch.device) -> list[Contestant]:
    """Our backends for the device, and the others on a GPU."""
    names = [name for name in dispatch.BACKENDS if (name == "cpu") == (device.type == "cpu")]
    found = [Contestant(f"tilewise.{name}", True, partial(_ours, name)) for name in names]
    if device.type == "cuda":
        found += [
            Contestant("cudnn", False, partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
            Contestant("fa2", False, partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
            Contestant("fa3", False, _fa3, partial(_missing, FA3), "fa3-fwd"),
            Contestant("flashinfer", False, _flashinfer, partial(_missing, FLASHINFER), "flashinfer-python"),
        ]
    return found
