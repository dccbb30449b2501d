"""Two openings of one real store, for tests of what one is told of the other (S10)."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Store
from tests.kit.full_store import PushingStore, pushing_store_for

__all__ = ["KIND", "Told", "opened", "published"]

KIND = "price"
Told = list[tuple[str, str, str | None]]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PushingStore]:
    store = pushing_store_for(url, time.time)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def published(store: Store, id_: str, *tags: str) -> str:
    lease = (await store.acquire(KIND, [Ask(id_, None, tags)], 10))[id_]
    assert isinstance(lease, Lease)
    await store.publish(KIND, {id_: (lease, Copy(lease.token, time.time(), Policy(60), b"x"))})
    return lease.token
