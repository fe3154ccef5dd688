"""The demo on a small scale: it learns, it repeats itself, and it notices when two implementations differ."""

from __future__ import annotations

import doctest
import importlib
import io
import json
import math
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import guards
from tilewise import cli, demo
from tilewise.arguments import prepare
from tilewise.cpu import fused
from tilewise.demo import DemoConfig, exactness, extras, pipeline, plots
from tilewise.demo.attend import AttentionCall, attend_oracle, attend_sdpa, attend_tilewise
from tilewise.demo.compare import Disagreement, compare
from tilewise.demo.config import ModelConfig, Plan, Recipe, plan
from tilewise.demo.data import Corpus, even_batches, load_corpus, random_batches
from tilewise.demo.generate import generate
from tilewise.demo.metrics import Metrics
from tilewise.demo.model import Cache, Decoder
from tilewise.demo.report import Report
from tilewise.demo.train import fit
from tilewise.errors import ArgumentError, DeviceError, UnsupportedError

MODEL = ModelConfig(layers=2, width=32, heads_q=2, heads_kv=1, head_dim=16, hidden=64, seqlen=48, window=12)
RECIPE = Recipe(steps=20, batch=4, learning_rate=1e-2, warmup=2, evaluations=2, evaluation_batches=2)
SMALL = DemoConfig(
    model=MODEL,
    recipe=RECIPE,
    device="cpu",
    compare_steps=6,
    compare_batch=2,
    check_seqlen=80,
    generate_bytes=24,
    corpus_bytes=1 << 20,
)


