"""Steps of a store for tests whose requests arrive late: leases and copies of the key `a`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Store

__all__ = ["KIND", "NOW", "POLICY", "leased", "opened", "publishes"]

KIND = "price"
NOW = 1_700_000_000.0
POLICY = Policy(60, 60, 60)


@asynccontextmanager
async def opened(*stores: Store) -> AsyncIterator[None]:
    for store in stores:
        await store.open()
    try:
        yield
    finally:
        for store in stores:
            await store.close()


async def leased(store: Store, seen: str | None = None, *tags: str) -> Lease:
    grant = (await store.acquire(KIND, [Ask("a", seen, tags)], 30))["a"]
    assert isinstance(grant, Lease), grant
    return grant


async def publishes(store: Store, lease: Lease, value: bytes = b"old") -> bool:
    copy = Copy(lease.token, NOW, POLICY, value)
    return await store.publish(KIND, {"a": (lease, copy)}) == set()
