"""Write the tables of docs/which.md from what `explain` and dispatch say of typical calls on each class of devices."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tilewise import BlockMask, dispatch, explain, roofline
from tilewise.arguments import prepare
from tilewise.cache_arguments import prepare as prepare_cache
from tilewise.masks import Document
from tilewise.problem import Problem
from tilewise.score_mods import ScoreMod

PAGE = Path(__file__).parents[1] / "docs" / "which.md"
BEGIN = "<!-- which backend: written by `make table` -->\n"
END = "<!-- end of which backend -->\n"

CPU = "cpu"
# Devices of a class are served alike, which `answer` checks.
CLASSES = {
    "CPU": (CPU,),
    "H100, H200": ("h100", "h200"),
    "other GPUs": ("a100-40gb", "a100-80gb", "rtx4090", "b200"),
}


class Call(NamedTuple):
    """A typical call: sizes, dtype, whether it trains, and its options."""

    seqlen_q: int = 4096
    seqlen_k: int = 4096
    heads_q: int = 16
    heads_kv: int = 16
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    trains: bool = True
    members: int = 0
    cached: bool = False
    options: Mapping[str, Any] = MappingProxyType({"causal": True})

    def arguments(self) -> dict[str, Any]:
        """What `explain` takes; packed in `members` of equal length, if any."""
        front = () if self.members else (1,)
        # Memory that nobody touches is not taken.
        q, k = (
            torch.empty(*front, *shape, self.head_dim, dtype=self.dtype, requires_grad=self.trains)
            for shape in ((self.seqlen_q, self.heads_q), (self.seqlen_k, self.heads_kv))
        )
        found = {"q": q, "k": k, "v": k, **self.options}
        if self.members:
            length = self.seqlen_k // self.members
            offsets = torch.arange(self.members + 1, dtype=torch.int32) * length
            found |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": length, "max_seqlen_k": length}
        return found


class Answer(NamedTuple):
    """Who serves a call, and why not the others."""

    forward: str | None
    backward: str | None
    reasons: tuple[str, ...]


def _doubled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + s


def _doubled_slope(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return ds + ds


def calls() -> dict[str, Call]:
    """The rows of the table."""
    tiles = torch.eye(32, dtype=torch.bool)[None, None]
    packed = Call(members=8)
    decode = Call(1, 4096, 32, 8, trains=False, cached=True)
    return {
        **{f"training, causal, bf16, head dim {d}": Call(head_dim=d) for d in (64, 128, 256)},
        "inference, causal, bf16, head dim 128": Call(trains=False),
        "head dim 512": Call(head_dim=512),
        "fp32": Call(dtype=torch.float32),
        "fp64": Call(dtype=torch.float64),
        "window of 1,024": Call(options={"window": (1023, 0)}),
        "softcap": Call(options={"causal": True, "softcap": 30.0}),
        "ALiBi": Call(options={"causal": True, "alibi_slopes": torch.ones(16)}),
        "dropout": Call(options={"causal": True, "dropout_p": 0.1, "dropout_seed": 0}),
        "a `score_mod` of your own": Call(options={"score_mod": ScoreMod(_doubled, _doubled_slope)}),
        "documents": Call(options={"causal": True, "mask": Document.from_lengths([1024] * 4)}),
        "block mask": Call(options={"mask": BlockMask(tiles, 128, 128)}),
        "packed, 8 members": packed,
        "packed, for inference": packed._replace(trains=False),
        "decoding one token, 32 query heads on 8": Call(1, 4096, 32, 8, trains=False, options={}),
        "one token, paged cache of 4,096 keys": decode,
        "4 drafted tokens, paged cache": decode._replace(seqlen_q=4),
        "512 tokens of a prompt, paged cache": decode._replace(seqlen_q=512),
        "cross attention, 64 queries": Call(64, 4096, options={}),
    }


def posed(call: Call, device: str) -> Problem:
    """The call's problem as if its tensors were on `device`."""
    arguments = call.arguments()
    problem = prepare(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)[0]
    if device == CPU:
        return problem
    return replace(problem, device=torch.device("cuda"), assumed_capability=roofline.device(device).capability)


