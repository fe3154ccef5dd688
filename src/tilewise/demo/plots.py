"""The loss curves as a figure. matplotlib is imported where it draws, never before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .metrics import Comparison, Metrics, Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, PEER, LIMIT = "#334155", "#0f766e", "#f59e0b", "#dc2626"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "tilewise",
}


def save(metrics: Metrics, folder: Path) -> list[Path]:
    """Write `loss.svg` and `loss.png` to `folder`, byte for byte the same for the same metrics."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = [folder / "loss.svg", folder / "loss.png"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, metrics)
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=160)
    return paths


def _draw(figure: Figure, metrics: Metrics) -> None:
    axes = figure.subplot_mosaic([["main", "pair"], ["main", "gap"]], width_ratios=[1.25, 1], height_ratios=[1.6, 1])
    _draw_training(axes["main"], metrics.training)
    axes["gap"].sharex(axes["pair"])
    _draw_pair(axes["pair"], metrics.comparison)
    _draw_gap(axes["gap"], metrics.comparison)


def _draw_training(axes: Axes, training: Training) -> None:
    steps = range(1, len(training.loss) + 1)
    done, held_out = zip(*training.validation, strict=True)
    axes.plot(steps, training.loss, color=ACCENT, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth(training.loss), color=ACCENT, linewidth=1.8, label="training, smoothed")
    at_the_end = f"{held_out[-1]:.2f} nats = {training.bits_per_byte:.2f} bits per byte at the end"
    axes.plot(done, held_out, "o", color=INK, markersize=4.5, label=f"held-out files: {at_the_end}")
    axes.set(title="Training with tilewise", xlabel="step", ylabel="loss, nats per byte")
    axes.legend(loc="upper right")


def _draw_pair(axes: Axes, comparison: Comparison) -> None:
    steps = range(1, len(comparison.sdpa) + 1)
    axes.plot(steps, comparison.sdpa, color=PEER, linewidth=4, alpha=0.7, label="torch SDPA")
    axes.plot(steps, comparison.tilewise, color=ACCENT, linewidth=1.2, label="tilewise")
    axes.set(title="Beside torch SDPA, fp32, dropout off", ylabel="loss, nats per byte")
    axes.tick_params(labelbottom=False)
    axes.legend(loc="upper right")


def _draw_gap(axes: Axes, comparison: Comparison) -> None:
    gap = [1e6 * abs(a - b) for a, b in zip(comparison.tilewise, comparison.sdpa, strict=True)]
    bound = 1e6 * comparison.bound
    axes.plot(range(1, len(gap) + 1), gap, ".", color=ACCENT, markersize=4)
    axes.axhline(bound, color=LIMIT, linewidth=1, linestyle="--")
    axes.annotate("what fp32 rounding explains", (1, bound), xytext=(0, -11), textcoords="offset points", color=LIMIT)
    axes.set(xlabel="step", ylabel="difference, 10⁻⁶", ylim=(-0.06 * bound, 1.2 * max(bound, *gap)))


def smooth(values: list[float], memory: float = 0.9) -> list[float]:
    """Exponential moving average without the pull of its start.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    smoothed, total = [], 0.0
    for count, value in enumerate(values, start=1):
        total = memory * total + (1 - memory) * value
        smoothed.append(total / (1 - memory**count))
    return smoothed
