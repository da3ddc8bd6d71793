"""Chromium from the PATH, driven by playwright: a page of the console, and what its console said."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Response, async_playwright, expect

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"
)
# Nothing that is not the console's is asked for, and root may run it.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE = 20_000  # milliseconds: browsers are slow on a busy machine
expect.set_options(timeout=PATIENCE)
DESK = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}


@dataclass
class Opened:
    """A page; `complaints` are errors and warnings of its console, exceptions, and what was loaded from
    elsewhere."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)

    def said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def received(self, response: Response) -> None:
        if not response.url.startswith(self.origin):
            self.complaints.append(f"loaded from elsewhere: {response.url}")

    async def view(self, name: str) -> None:
        await self.page.click(f'nav a[data-view="{name}"]')
        await self.page.wait_for_selector(f"#view-{name}:visible")

    async def too_wide(self) -> int:
        """How many pixels the page is wider than the window."""
        return int(await self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def console(browser: Browser, port: int, **context: Any) -> AsyncIterator[Opened]:
    """The console of an admin port, in a context of its own, in a browser that is running."""
    async with await browser.new_context(**{"viewport": DESK, **context}) as one:
        page = await one.new_page()
        page.set_default_timeout(PATIENCE)
        opened = Opened(page, f"http://127.0.0.1:{port}/")
        page.on("console", opened.said)
        page.on("response", opened.received)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        await page.goto(opened.origin)
        yield opened