def answer_with_cache(call: Call, device: str) -> Answer:
    """What dispatch says of the call with pages of 64 keys, in the words of `explain`."""
    q, pages = (
        torch.empty(*shape, call.head_dim, dtype=call.dtype)
        for shape in ((1, call.seqlen_q, call.heads_q), (call.seqlen_k // 64, 64, call.heads_kv))
    )
    table = torch.zeros(1, pages.shape[0], dtype=torch.int32)
    new = torch.empty(1, call.seqlen_q, call.heads_kv, call.head_dim, dtype=call.dtype)
    posed = prepare_cache(q, pages, pages, table[:, 0], page_table=table, k_new=new, v_new=new, **call.options)[0]
    if device != CPU:
        capability = roofline.device(device).capability
        there = replace(posed.attention, device=torch.device("cuda"), assumed_capability=capability)
        posed = replace(posed, attention=there)
    serving, reasons = None, []
    for name in dispatch.BACKENDS:
        why = dispatch.cache_reasons(name, posed)
        if serving is not None:
            why = why or [f"{serving} serves the call and comes first"]
        elif not why:
            serving = name
        reasons += [f"`{name}`: {'; '.join(why)}"] if why else []
    return Answer(serving, None, tuple(reasons))


def answer_of(call: Call, device: str) -> Answer:
    """What `explain` says of the forward pass, and dispatch of the backward pass."""
    if call.cached:
        return answer_with_cache(call, device)
    found = explain(**call.arguments(), device=None if device == CPU else device)
    reasons = [f"`{name}`: {'; '.join(why)}" for name, why in found.reasons.items()]
    backward = None
    if call.trains and found.backend is not None:
        problem = posed(call, device)
        backward = dispatch.choose(problem, "backward")
        if backward != found.backend:
            refused = dispatch.reasons(found.backend, problem, "backward")
            better = dispatch.drawback(found.backend, problem, "backward")
            reasons.append(f"`{found.backend}` does not do {'; '.join(refused)}" if refused else f"{better}")
    return Answer(found.backend, backward, tuple(reasons))


def answer(call: Call, devices: tuple[str, ...]) -> Answer:
    """What holds for all devices of a class, with the reasons that each of them gives."""
    found = [answer_of(call, device) for device in devices]
    if any(one[:2] != found[0][:2] for one in found):
        sys.exit(f"{', '.join(devices)} are not one class any more: {found}")
    return found[0]._replace(reasons=tuple(dict.fromkeys(reason for one in found for reason in one.reasons)))


def cell(found: Answer, notes: list[str]) -> str:
    """One entry, with numbers into `notes`."""
    notes += [reason for reason in found.reasons if reason not in notes]
    numbers = ",".join(str(number) for number, reason in enumerate(notes, 1) if reason in found.reasons)
    backward = f", backward `{found.backward}`" if found.backward not in (None, found.forward) else ""
    served = f"`{found.forward}`{backward}" if found.forward else "none"
    return f"{served}<sup>{numbers}</sup>" if numbers else served


def table() -> str:
    """The table in Markdown, and under it why the others decline."""
    notes: list[str] = []
    lines = ["| call | " + " | ".join(CLASSES) + " |", "|---|" + "---|" * len(CLASSES)]
    for name, call in calls().items():
        cells = [cell(answer(call, devices), notes) for devices in CLASSES.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    legend = [f"{number}. {reason}" for number, reason in enumerate(notes, 1)]
    return "\n".join([*lines, "", "Why not the others:", "", *legend]) + "\n"


def rewritten(text: str) -> str:
    """The page with the table of today."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    check = parser.parse_args().check
    if not find_spec("triton"):
        sys.exit("The kernel backends' own word needs Triton: pip install triton")
    # The page tells of the compiled backends, whatever runs beside it.
    os.environ.pop("TRITON_INTERPRET", None)
    old = PAGE.read_text()
    new = rewritten(old)
    if check and new != old:
        sys.exit("docs/which.md is out of date: make table")
    if not check:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()
