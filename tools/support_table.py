"""Write README's support table from what the backends say: `unsupported_reasons` of one problem per feature."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tilewise import dispatch
from tilewise.arguments import prepare
from tilewise.cache_arguments import prepare as prepare_cache
from tilewise.kvcache import FP8, CacheProblem, Rotary
from tilewise.masks import BlockMask, Causal, Document, PrefixLM, Window
from tilewise.problem import Problem
from tilewise.score_mods import ScoreMod

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- support table: written by `make table` -->\n"
END = "<!-- end of support table -->\n"

SEQLEN, HEADS, HEAD_DIM = 128, 4, 64
Call = Callable[..., Problem | CacheProblem]


def dense(
    *, seqlen_q: int = SEQLEN, heads_kv: int = HEADS, d: int = HEAD_DIM, d_v: int | None = None,
    dtype: torch.dtype = torch.float16, grad: bool = False, **arguments: Any,
) -> Problem:  # fmt: skip
    """The problem of a dense call with one thing about it that is not plain."""
    q = torch.zeros(1, seqlen_q, HEADS, d, dtype=dtype, requires_grad=grad)
    k = torch.zeros(1, SEQLEN, heads_kv, d, dtype=dtype)
    v = torch.zeros(1, SEQLEN, heads_kv, d_v or d, dtype=dtype)
    return prepare(q, k, v, **arguments)[0]


def packed(*, grad: bool = False, **arguments: Any) -> Problem:
    """The problem of a call on three packed sequences, one of them empty."""
    q = torch.zeros(SEQLEN, HEADS, HEAD_DIM, dtype=torch.float16, requires_grad=grad)
    cu = torch.tensor([0, 20, 20, SEQLEN], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": SEQLEN, "max_seqlen_k": SEQLEN}
    return prepare(q, q.detach(), q.detach(), **lengths, **arguments)[0]


def cached(
    *, rows: int = 1, new: bool = True, page_size: int = 16, heads_kv: int = 1, d: int = HEAD_DIM,
    d_v: int = HEAD_DIM, dtype: torch.dtype | None = None, grad: bool = False, **arguments: Any,
) -> CacheProblem:  # fmt: skip
    """The problem of a call with a paged cache; it has no backward pass."""
    q = torch.zeros(1, rows, HEADS, d, dtype=torch.float16)
    k = torch.zeros(4, page_size, heads_kv, d, dtype=dtype or torch.float16)
    if new:
        k_new = torch.zeros(1, rows, heads_kv, d, dtype=torch.float16)
        arguments |= {"k_new": k_new, "v_new": k_new[..., :d_v]}
    table = {"page_table": torch.zeros(1, 4, dtype=torch.int32)}
    return prepare_cache(q, k, k[..., :d_v], torch.zeros(1, dtype=torch.int32), **table, **arguments)[0]


def _square(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 2 == 0


def features() -> dict[str, tuple[Call, dict[str, Any]]]:
    """What the table has a row for, and a call that needs just that."""
    slopes, tiles = torch.ones(HEADS), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    double = ScoreMod(lambda s, b, h, q, k: 2 * s, lambda ds, s, b, h, q, k: 2 * ds)
    cells = torch.ones(1, HEADS, SEQLEN, SEQLEN)
    rows: dict[str, dict[str, Any]] = {
        "fp16": {},
        "bf16": {"dtype": torch.bfloat16},
        "fp32, computed as fp32": {"dtype": torch.float32},
        "fp64": {"dtype": torch.float64},
        "head dim 1 – 256, any number": {"d": 251},
        "head dim up to 512": {"d": 512},
        "`v` of another head dim": {"d_v": 32},
        "grouped and multi-query heads": {"heads_kv": 1},
        "other lengths of queries and keys": {"seqlen_q": 7},
        "causal, bottom-right": {"causal": True},
        "causal, top-left": {"causal": "top_left"},
        "window": {"window": (8, 8)},
        "documents": {"mask": Document.from_lengths([30, 98])},
        "prefix-LM": {"mask": PrefixLM(8)},
        "block-sparse map": {"mask": BlockMask(tiles, SEQLEN, SEQLEN)},
        "predicate": {"mask": _square},
        "boolean mask": {"mask": cells > 0},
        "masks joined by `&`": {"mask": Causal() & Window(8, None)},
        "masks joined by `\\|`": {"mask": PrefixLM(8) | Window(8, 8)},
        "softcap": {"softcap": 30.0},
        "`score_mod` of your own": {"score_mod": double},
        "ALiBi": {"alibi_slopes": slopes},
        "bias": {"bias": cells},
        "sinks": {"sinks": slopes},
        "dropout with replay": {"dropout_p": 0.1, "dropout_seed": 0},
        "unrounded partial results": {"out_dtype": torch.float32},
        "bitwise repeatable backward": {"deterministic": True},
    }
    table: dict[str, tuple[Call, dict[str, Any]]] = {name: (dense, call) for name, call in rows.items()}
    used = torch.tensor([20, 0, 30], dtype=torch.int32)
    table["packed sequences"] = (packed, {})
    table["packed, keys used in part"] = (packed, {"seqused_k": used})
    return table | {name: (cached, call) for name, call in caches().items()}


def caches() -> dict[str, dict[str, Any]]:
    """Rows about key/value caches."""
    half = HEAD_DIM // 2
    rotary, scale = Rotary(torch.ones(SEQLEN, half), torch.zeros(SEQLEN, half)), torch.ones(1)
    tree = torch.ones(1, 4, 4, dtype=torch.bool)
    return {
        "cache: one new token, appended and attended to": {},
        "cache: a piece of a prompt": {"rows": 40, "causal": True},
        "cache: pages of any size": {"page_size": 3},
        "cache: RoPE in the same call": {"rotary": rotary, "causal": True},
        "cache: a tree of drafted tokens": {"rows": 4, "mask": tree},
        "cache: windows, predicates, softcap, ALiBi, sinks": {
            "window": (8, 0), "mask": _square, "softcap": 30.0, "alibi_slopes": torch.ones(HEADS),
            "sinks": torch.ones(HEADS),
        },
        "cache: keys and values in e4m3, with scales": {"dtype": FP8, "k_scale": scale, "v_scale": scale},
        "cache: latent (MLA), 576 over 512 dims": {"d": 576, "d_v": 512},
        "cache: `num_splits`": {"num_splits": 2},
        "cache: `split_size`, rows that do not depend on the batch": {"split_size": 256},
        "cache: an assumed maximum": {"softcap": 10.0, "softmax_max": 10.0},
    }  # fmt: skip


def refusals(backend: str, problem: Problem | CacheProblem, pass_: str) -> list[str]:
    """Why the backend refuses a pass, on the device that suits it best: what is missing here does not count."""
    if isinstance(problem, CacheProblem):
        there = replace(problem.attention, device=torch.device("cuda"), assumed_capability=(9, 0))
        here = problem if backend == "cpu" else replace(problem, attention=there)
        return dispatch.cache_reasons(backend, here)
    posed = problem if backend == "cpu" else replace(problem, device=torch.device("cuda"), assumed_capability=(9, 0))
    return dispatch.reasons(backend, posed, pass_)


def cell(backend: str, call: Call, arguments: dict[str, Any], notes: list[str]) -> str:
    """One entry: both passes, the forward pass alone, or none, with a number into `notes`."""
    passes = {"forward": call(**arguments), "backward": call(grad=True, **arguments)}
    why = {pass_: refusals(backend, problem, pass_) for pass_, problem in passes.items()}
    if why["forward"]:
        text, reasons = "no", why["forward"]
    else:
        text, reasons = ("forward", why["backward"]) if why["backward"] else ("yes", [])
    notes += [reason for reason in reasons if reason not in notes]
    numbers = sorted(notes.index(reason) + 1 for reason in reasons)
    return text + (f"<sup>{','.join(map(str, numbers))}</sup>" if numbers else "")


def table() -> str:
    """The table in Markdown, and under it the reasons for whatever is missing."""
    notes: list[str] = []
    lines = ["| feature | " + " | ".join(f"`{name}`" for name in dispatch.BACKENDS) + " |"]
    lines.append("|---|" + "---|" * len(dispatch.BACKENDS))
    for name, (call, arguments) in features().items():
        cells = [cell(backend, call, arguments, notes) for backend in dispatch.BACKENDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    meaning = "*yes*: forward and backward (with a cache: the call); the backward pass may be another backend's."
    legend = ["", f"{meaning} *no* and *forward* because:", ""]
    legend += [f"{number}. {reason}" for number, reason in enumerate(notes, 1)]
    return "\n".join([*lines, *legend]) + "\n"


def rewritten(text: str) -> str:
    """README with the table of today."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if README is out of date")
    check = parser.parse_args().check
    if not find_spec("triton"):
        sys.exit("The kernel backends' own word needs Triton: pip install triton")
    old = README.read_text()
    new = rewritten(old)
    if check and new != old:
        sys.exit("README's support table is out of date: make table")
    if not check:
        README.write_text(new)


if __name__ == "__main__":
    main()
