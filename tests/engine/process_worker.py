"""A process that reads one price through the engine on a SQLite file: `FILE LOG SECONDS [die]`.

Every load adds a line to LOG. With `die` the loader never answers: it says so and waits to be
killed. Otherwise the process prints the value it was served.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stillfresh import Cache


async def main(file: str, log: str, takes: float, *, dies: bool) -> None:
    cache = Cache(f"sqlite:///{file}")

    @cache.batched("price", fresh_for=60, stale_for=60, error_for=60, lease_for="1s")
    async def prices(skus: list[str]) -> Mapping[str, int]:
        with Path(log).open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        if dies:
            print("loading", flush=True)
            await asyncio.Event().wait()
        await asyncio.sleep(takes)
        return dict.fromkeys(skus, os.getpid())

    async with cache:
        print("ready", flush=True)
        sys.stdin.readline()
        print(await prices("sku-1"), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), dies="die" in sys.argv))
