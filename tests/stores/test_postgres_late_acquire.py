"""S15: a lease that a late ACQUIRE left behind on PostgreSQL is recognised by its asker.

The statement of a process that gave up, or sent it again, is done later: it takes the lease, and
nobody loads. The next caller of that process takes the lease at once.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import psycopg
import pytest

from stillfresh import Cache, Origin, Policy, StoreError
from stillfresh.stores.contract import Ask, Copy, Grant, Held, Lease, Record, Store
from stillfresh.stores.postgres import link
from stillfresh.stores.urls import store_for
from tests.kit.engine import until
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.postgres import HOST, PostgresServer

KIND = "price"
LEASE = 60.0
"""Seconds: longer than any test waits."""


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = store_for(url, time.time)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_store()


@pytest.fixture
async def proxy(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FlakyProxy]:
    """A statement's own text is in every request, so that it can arrive elsewhere."""
    monkeypatch.setattr(link, "PREPARED_AFTER", None)
    async with FlakyProxy(HOST, postgres.port) as proxy:
        yield proxy


@pytest.fixture
def slow_url(proxy: FlakyProxy, url: str) -> str:
    """Through the proxy."""
    return re.sub(r":\d+/", f":{proxy.port}/", url)


@pytest.fixture
async def store(slow_url: str) -> AsyncIterator[Store]:
    async with opened(slow_url) as store:
        yield store


@pytest.fixture
async def other(url: str) -> AsyncIterator[Store]:
    """Another machine's, straight to the server."""
    async with opened(url) as store:
        yield store


async def ask(store: Store, id_: str = "a") -> Grant:
    copy = (await store.read(KIND, [id_])).get(id_, Record()).copy
    seen = None if copy is None else copy.generation
    return (await store.acquire(KIND, [Ask(id_, seen, ("eu",))], LEASE))[id_]


async def leased(store: Store, id_: str = "a") -> Lease:
    grant = await ask(store, id_)
    assert isinstance(grant, Lease), grant
    return grant


async def publishes(store: Store, lease: Lease, value: bytes = b"value") -> bool:
    copy = Copy(lease.token, time.time(), Policy(60), value)
    return await store.publish(KIND, {lease.id: (lease, copy)}) == set()


async def answers_again(store: Store) -> None:
    """Until the store has found out that its server answers."""
    deadline = time.monotonic() + 30
    while True:
        try:
            await store.read(KIND, ["another"])
        except StoreError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        else:
            return


async def give_up(store: Store, proxy: FlakyProxy, work: Awaitable[object]) -> None:
    """Both of its statements are on their way when it fails."""
    proxy.held.clear()
    proxy.lose("late", to=b".acquire(", times=2)
    with pytest.raises(StoreError, match="unavailable"):
        await work
    proxy.heal()
    assert len(proxy.held) == 2
    await answers_again(store)


class TestS15LateAcquire:
    async def test_a_lease_of_a_request_that_was_given_up_is_taken_at_once(
        self, store: Store, other: Store, proxy: FlakyProxy, postgres: PostgresServer
    ) -> None:
        """By its own process; another one cannot know, and waits for its end."""
        await give_up(store, proxy, ask(store))
        for request in proxy.held:
            await postgres.deliver(request)
        assert isinstance(await ask(other), Held)
        assert (await other.read(KIND, ["a"]))["a"].held_until is not None
        assert (await store.read(KIND, ["a"])).get("a", Record()).held_until is None
        lease = await leased(store)
        assert isinstance(await ask(store), Held)
        assert (await store.read(KIND, ["a"]))["a"].held_until is not None
        assert await publishes(store, lease)
        assert await other.invalidate_tag("eu") == [(KIND, "a")]

    async def test_a_request_that_was_cancelled_leaves_no_lease_that_lasts(
        self, url: str, other: Store, postgres: PostgresServer
    ) -> None:
        """It waited for a lock; the server goes on with it when its caller is gone."""
        await other.release(KIND, [await leased(other)])
        assert await publishes(other, await leased(other))
        schema = url.partition("schema=")[2].partition("&")[0]
        waiting = (
            "SELECT count(*) FROM pg_stat_activity"
            f" WHERE wait_event_type = 'Lock' AND application_name = '{schema}'"
        )
        async with opened(f"{url}&application_name={schema}") as store:
            with psycopg.connect(postgres.address) as holder:
                holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
                asking = asyncio.create_task(ask(store))
                await until(lambda: postgres.execute(waiting) == [(1,)])
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: postgres.execute(waiting) == [(0,)])
            assert isinstance(await ask(other), Held)
            assert await publishes(store, await leased(store), b"new")

    async def test_a_request_that_was_sent_twice_is_recognised_when_its_load_has_ended(
        self, store: Store, other: Store, proxy: FlakyProxy, postgres: PostgresServer
    ) -> None:
        """Its first statement arrives after the publication, and again after a release."""
        proxy.lose("late", to=b".acquire(", times=1)
        lease = await leased(store)
        proxy.heal()
        (late,) = proxy.held
        assert await publishes(store, lease)
        await other.delete(KIND, ["a"])
        for _ in range(2):
            await postgres.deliver(late)
            assert isinstance(await ask(other), Held)
            await store.release(KIND, [await leased(store)])
        assert await store.read(KIND, ["a"]) == {}

    async def test_a_load_under_way_is_not_taken_for_one_that_was_left(
        self, store: Store, proxy: FlakyProxy, postgres: PostgresServer
    ) -> None:
        """Of two keys that were asked for together, one has ended and the other has not."""
        proxy.lose("late", to=b".acquire(", times=1)
        grants = await store.acquire(KIND, [Ask("a"), Ask("b")], LEASE)
        proxy.heal()
        first, second = grants["a"], grants["b"]
        assert isinstance(first, Lease)
        assert isinstance(second, Lease)
        assert await publishes(store, first)
        await postgres.deliver(proxy.held[0])
        assert isinstance(await ask(store, "b"), Held)
        assert (await store.read(KIND, ["b"]))["b"].held_until is not None
        assert await publishes(store, second)

    async def test_readers_do_not_wait_for_it(
        self, slow_url: str, proxy: FlakyProxy, postgres: PostgresServer
    ) -> None:
        """E5: the cache whose request was late loads at its next read, and stores the value."""
        loads: list[str] = []
        async with Cache(slow_url) as cache:

            @cache.batched(KIND, fresh_for=60, lease_for=LEASE)
            async def prices(skus: list[str]) -> dict[str, int]:
                loads.extend(skus)
                return dict.fromkeys(skus, len(loads))

            assert await prices("warm") == 1
            proxy.lose("late", to=b".acquire(", times=2)
            assert await prices("a") == 2  # loaded without the store
            proxy.heal()
            for request in proxy.held:
                await postgres.deliver(request)
            await answers_again(cache._store)
            async with asyncio.timeout(20):
                # Memory may answer for a second with a value that was not stored.
                while (await prices.get("a")).origin is not Origin.LOADED:
                    await asyncio.sleep(0.05)
            assert (await prices.get("a")).origin is not Origin.LOADED
