"""S1, S2, S5, S7: Redis on real servers: the contract, what lies there, and for how long."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from stillfresh import Cache, Policy, Resource
from stillfresh.clock import Clock
from stillfresh.stores.contract import UNREAD, Ask, Copy, Failure, Held, Lease, Mark, Record, Store
from stillfresh.stores.redis import RedisStore, listing
from stillfresh.stores.redis.layout import (
    BUCKETS,
    COPY,
    GLANCE,
    MOST_FAILURES,
    NAME,
    Keyspace,
    record_of,
)
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock, StoreConformance
from stillfresh.testing.conformance_kit import Deliver
from tests.kit.full_store import full_store_for
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.valkey import HOST, SERVERS, Server, binary_of
from tests.kit.thread_store import ThreadStore

T = TypeVar("T")

KIND = "price"
POLICY = Policy(30, 60, 90)
MINUTE = 60_000


@pytest.fixture(params=[name for name in SERVERS if binary_of(name)])
def server(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Server:
    return servers(request.param)


class TestS1RedisStore(StoreConformance):
    """S2, S5, S8: every sentence of the contract, on Valkey and on Redis."""

    server: Server

    @pytest.fixture(autouse=True)
    def _on(self, server: Server) -> None:
        self.server = server
        self.url = server.url()

    async def new_store(self, clock: Clock) -> Store:
        return store_for(self.url, clock)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        """Through a proxy, which `delayed` tells to hold requests back."""
        async with FlakyProxy(HOST, self.server.port) as self.proxy:
            self.url = self.server.url(timeout="30s").replace(
                f":{self.server.port}/", f":{self.proxy.port}/"
            )
            async with super().opened() as store:
                yield store

    async def delayed(self, step: Awaitable[T]) -> tuple[T, Deliver | None]:
        """S8: the step's first request is held back, and sent again by the store."""
        self.proxy.held.clear()
        self.proxy.lose("late", to=b"EVALSHA", times=1)
        result = await step
        self.proxy.heal()
        assert len(self.proxy.held) == 1
        return result, self.proxy.deliver

    async def unanswered(self, step: Awaitable[T], meanwhile: Deliver) -> T:
        """S2: the server publishes or puts, and the connection breaks."""
        lost = self.proxy.lost
        self.proxy.lose("replies", to=b"EVALSHA", times=1, meanwhile=meanwhile)
        result = await step
        assert self.proxy.lost == lost + 1
        return result


class TestS14RedisStoreInThreads(TestS1RedisStore):
    """E20, S2, S8: the same suite, each step on a blocking connection of a thread."""

    async def new_store(self, clock: Clock) -> Store:
        self.stores.append(ThreadStore(store_for(self.url, clock)))
        return self.stores[-1]

    @pytest.fixture(autouse=True)
    def _ended(self) -> Iterator[None]:
        self.stores: list[ThreadStore] = []
        yield
        for store in self.stores:
            store.end()


def test_s5_debians_redis_is_tested_too(servers: Callable[[str], Server]) -> None:
    """Where it is installed; the suite above has run on it."""
    assert servers("redis").command("PING") == "+PONG\r\n"


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name.partition('[')[0][:40]}-{time.monotonic_ns()}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture
async def store(valkey: Server, prefix: str, clock: ManualClock) -> AsyncIterator[RedisStore]:
    async with opened(valkey.address, prefix=prefix, clock=clock, timeout=30) as store:
        yield store


@pytest.fixture
async def raw(valkey: Server) -> AsyncIterator["Redis"]:
    client = Redis.from_url(valkey.address)
    yield client
    await client.aclose()


async def leased(store: Store, id_: str = "a", *tags: str, lasts: float = 10) -> Lease:
    record = (await store.read(KIND, [id_])).get(id_, Record())
    seen = record.copy.generation if record.copy is not None else None
    grant = (await store.acquire(KIND, [Ask(id_, seen, tags)], lasts))[id_]
    assert isinstance(grant, Lease), grant
    return grant


async def published(
    store: Store, clock: Clock, id_: str = "a", *tags: str, value: bytes | None = b"value"
) -> Copy:
    lease = await leased(store, id_, *tags)
    copy = Copy(lease.token, clock(), POLICY, value)
    assert await store.publish(KIND, {id_: (lease, copy)}) == set()
    return copy


