"""Processes that come to grief at a chosen moment (T4), and one whose disk fails under it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from stillfresh import Cache, Policy, StoreError
from stillfresh.stores.contract import Ask, Copy, LateTags, Lease, Store
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.urls import store_for

__all__ = ["BIG", "KEYS", "KIND", "LEASE_FOR", "declared", "die_in"]

KIND: Final = "price"
KEYS: Final = [f"sku-{number}" for number in range(12)]
LEASE_FOR: Final = 1.0
BIG: Final = 600_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """A store whose process is killed while it publishes."""

    def __init__(self, store: Store, after: float) -> None:
        self._store = store
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        publishing = asyncio.ensure_future(self._store.publish(kind, copies, tags))
        await asyncio.sleep(self._after)
        die()
        return await publishing


def declared(cache: Cache, loads: list[str], *, dies: bool = False, lease_for: float = 60) -> Any:
    """A resource whose value says which process loaded it."""

    @cache.batched(KIND, fresh_for=3600, stale_for=60, lease_for=lease_for, max_batch=len(KEYS))
    async def prices(skus: list[str]) -> Mapping[str, str]:
        loads.extend(skus)
        if dies:
            die()
        return {sku: f"{os.getpid()} {sku}" for sku in skus}

    return prices


def die_in(step: str, url: str, environment: dict[str, str], after: float) -> None:
    """Loads a batch, and is killed in that step of it."""
    os.environ.update(environment)

    async def main() -> None:
        store = store_for(url, time.time)
        if step == "publish":
            store = cast("Store", Mortal(store, after))
        async with Cache(store) as cache:
            prices = declared(cache, [], dies=step == "load", lease_for=LEASE_FOR)
            await prices.get_many(KEYS)

    asyncio.run(main())


async def publish_on_a_failing_disk(path: Path) -> None:
    """Says of each key whether it was published; goes on, whatever is said."""
    store = SqliteStore(path)
    await store.open()
    for key in KEYS:
        try:
            lease = (await store.acquire(KIND, [Ask(key)], 30))[key]
            assert isinstance(lease, Lease)
            copy = Copy(lease.token, time.time(), Policy(3600), key.encode() * BIG)
            superseded = await store.publish(KIND, {key: (lease, copy)})
            print(key, "superseded" if superseded else "published", flush=True)
        except StoreError as exc:
            print(key, "refused", exc, flush=True)
    await store.close()


if __name__ == "__main__":
    asyncio.run(publish_on_a_failing_disk(Path(sys.argv[1])))
