"""What goes into the page: closed forms against the textbook's machine, masks, the pipeline, and the file itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import cli, errors, report, roofline
from tilewise.report import mask_figures, pipeline
from tilewise.report.figures import SETS, Initial, figures
from tilewise.report.walks import MAX_TILES, Walk, check
from tilewise.roofline import forms
from tilewise.textbook import flash_v1, flash_v2, standard
from tilewise.textbook.memory import Machine
from tilewise.textbook.tiling import Blocks


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize(("n", "d", "m"), [(64, 8, 512), (50, 4, 160), (33, 3, 100), (1, 2, 8), (40, 16, 700)])
def test_closed_forms_are_what_the_textbook_moves(n: int, d: int, m: int, order: str, causal: bool) -> None:
    walk = Walk(n, d, m, order, causal)
    machine = Machine(sram=m + 2 * walk.tile().block_q)  # version 1 reads its row statistics into SRAM, too
    q, k, v = torch.randn(3, n, d, dtype=torch.float64)
    algorithm = {"v1": flash_v1, "v2": flash_v2}[order]
    algorithm.forward(machine, q, k, v, Blocks(*walk.tile(), causal=causal))
    assert (machine.counts.read, machine.counts.written) == walk.traffic()
    plain = Machine()
    standard.forward(plain, q, k, v)
    assert (plain.counts.read, plain.counts.written) == walk.standard()


@pytest.mark.parametrize("walk", [walk for walk in SETS if not walk.causal], ids=str)
def test_closed_forms_are_the_rooflines_where_nothing_is_masked(walk: Walk) -> None:
    block_q, block_k = walk.tile()
    if walk.order == "v1":
        assert walk.traffic() == forms.flash_v1_forward(walk.n, walk.d, block_k)
    else:
        assert walk.traffic() == forms.flash_v2_forward(walk.n, walk.d, block_q)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"m": 63}, "m: got 63 elements of SRAM; supported: at least 4·d = 64 elements"),
        ({"n": 0}, "n: got 0; supported: an integer from 1 to 16384"),
        ({"d": -1}, "d: got -1; supported: an integer from 1 to 256"),
        ({"m": 1 << 21}, "m: got 2097152; supported: an integer from 1 to 1048576"),
        ({"order": "v3"}, "order: got 'v3'; supported: v1 or v2"),
        ({"n": 16_384, "m": 64}, f"n: got 16384, 16384 tiles a side; supported: up to {MAX_TILES} tiles"),
    ],
)
def test_what_cannot_be_walked_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=re.escape(text)):
        check(Initial().walk._replace(**change))


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match=r"device: got 'h300'; supported: a100-40gb, "):
        report.write(tmp_path / "page.html", initial=Initial(device="h300"))
    assert not list(tmp_path.iterdir())


def test_the_command_writes_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    cli.report(out=out, seqlen=96, head_dim=8, sram=512, order="v1", causal=True, device="B200")
    assert capsys.readouterr().out == f"wrote {out}\n"
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', out.read_text("utf-8"))
    assert data is not None
    first = {"n": 96, "d": 8, "m": 512, "order": "v1", "causal": True, "device": "b200"}
    assert json.loads(data[1])["initial"] == first
    out.write_text("mine")
    with pytest.raises(errors.ArgumentError, match=r"which exists; supported: a new file. Fix: pass --force"):
        cli.report(out=out)
    assert out.read_text() == "mine"
    cli.report(out=out, force=True)
    assert out.read_text("utf-8").startswith("<!doctype html>")


def test_places_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="a folder; supported: the name of a file"):
        report.write(tmp_path, force=True)
    with pytest.raises(errors.ArgumentError, match=r"supported: a file in a folder that exists\. Fix: mkdir -p"):
        report.write(tmp_path / "missing" / "page.html")


def test_the_page_is_one_file_without_addresses() -> None:
    page = report.render()
    found = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w./]*", page))
    assert found <= {"http://www.w3.org/2000/svg"}  # a name, not an address that is fetched
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", page)
    assert len(page.encode()) < 400_000


def test_every_file_of_the_page_is_in_it() -> None:
    folder = Path(report.__file__).parent / "page"
    assert {path.stem for path in folder.glob("*.js")} == set(report.SCRIPTS)
    page = report.render()
    assert all(path.read_text("utf-8").strip() in page for path in folder.iterdir() if path.suffix in (".js", ".css"))


@pytest.mark.parametrize("shown", mask_figures.shown(), ids=lambda shown: shown.name)
def test_masks_show_the_pairs_of_their_definition(shown: mask_figures.Shown) -> None:
    (found,) = (mask for mask in mask_figures.figures() if mask["name"] == shown.name)
    assert sum(b - a for row in found["rows"] for a, b in zip(row[::2], row[1::2], strict=True)) == found["visible"]
    for block, counts in found["tiles"].items():
        assert sum(counts) == (mask_figures.SEQLEN // block) ** 2


@pytest.mark.parametrize("head_dim", pipeline.HEAD_DIMS)
@pytest.mark.parametrize("name", pipeline.SCHEDULES)
def test_every_step_of_the_pipeline_is_drawn(name: str, head_dim: int) -> None:
    line = pipeline.timeline(name, head_dim)
    drawn = [span for interval in line.intervals for span in pipeline.spans(interval)]
    assert len(line.intervals) == pipeline.TILES * (2 + 3 * 2)  # K and V; S, P and O of two consumers
    assert len(drawn) == len(line.intervals) + pipeline.TILES * 3 * 2
    assert {span.lane for span in drawn} == set(range(len(pipeline.LANES)))
    assert all(span.lane == span.who for span in drawn if span.lane in (1, 2))
    assert max(span.end for span in drawn) == line.cycles


@pytest.mark.parametrize("head_dim", pipeline.HEAD_DIMS)
def test_each_idea_of_the_pipeline_pays(head_dim: int) -> None:
    cycles = {name: pipeline.timeline(name, head_dim).cycles for name in pipeline.SCHEDULES}
    alone, in_step, *hidden = cycles.values()
    assert alone > in_step > max(hidden)


def test_figures_are_those_of_the_library() -> None:
    found = figures(Initial())
    assert [on["name"] for on in found["devices"]] == list(roofline.DEVICES)
    at = found["lengths"].index(1024)
    cost = found["costs"][64]["forward"]["full"]["standard"][at]
    assert cost == {"flops": 4 * 1024**2 * 64, "bytes": 2 * (4 * 1024**2 + 4 * 1024 * 64) + 4 * 1024}
    m = roofline.device("a100-40gb").sram_elements(torch.float16)
    assert found["traffic"]["a100-40gb"][64]["causal"]["v2"][at] == 2 * Walk(1024, 64, m, "v2", True).traffic().total
