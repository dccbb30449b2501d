"""A process of the library's soak: reads, puts, invalidations, tags and watches on one store.

`python -m tests.kit.workers.soak_library STORE KEYS`. For each line on its standard input it
prints one line of JSON: its figures since the last one.
"""

import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from typing import Any

from stillfresh import Cache
from stillfresh.errors import LoadFailed

WATCHED = 200
"""Keys at a time; each watch ends after a few seconds."""
READERS = 4
PAUSE = 0.02
"""Seconds between two changes, or two dozens of reads."""


class Soak:
    def __init__(self, store: str, keys: int) -> None:
        self._cache = Cache(store)
        self._keys = keys
        self._waits: list[float] = []
        self._prices = self._cache.batched(
            "price",
            fresh_for="60s",
            stale_for="5m",
            error_for="1h",
            memory_for="1m",
            max_entries=2 * keys,
            max_batch=100,
            tags=lambda sku: [f"shop:{int(sku) % 100}"],
        )(self._load)

    async def _load(self, skus: list[str]) -> dict[str, dict[str, Any]]:
        await asyncio.sleep(0.005)
        if random.random() < 0.02:
            raise ConnectionError("the upstream is down")
        return {sku: self._view_of(sku) for sku in skus}

    @staticmethod
    def _view_of(sku: str) -> dict[str, Any]:
        return {"sku": sku, "at": time.time(), "text": "x" * 100}

    def _any_key(self) -> str:
        return str(random.randrange(self._keys))

    async def run(self) -> None:
        async with self._cache:
            for first in range(0, self._keys, 1_000):
                keys = [str(key) for key in range(first, first + 1_000)]
                await self._prices.put_many({key: self._view_of(key) for key in keys})
            print("ready", flush=True)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(READERS):
                    tasks.create_task(self._read())
                tasks.create_task(self._change())
                tasks.create_task(self._watch())
                tasks.create_task(self._tell())

    async def _read(self) -> None:
        while True:
            for _ in range(12):
                began = time.perf_counter()
                # One load in fifty fails, and some of its keys have no copy.
                with suppress(LoadFailed):
                    await self._prices.get(self._any_key())
                self._waits.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE)

    async def _change(self) -> None:
        while True:
            key = self._any_key()
            chance = random.random()
            if chance < 0.6:
                await self._prices.put(key, self._view_of(key))
            elif chance < 0.95:
                await self._prices.invalidate(key)
            else:
                await self._cache.invalidate_tag(f"shop:{random.randrange(100)}")
            await asyncio.sleep(PAUSE)

    async def _watch(self) -> None:
        while True:
            with self._prices.watch(*(self._any_key() for _ in range(WATCHED))):
                await asyncio.sleep(5)

    async def _tell(self) -> None:
        while await asyncio.to_thread(sys.stdin.readline):
            waits = sorted(self._waits)
            self._waits.clear()
            figures = {
                "requests": len(waits),
                "p50": waits[len(waits) // 2] if waits else 0.0,
                "p99": waits[len(waits) * 99 // 100] if waits else 0.0,
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    asyncio.run(Soak(sys.argv[1], int(sys.argv[2])).run())
