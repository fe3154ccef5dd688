"""What the demo says on the terminal. The figures are made elsewhere; this file lays them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .metrics import Comparison, Environment, Errors, Exactness, Sample, Setup, Traffic, Training

BARS = " ▁▂▃▄▅▆▇█"
CHART_SIZE = 64, 6
INDENT = (0, 0, 0, 2)
NOTHING = "–"


class Report:
    """The demo's voice, one method for each thing that it has to say."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def heading(self, title: str, note: str) -> None:
        """A section's title, and in one line what it shows."""
        self.console.print()
        self.console.print(Text(title, "bold cyan"))
        self.say(note, "dim")

    def say(self, text: str, style: str = "") -> None:
        """One indented paragraph."""
        self.console.print(Padding(Text(text, style), INDENT))

    def opening(self, setup: Setup, environment: Environment) -> None:
        """What is about to happen."""
        model, recipe = setup.model, setup.recipe
        self.console.print(Text.assemble(("tilewise demo", "bold cyan"), "  exact tiled attention trains on real text"))
        facts = Table.grid(padding=(0, 2))
        for name, value in {
            "text": f"{setup.corpus_files} files of Python's standard library, {setup.corpus_bytes / 1e6:.1f} MB",
            "model": f"{setup.parameters / 1e6:.2f} M parameters: {model['layers']} layers of width {model['width']}, "
            f"{model['heads_q']} query and {model['heads_kv']} kv heads",
            "attention": f"causal; every other layer in a window of {model['window']}; dropout {model['dropout_p']:g}",
            "training": f"{recipe['steps']:,} steps of {recipe['batch']} × {model['seqlen']} bytes; seed {setup.seed}",
            "machine": f"{environment.device}; {environment.dtype}; torch {environment.torch}",
        }.items():
            facts.add_row(Text(name, "dim"), value)
        self.console.print(Padding(facts, INDENT))

    @contextmanager
    def progress(self, label: str, total: int, fields: str = "") -> Iterator[Callable[..., None]]:
        """A progress bar; the function it gives advances it by one and sets the `fields` shown behind it."""
        columns = [
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn(fields),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
        ]
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(label, total=total, loss=math.nan, speed=0.0)
            yield lambda **values: bar.update(task, advance=1, **values)

    def training(self, training: Training) -> None:
        """How the loss fell."""
        for line in chart(training.loss, *CHART_SIZE):
            self.say(line, "cyan")
        self.console.print()
        table = self._table("step", "training loss", "held-out loss", "bits per byte")
        for step, held_out in training.validation:
            recent = training.loss[max(0, step - 20) : step] or training.loss[:1]
            cells = [sum(recent) / len(recent), held_out, held_out / math.log(2)]
            table.add_row(f"{step:,}", *(f"{cell:.3f}" for cell in cells))
        self.console.print(Padding(table, INDENT))

    def comparison(self, comparison: Comparison) -> None:
        """Whether the two implementations train alike."""
        self.console.print()
        last = len(comparison.sdpa) - 1
        table = self._table("step", "tilewise", "torch SDPA", "difference", "oracle (fp64)")
        for step in sorted({round(last * part / 5) for part in range(6)}):
            ours, torchs, oracle = (c[step] for c in (comparison.tilewise, comparison.sdpa, comparison.oracle))
            table.add_row(f"{step + 1}", f"{ours:.6f}", f"{torchs:.6f}", f"{abs(ours - torchs):.1e}", f"{oracle:.6f}")
        self.console.print(Padding(table, INDENT))
        self.console.print()
        verdict, style = ("the curves agree", "bold green") if comparison.agree else ("THE CURVES DIFFER", "bold red")
        text = (
            f": largest difference {comparison.difference:.1e}, bound {comparison.bound:.1e} nats. The bound is what "
            f"rounding does: on these steps torch in fp32 strays {comparison.rounding:.1e} from fp64."
        )
        self.console.print(Padding(Text.assemble((verdict, style), text), INDENT))

    def sample(self, sample: Sample) -> None:
        """What the model writes; the prompt is in colour."""
        text = Text.assemble((printable(sample.prompt), "cyan"), printable(sample.text))
        self.console.print(Padding(Panel(text, border_style="dim"), INDENT))

    def exactness(self, rows: Sequence[Exactness]) -> None:
        """Errors against the oracle."""
        table = self._table("layer", "computed by", *Errors.__dataclass_fields__, left=2)
        for row in rows:
            name = row.layer
            for label, errors in {"tilewise": row.tilewise, "torch SDPA": row.sdpa, "plain torch": row.plain}.items():
                if errors is not None:
                    values = [NOTHING if error is None else f"{error:.1e}" for error in astuple(errors)]
                    table.add_row(name, label, *values)
                    name = ""
            table.add_section()
        self.console.print(Padding(table, INDENT))

    def traffic(self, rows: Sequence[Traffic]) -> None:
        """Memory and traffic, a block for each shape."""
        table = self._table("layer", "S and P", "standard", "tiled", "less", "FLOP", "floor", left=1)
        shape = None
        for row in rows:
            if shape != (row.batch, row.seqlen):
                shape = (row.batch, row.seqlen)
                table.add_section()
                table.add_row(Text(f"{row.batch} × {row.seqlen:,} bytes", "dim"))
            table.add_row(
                f"{row.layer} {row.direction}",
                quantity(row.score_bytes, "B"),
                quantity(row.standard_hbm_bytes, "B"),
                quantity(row.tiled_hbm_bytes, "B"),
                f"{row.standard_hbm_bytes / row.tiled_hbm_bytes:,.0f}×",
                quantity(row.flops, ""),
                quantity(row.floor_us / 1e6, "s"),
            )
        self.console.print(Padding(table, INDENT))

    def closing(self, seconds: float, paths: Sequence[Path]) -> None:
        """Time and files."""
        self.console.print()
        self.say(f"done in {seconds:.0f} s", "bold")
        for path in paths:
            self.say(f"wrote {path}")

    def _table(self, *columns: str, left: int = 0) -> Table:
        table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
        for i, name in enumerate(columns):
            table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
        return table


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """`values`, averaged into at most `width` groups, as columns from the lowest to the highest; a line each row.

    >>> print(*chart([3.0, 2.0, 1.0, 1.0], width=4, height=2), sep="\\n")
    3.00 ┤█▁
    1.00 ┤██▁▁
    """
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(BARS) - 1
    levels = [1 + round((mean - low) / (high - low or 1.0) * (height * top - 1)) for mean in means]
    rows = ["".join(BARS[min(max(level - top * row, 0), top)] for level in levels) for row in range(height)]
    labels = [f"{low:.2f} ┤", *["     │"] * (height - 2), f"{high:.2f} ┤"]
    return [(label + row).rstrip() for label, row in zip(labels, rows, strict=True)][::-1]


def quantity(value: float, unit: str) -> str:
    """Three digits and a prefix.

    >>> quantity(8_388_608, "B"), quantity(2.2e-6, "s"), quantity(0, "B")
    ('8.39 MB', '2.20 µs', '0 B')
    """
    if value == 0:
        return f"0 {unit}"
    power = max(-3, min(4, math.floor(math.log10(abs(value)) / 3 + 1e-12)))
    scaled = value / 1000.0**power
    digits = max(0, 2 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:.{digits}f} {dict(zip(range(-3, 5), 'nµm kMGT', strict=True))[power].strip()}{unit}"


def printable(text: str) -> str:
    r"""`text` with what a terminal would obey, or cannot show, replaced by a dot.

    >>> printable("def f():\n\tpass\x1b[2J")
    'def f():\n\tpass·[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
