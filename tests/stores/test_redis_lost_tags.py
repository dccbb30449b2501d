"""S5, E8: a server that is full drops keys, a tag's set too: that costs loads, never freshness."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from stillfresh import Cache, Policy
from stillfresh.stores.contract import (
    REMEMBERED,
    Ask,
    Copy,
    Failure,
    Lease,
    Mark,
    Newer,
    Record,
)
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.layout import Places
from tests.kit.servers.valkey import Server, binary_of, serving

KIND = "price"
PREFIX = f"test-{uuid4().hex}"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that may drop any key."""
    binary = binary_of("valkey")
    assert binary is not None
    options = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with serving(binary, tmp_path_factory.mktemp("full"), *options) as server:
        yield server


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.address, prefix=PREFIX, timeout=10)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(full: Server) -> AsyncIterator[RedisStore]:
    async with opened(full) as store:
        await store.delete(KIND, ["a"])
        yield store


async def drop(server: Server, id_: str = "a", tag: str = "eu") -> None:
    """What the server does when it is full."""
    (place,) = Places(PREFIX).of(KIND, [id_])
    client = Redis.from_url(server.address)
    assert await client.delete(place.base + b"#" + tag.encode()) == 1
    await client.aclose()


async def leased(store: RedisStore, *tags: str) -> Lease:
    copy = (await store.read(KIND, ["a"])).get("a", Record()).copy
    seen = copy.generation if copy is not None else None
    grant = (await store.acquire(KIND, [Ask("a", seen, tags)], 10))["a"]
    assert isinstance(grant, Lease)
    return grant


async def published(store: RedisStore, *tags: str) -> Copy:
    lease = await leased(store, *tags)
    copy = Copy(lease.token, time.time(), Policy(60, 60), b"x" * 1_000)
    assert await store.publish(KIND, {"a": (lease, copy)}) == set()
    return copy


async def mark_of(store: RedisStore, known: str | None = None) -> Mark:
    record = (await store.read(KIND, ["a"], {"a": known} if known else None))["a"]
    assert record.copy is not None
    return record.copy.mark


