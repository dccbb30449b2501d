"""S5, E8: a server that is full drops keys, a tag's set too: that costs loads, never freshness."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from stillfresh import Cache, Policy, StoreError
from stillfresh.stores.contract import (
    REMEMBERED,
    UNREAD,
    Ask,
    Copy,
    Failure,
    Lease,
    Mark,
    Newer,
    Put,
    PutOutcome,
    Record,
    When,
)
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.layout import Keyspace
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
    (place,) = Keyspace(PREFIX).of(KIND, [id_])
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

    @pytest.mark.parametrize("invalidates", [True, False])
    async def test_s15_a_put_does_not_believe_it_either(
        self, store: RedisStore, full: Server, *, invalidates: bool
    ) -> None:
        """It is not live: `touch` leaves it alone, `add` stores, `update` replaces what it read."""
        for when in When:
            await store.delete(KIND, ["a"])
            copy = await published(store, "eu")
            await drop(full)
            if invalidates:
                await store.invalidate_tag("eu")
            new = Copy(store.new_generation(), time.time(), Policy(60, 60), b"new")
            put = Put(new, when=when, seen=copy.generation, seen_mark=Mark.HARD)
            outcomes = [(await store.put(KIND, {"a": put}))["a"].outcome for _ in range(3)]
            expected = PutOutcome.REFUSED if when is When.LIVE_COPY else PutOutcome.STORED
            assert outcomes[-1] is expected
            touched = replace(put, copy=replace(new, value=UNREAD), when=When.LIVE_COPY)
            if when is When.LIVE_COPY:
                assert (await store.put(KIND, {"a": touched}))["a"].outcome is PutOutcome.REFUSED
                assert await mark_of(store) is Mark.HARD

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
        (place,) = Keyspace(PREFIX).of(KIND, ["a"])
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
        (place,) = Keyspace(PREFIX).of(KIND, ["a"])
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
            (place,) = Keyspace(PREFIX).of("shoe", ["a"])
            client = Redis.from_url(full.address)
            await client.delete(place.base + b"#fr")
            await client.aclose()
            await cache.invalidate_tag("fr")
            assert await shoes("a") == 2


async def test_i26_an_epoch_is_newer_than_all_before_it(full: Server, store: RedisStore) -> None:
    """Also if the server's clock was set back: a load that began before is void."""
    (place,) = Keyspace(PREFIX).of(KIND, ["a"])
    client = Redis.from_url(full.address)
    await client.zadd(place.base + b"@", {"!": 1, "#later": 4e15})
    lease = await leased(store)
    await store.invalidate_tag("eu")
    copy = Copy(lease.token, time.time(), Policy(60), b"old")
    assert await store.publish(KIND, {"a": (lease, copy)}, {"a": ("eu",)}) == {"a"}
    await client.delete(place.base + b"@")
    await client.aclose()


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own, which drops nothing yet."""
    binary = binary_of("valkey")
    assert binary is not None
    with serving(binary, tmp_path) as server:
        yield server


async def begin_to_drop(server: Server, prefix: str, tag: str) -> None:
    """Eviction is switched on, and the server drops the tag's sets, which it may do then."""
    server.command("CONFIG SET maxmemory 100mb")
    server.command("CONFIG SET maxmemory-policy allkeys-lru")
    async with Redis.from_url(server.address) as client:
        await client.delete(*(key for _, key in Keyspace(prefix).tagged(tag)))


class Shop:
    """A cache whose loads are counted; each value says whose it is."""

    def __init__(self, name: str, url: str, **options: Any) -> None:
        self.loads = 0
        self.cache = Cache(url)

        @self.cache.batched("shoe", fresh_for="1h", tags=lambda _: ["fr"], **options)
        async def shoes(ids: list[str]) -> dict[str, str]:
            self.loads += len(ids)
            return dict.fromkeys(ids, name)

        self.shoes = shoes


class TestS15EvictionIsSwitchedOn:
    """While caches are open: that costs loads, never freshness."""

    IDS: ClassVar = [str(number) for number in range(20)]

    @pytest.mark.parametrize("options", [{}, {"memory_for": "1s"}])
    async def test_an_invalidated_tag_reaches_every_copy(
        self, keeping: Server, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
    ) -> None:
        """Measured before: 15 of 20 stayed fresh after it was acknowledged, in both caches."""
        monkeypatch.setattr("stillfresh.stores.redis.link.LOOK_EVERY", 0.0)
        url = f"{keeping.address}?prefix=shop&timeout=30s"
        ours, theirs = Shop("ours", url, **options), Shop("theirs", url)
        async with ours.cache, theirs.cache:
            await ours.shoes.get_many(self.IDS)
            await theirs.shoes.get_many(self.IDS)
            assert (ours.loads, theirs.loads) == (20, 0)
            await begin_to_drop(keeping, "shop", "fr")
            await theirs.cache.invalidate_tag("fr")
            await theirs.shoes.get_many(self.IDS)
            assert theirs.loads == 20
            for id_ in self.IDS:
                await eventually_fresh(ours, id_)

    async def test_the_heartbeat_looks_again(
        self, keeping: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cache that is not read learns of it all the same."""
        monkeypatch.setattr("stillfresh.stores.redis.link.LOOK_EVERY", 0.0)
        store = RedisStore(keeping.address, prefix="shop", timeout=30)
        async with opened_store(store), store.listen(lambda *_: None) as channel:
            await channel.beat()
            assert not store._opened().drops_keys
            await begin_to_drop(keeping, "shop", "fr")
            await channel.beat()
            assert store._opened().drops_keys

    async def test_threads_look_again(
        self, keeping: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E20: they read on connections of their own."""
        monkeypatch.setattr("stillfresh.stores.redis.link.LOOK_EVERY", 0.0)
        store = RedisStore(keeping.address, prefix="shop", timeout=30)
        async with opened_store(store):
            assert await asyncio.to_thread(store.read_in_thread, KIND, ["a"]) == {}
            await begin_to_drop(keeping, "shop", "fr")
            with pytest.raises(StoreError, match="drops keys"):
                await asyncio.to_thread(store.read_in_thread, KIND, ["a"])

    async def test_the_eviction_setting_is_read_once_a_second(self, keeping: Server) -> None:
        """Once a second, in a request that is sent anyway."""
        store = RedisStore(keeping.address, prefix="shop", timeout=30)
        async with opened_store(store), Redis.from_url(keeping.address) as client:
            began, before = time.monotonic(), await looks(client)
            for _ in range(200):
                await store.read(KIND, ["a"])
            after, seconds = await looks(client), time.monotonic() - began
        assert after - before <= 2 + seconds  # one is of this test's own


async def looks(client: "Redis") -> int:
    stats = await client.info("commandstats")
    return int(stats["cmdstat_info"]["calls"])


async def eventually_fresh(shop: Shop, id_: str) -> None:
    """S10: the memory in front is told of the tag a moment later."""
    deadline = time.monotonic() + 30
    while (await shop.shoes.get(id_)).value != "theirs":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@asynccontextmanager
async def opened_store(store: RedisStore) -> AsyncIterator[None]:
    await store.open()
    try:
        yield
    finally:
        await store.close()
