"""A process that watches two prices through a hub: `FILE LOG`. Prints what it is told, once each.

Every id that is fetched adds a line to LOG.
"""

import asyncio
import sys
from pathlib import Path

from stillfresh import Cache
from stillfresh.gateway.live import Hub
from stillfresh.systems.coordinator import Kind


async def main(file: str, log: str) -> None:
    async def fetch(ids: list[str]) -> dict[str, int]:
        with Path(log).open("a") as lines:
            lines.write("".join(f"{id_}\n" for id_ in ids))
        await asyncio.sleep(0.2)
        return dict.fromkeys(ids, 1)

    async with Cache(f"sqlite:///{file}") as cache:
        hub = Hub(cache, kinds=[Kind("price", fetch=fetch, fresh_for="1h")])
        print("ready", flush=True)
        sys.stdin.readline()
        with hub.connect() as guest:
            guest.subscribe("price", "a")
            guest.subscribe("price", "b")
            for id_ in ("a", "b"):
                await guest.get("price", id_)
                print(id_, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