class Finished(NamedTuple):
    """One run of the demo: its figures, its folder, and what it printed on a terminal of 80 columns."""

    metrics: Metrics
    out: Path
    printed: str


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(SMALL.corpus_bytes)


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(SMALL, "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    console = Console(file=io.StringIO(), width=80)
    metrics = demo.run(replace(SMALL, out=out), console)
    return Finished(metrics, out, console.file.getvalue())  # type: ignore[attr-defined]  # the StringIO above


def test_loss_falls(finished: Finished) -> None:
    training = finished.metrics.training
    assert len(training.loss) == RECIPE.steps
    assert [step for step, _ in training.validation] == [0, 10, 20]
    assert 4 < training.validation[0][1] < 7
    assert training.validation[-1][1] < training.validation[0][1] - 1
    assert training.bits_per_byte == training.validation[-1][1] / math.log(2)


def test_losses_repeat_bit_for_bit(small: Plan, corpus: Corpus, finished: Finished) -> None:
    _, again = fit(small, corpus, lambda loss, speed: None)
    assert again.loss == finished.metrics.training.loss
    assert again.validation == finished.metrics.training.validation
    other = replace(small, config=replace(SMALL, seed=1), recipe=replace(RECIPE, steps=1))
    _, changed = fit(other, corpus, lambda loss, speed: None)
    assert changed.loss[0] != again.loss[0]


def test_dropout_is_on_in_training(small: Plan, corpus: Corpus, finished: Finished) -> None:
    without = replace(small, model=replace(MODEL, dropout_p=0.0))
    _, training = fit(without, corpus, lambda loss, speed: None)
    assert training.loss != finished.metrics.training.loss
    assert training.validation[0] == finished.metrics.training.validation[0]


def test_training_with_torch_gives_the_same_losses(finished: Finished) -> None:
    comparison = finished.metrics.comparison
    assert comparison.agree
    assert len(comparison.tilewise) == len(comparison.sdpa) == len(comparison.oracle) == SMALL.compare_steps
    assert comparison.difference <= comparison.bound < 1e-4
    assert comparison.sdpa[-1] < comparison.sdpa[0]


def wider(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    return attend_tilewise(q, k, v, call if call.window is None else replace(call, window=(call.window[0] + 1, 0)))


def scaled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    return attend_tilewise(q * 1.001, k, v, call)


def coarse(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    return attend_tilewise(q.bfloat16(), k.bfloat16(), v.bfloat16(), call).float()


def undefined(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    return attend_tilewise(q, k, v, call) * math.nan


@pytest.mark.parametrize("fault", [wider, scaled, coarse, undefined], ids=lambda fault: fault.__name__)
def test_comparison_notices(fault: Callable[..., Tensor], small: Plan, corpus: Corpus) -> None:
    assert not compare(small, corpus, lambda: None, attend=fault).agree


def test_disagreement_is_loud(monkeypatch: pytest.MonkeyPatch, finished: Finished, tmp_path: Path) -> None:
    wrong = replace(finished.metrics.comparison, difference=0.1)
    monkeypatch.setattr(pipeline, "compare", lambda *_: wrong)
    few = replace(SMALL, steps=1, out=tmp_path)
    console = Console(file=io.StringIO())
    with pytest.raises(Disagreement, match=r"losses 1.00e-01 apart, and fp32 rounding explains \d.\d\de-0\d"):
        demo.run(few, console)
    assert "THE CURVES DIFFER" in console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert json.loads((tmp_path / "metrics.json").read_text())["comparison"]["agree"] is False


def test_disagreement_fails_the_command(monkeypatch: pytest.MonkeyPatch, finished: Finished) -> None:
    def differ(*_: object) -> None:
        raise Disagreement(finished.metrics.comparison)

    monkeypatch.setattr(pipeline, "run", differ)
    assert CliRunner().invoke(cli.app, ["demo", "--steps", "1"]).exit_code == 1


def test_command_passes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[DemoConfig] = []
    monkeypatch.setattr(pipeline, "run", lambda config, console: seen.append(config))
    done = CliRunner().invoke(cli.app, ["demo", "--steps", "7", "--seed", "3", "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert seen == [DemoConfig(steps=7, seed=3, out=tmp_path)]


def test_files_are_written(finished: Finished) -> None:
    names = {path.name for path in finished.out.iterdir()}
    assert names == {"loss.svg", "loss.png", "metrics.json"}
    assert (finished.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(finished.out / "loss.svg").getroot().tag.endswith("svg")


def test_figures_repeat_byte_for_byte(finished: Finished, tmp_path: Path) -> None:
    for path in plots.save(finished.metrics, tmp_path):
        assert path.read_bytes() == (finished.out / path.name).read_bytes()


SCHEMA = {
    "schema": None,
    "environment": {"tilewise", "torch", "python", "device", "threads", "dtype"},
    "setup": {"seed", "parameters", "model", "recipe", "corpus_files", "corpus_bytes", "corpus_sha256"},
    "training": {"loss", "validation", "seconds", "tokens_per_second", "bits_per_byte"},
    "comparison": {"tilewise", "sdpa", "oracle", "rounding", "bound", "difference", "agree"},
    "sample": {"prompt", "temperature", "text"},
    "exactness": [{"layer", "backend", "tilewise", "sdpa", "plain"}] * 3,
    "traffic": [
        {"layer", "direction", "batch", "seqlen", "score_bytes", "standard_hbm_bytes", "tiled_hbm_bytes", "flops"}
        | {"floor_us", "device"}
    ]
    * 8,
    "seconds": None,
}


def test_json_has_its_schema(finished: Finished) -> None:
    def keys(value: object) -> object:
        if isinstance(value, list):
            return [keys(item) for item in value]
        return set(value) if isinstance(value, dict) else None

    found = json.loads((finished.out / "metrics.json").read_text())
    assert {name: keys(value) for name, value in found.items()} == SCHEMA
    assert found["schema"] == 1
    assert found["training"]["loss"] == finished.metrics.training.loss


def test_attention_of_the_trained_model_is_exact(finished: Finished) -> None:
    causal, window, dropout = finished.metrics.exactness
    assert (causal.layer, window.layer, dropout.layer) == ("causal", "window 12", "dropout 0.1")
    for row in finished.metrics.exactness:
        for name in ("out", "lse", "dq", "dk", "dv"):
            ours, plain = getattr(row.tilewise, name), getattr(row.plain, name)
            assert ours <= 2 * plain + 1e-5, (row.layer, name)
    assert dropout.sdpa is None
    assert window.sdpa is not None
    assert window.sdpa.lse is None


def test_traffic_is_what_the_matrices_weigh(finished: Finished) -> None:
    scores = RECIPE.batch * MODEL.heads_q * MODEL.seqlen**2 * 4
    forward = finished.metrics.traffic[0]
    assert (forward.layer, forward.direction, forward.seqlen) == ("causal", "forward", MODEL.seqlen)
    assert forward.score_bytes == 2 * scores
    assert forward.standard_hbm_bytes - forward.tiled_hbm_bytes == 4 * scores


def test_output_fits_a_terminal(finished: Finished) -> None:
    assert "…" not in finished.printed
    assert max(len(line) for line in finished.printed.splitlines()) <= 80
    for text in (
        "tilewise demo",
        "the curves agree",
        "torch SDPA",
        "bits per byte",
        "1 × 16,384 bytes",
        "metrics.json",
    ):
        assert text in finished.printed


def test_what_it_says_about_the_cpu_is_true() -> None:
    q, k = torch.randn(1, 48, 2, 16), torch.randn(1, 48, 1, 16)
    for window, dropout_p, is_fused in [(None, 0.0, True), ((11, 0), 0.0, False), (None, 0.1, False)]:
        problem, inputs, _ = prepare(q, k, k, causal=True, window=window, dropout_p=dropout_p)
        assert (fused.usable(problem, inputs) is not None) is is_fused


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generation_yields_bytes(temperature: float) -> None:
    model = Decoder(MODEL, attend_tilewise, seed=0)
    written = generate(model, b"import ", 2 * MODEL.seqlen, temperature, seed=0)
    assert isinstance(written, bytes)
    assert len(written) == 2 * MODEL.seqlen
    assert written == generate(model, b"import ", 2 * MODEL.seqlen, temperature, seed=0)


@torch.no_grad()
def test_cached_generation_sees_what_training_saw() -> None:
    model = Decoder(MODEL, attend_tilewise, seed=0).eval()
    tokens = torch.randint(256, (1, MODEL.seqlen), generator=torch.Generator().manual_seed(0))
    cache = Cache()
    one_by_one = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(MODEL.seqlen)], dim=1)
    torch.testing.assert_close(one_by_one, model(tokens))


@pytest.mark.parametrize("window", [None, (11, 0)])
def test_attention_functions_mean_the_same(window: tuple[int, int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 48, heads, 16, generator=generator) for heads in (2, 1, 1))
    call = AttentionCall(window)
    truth = attend_oracle(q, k, v, call).float()
    torch.testing.assert_close(attend_tilewise(q, k, v, call), truth)
    torch.testing.assert_close(attend_sdpa(q, k, v, call), truth)


def test_same_seed_same_weights() -> None:
    ours, torchs = (Decoder(MODEL, attend, seed=5).state_dict() for attend in (attend_tilewise, attend_sdpa))
    assert all(torch.equal(ours[name], torchs[name]) for name in ours)


def test_sdpa_refuses_dropout() -> None:
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(UnsupportedError, match=r"dropout_p: got 0.1; supported: 0 with torch SDPA"):
        attend_sdpa(q, q, q, AttentionCall(dropout_p=0.1, dropout_seed=0))


def test_corpus_is_split_by_file(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_bytes(b"excluded")
    for i in range(32):
        (tmp_path / f"m{i:02}.py").write_bytes(b"%02d\r\n" % i)
    found = load_corpus(1000, tmp_path)
    assert bytes(found.validation.tolist()) == b"15\n31\n"
    assert bytes(found.train.tolist()) == b"".join(b"%02d\n" % i for i in range(32) if i not in (15, 31))
    assert found.files == 32
    capped = load_corpus(3 * 16 + 1, tmp_path)
    assert (len(capped.train), len(capped.validation), capped.files) == (3 * 15 + 1, 3, 17)
    with pytest.raises(ArgumentError, match="at least 16 Python source files"):
        load_corpus(1000, tmp_path / "test")


def test_batches_repeat_and_stay_inside(corpus: Corpus) -> None:
    first, again = (next(random_batches(corpus.train, 3, 48, seed=2)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (3, 49)
    text = torch.arange(49, dtype=torch.uint8)
    assert torch.equal(next(random_batches(text, 1, 48, seed=0))[0], text.long())
    assert [batch[:, 0].tolist() for batch in even_batches(text, 2, 8, 2)] == [[0, 13], [26, 40]]
    with pytest.raises(ArgumentError, match="corpus_bytes: got a part of 49 bytes"):
        next(random_batches(text, 1, 49, seed=0))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"steps": 0}, "steps: got 0"),
        ({"steps": 1.5}, "steps: got 1.5"),
        ({"steps": True}, "steps: got True"),
        ({"seed": -1}, "seed: got -1"),
        ({"device": "tpu"}, "device: got 'tpu'; supported: one of cpu, cuda"),
    ],
)
def test_bad_config(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DemoConfig(**wrong)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_extras_are_asked_for_before_work(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UnsupportedError, match=rf"without {missing}, .* Fix: pip install 'tilewise\[demo\]'"):
        demo.run(replace(SMALL, out=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_device_is_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    report = Report(console)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pipeline.choose_device(None, report) == pipeline.choose_device("cpu", report) == "cpu"
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        pipeline.choose_device("cuda", report)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pipeline, "refusal_of_gpu", lambda: None)
    assert pipeline.choose_device(None, report) == pipeline.choose_device("cuda", report) == "cuda"
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]  # the StringIO above
    monkeypatch.setattr(pipeline, "refusal_of_gpu", lambda: "no kernel")
    assert pipeline.choose_device(None, report) == "cpu"
    assert "no kernel" in console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above


def test_gpu_plan_is_larger() -> None:
    cpu, gpu = (plan(DemoConfig(), device) for device in ("cpu", "cuda"))
    assert gpu.dtype == torch.bfloat16
    assert gpu.model.width > cpu.model.width
    assert gpu.recipe.steps > cpu.recipe.steps
    assert plan(DemoConfig(steps=3), "cuda").recipe.steps == 3


def test_mixed_precision_as_on_a_gpu(small: Plan, corpus: Corpus) -> None:
    mixed = replace(small, autocast=torch.bfloat16, recipe=replace(RECIPE, steps=2))
    model, training = fit(mixed, corpus, lambda loss, speed: None)
    assert all(math.isfinite(loss) for loss in training.loss)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    layers = exactness.layers(mixed, model, corpus)
    assert {layer.q.dtype for layer in layers} == {mixed.dtype} == {torch.bfloat16}
    for row in map(exactness.check, layers):
        assert row.tilewise.out is not None
        assert row.plain.out is not None
        assert 0 < row.tilewise.out <= 2 * row.plain.out + 8e-3


def test_import_is_light() -> None:
    code = "import sys, tilewise.demo; print({'rich', 'matplotlib'} & {m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=guards.SECONDS, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(demo.__path__)])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"tilewise.demo.{name}")).failed == 0
