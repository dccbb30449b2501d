"""A real browser for the tests of the web part: headless Chromium, driven by Playwright.

A worker has one of each, on the loop of its session: a test with a page runs on that loop too,
and so must every fixture that it awaits (`@pytest_asyncio.fixture(loop_scope="session")`).

`page` is a blank page of a context of its own; `new_page(**options)` makes more, dark or on a
telephone. A test fails at its end if a page of it wrote an error to the console, or asked another
host than this one. `expected_errors` takes the parts of console errors that a test provokes.
"""

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.kit.browser_site import PATIENCE, Site
from tests.kit.live import Upstream

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
UNUSED: Final = [
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxFullPopup",
    "SpareRendererForSitePerProcess",
]
"""Each window would load the pages of its address bar, and start a process for the next page: half
a second of work for each test."""
FLAGS: Final = [
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",  # a page takes a quarter less time
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--no-startup-window",
    f"--disable-features={','.join(UNUSED)}",
    "--remote-debugging-port=0",
]
OURS: Final = {"127.0.0.1", "localhost", "::1", None}
"""None: about:blank, data: and blob: addresses ask nobody."""

expect.set_options(timeout=PATIENCE)

NewPage = Callable[..., Awaitable[Page]]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Starting a driver on a loop of its own would cost each test most of a second."""
    if isinstance(item, pytest.Function) and "browser" in item.fixturenames:
        item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One browser for the tests of a worker; where it listens."""
    if CHROMIUM is None:
        pytest.skip("this machine has no chromium")
    folder = tmp_path_factory.mktemp("chromium")
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={folder}"], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{_port(folder, started)}"
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait(10)


def _port(folder: Path, started: subprocess.Popen[bytes]) -> int:
    """It writes the port that it chose into its folder, once it listens."""
    end, told = time.monotonic() + 60, folder / "DevToolsActivePort"
    while time.monotonic() < end and started.poll() is None:
        if told.exists() and len(lines := told.read_text().splitlines()) == 2:
            return int(lines[0])
        time.sleep(0.02)
    pytest.fail(f"chromium did not start: {(folder / 'log').read_text()[-2000:]}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        yield await playwright.chromium.connect_over_cdp(chromium)


@pytest.fixture
def expected_errors() -> list[str]:
    """Append parts of the console errors that the test provokes."""
    return []


class Complaints(list[str]):
    """What pages did that they should not, until the test is over."""

    is_over = False

    def note(self, text: str) -> None:
        if not self.is_over:
            self.append(text)


KEY: Final = pytest.StashKey[Complaints]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a page says when its server goes is no mistake of the page's."""
    if (complaints := item.stash.get(KEY, None)) is not None:
        complaints.is_over = True


@pytest_asyncio.fixture(loop_scope="session")
async def new_page(
    request: pytest.FixtureRequest, browser: Browser, expected_errors: list[str]
) -> AsyncIterator[NewPage]:
    """`await new_page(color_scheme="dark", viewport={"width": 360, "height": 640})`"""
    complaints = request.node.stash[KEY] = Complaints()
    contexts = []

    async def made(**options: Any) -> Page:
        # Sixty pictures a second of a mark that breathes cost more than all else on a page.
        context = await browser.new_context(**{"reduced_motion": "reduce", **options})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = await context.new_page()
        _listen(page, complaints)
        return page

    yield made
    for context in contexts:
        await context.close()
    unexpected = [text for text in complaints if not any(part in text for part in expected_errors)]
    assert not unexpected, unexpected


def _listen(page: Page, complaints: Complaints) -> None:
    def asked(url: str) -> None:
        if urlsplit(url).hostname not in OURS:
            complaints.note(f"a request to another host: {url}")

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.note(f"console: {message.text}")

    page.on("request", lambda request: asked(request.url))
    page.on("websocket", lambda socket: asked(socket.url))
    page.on("pageerror", lambda error: complaints.note(f"uncaught: {error}"))
    page.on("console", said)


@pytest_asyncio.fixture(loop_scope="session")
async def page(new_page: NewPage) -> Page:
    return await new_page()


@pytest_asyncio.fixture(loop_scope="session")
async def site() -> AsyncIterator[Site]:
    site = Site(Upstream())
    await site.start()
    yield site
    await site.stop()
