"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import errors
from ..roofline import BACKWARD, FORWARD
from . import decode, decode_cases, peers, report, runner
from .cases import DTYPES, SETS, Filters, select


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
    known = ", ".join([*SETS, *decode_cases.SETS])
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


def _decode(chosen: argparse.Namespace, sets: Sequence[str], device: torch.device) -> int:
    """The sets of calls with a cache."""
    cases = decode.select(sets)
    if chosen.s is not None:
        cases = [case for case in cases if case.seqlen in chosen.s]
    if chosen.list:
        for case in cases:
            print(case.name)
        return 0
    document = decode.run(
        cases, chosen.peers, _settings(chosen, sets, device), lambda found: print(decode.line(found), flush=True)
    )
    decode.show(document)
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
    if set(sets) <= decode_cases.SETS.keys():
        return _decode(chosen, sets, device)
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
    if path is not None and document["cases"]:
        print(f"wrote {path}")
    wrong = runner.failures(document)
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0
