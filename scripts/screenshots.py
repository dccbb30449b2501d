"""Takes the pictures in docs/images: the demo and its dashboard, light, dark and on a telephone.

`make screenshots` runs it. Everything is real: the demo's own process, its slow upstream, and a
browser; a few readers are added, so that the dashboard has something to show.
"""

import asyncio
import random
import shutil
import signal
import struct
import sys
import zlib
from asyncio.subprocess import PIPE
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from playwright.async_api import Browser, Page, async_playwright

IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
MOST_BYTES: Final = 150_000
WARM: Final = 60.0
"""Seconds of life before the dashboard is looked at."""
SCREEN: Final[dict[str, Any]] = {"viewport": {"width": 1360, "height": 860}}
PHONE: Final[dict[str, Any]] = {
    "viewport": {"width": 390, "height": 800},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {**SCREEN, "color_scheme": "light"},
    "dark": {**SCREEN, "color_scheme": "dark"},
    "phone": {**PHONE, "color_scheme": "light"},
}
TO_THE_TOP: Final = """
for (const column of document.querySelectorAll(".side, .sides")) column.scrollTop = 0;
scrollTo(0, 0);
"""
"""The columns scroll on their own, and a click on a topic scrolls one of them."""
READERS: Final = 4
PALETTE: Final = """async (source) => {
  const image = Object.assign(new Image(), { src: source });
  await image.decode();
  const { width, height } = image;
  const paper = new OffscreenCanvas(width, height).getContext("2d");
  paper.drawImage(image, 0, 0);
  const pixels = new Uint32Array(paper.getImageData(0, 0, width, height).data.buffer);
  const used = new Map();
  for (const it of pixels) used.set(it, (used.get(it) ?? 0) + 1);
  const rgb = (it) => [it & 255, (it >> 8) & 255, (it >> 16) & 255];
  const colours = [...used].sort((a, b) => b[1] - a[1]).slice(0, 256).map(([it]) => rgb(it));
  const far = (a, b) => (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 + (a[2] - b[2]) ** 2;
  for (const it of used.keys()) {
    const ranks = colours.map((colour) => far(colour, rgb(it)));
    used.set(it, ranks.indexOf(Math.min(...ranks)));
  }
  let text = "";
  for (const it of pixels) text += String.fromCharCode(used.get(it));
  return [width, height, colours.flat(), btoa(text)];
}"""
"""A picture in its 256 most used colours; others become the nearest of these."""
FLAGS: Final = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """Where it listens, as it says itself."""
    command = Path(sys.executable).with_name("stillfresh")
    process = await asyncio.create_subprocess_exec(command, "demo", "--port", "0", stdout=PIPE)
    assert process.stdout is not None  # noqa: S101 (it is a pipe)
    try:
        async with asyncio.timeout(30):
            said = (await process.stdout.readline()).decode()
        yield said.split()[-1].rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()


async def readers(url: str) -> None:
    """Who reads over HTTP: some posts often, most of them now and then."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        told = await client.get("/_stillfresh/api/entries", params={"kind": "post", "limit": 500})
        ids = [entry["id"] for entry in told.json()["entries"]]
        while True:
            rank = min(int(random.expovariate(0.15)), len(ids) - 1)
            await client.get(f"/v1/post/{ids[rank]}")
            await asyncio.sleep(0.01)


@asynccontextmanager
async def looking(browser: Browser, look: str, url: str) -> AsyncIterator[Page]:
    context = await browser.new_context(**LOOKS[look])
    page = await context.new_page()
    await page.goto(url)
    yield page
    await context.close()


async def keep(page: Page, name: str) -> None:
    path = IMAGES / f"{name}.png"
    taken = await page.screenshot(animations="disabled")
    size = path.write_bytes(await small(page, taken))
    print(f"{path.name}: {size:,} bytes")  # noqa: T201 (a script)
    if size > MOST_BYTES:
        sys.exit(f"{path.name} has {size:,} bytes, of {MOST_BYTES:,} allowed")


async def small(page: Page, png: bytes) -> bytes:
    """The same picture, as a PNG with a palette: about half as large."""
    blank = await page.context.new_page()
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    width, height, colours, encoded = await blank.evaluate(PALETTE, source)
    await blank.close()
    pixels = b64decode(encoded)
    rows = b"".join(b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
    parts = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(colours)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


async def take_demo(browser: Browser, url: str) -> None:
    for look in LOOKS:
        async with looking(browser, look, url) as page:
            await page.locator('#feed [data-verdict="fresh"]').nth(2).wait_for(timeout=60_000)
            if look != "phone":
                await play(page)
            await page.wait_for_timeout(3_000)
            await keep(page, f"demo-{look}")


async def play(page: Page) -> None:
    """Two games are begun, and a topic is read."""
    for cell in (4, 0):
        await page.locator("#next:enabled").click()
        await page.locator("#board button[aria-disabled='false']").nth(cell).click()
        await page.wait_for_timeout(1_000)
    await page.locator("#topics button").nth(1).click()
    await page.evaluate(TO_THE_TOP)


async def take_dashboard(browser: Browser, url: str) -> None:
    for look in LOOKS:
        async with looking(browser, look, f"{url}/_stillfresh/") as page:
            await page.wait_for_timeout(12_000)
            await keep(page, f"dashboard-{look}")
            if look == "light":
                await take_entry(page)


async def take_down(browser: Browser, url: str) -> None:
    """The point: the upstream is switched off, the site stays, and says its age."""
    async with looking(browser, "light", url) as page:
        await page.locator('#feed [data-verdict="fresh"]').nth(2).wait_for(timeout=60_000)
        await page.locator("#got-it").click()
        await play(page)
        await page.wait_for_timeout(4_000)
        await page.get_by_label("Down").check()
        await page.wait_for_timeout(25_000)
        await keep(page, "demo-down")
        await page.get_by_label("Fine").check()
        await page.wait_for_timeout(4_000)


async def take_dashboard_down(browser: Browser, visitor: Page, url: str) -> None:
    await visitor.get_by_label("Down").check()
    await visitor.wait_for_timeout(25_000)
    async with looking(browser, "light", f"{url}/_stillfresh/") as board:
        await board.wait_for_timeout(12_000)
        await keep(board, "dashboard-down")


async def take_entry(page: Page) -> None:
    await page.locator("#kind").select_option("post")
    await page.wait_for_timeout(1_000)
    await page.locator(".entry-name").nth(3).click()
    await page.locator("#panel-value").wait_for()
    await keep(page, "dashboard-entry")


async def scroll(page: Page) -> None:
    """Through the feed, as somebody would: what came into view is kept from then on."""
    for _ in range(12):
        await page.wait_for_timeout(3_000)
        await page.mouse.move(600, 500)
        await page.mouse.wheel(0, 700)


async def take() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("this machine has no chromium")
    async with demo() as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        async with looking(browser, "light", url) as visitor:
            await scroll(visitor)
            await take_demo(browser, url)  # before the readers: its numbers are a visitor's
            await take_down(browser, url)
            reading = asyncio.gather(*(readers(url) for _ in range(READERS)))
            try:
                await asyncio.sleep(WARM)
                await take_dashboard(browser, url)
                await take_dashboard_down(browser, visitor, url)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(take())
