"""The contestants: small records that say whether they are here, and how to set them up for a case.

To add one: write its `attend` and its record, and name it in `PEERS`. Everything else (gradients, the check against the
oracle, timing, the report) is common.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

from .. import dispatch, errors
from .cases import Case
from .data import Data, leaves, options, problem

Gradients = tuple[Tensor, ...]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _transposed(x: Tensor) -> Tensor:
    """[B, S, H, D] as [B, H, S, D] or back: a view, nothing is copied."""
    return x.transpose(1, 2)


class Calls(NamedTuple):
    """A contestant on one case, ready to be called any number of times.

    Args:
        attend: its function of any q, k and v like the case's, in the case's layout; the output is in its own.
        forward: the output for the case's tensors, in the contestant's own layout.
        backward: gradients of q, k and v (in the case's layout) from the output's gradient (in its own); None in
            forward cases. The graph is kept, so only the backward's launches are in it.
        layout: from the case's layout to the contestant's own; its own inverse.
    """

    attend: Attend
    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], Gradients] | None
    layout: Callable[[Tensor], Tensor] = _same


Setup = Callable[[Case, Data], "Calls | str"]


@dataclass(frozen=True)
class Peer:
    """One contestant.

    Args:
        name: in tables, files and ``--peers``.
        available: the reason why it is not here, or None, for a device.
        setup: its calls for a case, or the reason why it does not serve the case.
        ours: whether it is one of tilewise's backends.
        own_dropout: draws dropout from a generator of its own, so it is checked without.
        package: the distribution that its version is of; None: PyTorch.
    """

    name: str
    available: Callable[[torch.device], str | None]
    setup: Setup
    ours: bool = False
    own_dropout: bool = True
    package: str | None = None

    def version(self) -> str:
        """Of the package that it comes in."""
        return version_of(self.package, self.ours)


def version_of(package: str | None, ours: bool) -> str:
    """Of a contestant's package; None is PyTorch."""
    if ours:
        return tilewise.__version__
    if package is None:
        return f"torch {torch.__version__}"
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:  # on the path without having been installed
        return f"{package}, version unknown"


def calls(case: Case, data: Data, attend: Attend, layout: Callable[[Tensor], Tensor] = _same) -> Calls:
    """The calls of anything that is differentiable by autograd."""
    q, k, v = leaves(case, data)
    if not case.backward:
        return Calls(attend, lambda: attend(q, k, v), None, layout)
    # As a training step meets it: what makes calls fast that are like earlier ones has seen some.
    for _ in range(3):
        out = attend(q, k, v)
    return Calls(attend, lambda: out, lambda do: torch.autograd.grad(out, (q, k, v), do, retain_graph=True), layout)


def _lacks(case: Case, has: Iterable[str], dtypes: Iterable[str] = ("fp16", "bf16")) -> str | None:
    """Why a contestant with these features cannot serve the case."""
    missing = sorted(case.features() - set(has)) + ([case.dtype] if case.dtype not in dtypes else [])
    return f"has no {', '.join(missing)}" if missing else None


def _only_on(device_type: str, device: torch.device) -> str | None:
    return None if device.type == device_type else f"runs on {device_type}, not on {device.type}"


# ---- tilewise


def _setup_ours(backend: str, case: Case, data: Data) -> Calls | str:
    if why := dispatch.reasons(backend, problem(case, data)[0]):
        return "; ".join(why)
    entry: Any = tilewise.attention_varlen if case.lengths else tilewise.attention
    return calls(case, data, partial(entry, **options(case, data), backend=backend))


def ours() -> list[Peer]:
    """One contestant for each backend."""
    return [
        Peer(f"tilewise.{name}", lambda _: None, partial(_setup_ours, name), ours=True, own_dropout=False)
        for name in dispatch.BACKENDS
    ]


# ---- PyTorch's scaled_dot_product_attention


def _setup_sdpa(backend: SDPBackend | None, case: Case, data: Data) -> Calls | str:
    dtypes = ("fp16", "bf16") if backend is not None else ("fp16", "bf16", "fp32", "fp64")
    if why := _lacks(case, ("backward", "grouped heads", "dropout"), dtypes):
        return why
    arguments: dict[str, Any] = {"is_causal": case.causal, "dropout_p": case.dropout_p}
    arguments["enable_gqa"] = case.heads != case.heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return functional.scaled_dot_product_attention(_transposed(q), _transposed(k), _transposed(v), **arguments)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            attend(*leaves(case, data))
        except RuntimeError as error:
            # torch gives the reason why a kernel declines as warnings, and then a general error.
            return "; ".join(str(warning.message).splitlines()[0] for warning in said) or str(error).splitlines()[0]
    return calls(case, data, attend, _transposed)


# ---- FlexAttention


def _flex_score_mod(case: Case, data: Data) -> Any:
    """Softcap, then ALiBi, as the case says; None where it has neither."""
    cap, slopes = case.softcap, data.slopes
    if cap is None and slopes is None:
        return None

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        return s if slopes is None else s - slopes[h] * torch.abs(q - k)

    return score_mod


def _flex_block_mask(case: Case, data: Data) -> Any:
    """The mask of the case, or None where all is visible. Queries are as many as keys, so there is no offset."""
    from torch.nn.attention.flex_attention import create_block_mask

    tests: list[Callable[[Any, Any], Any]] = []
    if case.causal:
        tests.append(lambda q, k: q >= k)
    left, right = case.window or (None, None)
    if left is not None:
        tests.append(lambda q, k: q - k <= left)
    if right is not None:
        tests.append(lambda q, k: k - q <= right)
    if (blocks := data.blocks) is not None:
        tiles = blocks.tiles[0, 0]
        tests.append(lambda q, k: tiles[q // blocks.block_q, k // blocks.block_k])
    if not tests:
        return None

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = tests[0](q, k)
        for test in tests[1:]:
            seen = seen & test(q, k)
        return seen

    return create_block_mask(mask_mod, None, None, case.seqlen, case.seqlen, device=data.q.device)


def _setup_flex(case: Case, data: Data) -> Calls | str:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    if why := _lacks(case, ("backward", "grouped heads", "window", "softcap", "alibi", "block mask")):
        return why
    # Past its limit of recompilations dynamo falls back to plain code without a word.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    arguments: dict[str, Any] = {"score_mod": _flex_score_mod(case, data), "block_mask": _flex_block_mask(case, data)}
    arguments["enable_gqa"] = case.heads != case.heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(_transposed(q), _transposed(k), _transposed(v), **arguments)
        return out

    # A backward that may overwrite what the forward saved could run only once.
    with config.patch(donated_buffer=False):
        ready = calls(case, data, attend, _transposed)
        ready.forward()
        if ready.backward is not None:
            ready.backward(_transposed(data.do))
    return ready


# ---- FlashAttention 3 and 4, from their own packages


def first_module(names: Iterable[str]) -> Any:
    """The first of these modules that is here, or the reason why none is."""
    failures = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
        except Exception as error:  # a package that breaks while it is imported is not here either
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return "; ".join(failures)


def _importable(names: Iterable[str], device: torch.device) -> str | None:
    if why := _only_on("cuda", device):
        return why
    found = first_module(names)
    return found if isinstance(found, str) else None


def _attend_flash(module: Any, case: Case, data: Data, unbounded: int | None) -> Attend:
    """`flash_attn_func` or its packed sibling, whose arguments FA3 and FA4 share."""
    arguments: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        arguments["window_size"] = tuple(unbounded if bound is None else bound for bound in case.window)
    if case.softcap is not None:
        arguments["softcap"] = case.softcap
    if case.deterministic:
        arguments["deterministic"] = True
    if data.offsets is not None:
        arguments |= {"cu_seqlens_q": data.offsets, "cu_seqlens_k": data.offsets}
        arguments |= {"max_seqlen_q": case.seqlen, "max_seqlen_k": case.seqlen}
    function = module.flash_attn_func if data.offsets is None else module.flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **arguments)
        # Some versions return the LSE as well.
        return out[0] if isinstance(out, (tuple, list)) else out

    return attend


# The wheel on PyPI has bf16 forward alone; FlashAttention's own build of hopper/ has the rest.
FA3 = ("fa3_fwd_interface", "flash_attn_interface")
FA4 = ("flash_attn.cute",)


def _setup_fa3(case: Case, data: Data) -> Calls | str:
    module = first_module(FA3)
    forward_only = module.__name__ == FA3[0]
    has = {"grouped heads", "packed", "window", "softcap"} | (set() if forward_only else {"backward", "deterministic"})
    if why := _lacks(case, has, ("bf16",) if forward_only else ("fp16", "bf16")):
        return why
    return calls(case, data, _attend_flash(module, case, data, unbounded=-1))


def _setup_fa4(case: Case, data: Data) -> Calls | str:
    has = ("backward", "grouped heads", "packed", "window", "softcap", "deterministic")
    if why := _lacks(case, has):
        return why
    return calls(case, data, _attend_flash(first_module(FA4), case, data, unbounded=None))


OTHERS = (
    Peer("cudnn", partial(_only_on, "cuda"), partial(_setup_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Peer("fa2", partial(_only_on, "cuda"), partial(_setup_sdpa, SDPBackend.FLASH_ATTENTION)),
    Peer("flex", partial(_only_on, "cuda"), _setup_flex),
    Peer("fa3", partial(_importable, FA3), _setup_fa3, package="fa3-fwd"),
    Peer("fa4", partial(_importable, FA4), _setup_fa4, package="flash-attn-4"),
    Peer("sdpa", partial(_only_on, "cpu"), partial(_setup_sdpa, None)),
)


def everyone() -> list[Peer]:
    """Our backends, then the others."""
    return [*ours(), *OTHERS]


def named(names: Iterable[str] | None) -> list[Peer]:
    """The contestants of these names; "ours" stands for all backends; None: everyone.

    Raises:
        tilewise.errors.ArgumentError: a name that nobody has.
    """
    known = everyone()
    if names is None:
        return known
    wanted = set(names)
    unknown = wanted - {peer.name for peer in known} - {"ours"}
    if unknown:
        has = ", ".join(["ours", *(peer.name for peer in known)])
        errors.fail(errors.ArgumentError, "peers", ", ".join(sorted(unknown)), has, "name some of these")
    return [peer for peer in known if peer.name in wanted or (peer.ours and "ours" in wanted)]
