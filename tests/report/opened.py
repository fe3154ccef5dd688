"""A page in the browser, as tests see it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from playwright.sync_api import Page

import guards

DESKTOP, PHONE, SMALL_PHONE = (1280, 800), (390, 844), (360, 740)


@dataclass
class Opened:
    """A page that was opened, and everything that it complained of or asked the network for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        return self.page.locator(f"#{name}").inner_text()

    def hold_time(self) -> None:
        """The page's clock stands still from here on, but for `pass_time`: a slow browser sees the same moments."""
        self.page.clock.install(time=0)
        self.page.clock.pause_at(1000)

    def pass_time(self, milliseconds: int) -> None:
        self.page.clock.run_for(milliseconds)

    def wait(self, condition: str, seconds: float = guards.SECONDS) -> None:
        """Until a condition holds. Playwright's own wait evaluates strings, which the page's policy bars."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"{condition} did not come true within {seconds:g} s"
            self.page.wait_for_timeout(20)

    def settle(self) -> None:
        """Two frames, after which whatever was asked for is drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
