"""The page in a real browser: Chromium, headless, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

import guards
from tilewise import report

from .opened import DESKTOP, Opened

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(tmp_path_factory.mktemp("report") / "page.html")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("these tests drive Chromium, which is not on PATH. Fix: make browser, or install it by hand")
    # Chromium has no sandbox for root, which tests in containers run as.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments, timeout=1e3 * guards.SECONDS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, page_file: Path) -> Iterator[Callable[..., Opened]]:
    """Opens the page; when the test ends, it must have complained of nothing and asked nobody for anything."""
    visits: list[Opened] = []

    def open_page(fragment: str = "", size: tuple[int, int] = DESKTOP, **media: Any) -> Opened:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, **media)  # type: ignore[arg-type]  # a TypedDict of these
        context.set_default_timeout(1e3 * guards.SECONDS)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(page_file.as_uri() + fragment)
        visits.append(opened)
        return opened

    yield open_page
    for opened in visits:
        opened.page.context.close()
        assert not opened.complaints
        elsewhere = [url for url in opened.requests if not url.startswith((page_file.as_uri(), "data:"))]
        assert not elsewhere
