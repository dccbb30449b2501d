"""I26: more tags are invalidated while a load runs than a store remembers.

On Redis it is in `test_redis_lost_tags.py`.
"""

import asyncio
import time
from pathlib import Path

import pytest

from stillfresh import Policy
from stillfresh.stores.contract import REMEMBERED, Ask, Copy, Lease, Store
from stillfresh.stores.urls import store_for
from tests.kit.servers.postgres import PostgresServer


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        return postgres.new_store()
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


async def published(store: Store, lease: Lease) -> set[str]:
    copy = Copy(lease.token, time.time(), Policy(60), b"value")
    return await store.publish("price", {"a": (lease, copy)}, {"a": ("late",)})


async def leased(store: Store) -> Lease:
    grant = (await store.acquire("price", [Ask("a")], 60))["a"]
    assert isinstance(grant, Lease)
    return grant


async def test_i26_a_tag_that_is_no_longer_remembered_supersedes(url: str) -> None:
    """What cannot be known is not published; the next load is."""
    store = store_for(url, time.time)
    await store.open()
    lease = await leased(store)
    await store.invalidate_tag("late")
    await asyncio.gather(*(store.invalidate_tag(str(it)) for it in range(REMEMBERED + 1)))
    assert await published(store, lease) == {"a"}
    assert await published(store, await leased(store)) == set()
    await store.close()
