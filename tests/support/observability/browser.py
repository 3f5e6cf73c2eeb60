"""A real headless Chromium, for tests of the console: driven by Playwright."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_IN_VENV = Path(__file__).parents[3] / ".venv" / "chromium" / "usr" / "lib"
OTHER_NAME = "router.example"  # of this machine, which the browser takes for another one
_TIMEOUT_MS = 120_000


def _program() -> tuple[str, dict[str, str]]:
    """Path and environment of a browser. Skips the test without one."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found, {}
    unpacked = _IN_VENV / "chromium" / "chromium-headless-shell"
    if not unpacked.exists():
        pytest.skip(
            "NOT TESTED: there is no Chromium. `make chromium` unpacks Debian's package into .venv; elsewhere, install "
            "Chromium or Chrome so that it is on PATH"
        )
    folders = {path.parent for path in _IN_VENV.rglob("*.so*")}
    return str(unpacked), {"LD_LIBRARY_PATH": ":".join(map(str, sorted(folders)))}


class Seen:
    """What a page has asked for, and what went wrong on it, from now on."""

    def __init__(self, page: Page) -> None:
        self.urls: list[str] = []
        self.errors: list[str] = []  # exceptions, and what the browser blocked or complained about
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location['url']})")


async def shows(page: Page, selector: str, text: str) -> None:
    """Wait until an element's text contains this one."""
    await expect(page.locator(selector)).to_contain_text(text, timeout=_TIMEOUT_MS)


async def until(page: Page, expression: str) -> None:
    """Wait until it is true. Playwright's own wait evaluates it in a way that a page's policy may forbid."""
    async with asyncio.timeout(_TIMEOUT_MS / 1000):
        while not await page.evaluate(expression):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def focused(page: Page) -> str:
    """The id, or the text, of what has the focus."""
    return await page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 40)")


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A tab of a browser with a profile of its own."""
    program, environment = _program()
    arguments = ["--no-proxy-server", f"--host-resolver-rules=MAP {OTHER_NAME} 127.0.0.1"]
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(
            executable_path=program, args=arguments, env={**os.environ, **environment}
        ) as browser,
        await browser.new_page(viewport={"width": 1280, "height": 860}) as page,
    ):
        page.set_default_timeout(_TIMEOUT_MS)
        yield page
