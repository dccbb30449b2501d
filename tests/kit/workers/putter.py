"""A process that puts one key whenever it is told to: `URL NAME`.

It says what it put, or the error.
"""

import asyncio
import sys
from itertools import count

from stillfresh import Cache, Resource, StoreError


def values_in(cache: Cache) -> Resource[str, str]:
    @cache.batched("value", fresh_for="1h")
    async def values(keys: list[str]) -> dict[str, str]:
        raise RuntimeError("a value was lost: a read had to load it")

    return values


async def main(url: str, name: str) -> None:
    async with Cache(url) as cache:
        values = values_in(cache)
        await values.core.ready()
        print("ready", flush=True)
        for number in count():
            if not await asyncio.to_thread(sys.stdin.readline):
                return
            value = f"{name}-{number}"
            try:
                stored = await values.put("one", value)
                print(value if stored.stored else "not stored", flush=True)
            except StoreError as exc:
                print(f"StoreError: {exc}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
