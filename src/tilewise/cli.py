"""The command line: ``tilewise info``, ``explain``, ``demo``, ``report``, ``quiz`` and ``bench``."""

from __future__ import annotations

import random
import string
import sys
from pathlib import Path
from typing import Annotated

import torch

from . import errors, surroundings
from .bench import main as run_bench
from .demo import DemoConfig
from .demo import run as run_demo
from .explanation import explain as explain_call
from .report import Initial, Walk
from .report import write as write_report
from .textbook.quiz import Question, questions

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as missing:  # pragma: no cover - the package itself needs neither
    raise SystemExit(f"The command line needs {missing.name}. Fix: pip install 'tilewise[cli]'") from missing

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Exact attention, tile by tile."
)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@app.command()
def info() -> None:
    """Versions, devices, backends and why one is not available, extras, variables, cache directory."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in surroundings.rows():
        table.add_row(f"[bold]{label}[/bold]", escape(value))
    Console().print(table)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 4:
        raise typer.BadParameter(f"got {text!r}; supported: batch,seqlen,heads,head_dim such as 1,4096,32,128")
    return sizes


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    try:
        left, right = (None if part.strip() in ("", "None") else int(part) for part in text.split(","))
    except ValueError as bad:
        raise typer.BadParameter(f"got {text!r}; supported: left,right such as 1023,0 or 1023, (unbounded)") from bad
    return left, right


@app.command()
def explain(
    q: Annotated[str, typer.Option(help="batch,seqlen,heads,head_dim of the queries")],
    kv_heads: Annotated[int | None, typer.Option(help="key/value heads; default: as many as query heads")] = None,
    kv_len: Annotated[int | None, typer.Option(help="keys; default: as many as queries")] = None,
    head_dim_v: Annotated[int | None, typer.Option(help="head dim of the values; default: the queries'")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="causal, bottom-right aligned")] = False,
    window: Annotated[str | None, typer.Option(help="left,right; inclusive, empty is unbounded")] = None,
    softcap: Annotated[float | None, typer.Option(help="cap of the scores")] = None,
    dropout_p: Annotated[float, typer.Option(help="probability of dropping a weight")] = 0.0,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64")] = "bf16",
    device: Annotated[str | None, typer.Option(help="a device of tilewise.roofline, e.g. h200; default: here")] = None,
    backend: Annotated[str | None, typer.Option(help="ask for this backend")] = None,
) -> None:
    """Backend and why not the others, tile, FLOPs, HBM bytes and the floor time of a call."""
    batch, seqlen, heads, head_dim = _sizes(q)
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"got --dtype {dtype!r}; supported: {', '.join(_DTYPES)}")
    keys = (batch, seqlen if kv_len is None else kv_len, heads if kv_heads is None else kv_heads)
    # Shapes are all that is needed; where no device is named, the question is about this machine's own.
    where = "meta" if device else "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((batch, seqlen, heads, head_dim), (*keys, head_dim), (*keys, head_dim_v or head_dim))
    tensors = [torch.empty(shape, dtype=_DTYPES[dtype], device=where) for shape in shapes]
    found = explain_call(
        *tensors,
        device=device,
        causal=causal,
        window=_window(window),
        softcap=softcap,
        dropout_p=dropout_p,
        backend=backend,
    )
    typer.echo(found)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="training steps; default: fits the machine")] = None,
    seed: Annotated[int, typer.Option(help="of weights, batches, dropout and generation")] = 0,
    out: Annotated[Path | None, typer.Option(help="write curves (SVG, PNG) and metrics (JSON) to this folder")] = None,
) -> None:
    """Train a byte-level model on the Python standard library with tiled attention, beside torch's own."""
    run_demo(DemoConfig(steps=steps, seed=seed, out=out))


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="the page's file")] = Path("tilewise.html"),
    force: Annotated[bool, typer.Option("--force", help="overwrite the file if it exists")] = False,
    seqlen: Annotated[int, typer.Option(help="N, rows and keys that are shown first")] = Initial().walk.n,
    head_dim: Annotated[int, typer.Option(help="d, head dim that is shown first")] = Initial().walk.d,
    sram: Annotated[int, typer.Option(help="M, elements of SRAM that are shown first")] = Initial().walk.m,
    order: Annotated[str, typer.Option(help="v1 (keys outside) or v2 (queries outside)")] = Initial().walk.order,
    causal: Annotated[bool, typer.Option("--causal", help="show a causal mask first")] = False,
    device: Annotated[str, typer.Option(help="device of the first roofline")] = Initial().device,
) -> None:
    """Write a page that shows the walk over the tiles, its traffic, rooflines, masks and the Hopper pipeline."""
    initial = Initial(Walk(seqlen, head_dim, sram, order, causal), device.lower())
    typer.echo(f"wrote {write_report(out, force=force, initial=initial)}")


@app.command()
def quiz(
    count: Annotated[int, typer.Option(help="how many questions")] = 10,
    seed: Annotated[int | None, typer.Option(help="the same questions again; default: other ones each time")] = None,
    answers: Annotated[bool, typer.Option("--answers", help="print questions and answers instead of asking")] = False,
) -> None:
    """Ask about traffic, tiles and numerics; the answers are counted and computed, and so are the mistakes."""
    seed = random.randrange(10_000) if seed is None else seed
    asked = questions(count, seed)
    if not answers and not sys.stdin.isatty():
        errors.fail(errors.ArgumentError, "stdin", "no terminal", "a terminal to answer on", "pass --answers")
    right = 0
    for number, question in enumerate(asked, 1):
        typer.echo(f"\n{number}. {question.text}")
        for letter, choice in zip(string.ascii_lowercase, question.choices, strict=False):
            typer.echo(f"   {letter}) {choice}")
        solution = f"{string.ascii_lowercase[question.right]}) {question.answer}: {question.why}."
        if answers:
            typer.echo(f"   → {solution}")
            continue
        correct = _chosen(question) == question.right
        right += correct
        typer.echo(f"   {'Right' if correct else 'No'}: {solution}")
    score = "" if answers else f"{right} of {len(asked)} right. "
    typer.echo(f"\n{score}These questions again: tilewise quiz --count {count} --seed {seed}")


def _chosen(question: Question) -> int:
    """The index of the choice whose letter is typed; asks until there is one."""
    letters = string.ascii_lowercase[: len(question.choices)]

    def index(text: str) -> int:
        if len(text) != 1 or text.lower() not in letters:
            raise typer.BadParameter(f"got {text!r}; supported: one of {', '.join(letters)}")
        return letters.index(text.lower())

    return typer.prompt("  ", value_proc=index, prompt_suffix="> ")


# The benchmarks read their own options, so that they run on machines that have neither typer nor rich.
@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Time tilewise beside the other implementations that are installed; bench --help lists the options."""
    raise typer.Exit(run_bench(context.args))


def main() -> None:
    """Run the command line; errors that the library raises on purpose are one line, not a traceback."""
    try:
        app()
    except errors.TilewiseError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
