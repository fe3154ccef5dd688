"""``tilewise report``: one HTML page that shows how tiled attention works and what it costs.

The page is put together from the files in ``page/`` and holds everything it needs: no network, fonts or scripts from
elsewhere. Its figures are the library's; what it counts itself, the walk over the tiles, ends at the closed forms of
`report.walks`, which tests compare with the textbook's counting machine.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from string import Template

from .. import __version__, errors
from ..roofline import device
from .figures import Initial, figures
from .walks import Walk, check

__all__ = ["Initial", "Walk", "render", "write"]

# In this order: each uses those before it.
SCRIPTS = (
    "format",
    "schedule",
    "settings",
    "rowstate",
    "svg",
    "board",
    "panels",
    "traversal",
    "roofline",
    "masks",
    "pipeline",
    "main",
)


def render(initial: Initial | None = None) -> str:
    """The page's HTML.

    Args:
        initial: what it shows first.

    Raises:
        tilewise.errors.ArgumentError: a size that cannot be drawn, SRAM too small for one tile, an unknown device.

    >>> page = render()
    >>> page.startswith("<!doctype html>"), "http://" in page.replace("http://www.w3.org/2000/svg", "")
    (True, False)
    """
    initial = initial or Initial()
    check(initial.walk)
    device(initial.device)
    source = files(__package__) / "page"
    # A tag inside a string of the data would end the script element.
    data = json.dumps(figures(initial), separators=(",", ":")).replace("</", "<\\/")
    return Template((source / "page.html").read_text("utf-8")).substitute(
        style=(source / "style.css").read_text("utf-8"),
        script="\n".join((source / f"{name}.js").read_text("utf-8") for name in SCRIPTS),
        figures=data,
        version=__version__,
    )


def write(out: Path, *, force: bool = False, initial: Initial | None = None) -> Path:
    """Write the page to `out`.

    Raises:
        tilewise.errors.ArgumentError: `out` exists and `force` is not set, is a folder, or its folder is missing;
            or as `render` raises.
    """
    if out.is_dir():
        errors.fail(errors.ArgumentError, "out", f"{out}, a folder", "the name of a file", f"pass {out / 'page.html'}")
    if not out.parent.is_dir():
        errors.fail(errors.ArgumentError, "out", out, "a file in a folder that exists", f"mkdir -p {out.parent}")
    if out.exists() and not force:
        fix = "pass --force to overwrite it, or another name"
        errors.fail(errors.ArgumentError, "out", f"{out}, which exists", "a new file", fix)
    page = render(initial)
    out.write_text(page, "utf-8")
    return out