async def keys_of(raw: "Redis", prefix: str) -> list[bytes]:
    """But those of the epochs and stamps (I26, S13), which belong to no id, and mere traces."""
    keys = [key async for key in raw.scan_iter(match=f"{prefix}:*", count=1000)]
    own = sorted(key for key in keys if not key.endswith((b"@", b"+")))
    texts: dict[bytes, Any] = {key: await raw.get(key) for key in own if b"}:#" not in key}
    return [key for key in own if b"}:#" in key or record_of(texts[key]) is not None]


class TestS5Layout:
    async def test_one_string_for_an_id(
        self, store: RedisStore, raw: "Redis", prefix: str, clock: ManualClock
    ) -> None:
        """Copy, lease and failure in one key, so that many are read by one MGET."""
        copy = await published(store, clock)
        lease = await leased(store)
        await store.release(KIND, [lease], {"a": Failure(1, clock() + 5, "TimeoutError")})
        await leased(store)
        (key,) = await keys_of(raw, prefix)
        assert key.startswith(f"{prefix}:v2:{{".encode())
        assert key.endswith(b"}:price:a")
        text = await raw.get(key)
        assert isinstance(text, bytes)
        assert text.endswith(b"TimeoutErrorvalue")
        assert copy.generation.encode() in text

    async def test_all_keys_of_an_id_are_in_one_slot(
        self, store: RedisStore, raw: "Redis", prefix: str, clock: ManualClock
    ) -> None:
        """Its tags' sets too, whatever braces it has in its name."""
        for id_ in ("a", "{", "}", "{}", "}{", "{a}b", ""):
            await published(store, clock, id_, "eu", "{us}", "}")
            slots = {key_slot(key) for key in await keys_of(raw, prefix)}
            assert len(slots) == 1, id_
            await store.delete(KIND, [id_])
            assert await keys_of(raw, prefix) == []

    def test_ids_are_spread(self) -> None:
        """Every bucket gets its share, and they lie in different slots."""
        places = Keyspace("p").of(KIND, [str(number) for number in range(10_000)])
        slots = [key_slot(place.key) for place in places]
        assert len(set(slots)) == len(BUCKETS)
        assert max(map(slots.count, set(slots))) < 2 * len(slots) / len(BUCKETS)

    @pytest.mark.parametrize("primaries", range(1, 33))
    def test_primaries_share_the_buckets_evenly(self, primaries: int) -> None:
        """S9: if they share the slots evenly, as cluster tools make it."""
        slots = [key_slot(base) for base in Keyspace("p").bases]
        counts = Counter(slot * primaries // 16384 for slot in slots)
        assert len(counts) == primaries
        assert max(counts.values()) - min(counts.values()) <= 1

    async def test_prefixes_are_apart(self, valkey: Server, clock: ManualClock) -> None:
        """Two caches on one database do not see each other, not even in counts and tags."""
        one, two = (full_store_for(valkey.url(), clock) for _ in range(2))
        await one.open()
        await two.open()
        await published(one, clock, "a", "eu")
        assert await two.read(KIND, ["a"]) == {}
        assert await two.invalidate_tag("eu") == []
        assert (await two.stats()).copies == 0
        assert await two.evict(clock() + 1e9) == 0
        assert (await one.stats()).copies == 1
        await one.close()
        await two.close()

    async def test_a_reader_that_knows_a_copy_is_not_sent_its_value(
        self, store: RedisStore, raw: "Redis", clock: ManualClock
    ) -> None:
        """A megabyte that the reader has already does not travel again."""
        copy = await published(store, clock, value=bytes(1 << 20))
        before = (await raw.info("stats"))["total_net_output_bytes"]
        for _ in range(10):
            record = (await store.read(KIND, ["a"], {"a": copy.generation}))["a"]
            assert record.copy is not None
            assert record.copy.value is UNREAD
        after = (await raw.info("stats"))["total_net_output_bytes"]
        assert after - before < 1 << 20

    async def test_an_error_too_long_for_a_glance_is_read_whole(
        self, store: RedisStore, clock: ManualClock
    ) -> None:
        """Known or not, everything else is told."""
        copy = await published(store, clock, value=bytes(5_000))
        failure = Failure(1, clock() + 5, "é" * GLANCE)
        await store.release(KIND, [await leased(store)], {"a": failure})
        record = (await store.read(KIND, ["a"], {"a": copy.generation}))["a"]
        assert record.failure == failure

    async def test_thousands_of_ids_at_once(self, store: RedisStore, clock: ManualClock) -> None:
        """More than one command carries, and more bytes than one round trip should."""
        ids = [f"id-{number}" for number in range(2_300)]
        grants = await store.acquire(KIND, [Ask(id_) for id_ in ids], 10)
        copies = {
            id_: (lease, Copy(lease.token, clock(), POLICY, id_.encode() * 200))
            for id_, lease in grants.items()
            if isinstance(lease, Lease)
        }
        assert await store.publish(KIND, copies) == set()
        assert await store.read(KIND, ids) == {id_: Record(copies[id_][1]) for id_ in ids}
        await store.delete(KIND, ids)
        assert await store.read(KIND, ids) == {}


class TestS5Forgets:
    async def test_a_copy_lives_as_long_as_it_can_be_served(
        self, store: RedisStore, raw: "Redis", prefix: str, clock: ManualClock
    ) -> None:
        """And a minute longer, since clocks differ; then the server drops it by itself."""
        await published(store, clock)
        (key,) = await keys_of(raw, prefix)
        assert 0 <= 120_000 + MINUTE - await raw.pttl(key) < MINUTE / 2

    async def test_a_lease_and_a_failure_live_as_long_as_they_mean_something(
        self, store: RedisStore, raw: "Redis", prefix: str, clock: ManualClock
    ) -> None:
        """A holder that died leaves nothing for ever."""
        lease = await leased(store, lasts=200)
        (key,) = await keys_of(raw, prefix)
        assert 0 <= 200_000 + MINUTE - await raw.pttl(key) < MINUTE / 2
        await store.renew(KIND, [lease], 400)
        assert 0 <= 400_000 + MINUTE - await raw.pttl(key) < MINUTE / 2
        await store.release(KIND, [lease], {"a": Failure(1, clock() + 100, "TimeoutError")})
        assert 0 <= 100_000 + MINUTE - await raw.pttl(key) < MINUTE / 2

    async def test_a_tags_set_lives_as_long_as_the_longest_of_its_ids(
        self, store: RedisStore, raw: "Redis", prefix: str, clock: ManualClock
    ) -> None:
        """Extended by the step that extends the id, so that no copy outlives its tags."""
        await leased(store, "a", "eu", lasts=400)
        ids = await ids_beside(store, "a", 2)
        await published(store, clock, ids[0], "eu")
        tag = next(key for key in await keys_of(raw, prefix) if key.endswith(b"#eu"))
        assert 0 <= 400_000 + MINUTE - await raw.pttl(tag) < MINUTE / 2
        lease = await leased(store, ids[1], "eu")
        await store.renew(KIND, [lease], 800)
        assert 0 <= 800_000 + MINUTE - await raw.pttl(tag) < MINUTE / 2

    async def test_terms_of_a_thousand_years(self, store: RedisStore, clock: ManualClock) -> None:
        """Longer than the server can count is as good as for ever."""
        lease = await leased(store)
        copy = Copy(lease.token, clock(), Policy(3e10, 3e10), b"value")
        assert await store.publish(KIND, {"a": (lease, copy)}) == set()
        assert await store.read(KIND, ["a"]) == {"a": Record(copy)}

    async def test_on_its_own_clock_the_server_does_the_evicting(
        self, valkey: Server, prefix: str, raw: "Redis"
    ) -> None:
        """No walk over the database every hour from every process."""
        async with opened(valkey.address, prefix=prefix) as store:
            before = await calls_of(raw, "scan")
            assert await store.evict(time.time()) == 0
            assert await calls_of(raw, "scan") == before


async def ids_beside(store: RedisStore, id_: str, count: int) -> list[str]:
    """Other ids of the same bucket."""
    (place,) = store._place.of(KIND, [id_])
    names = [f"beside-{number}" for number in range(400)]
    bases = [one.base for one in store._place.of(KIND, names)]
    return [name for name, base in zip(names, bases, strict=True) if base == place.base][:count]


class TestS5Clock:
    async def test_leases_are_judged_by_the_servers_clock(
        self, valkey: Server, prefix: str, raw: "Redis", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Machines whose clocks are an hour apart agree on who holds a lease."""
        urls = [f"{valkey.address}?prefix={prefix}" for _ in range(2)]
        early, late = (store_for(url, time.time) for url in urls)
        await early.open()
        await late.open()
        monkeypatch.setattr(time, "time", lambda: 0.0)
        lease = await leased(early)
        monkeypatch.undo()
        seconds, microseconds = await raw.time()
        assert abs(lease.expires_at - 10 - seconds - microseconds / 1e6) < 5
        assert isinstance((await late.acquire(KIND, [Ask("a")], 10))["a"], Held)
        await early.close()
        await late.close()

    async def test_a_cache_on_a_clock_of_its_own_brings_it(
        self, store: RedisStore, clock: ManualClock
    ) -> None:
        """A manual clock moves leases, too."""
        lease = await leased(store)
        assert lease.expires_at == clock() + 10
        clock.advance(10)
        assert isinstance((await store.acquire(KIND, [Ask("a")], 10))["a"], Lease)


class TestS5Tags:
    async def test_the_server_forgot_the_id(
        self, store: RedisStore, raw: "Redis", prefix: str, clock: ManualClock
    ) -> None:
        """Its name is dropped when the tag is next invalidated."""
        await published(store, clock, "a", "eu")
        record, tag = sorted(await keys_of(raw, prefix), key=lambda key: b"#" in key)
        await raw.delete(record)
        assert await store.invalidate_tag("eu") == []
        assert not await raw.exists(tag)

    async def test_a_tag_does_not_fill_up_with_names_of_the_dead(
        self, store: RedisStore, raw: "Redis"
    ) -> None:
        """Ids that come and go: who comes looks after two of those who went."""
        ids = [f"id-{number}" for number in range(10_000)]
        for first in range(0, len(ids), 1_000):
            some = ids[first : first + 1_000]
            await store.acquire(KIND, [Ask(id_, tags=("eu",)) for id_ in some], 10)
            places = store._place.of(KIND, some)
            await raw.delete(*(place.key for place in places))
        keys = [key for _, key in store._place.tagged("eu")]
        named = sum([int(await raw.scard(key)) for key in keys])
        assert named < 4_000

    async def test_a_tag_of_thousands(self, store: RedisStore, clock: ManualClock) -> None:
        """In slices; every one is reached, voided and named once."""
        ids = [f"id-{number}" for number in range(20_000)]
        grants = await store.acquire(KIND, [Ask(id_, tags=("eu",)) for id_ in ids], 10)
        lease = grants["id-7"]
        assert isinstance(lease, Lease)
        copy = Copy(lease.token, clock(), POLICY, b"")
        await store.publish(KIND, {"id-7": (lease, copy)})
        reached = await store.invalidate_tag("eu")
        assert sorted(reached) == sorted((KIND, id_) for id_ in ids)
        record = (await store.read(KIND, ids)).pop("id-7")
        assert record.copy is not None
        assert record.copy.mark is Mark.HARD
        assert await store.invalidate_tag("eu") == [(KIND, "id-7")]

    async def test_what_was_made_of_an_entry_whose_bucket_was_still_to_come_is_reached_too(
        self, store: RedisStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E8, E37: values with one tag are made of each other, and buckets are not done at once."""
        await published(store, clock, "part", "eu")
        link = store._opened()
        run = link.run

        async def run_while_a_value_is_made(*args: Any, **options: Any) -> list[Any]:
            monkeypatch.undo()
            replies = await run(*args, **options)
            await published(store, clock, "whole", "eu")
            return replies

        monkeypatch.setattr(link, "run", run_while_a_value_is_made)
        reached = await store.invalidate_tag("eu")
        assert sorted(reached) == [(KIND, "part"), (KIND, "whole")]
        record = (await store.read(KIND, ["whole"]))["whole"]
        assert record.copy is not None
        assert record.copy.mark is Mark.HARD

    async def test_a_tag_and_its_loads_race(self, store: RedisStore, clock: ManualClock) -> None:
        """E8: whoever was leased before the invalidation began publishes nothing after it."""
        for number in range(30):
            early = {id_: await leased(store, id_, "eu") for id_ in ("a", "b")}
            invalidation = asyncio.create_task(store.invalidate_tag("eu"))
            for _ in range(number % 10):
                await asyncio.sleep(0)
            others = await store.acquire(KIND, [Ask("c", tags=("eu",)), Ask("a")], 10)
            await invalidation
            copies = {id_: (it, Copy(it.token, clock(), POLICY, b"")) for id_, it in early.items()}
            assert await store.publish(KIND, copies) == {"a", "b"}
            await store.delete(KIND, [*others, "b"])


class TestS5Foreign:
    @pytest.mark.parametrize("text", [b"", b"x", b"not ours " * 100, b"\x01" * 500, b"SF\0\1"])
    async def test_a_string_that_is_not_ours_is_nothing(
        self, store: RedisStore, raw: "Redis", clock: ManualClock, text: bytes
    ) -> None:
        """Read as a miss, leased as a miss, and replaced."""
        (place,) = store._place.of(KIND, ["a"])
        await raw.set(place.key, text)
        assert await store.read(KIND, ["a"]) == {}
        assert await store.read(KIND, ["a"], {"a": "known"}) == {}
        await store.invalidate(KIND, ["a"])
        assert (await store.stats()).copies == 0
        copy = await published(store, clock)
        assert await store.read(KIND, ["a"]) == {"a": Record(copy)}

    async def test_a_list_under_our_key_is_a_miss_and_gives_way(
        self, store: RedisStore, raw: "Redis"
    ) -> None:
        """As a text that is not ours: what is under our prefix is ours to write."""
        (place,) = store._place.of(KIND, ["a"])
        await raw.rpush(place.key, b"x")
        assert await store.read(KIND, ["a"], {"a": "known"}) == {}
        grants = await store.acquire(KIND, [Ask("a")], 10)
        assert isinstance(grants["a"], Lease)

    async def test_a_generation_that_nobody_can_name_is_nothing(
        self, store: RedisStore, raw: "Redis", clock: ManualClock
    ) -> None:
        """Half a character is no text: who had seen it could not say so."""
        await published(store, clock)
        (place,) = store._place.of(KIND, ["a"])
        await raw.setrange(place.key, COPY.size - NAME, b"\xed\xa0\x80")
        assert await store.read(KIND, ["a"]) == {}
        assert await store.entries() == []
        copy = await published(store, clock)
        assert await store.read(KIND, ["a"]) == {"a": Record(copy)}

    async def test_no_number_of_failures_is_too_large(
        self, store: RedisStore, clock: ManualClock
    ) -> None:
        """One more than the most that there is a place for is the most."""
        for count in (MOST_FAILURES, MOST_FAILURES + 1):
            failure = Failure(count, clock() - 1, "away")
            await store.release(KIND, [await leased(store)], {"a": failure})
            told = (await store.read(KIND, ["a"]))["a"].failure
            assert told == Failure(MOST_FAILURES, clock() - 1, "away")
            grant = (await store.acquire(KIND, [Ask("a", failures=told.count)], 10))["a"]
            assert isinstance(grant, Lease)
            await store.release(KIND, [grant])


class TestS5Listing:
    async def test_whats_not_ours_is_not_listed(
        self, store: RedisStore, raw: "Redis", clock: ManualClock
    ) -> None:
        """Other keys, tags, other types, broken strings, and keys that could never be ours."""
        await published(store, clock, "mine")
        await store.acquire(KIND, [Ask("tagged", tags=("eu",))], 10)
        (place,) = store._place.of(KIND, ["list"])
        await raw.rpush(place.key, b"x")
        base = store._place.bases[0]
        for key in (b"other", base, base + b"Kind:a", base + b"price:\xff", base + b"price"):
            await raw.set(key, b"SF\0\1" + bytes(500))
        (place,) = store._place.of(KIND, ["broken"])
        await raw.set(place.key, b"not ours")
        assert [entry.id for entry in await store.entries()] == ["mine", "tagged"]

    async def test_one_in_the_wrong_bucket_is_not_listed(
        self, store: RedisStore, raw: "Redis"
    ) -> None:
        """A read would never find it."""
        (place,) = store._place.of(KIND, ["a"])
        wrong = next(base for base in store._place.bases if base != place.base)
        await raw.set(wrong + place.member, b"SF\0\1" + bytes(500))
        assert await store.entries() == []

    async def test_an_entry_deleted_while_it_is_listed_ends_no_page(
        self, store: RedisStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Deleted between its name and its row: the next ones take its place."""
        for id_ in "abcd":
            await published(store, clock, id_)
        describe = listing._read_entries

        async def late(*args: Any) -> Any:
            await store.delete(KIND, ["a"])
            return await describe(*args)

        monkeypatch.setattr(listing, "_read_entries", late)
        assert [entry.id for entry in await store.entries(limit=2)] == ["b", "c"]

    async def test_a_long_error_is_told_from_its_beginning(
        self, store: RedisStore, clock: ManualClock
    ) -> None:
        """Cut anywhere, and still text."""
        tags = tuple(f"{'ü' * 100}{number}" for number in range(19))
        lease = (await store.acquire(KIND, [Ask("a", tags=tags)], 10))["a"]
        assert isinstance(lease, Lease)
        await store.release(KIND, [lease], {"a": Failure(1, clock() + 5, "ü" * 500)})
        (entry,) = await store.entries()
        assert entry.record.failure is not None
        assert entry.record.failure.error.startswith("ü")


class TestS5Stats:
    async def test_a_very_large_database_is_estimated(
        self, store: RedisStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From its first slices: a dashboard must not walk over millions of keys."""
        ids = [f"id-{number}" for number in range(4_000)]
        await store.acquire(KIND, [Ask(id_) for id_ in ids], 10)
        assert (await store.stats()).leases == 4_000
        monkeypatch.setattr("stillfresh.stores.redis.listing.SAMPLE", 4)
        assert 1_000 < (await store.stats()).leases < 16_000


class Upstream:
    """The version of the moment, for two resources: one asks always, one may lag by a second."""

    version = 1

    def declare(self, cache: Cache) -> tuple[Resource[str, int], Resource[str, int]]:
        async def load(ids: list[str]) -> Mapping[str, int]:
            return dict.fromkeys(ids, self.version)

        strict = cache.batched("strict", fresh_for=60)(load)
        return strict, cache.batched("lagging", fresh_for=60, memory_for=1)(load)


async def calls_of(raw: "Redis", command: str) -> int:
    stats = await raw.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


class TestE9RoundTrips:
    async def test_every_read_asks_unless_memory_may_lag(
        self, valkey: Server, clock: ManualClock
    ) -> None:
        """E9: another machine's invalidation is seen by the next read, or within `memory_for`."""
        url, upstream = valkey.url(), Upstream()
        ours, theirs = (Cache(url, clock=clock) for _ in range(2))
        (strict, lagging), (strict_there, lagging_there) = map(upstream.declare, (ours, theirs))
        async with ours, theirs:
            assert (await strict("a"), await lagging("a")) == (1, 1)
            upstream.version = 2
            await strict_there.invalidate("a")
            await lagging_there.invalidate("a")
            assert await strict("a") == 2
            assert await lagging("a") in {1, 2}
            clock.advance(1)
            assert await lagging("a") == 2

    async def test_a_turn_is_one_round_trip(
        self, valkey: Server, raw: "Redis", clock: ManualClock
    ) -> None:
        """E4: what twenty tasks ask for in one turn is one MGET; nothing, within `memory_for`."""
        ids = [f"id-{number}" for number in range(20)]
        cache = Cache(valkey.url(), clock=clock)
        _, lagging = Upstream().declare(cache)
        async with cache:
            before = await calls_of(raw, "mget")
            await asyncio.gather(*(lagging(id_) for id_ in ids))
            assert await calls_of(raw, "mget") - before == 1
            read = await calls_of(raw, "getrange")
            await asyncio.gather(*(lagging(id_) for id_ in ids))
            assert await calls_of(raw, "getrange") == read
            assert await calls_of(raw, "mget") - before == 1


class TestS7Contenders:
    async def test_thirty_two_contenders_fifty_rounds(self, valkey: Server) -> None:
        """Each with a cache, and connections, of its own; every cold key is loaded once."""
        url, loads = valkey.url(timeout="10s"), 0

        async def load(ids: list[str]) -> Mapping[str, int]:
            nonlocal loads
            loads += len(ids)
            return dict.fromkeys(ids, loads)

        async def short(_seconds: float) -> None:
            await asyncio.sleep(0.001)

        async with AsyncExitStack() as stack:
            caches = [Cache(url, sleep=short) for _ in range(32)]
            declare = [cache.batched("cold", fresh_for=60, lease_for=60) for cache in caches]
            resources = [each(load) for each in declare]
            for cache in caches:
                await stack.enter_async_context(cache)
            for number in range(50):
                values = await asyncio.gather(*(one(f"key-{number}") for one in resources))
                assert (loads, set(values)) == (number + 1, {number + 1})
            stats = [(await cache.stats()).resources["cold"] for cache in caches]
            assert sum(each.store_errors for each in stats) == 0
