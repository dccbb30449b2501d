"""A process that reads one price through the engine on a shared store.

`URL LOG SECONDS LEASE [die]`: every load adds a line to LOG and takes so many seconds; LEASE is in
seconds, too. With `die` the loader never answers: it says so and waits to be killed. Otherwise the
process prints the value it was served, when it is no longer a stale one.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stillfresh import Cache, Verdict


async def main(url: str, log: str, takes: float, lease_for: float, *, dies: bool) -> None:
    cache = Cache(url)

    @cache.batched("price", fresh_for=60, stale_for=60, error_for=60, lease_for=lease_for)
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
        while (answer := await prices.get("sku-1")).verdict is Verdict.STALE:
            await asyncio.sleep(0.02)
        print(answer.value, flush=True)


if __name__ == "__main__":
    url, log, takes, lease_for = sys.argv[1:5]
    asyncio.run(main(url, log, float(takes), float(lease_for), dies="die" in sys.argv))
