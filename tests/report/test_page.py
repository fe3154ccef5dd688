"""The page as a reader meets it: it loads, plays, counts to the closed forms, and fits screen, theme and keyboard."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tilewise import errors
from tilewise.report.figures import SETS
from tilewise.report.walks import Walk, check

from .opened import DESKTOP, PHONE, SMALL_PHONE, Opened

Visit = Callable[..., Opened]
STEPS = "traversal.state.walk.steps.length"


def drawn(walk: Walk) -> bool:
    """Whether the page can draw it."""
    try:
        check(walk)
    except errors.ArgumentError:
        return False
    return True


def walks() -> list[Walk]:
    """Random settings, ragged edges and single rows among them."""
    choose = random.Random(7)
    sizes = (1, 2, 3, 17, 100, 255, 256, 1000, 2048)
    some = [
        Walk(choose.choice(sizes), choose.choice((1, 3, 16, 64, 100)), choose.randint(4, 50_000), order, causal)
        for order in ("v1", "v2")
        for causal in (False, True)
        for _ in range(30)
    ]
    return [walk for walk in some if drawn(walk)]


def test_the_walk_counts_to_the_closed_forms_of_python(visit: Visit) -> None:
    some = walks()
    assert len(some) > 60
    asked = [walk._asdict() for walk in some]
    counted = visit().page.evaluate(
        """(asked) => asked.map((settings) => {
             const { steps, at } = schedule.walk(settings);
             const { read, written } = at(steps.length);
             return [read, written, schedule.closedForm(settings), schedule.standardTotal(settings)];
           })""",
        asked,
    )
    for walk, (read, written, form, standard) in zip(some, counted, strict=True):
        expected = walk.traffic()
        assert (read, written) == (form["read"], form["written"]) == expected, walk
        assert standard == walk.standard().total, walk


def test_the_page_agrees_with_the_sets_that_it_carries(visit: Visit) -> None:
    opened = visit()
    assert opened.page.evaluate("page.figures.sets.length") == len(SETS)
    assert opened.page.evaluate("page.disagreements()") == []


def test_counters_on_the_screen_end_at_the_closed_form(visit: Visit) -> None:
    opened = visit()
    page = opened.page
    for walk in SETS[::2] + SETS[1:6:2]:
        # First to where every N and d can be drawn, then to where they should be.
        for name, value in (("m", 1 << 20), ("n", walk.n), ("d", walk.d), ("m", walk.m)):
            page.fill(f"#{name}", str(value))
            page.press(f"#{name}", "Enter")
        page.click(f'label:has(input[value="{walk.order}"])')
        page.locator("#causal").set_checked(walk.causal)
        page.click("#last")
        assert opened.text("notes") == ""
        assert opened.text("moved-tiled") == f"{walk.traffic().total:,}"
        assert opened.text("moved-standard") == f"{walk.standard().total:,}"
        assert f"Counted {walk.traffic().total:,}, exactly the closed form" in opened.text("closed")
        assert "Equal to softmax over the whole row" in opened.text("row-verdict")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE, SMALL_PHONE], ids=["desktop", "phone", "small phone"])
def test_it_fits_screen_and_scheme(visit: Visit, size: tuple[int, int], scheme: str) -> None:
    opened = visit("#causal=1", size, color_scheme=scheme)
    opened.page.evaluate(f"traversal.seek(Math.round({STEPS} / 2))")
    opened.settle()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == size[0]
    image = np.asarray(Image.open(io.BytesIO(opened.page.screenshot(full_page=True))).convert("RGB"))
    ground = image[-4:, :4].mean() / 255
    assert (ground > 0.9) if scheme == "light" else (ground < 0.15)
    for name in ("board", "mask-board", "roof-chart", "traffic-chart", "memory-chart", "pipe-chart", "history"):
        box = opened.page.locator(f"#{name}").bounding_box()
        assert box is not None
        x, y, width, height = (int(box[key]) for key in ("x", "y", "width", "height"))
        colours = np.unique(image[y : y + height, x : x + width] @ [1, 256, 65_536])
        assert len(colours) > 20, f"{name} is all but blank"


NEGATIVE = """() => {
  const wrong = [];
  const sizes = { fillRect: [2, 3], strokeRect: [2, 3], rect: [2, 3], clearRect: [2, 3] };
  for (const [name, at] of Object.entries(sizes)) {
    const draw = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...all) {
      if (at.some((index) => !(all[index] >= 0))) wrong.push(`${name}(${all})`);
      return draw.apply(this, all);
    };
  }
  const check = (when) => {
    for (const node of document.querySelectorAll("svg, svg *")) {
      for (const name of ["width", "height", "r", "rx", "stroke-width"]) {
        const value = node.getAttribute(name);
        if (value !== null && !(Number(value) >= 0)) wrong.push(`${when}: ${node.tagName} ${name}=${value}`);
      }
    }
  };
  for (const walk of [{ n: 64, d: 16, m: 64 }, { n: 100, d: 3, m: 700 }, { n: 1, d: 1, m: 4 }]) {
    traversal.apply({ ...walk, order: "v1", causal: true });
    const steps = traversal.state.walk.steps.length;
    for (const width of [0, 1, 4, 19, 40, 90, 300]) {
      document.body.style.width = `${width}px`;
      for (const part of [rooflines, maskViewer, pipelines]) part.render();
      for (const share of [0, 0.5, 1]) {
        traversal.seek(share * steps);
        check(`N ${walk.n}, width ${width}, ${share}`);
      }
    }
    document.body.style.display = "none";
    for (const part of [traversal, rooflines, maskViewer, pipelines]) part.render();
    check(`N ${walk.n}, hidden`);
    document.body.style.display = "";
  }
  return wrong.slice(0, 8);
}"""


def test_nothing_has_a_negative_size_at_any_width(visit: Visit) -> None:
    """Down to none, which the first layout of a busy browser may have."""
    assert visit().page.evaluate(NEGATIVE) == []


def test_drawings_follow_the_width(visit: Visit) -> None:
    opened = visit("#n=64&d=8&m=512", DESKTOP)
    opened.page.click("#play")
    for width in (320, 1600, 331, 900, 320, 412):
        opened.page.set_viewport_size({"width": width, "height": 700})
    fits = """["#history div", "#roof-chart", "#memory-chart"].every((name) => {
        const host = document.querySelector(name);
        return host.clientWidth > 0 && host.firstElementChild.clientWidth === host.clientWidth;
      })"""
    opened.wait(fits)
    opened.page.evaluate("() => { document.body.style.width = 0; }")  # the page's own width, in the same window
    opened.wait("document.querySelector('#roof-chart').firstElementChild.getAttribute('width') === '160'")
    opened.page.evaluate("() => { document.body.style.width = ''; }")
    opened.wait(fits)


def test_no_text_runs_out_of_its_drawing_on_a_phone(visit: Visit) -> None:
    outside = visit("", SMALL_PHONE).page.evaluate(
        """() => [...document.querySelectorAll("svg[role=img] text")].filter((text) => {
             const own = text.getBoundingClientRect();
             const room = text.closest("svg").getBoundingClientRect();
             return own.left < room.left - 1 || own.right > room.right + 1;
           }).map((text) => text.textContent)"""
    )
    assert outside == []


def test_it_plays_pauses_and_ends(visit: Visit) -> None:
    opened = visit("#n=64&d=8&m=512")
    page = opened.page
    opened.hold_time()
    page.select_option("#speed", "4")
    page.click("#play")
    opened.pass_time(200)  # at 4 steps a second at least, four times as fast
    paused = page.evaluate("traversal.state.done")
    assert 2 <= paused < page.evaluate(STEPS)
    assert page.locator("#play").inner_text() == "Pause"
    page.click("#play")
    opened.pass_time(1000)
    assert page.evaluate("traversal.state.done") == paused
    page.select_option("#speed", "16")
    page.click("#play")
    opened.pass_time(2000)  # 24 seconds at most, sixteen times as fast
    assert page.evaluate(f"traversal.state.done === {STEPS}")
    assert page.locator("#play").inner_text() == "Play"
    assert opened.text("moved-tiled") == f"{Walk(64, 8, 512, 'v2', False).traffic().total:,}"
    page.click("#play")  # again, from the start
    opened.pass_time(100)
    assert page.evaluate(f"traversal.playing() && 0 < traversal.state.done && traversal.state.done < {STEPS}")


def test_the_keyboard_is_enough(visit: Visit) -> None:
    opened = visit()
    page = opened.page
    opened.hold_time()
    page.focus("#board")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("traversal.state.done") == 1
    page.keyboard.press("End")
    assert page.evaluate(f"traversal.state.done === {STEPS}")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert page.evaluate("traversal.playing()")
    page.keyboard.press(" ")
    assert not page.evaluate("traversal.playing()")
    page.focus("#scrub")
    page.keyboard.press("End")
    assert page.evaluate(f"traversal.state.done === {STEPS}")


def test_every_control_has_a_name_and_shows_its_focus(visit: Visit) -> None:
    page = visit().page
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, [tabindex], [role=img]")]
             .filter((node) => !(node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
               || node.labels?.length || node.textContent.trim()))
             .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    seen: dict[str, Any] = {}
    while True:
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):  # past the last one
            break
        path, outline = page.evaluate(
            """() => {
                 const node = document.activeElement;
                 const shown = node.matches("input[type=radio]") ? node.nextElementSibling : node;
                 return [node.id || node.outerHTML.slice(0, 60), getComputedStyle(shown).outlineStyle];
               }"""
        )
        seen[path] = outline
    reached = {"theme", "n", "d", "m", "causal", "board", "play", "scrub", "row", "device", "mask", "schedule"}
    assert reached <= set(seen)
    assert "none" not in seen.values()


@pytest.mark.parametrize(
    ("name", "value", "kept", "why"),
    [
        ("m", "3", "64", "at least 4d = 64 elements at d = 16"),
        ("m", "0", "64", "from 4 to 1,048,576; set to 4"),
        ("n", "0", "1", "N is a whole number from 1 to 16,384; set to 1"),
        ("n", "-8", "1", "set to 1"),
        ("n", "", "512", "N must be a whole number; set to 512"),
        ("d", "2.5", "3", "d is a whole number from 1 to 256; set to 3"),
        ("d", "1000", "256", "set to 256"),
        ("row", "9999", "511", "row is a whole number from 0 to 511"),
    ],
)
def test_what_cannot_be_drawn_is_mended_and_explained(visit: Visit, name: str, value: str, kept: str, why: str) -> None:
    opened = visit()
    opened.page.fill(f"#{name}", value)
    opened.page.press(f"#{name}", "Enter")
    assert opened.page.input_value(f"#{name}") == kept
    assert why in opened.text("notes")


def test_more_tiles_than_can_be_told_apart_are_refused(visit: Visit) -> None:
    opened = visit("#n=16384&m=64")
    assert opened.page.input_value("#n") == "128"
    assert "At most 128 × 128 tiles are drawn" in opened.text("notes")


def test_an_unknown_device_or_order_in_the_address_is_explained(visit: Visit) -> None:
    opened = visit("#device=h300&order=v9")
    assert "Unknown device “h300”; showing h200. Known: a100-40gb" in opened.text("device-notes")
    assert "The order is v1 or v2" in opened.text("notes")
    assert visit("#device=b200").page.input_value("#device") == "b200"


def test_the_theme_can_be_chosen(visit: Visit) -> None:
    page = visit("", color_scheme="light").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_less_motion_is_respected(visit: Visit) -> None:
    opened = visit("#n=64&d=8&m=512", reduced_motion="reduce")
    page = opened.page
    opened.hold_time()
    page.evaluate(
        """() => {
             window.changes = 0;
             const { draw } = board;
             board.draw = (...all) => { changes += 1; draw(...all); };
           }"""
    )
    page.select_option("#speed", "16")
    page.click("#play")
    opened.pass_time(1200)
    assert page.evaluate("window.changes") == 2
    assert page.evaluate("getComputedStyle(document.querySelector('#sram span')).transitionDuration") == "0s"


CONTRAST = """(pairs) => {
  const style = getComputedStyle(document.documentElement);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const luminance = (name) => {
    const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((at) => linear(parseInt(hex.slice(at, at + 2), 16) / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return pairs.map(([a, b]) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(visit: Visit, scheme: str) -> None:
    """WCAG 2.2: 4.5 for text, 3 for drawings and the edges of controls."""
    page = visit("", color_scheme=scheme).page
    grounds = ("bg", "surface", "sunken")
    text = [(ink, ground) for ink in ("ink", "soft") for ground in grounds]
    text += [(ink, "surface") for ink in ("accent", "good", "bad", "q", "k", "v", "o")] + [("on-accent", "accent")]
    text += [("bg", fill) for fill in ("q", "s", "v", "stats")]
    shapes = [(fill, "surface") for fill in ("s", "stats", "line-strong")]
    assert min(page.evaluate(CONTRAST, text)) >= 4.5
    assert min(page.evaluate(CONTRAST, shapes)) >= 3


def test_every_mask_is_tiled_as_the_library_tiles_it(visit: Visit) -> None:
    opened = visit()
    wrong = opened.page.evaluate(
        """() => page.figures.masks.flatMap((mask) => Object.entries(mask.tiles)
             .filter(([block, counts]) => String(maskViewer.classify(mask, Number(block)).counts) !== String(counts))
             .map(([block]) => [mask.name, block]))"""
    )
    assert wrong == []
    for index in range(opened.page.locator("#mask option").count()):
        opened.page.select_option("#mask", str(index))
        assert "✓ Tiles as the library counts them" in opened.text("mask-verdict")


def test_every_schedule_and_device_can_be_shown(visit: Visit) -> None:
    page = visit().page
    for name in ("schedule", "pipe-d", "device", "roof-d", "roof-pass"):
        for value in page.locator(f"#{name} option").evaluate_all("(all) => all.map(({ value }) => value)"):
            page.select_option(f"#{name}", value)
    page.check("#roof-causal")
    assert page.evaluate("document.querySelectorAll('#pipe-chart rect').length") > 30
    assert not re.search("NaN|undefined|Infinity", page.inner_text("body"))
