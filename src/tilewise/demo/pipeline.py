"""The demo from start to end."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import tilewise

from ..errors import DeviceError, UnsupportedError, fail
from . import exactness, plots, traffic
from .attend import AttentionCall, attend_tilewise
from .compare import Disagreement, compare
from .config import SCALES, DemoConfig, Plan, plan
from .data import Corpus, load_corpus
from .extras import require
from .generate import generate
from .metrics import Comparison, Environment, Exactness, Metrics, Sample, Setup, Traffic, Training
from .model import Decoder
from .report import Report
from .train import fit

PROMPT = b"class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def "
TEMPERATURE = 0.8

CONTRAST = (
    "SDPA has no argument for a window, so those layers get a dense S×S mask, and no dropout mask that another "
    "implementation could replay, so dropout is off in these runs. A third run, in fp64, shows what rounding does."
)
ON_A_CPU = (
    "On a CPU tilewise leaves plain causal layers to torch's own fused kernel: what differs is the windowed ones."
)


@contextmanager
def one_thread() -> Iterator[None]:
    """One PyTorch thread: the model's products are too small to share, and threads that wait for each other spin.

    Beside other work on two cores the default run took 107 s with one thread and 192 s with two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(config: DemoConfig, console: Console | None = None) -> Metrics:
    """Train, compare, write, check and report; see `tilewise.demo.run`."""
    with one_thread():
        return _run(config, console or Console())


def _run(config: DemoConfig, console: Console) -> Metrics:
    started = time.perf_counter()
    if config.out is not None:
        require("matplotlib", "draws the curves for --out")
        config.out.mkdir(parents=True, exist_ok=True)
    report = Report(console)
    chosen = plan(config, choose_device(config.device, report))
    corpus = load_corpus(config.corpus_bytes)
    setup, environment = describe(chosen, corpus), surroundings(chosen)
    report.opening(setup, environment)

    model, training = train(chosen, corpus, report)
    comparison = contrast(chosen, corpus, report)
    sample = write(model, config, report)
    exact = hold_against_oracle(chosen, model, corpus, report)
    moved = count_traffic(chosen, report)

    seconds = time.perf_counter() - started
    metrics = Metrics(environment, setup, training, comparison, sample, exact, moved, seconds)
    report.closing(seconds, save(metrics, config))
    if not comparison.agree:
        raise Disagreement(comparison)
    return metrics


def choose_device(wanted: str | None, report: Report) -> str:
    """The device asked for; else the GPU if there is one and a backend serves the demo's calls on it; else the CPU.

    Raises:
        DeviceError: a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        fail(DeviceError, "device", "'cuda', and torch sees no GPU", "'cpu' here", "leave it out to choose")
    if wanted is not None or not has_gpu:
        return wanted or "cpu"
    refusal = refusal_of_gpu()
    if refusal is None:
        return "cuda"
    report.say(f"There is a GPU, but no backend for it, so training is on the CPU. {refusal}", "yellow")
    return "cpu"


def refusal_of_gpu() -> str | None:
    """Why no backend serves the demo's calls on the GPU, or None."""
    scale = SCALES["cuda"]
    q = torch.zeros(1, 8, 2, scale.model.head_dim, dtype=scale.autocast, device="cuda", requires_grad=True)
    try:
        attend_tilewise(q, q, q, AttentionCall((3, 0), scale.model.dropout_p, dropout_seed=0)).sum().backward()
    except UnsupportedError as error:
        return str(error)
    return None


def surroundings(chosen: Plan) -> Environment:
    """Where this run takes place."""
    threads = torch.get_num_threads()
    cpu = f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
    return Environment(
        tilewise=tilewise.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=cpu if chosen.device.type == "cpu" else torch.cuda.get_device_name(chosen.device),
        threads=threads,
        dtype=str(chosen.dtype).removeprefix("torch."),
    )


def describe(chosen: Plan, corpus: Corpus) -> Setup:
    """What is trained on what."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(chosen.model, attend_tilewise, seed=0).parameters())
    return Setup(
        seed=chosen.config.seed,
        parameters=parameters,
        model=asdict(chosen.model),
        recipe=asdict(chosen.recipe),
        corpus_files=corpus.files,
        corpus_bytes=len(corpus.train) + len(corpus.validation),
        corpus_sha256=corpus.sha256,
    )


def train(chosen: Plan, corpus: Corpus, report: Report) -> tuple[Decoder, Training]:
    """The main run, with dropout."""
    report.heading("Training", "Attention by tilewise in every layer, with dropout.")
    fields = "loss {task.fields[loss]:.3f}  {task.fields[speed]:>6,.0f} bytes/s"
    with report.progress("training", chosen.recipe.steps, fields) as step:
        model, training = fit(chosen, corpus, lambda loss, speed: step(loss=loss, speed=speed))
    report.training(training)
    return model, training


def contrast(chosen: Plan, corpus: Corpus, report: Report) -> Comparison:
    """The comparison with torch."""
    report.heading(
        "The same training with torch SDPA", "The same weights and batches, in fp32; nothing but attention differs."
    )
    report.say(f"{CONTRAST} {ON_A_CPU}" if chosen.device.type == "cpu" else CONTRAST)
    with report.progress("comparing", 3 * chosen.comparison.steps) as step:
        comparison = compare(chosen, corpus, step)
    report.comparison(comparison)
    return comparison


def write(model: Decoder, config: DemoConfig, report: Report) -> Sample:
    """Text by the trained model."""
    report.heading("What it learnt to write", f"One query a byte against the cached keys, temperature {TEMPERATURE}.")
    text = generate(model, PROMPT, config.generate_bytes, TEMPERATURE, config.seed)
    sample = Sample(PROMPT.decode(), TEMPERATURE, text.decode(errors="replace"))
    report.sample(sample)
    return sample


def hold_against_oracle(chosen: Plan, model: Decoder, corpus: Corpus, report: Report) -> list[Exactness]:
    """Errors on the trained model's own q, k and v."""
    size = chosen.config.check_seqlen
    report.heading("Exactness", f"Largest error against the fp64 oracle, on its own q, k, v for {size:,} new bytes.")
    rows = [exactness.check(layer) for layer in exactness.layers(chosen, model, corpus)]
    report.exactness(rows)
    return rows


def count_traffic(chosen: Plan, report: Report) -> list[Traffic]:
    """Memory and HBM bytes of the layers that were trained."""
    name = traffic.device(chosen).name
    report.heading(
        "Memory and HBM traffic",
        f"One layer. Standard attention stores S and P, tiled neither. Floor: {name}.",
    )
    rows = traffic.table(chosen)
    report.traffic(rows)
    return rows


def save(metrics: Metrics, config: DemoConfig) -> list[Path]:
    """Write figures and numbers to `config.out`, if there is one."""
    if config.out is None:
        return []
    numbers = config.out / "metrics.json"
    numbers.write_text(metrics.to_json(), encoding="utf-8")
    return [*plots.save(metrics, config.out), numbers]
