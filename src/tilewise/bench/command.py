"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import errors
from ..roofline import BACKWARD, FORWARD
from . import decode, peers, report, runner, step
from .cases import DTYPES, SETS, Filters, select

# Sets whose cases are more than one call of attention, and what runs them.
OTHER_KINDS = (decode, step)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _sizes(text: str) -> tuple[int, ...]:
    """Numbers joined by commas; k is 1024."""
    try:
        sizes = tuple(int(part[:-1]) * 1024 if part.lower().endswith("k") else int(part) for part in _names(text))
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"got {text!r}; supported: numbers such as 64,128 or 1k,16k") from bad
    return sizes


def _causal(text: str) -> bool | None:
    choices = {"yes": True, "no": False, "both": None}
    if text not in choices:
        raise argparse.ArgumentTypeError(f"got {text!r}; supported: yes, no, both")
    return choices[text]


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        prog="tilewise bench",
        description="Time tilewise beside the other implementations that are installed: the same tensors for all, "
        "every result checked against the fp64 oracle first, short bursts in interleaved rounds.",
    )
    add = options.add_argument
    known = ", ".join([*SETS, *(name for kind in OTHER_KINDS for name in kind.SETS)])
    add("--set", type=_names, help=f"of {known}; default: forward on a GPU, small on a CPU", metavar="A,B")
    add("--pass", dest="passes", type=_names, help=f"only {FORWARD} or {BACKWARD}", metavar="NAME")
    add("--d", type=_sizes, help="only these head dims", metavar="64,128")
    add("--s", type=_sizes, help="only these sequence lengths", metavar="1k,16k")
    add("--causal", type=_causal, help="yes, no or both; default both", metavar="WHICH")
    add("--dtype", choices=sorted(DTYPES), help="instead of the set's own")
    add("--peers", type=_names, help="only these contestants; 'ours' is all of tilewise", metavar="ours,cudnn,fa2")
    add("--seconds", type=float, help="begin no case after this time", metavar="N")
    add("--rounds", type=int, default=21, help="rounds that count (%(default)s)", metavar="N")
    add("--burst-ms", type=float, default=8.0, help="length of one burst (%(default)s)", metavar="MS")
    add("--device", help="cpu, cuda or cuda:N; default: the GPU if there is one")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of results (%(default)s)", metavar="DIR")
    add("--label", help="names the file of results; default: the sets", metavar="TEXT")
    add("--commit", help="the commit that is measured, where git cannot tell", metavar="ID")
    add("--list", action="store_true", help="print cases and contestants, and run nothing")
    return options


def _device(wanted: str | None) -> torch.device:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted or here)
    if device.type not in ("cpu", here):
        errors.fail(errors.DeviceError, "device", repr(wanted), f"'{here}' here", "leave it out to choose")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _settings(chosen: argparse.Namespace, sets: Sequence[str], device: torch.device) -> runner.Settings:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return runner.Settings(
        device=device,
        rounds=chosen.rounds,
        burst_ms=chosen.burst_ms,
        seconds=chosen.seconds,
        out=chosen.out,
        what=chosen.label or "-".join(sets),
        commit=chosen.commit,
    )


def _other_kind(chosen: argparse.Namespace, sets: Sequence[str]) -> Any:
    """What runs these sets if they are of another kind than calls of attention; None if they are not.

    Raises:
        tilewise.errors.ArgumentError: sets of several kinds, or a filter that such sets have no use for.
    """
    kinds = [kind for kind in OTHER_KINDS if set(sets) & kind.SETS.keys()]
    if not kinds:
        return None
    (kind, *more), text = kinds, ",".join(sets)
    if more or not set(sets) <= kind.SETS.keys():
        fix = "run one kind at a time"
        errors.fail(errors.ArgumentError, "set", repr(text), f"{', '.join(kind.SETS)} together, or others", fix)
    unused = {"pass": chosen.passes, "d": chosen.d, "causal": chosen.causal, "dtype": chosen.dtype}
    for name, value in unused.items():
        if value is not None:
            errors.fail(errors.ArgumentError, name, repr(value), f"--s with the set {text}", f"leave --{name} out")
    return kind


def _run_other(kind: Any, chosen: argparse.Namespace, sets: Sequence[str], device: torch.device) -> int:
    """The sets of one of `OTHER_KINDS`."""
    cases = [case for case in kind.select(sets) if chosen.s is None or case.seqlen in chosen.s]
    if not cases:
        has = ", ".join(str(n) for n in sorted({case.seqlen for case in kind.select(sets)}))
        errors.fail(errors.ArgumentError, "s", repr(chosen.s), f"in {','.join(sets)}: {has}", "name some of these")
    if chosen.list:
        for case in cases:
            print(case.name)
        return 0
    settings = _settings(chosen, sets, device)
    document, path = kind.run(cases, chosen.peers, settings, lambda found: print(kind.line(found), flush=True))
    kind.show(document)
    return _verdict(document, path)


def _verdict(document: dict[str, Any], path: Path | None) -> int:
    """Say where the results are, and what of ours is wrong; the exit status."""
    if path is not None and document["cases"]:
        print(f"wrote {path}")
    wrong = runner.failures(document)
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


def run(arguments: Sequence[str] | None) -> int:
    """Parse, run, show; 1 if anything of ours is wrong."""
    options = parser()
    chosen = options.parse_args(arguments)
    if chosen.rounds < 1:
        options.error(f"--rounds: got {chosen.rounds}; supported: 1 or more")
    device = _device(chosen.device)
    sets = chosen.set or (("forward",) if device.type == "cuda" else ("small",))
    if (kind := _other_kind(chosen, sets)) is not None:
        return _run_other(kind, chosen, sets, device)
    filters = Filters(chosen.passes, chosen.d, chosen.s, chosen.causal, chosen.dtype)
    cases, contestants = select(sets, filters, device.type), peers.named(chosen.peers)
    if chosen.list:
        for case in cases:
            print(case.name)
        for peer in contestants:
            print(f"{peer.name}: {peer.available(device) or peer.version()}")
        return 0
    settings = _settings(chosen, sets, device)
    document, path = runner.run(cases, contestants, settings, lambda record: print(report.line(record), flush=True))
    report.show(document)
    return _verdict(document, path)