class TestS5LostTags:
    async def test_a_copy_that_its_tag_does_not_name_is_not_believed(
        self, store: RedisStore, full: Server
    ) -> None:
        """An invalidation by the tag would have missed it: it counts as invalidated."""
        copy = await published(store, "eu", "shoes")
        assert await mark_of(store) is Mark.NONE
        await drop(full)
        assert await store.invalidate_tag("eu") == []
        assert await mark_of(store) is Mark.HARD
        assert await mark_of(store, copy.generation) is Mark.HARD

    async def test_a_tag_that_begins_anew_does_not_name_it_again(
        self, store: RedisStore, full: Server
    ) -> None:
        """Another id has the tag by now; the next lease of the old copy marks it for good."""
        copy = await published(store, "eu")
        await drop(full)
        await store.acquire(KIND, [Ask("b", None, ("eu",))], 10)
        assert await mark_of(store) is Mark.HARD
        grant = (await store.acquire(KIND, [Ask("a", None, ("eu",))], 10))["a"]
        assert isinstance(grant, Newer)
        await store.acquire(KIND, [Ask("a", copy.generation, ("eu",))], 10)
        assert await mark_of(store) is Mark.HARD
        await store.delete(KIND, ["b"])

    async def test_a_load_that_the_tag_does_not_name_publishes_nothing(
        self, store: RedisStore, full: Server
    ) -> None:
        """The law, for tags: the invalidation could not void its lease."""
        lease = await leased(store, "eu")
        await drop(full)
        assert await store.invalidate_tag("eu") == []
        assert await store.renew(KIND, [lease], 10) == {"a"}
        copy = Copy(lease.token, time.time(), Policy(60), b"old")
        assert await store.publish(KIND, {"a": (lease, copy)}) == {"a"}
        assert (await store.read(KIND, ["a"])).get("a", Record()).copy is None

    async def test_epochs_that_began_anew_are_not_compared_with_those_before(
        self, store: RedisStore, full: Server
    ) -> None:
        """I26: also if its clock was set back meanwhile, so that the new ones are lower."""
        (place,) = Places(PREFIX).of(KIND, ["a"])
        epochs = place.base + b"@"
        async with Redis.from_url(full.address) as client:
            await client.zadd(epochs, {"!": (time.time() + 3600) * 1e6})
            lease = await leased(store)
            assert await client.delete(epochs) == 1
        await store.invalidate_tag("late")
        copy = Copy(lease.token, time.time(), Policy(60), b"old")
        assert await store.publish(KIND, {"a": (lease, copy)}, {"a": ("late",)}) == {"a"}

    async def test_a_tag_that_is_no_longer_remembered_supersedes(
        self, store: RedisStore, full: Server
    ) -> None:
        """I26: more were invalidated since the grant than are kept; the next load is published."""
        (place,) = Places(PREFIX).of(KIND, ["a"])
        lease = await leased(store)
        await store.invalidate_tag("late")
        now = time.time() * 1e6
        others = {f"#{number}": now + number for number in range(REMEMBERED)}
        async with Redis.from_url(full.address) as client:
            await client.zadd(place.base + b"@", others)
        await store.invalidate_tag("one more")
        copy = Copy(lease.token, time.time(), Policy(60), b"old")
        assert await store.publish(KIND, {"a": (lease, copy)}, {"a": ("late",)}) == {"a"}
        lease = await leased(store)
        copy = Copy(lease.token, time.time(), Policy(60), b"new")
        assert await store.publish(KIND, {"a": (lease, copy)}, {"a": ("late",)}) == set()

    async def test_a_failed_refresh_does_not_make_it_believed(
        self, store: RedisStore, full: Server
    ) -> None:
        """What is released is named again, and marked."""
        await published(store, "eu")
        lease = await leased(store, "eu")
        await drop(full)
        await store.release(KIND, [lease], {"a": Failure(1, time.time() + 5, "Timeout")})
        assert await mark_of(store) is Mark.HARD

    async def test_the_next_load_is_good_again(self, store: RedisStore, full: Server) -> None:
        """One load, and the tag reaches it."""
        await published(store, "eu")
        await drop(full)
        await published(store, "eu")
        assert await mark_of(store) is Mark.NONE
        assert await store.invalidate_tag("eu") == [(KIND, "a")]

    async def test_a_server_that_drops_nothing_is_read_without_a_script(
        self, valkey: Server, full: Server
    ) -> None:
        """The price is paid where keys can be lost; a server that changes is noticed."""
        async with opened(valkey) as one, opened(full) as other:
            assert not one._opened().drops_keys
            assert other._opened().drops_keys

    async def test_memory_elsewhere_is_told_of_the_tag(self, full: Server) -> None:
        """S10: also if the tag names nobody any more."""
        told: list[tuple[str, str, str | None]] = []
        async with (
            opened(full) as one,
            opened(full) as other,
            one.listen(lambda *it: told.append(it)) as channel,
        ):
            await other.invalidate_tag("nobody")
            await channel.beat()
        assert told == [("", "nobody", None)]

    async def test_a_lost_tag_costs_a_load(self, full: Server) -> None:
        """Through the cache: what was invalidated is loaded anew, whatever the server dropped."""
        loads = 0
        cache = Cache(f"{full.address}?prefix={PREFIX}")

        @cache.batched("shoe", fresh_for=60, tags=lambda _: ["fr"])
        async def shoes(ids: list[str]) -> dict[str, int]:
            nonlocal loads
            loads += 1
            return dict.fromkeys(ids, loads)

        async with cache:
            assert await shoes("a") == 1
            (place,) = Places(PREFIX).of("shoe", ["a"])
            client = Redis.from_url(full.address)
            await client.delete(place.base + b"#fr")
            await client.aclose()
            await cache.invalidate_tag("fr")
            assert await shoes("a") == 2


async def test_i26_an_epoch_is_newer_than_all_before_it(full: Server, store: RedisStore) -> None:
    """Also if the server's clock was set back: a load that began before is void."""
    (place,) = Places(PREFIX).of(KIND, ["a"])
    client = Redis.from_url(full.address)
    await client.zadd(place.base + b"@", {"!": 1, "#later": 4e15})
    lease = await leased(store)
    await store.invalidate_tag("eu")
    copy = Copy(lease.token, time.time(), Policy(60), b"old")
    assert await store.publish(KIND, {"a": (lease, copy)}, {"a": ("eu",)}) == {"a"}
    await client.delete(place.base + b"@")
    await client.aclose()
