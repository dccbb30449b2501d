"""A process that asks for one page on a SQLite file: `FILE LOG SECONDS [die]`.

Every render adds a line to LOG. With `die` the render never ends: it says so and waits to be
killed. Otherwise the process prints the page it was served.
"""

import asyncio
import os
import sys
from pathlib import Path

from stillfresh.pages import Page, PageCache


async def main(file: str, log: str, takes: float, *, dies: bool) -> None:
    async def render() -> Page:
        with Path(log).open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        if dies:
            print("rendering", flush=True)
            await asyncio.Event().wait()
        await asyncio.sleep(takes)
        return Page(str(os.getpid()))

    async with PageCache(f"sqlite:///{file}", lease_for="1s") as pages:
        print("ready", flush=True)
        sys.stdin.readline()
        print((await pages.get("/pricing", render, revalidate=60)).body.decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), dies="die" in sys.argv))
