"""S13, E35: puts on real Redis servers: stamps, traces, older strings, lost counters."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from stillfresh import Cache, Policy, StoreError
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Failure,
    Lease,
    Mark,
    Put,
    PutOutcome,
    Record,
    Store,
    When,
)
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.heard import HeardStamps
from stillfresh.stores.redis.layout import (
    COPY,
    FIELDS,
    FULL_HEAD,
    MAGIC,
    NAME,
    VALUE,
    Keyspace,
    packed_tags,
    padded,
    record_of,
    stamp_of,
    stored_tags,
)
from stillfresh.stores.versions import packed_version
from tests.kit.engine import until
from tests.kit.processes import Process
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.valkey import HOST, Server, binary_of, serving

KIND = "price"
POLICY = Policy(60, 60, 60)
FAILURE_AT = COPY.size + 8 + NAME
AGAIN, STORED, REFUSED = PutOutcome.AGAIN, PutOutcome.STORED, PutOutcome.REFUSED


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name.partition('[')[0][:40]}-{time.monotonic_ns()}"


@asynccontextmanager
async def opened(url: str, prefix: str, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, prefix=prefix, **{"timeout": 30, **options})
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def proxy(valkey: Server) -> AsyncIterator[FlakyProxy]:
    async with FlakyProxy(HOST, valkey.port) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: FlakyProxy, other: RedisStore, prefix: str) -> AsyncIterator[RedisStore]:
    """Through the proxy. The server knows the scripts, and the buckets have their counters."""
    await teach(other)
    async with opened(f"redis://{HOST}:{proxy.port}/0", prefix) as store:
        yield store


@pytest.fixture
async def other(valkey: Server, prefix: str) -> AsyncIterator[RedisStore]:
    """Another process's, straight to the server."""
    async with opened(valkey.address, prefix) as store:
        yield store


@pytest.fixture
async def raw(valkey: Server) -> AsyncIterator["Redis"]:
    client = Redis.from_url(valkey.address)
    yield client
    await client.aclose()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own."""
    binary = binary_of("valkey")
    assert binary is not None
    with serving(binary, tmp_path) as server:
        yield server


async def teach(store: RedisStore) -> None:
    """The server knows every script, so that a request which arrives late is done."""
    await store.invalidate(KIND, [str(number) for number in range(300)])
    await store.invalidate_tag("taught")
    await store.delete(KIND, ["taught"])
    assert await put(store, "taught") is STORED


def new_put(store: Store, value: bytes = b"put", version: bytes = b"", **options: Any) -> Put:
    generation = store.new_generation()
    return Put(Copy(generation, time.time(), POLICY, value, version=version), **options)


async def attempt(store: Store, put: Put, id_: str = "a") -> PutOutcome:
    return (await store.put(KIND, {id_: put}))[id_].outcome


async def put(store: Store, id_: str = "a", value: bytes = b"put", **options: Any) -> PutOutcome:
    """Until the store says something else than AGAIN."""
    given = new_put(store, value, **options)
    while True:
        outcome = await attempt(store, given, id_)
        if outcome is not AGAIN:
            return outcome


async def lease_of(store: Store, id_: str = "a", *tags: str) -> Lease:
    record = (await store.read(KIND, [id_])).get(id_, Record())
    seen = record.copy.generation if record.copy is not None else None
    grant = (await store.acquire(KIND, [Ask(id_, seen, tags)], 30))[id_]
    assert isinstance(grant, Lease), grant
    return grant


async def copy_in(store: Store, id_: str = "a") -> Copy | None:
    return (await store.read(KIND, [id_])).get(id_, Record()).copy


async def text_of(raw: "Redis", key: bytes) -> bytes:
    text = await raw.get(key)
    return text if isinstance(text, bytes) else b""


def key_of(prefix: str, id_: str = "a") -> bytes:
    return Keyspace(prefix).of(KIND, [id_])[0].key


def counter_of(prefix: str, id_: str = "a") -> bytes:
    return Keyspace(prefix).of(KIND, [id_])[0].base + b"+"


class TestS13RoundTrips:
    async def test_a_put_that_nobody_disturbs_is_one_round_trip(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Also of a key that the process has never read, and of the next one, and of many."""
        await store.read(KIND, ["b"])
        before = proxy.requests
        for id_ in ("never read", "another", "never read"):
            assert await attempt(store, new_put(store), id_) is STORED
        many = {f"many {number}": new_put(store) for number in range(100)}
        results = await store.put(KIND, many)
        assert {result.outcome for result in results.values()} == {STORED}
        assert proxy.requests - before == 4

    async def test_every_change_of_a_key_is_one_round_trip(
        self, other: RedisStore, proxy: FlakyProxy, prefix: str
    ) -> None:
        """S14: a put, an add, a touch, a removal and an invalidation, whether a copy is there."""
        await teach(other)
        cache = Cache(f"redis://{HOST}:{proxy.port}/0?prefix={prefix}&timeout=30s")

        @cache.batched(KIND, fresh_for=60, stale_for=60)
        async def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        async def trips(change: Awaitable[object]) -> tuple[object, int]:
            before = proxy.requests
            result = await change
            is_token = isinstance(result, str)
            outcome = None if is_token else getattr(result, "stored", result)
            return outcome, proxy.requests - before

        async with cache:
            await prices.put("b", 1)
            assert await trips(prices.remove("a")) == (False, 1)
            assert await trips(prices.touch("a", fresh_for=9)) == (False, 1)
            assert await trips(prices.put("a", 1)) == (True, 1)
            assert await trips(prices.add("a", 2)) == (False, 1)
            assert await trips(prices.touch("a", fresh_for=90)) == (True, 1)
            assert await trips(prices.remove("a")) == (True, 1)
            assert await trips(prices.remove("a")) == (False, 1)
            assert await trips(prices.add("a", 3)) == (True, 1)
            assert await trips(prices.invalidate("a")) == (None, 1)
            assert await trips(prices.delete("a")) == (None, 1)
            assert await trips(prices.delete("a")) == (None, 1)
            assert await trips(prices.remove("a")) == (False, 1)
            many = {f"many {number}": number for number in range(100)}
            _, all_at_once = await trips(prices.put_many(many))
            assert all_at_once == 1

    async def test_a_change_that_was_read_costs_no_second_attempt(
        self, store: RedisStore, other: RedisStore
    ) -> None:
        """Another process has changed the entry: unread, the first answer is AGAIN."""
        for tags in ((), ("eu",)):
            await put(other)
            given = new_put(store, tags=tags)
            assert await attempt(store, given) is AGAIN
            assert await attempt(store, given) is STORED
            await put(other)
            assert await copy_in(store) is not None
            assert await attempt(store, new_put(store, tags=tags)) is STORED

    async def test_a_put_after_own_changes_needs_no_second_attempt(self, store: RedisStore) -> None:
        """Its own puts, loads, invalidations and deletions are heard by their answers."""
        assert await attempt(store, new_put(store)) is STORED
        lease = await lease_of(store)
        await store.publish(KIND, {"a": (lease, Copy(lease.token, time.time(), POLICY, b"load"))})
        assert await attempt(store, new_put(store)) is STORED
        await store.invalidate(KIND, ["a"])
        assert await attempt(store, new_put(store, tags=("eu",))) is STORED
        await store.invalidate_tag("eu")
        assert await attempt(store, new_put(store, tags=("eu",))) is STORED
        await store.delete(KIND, ["a"])
        assert await attempt(store, new_put(store)) is STORED

    async def test_the_first_connection_hears_of_all_buckets(
        self, valkey: Server, other: RedisStore, prefix: str
    ) -> None:
        """With one more command when connecting: so no first attempt is in vain."""
        ids = [str(number) for number in range(64)]
        for id_ in ids:
            await put(other, id_)
        async with opened(valkey.address, prefix) as store:
            outcomes = [await attempt(store, new_put(store), id_) for id_ in ids]
        assert set(outcomes) == {STORED}

    async def test_an_invalidation_asks_again_by_itself(
        self, store: RedisStore, other: RedisStore
    ) -> None:
        """S8: and so do a deletion and an invalidation by tag."""
        await put(other, tags=("eu",))
        await store.invalidate(KIND, ["a"], soft=True)
        copy = await copy_in(other)
        assert copy is not None
        assert copy.mark is Mark.SOFT
        await put(other, tags=("eu",))
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        copy = await copy_in(other)
        assert copy is not None
        assert copy.mark is Mark.HARD
        await put(other)
        await store.delete(KIND, ["a"])
        assert await copy_in(other) is None

    async def test_stamps_rise(self, store: RedisStore) -> None:
        """S13: the position of each change of a bucket is higher than all before it."""
        stamps = []
        for number in range(5):
            result = (await store.put(KIND, {"a": new_put(store)}))["a"]
            stamps.append(result.stamp)
            if number % 2:
                await store.invalidate(KIND, ["a"])
        assert all(first < second for first, second in pairwise(stamps))


class TestS13Traces:
    @pytest.mark.parametrize("change", ["delete", "invalidate"])
    async def test_a_deletion_leaves_its_stamp_for_a_minute(
        self, store: RedisStore, raw: "Redis", prefix: str, change: str
    ) -> None:
        """Of an entry, and of none; for readers, counts and lists nothing is there."""
        await getattr(store, change)(KIND, ["a"])
        text = await raw.get(key_of(prefix))
        assert isinstance(text, bytes)
        assert record_of(text) is None
        assert stamp_of(text) > 0
        assert 0 <= 60_000 - await raw.pttl(key_of(prefix)) < 30_000
        assert await store.read(KIND, ["a"], {"a": "known"}) == {}
        lists = [entry.id for entry in await store.entries()]
        assert "a" not in lists
        assert (await store.stats()).copies == 1  # what taught the server
        lease = await lease_of(store)
        assert stamp_of(await text_of(raw, key_of(prefix))) == stamp_of(text)
        await store.release(KIND, [lease])
        assert stamp_of(await text_of(raw, key_of(prefix))) == stamp_of(text)

    async def test_an_invalidated_copy_keeps_its_stamp_for_a_minute(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        """Also if the server would have dropped the copy a moment later."""
        await put(store)
        await raw.pexpire(key_of(prefix), 5_000)
        await store.invalidate(KIND, ["a"])
        assert 0 <= 60_000 - await raw.pttl(key_of(prefix)) < 30_000
        await put(store)
        before = await raw.pttl(key_of(prefix))
        await store.invalidate(KIND, ["a"])
        assert await raw.pttl(key_of(prefix)) > before - 30_000

    async def test_a_lease_on_nothing_leaves_nothing(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        """Nothing has changed: a load that is given up leaves no trace."""
        lease = await lease_of(store, "cold")
        await store.release(KIND, [lease])
        assert not await raw.exists(key_of(prefix, "cold"))

    async def test_eviction_leaves_the_stamp(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        """What is evicted may have been invalidated a moment ago."""
        await put(store)
        await store.invalidate(KIND, ["a"])
        stamp = stamp_of(await text_of(raw, key_of(prefix)))
        assert await store.evict(time.time() + 1e6) == 2
        assert await store.evict(time.time() + 1e6) == 0
        assert await store.read(KIND, ["a"]) == {}
        assert stamp_of(await text_of(raw, key_of(prefix))) == stamp

    async def test_a_tag_does_not_reach_what_was_deleted(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        """The trace has no tags."""
        await put(store, tags=("eu",))
        set_of_tag = key_of(prefix)[: len(counter_of(prefix)) - 1] + b"#eu"
        assert await raw.sismember(set_of_tag, "price:a")
        await store.delete(KIND, ["a"])
        assert await store.invalidate_tag("eu") == []
        assert not await raw.exists(set_of_tag)


def an_old_string(value: bytes = b"old", tags: tuple[str, ...] = ("eu",)) -> bytes:
    """As a release before `put` wrote it."""
    names = packed_tags(tags)
    times = (time.time(), 60.0, 60.0, 60.0)
    head = (MAGIC, VALUE, 0, *times, padded("old-generation"), 0.0, padded(None))
    return FIELDS.pack(*head, 0, 0.0, len(names), 0) + names + value


class TestS13OlderStrings:
    """Strings of a release before `put` are read, and carried over by the first change."""

    @pytest.fixture
    async def old(self, store: RedisStore, raw: "Redis", prefix: str) -> bytes:
        """Its key; the set of its tag names it."""
        key = key_of(prefix)
        await raw.set(key, an_old_string(), px=100_000)
        await raw.sadd(counter_of(prefix)[:-1] + b"#eu", b"price:a")
        return key

    @pytest.mark.usefixtures("old")
    async def test_the_value_is_still_served(self, store: RedisStore) -> None:
        """By the event loop and by threads, also if its generation is known."""
        for found in (
            await store.read(KIND, ["a"]),
            await asyncio.to_thread(store.read_in_thread, KIND, ["a"]),
        ):
            copy = found["a"].copy
            assert copy is not None
            assert (copy.value, copy.generation, copy.version) == (b"old", "old-generation", b"")
        known = (await store.read(KIND, ["a"], {"a": "old-generation"}))["a"]
        assert known.copy is not None
        assert [entry.size for entry in await store.entries() if entry.id == "a"] == [3]

    async def test_a_put_replaces_it(self, store: RedisStore, raw: "Redis", old: bytes) -> None:
        """In one attempt; late tags apart, its tags are gone."""
        assert await attempt(store, new_put(store, version=packed_version(1))) is STORED
        assert stamp_of(await text_of(raw, old)) > 0
        assert await store.invalidate_tag("eu") == []
        assert await put(store, version=packed_version(0)) is PutOutcome.KEPT

    @pytest.mark.parametrize("by_tag", [False, True])
    async def test_an_invalidation_marks_it_in_place(
        self, store: RedisStore, raw: "Redis", old: bytes, *, by_tag: bool
    ) -> None:
        """Value, tags and time to live stay; it has a stamp from now on."""
        if by_tag:
            assert await store.invalidate_tag("eu", soft=True) == [(KIND, "a")]
        else:
            await store.invalidate(KIND, ["a"], soft=True)
        text = await raw.get(old)
        assert isinstance(text, bytes)
        assert stamp_of(text) > 0
        assert stored_tags(text) == [b"eu"]
        assert 60_000 < await raw.pttl(old) <= 100_000
        copy = await copy_in(store)
        assert copy is not None
        assert (copy.value, copy.mark) == (b"old", Mark.SOFT)
        assert await store.invalidate_tag("eu") == [(KIND, "a")]

    async def test_a_load_replaces_it(self, store: RedisStore, raw: "Redis", old: bytes) -> None:
        """A failed one notes its failure and leaves the value."""
        lease = await lease_of(store, "a", "us")
        failure = Failure(1, time.time() + 5, "TimeoutError")
        await store.release(KIND, [lease], {"a": failure})
        record = (await store.read(KIND, ["a"]))["a"]
        assert record.copy is not None
        assert (record.copy.value, record.failure) == (b"old", failure)
        lease = await lease_of(store, "a", "us")
        copy = Copy(lease.token, time.time(), POLICY, b"new", version=packed_version(3))
        assert await store.publish(KIND, {"a": (lease, copy)}) == set()
        assert await copy_in(store) == copy
        assert stamp_of(await text_of(raw, old)) > 0
        assert await store.invalidate_tag("us") == [(KIND, "a")]

    @pytest.mark.usefixtures("old")
    async def test_a_deletion_leaves_a_trace(self, store: RedisStore) -> None:
        """As of any other."""
        await store.delete(KIND, ["a"])
        assert await store.read(KIND, ["a"]) == {}
        assert await store.invalidate_tag("eu") == []

    async def test_the_fields_of_a_new_string_look_like_a_tag_to_older_releases(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        """They read value and failure where they have always been, and mark and void in place."""
        await put(store, value=b"new", tags=("eu",), version=packed_version("v1"))
        text = await raw.get(key_of(prefix))
        assert isinstance(text, bytes)
        fields = FIELDS.unpack_from(text)
        assert text[FIELDS.size + fields[12] + fields[13] :] == b"new"
        length = int.from_bytes(text[FIELDS.size : FIELDS.size + 4])
        assert text[FIELDS.size + 4 + length :].startswith(packed_tags(["eu"]))


class TestS13LostCounters:
    """A counter that is lost or tampered with costs one more attempt, and begins higher."""

    @pytest.mark.parametrize(
        "spoil",
        [
            ("DEL", "{key}"),
            ("HSET", "{key}", "n", "7"),
            ("HSET", "{key}", "n", "x"),
            ("HSET", "{key}", "n", "9223372036854775807"),
            ("HSET", "{key}", "n", "2999999999999999"),
            ("HSET", "{key}", "b", "x"),
            ("HSET", "{key}", "b", "2900000000000000"),
            ("HSET", "{key}", "b", "inf"),
            ("HDEL", "{key}", "b"),
            ("SET", "{key}", "x"),
        ],
    )
    @pytest.mark.parametrize("is_there", [True, False])
    async def test_the_next_steps_work(
        self,
        store: RedisStore,
        other: RedisStore,
        raw: "Redis",
        prefix: str,
        spoil: tuple[str, ...],
        *,
        is_there: bool,
    ) -> None:
        """Of an entry that is there, and of none: puts, loads, invalidations, deletions."""
        if is_there:
            await put(store)
        client: Any = raw
        await client.execute_command(*(it.format(key=counter_of(prefix).decode()) for it in spoil))
        for one in (store, other):
            for number in range(3):
                async with asyncio.timeout(10):
                    assert await put(one, value=b"%d" % number, tags=("eu",)) is STORED
                    await one.invalidate(KIND, ["a"])
                    assert await put(one) is STORED
                    await one.delete(KIND, ["a"])
                    assert await put(one, value=b"last") is STORED
        copy = await copy_in(store)
        assert copy is not None
        assert (copy.value, copy.mark) == (b"last", Mark.NONE)

    @pytest.mark.parametrize("stamp", [2e15, 2.9999e15, 3e15, 1e300, float("nan"), -5.0])
    async def test_a_stamp_that_somebody_wrote_is_no_obstacle(
        self, store: RedisStore, raw: "Redis", prefix: str, stamp: float
    ) -> None:
        """S15: however high it is."""
        await put(store)
        await raw.setrange(key_of(prefix), FIELDS.size + 8, pack(">d", stamp))
        async with asyncio.timeout(10):
            assert await put(store, value=b"after") is STORED
            await raw.setrange(key_of(prefix), FIELDS.size + 8, pack(">d", stamp))
            await store.invalidate(KIND, ["a"])
            await raw.setrange(key_of(prefix), FIELDS.size + 8, pack(">d", stamp))
            await store.delete(KIND, ["a"])
            assert await put(store, value=b"after", tags=("eu",)) is STORED
            await raw.setrange(key_of(prefix), FIELDS.size + 8, pack(">d", stamp))
            assert await store.invalidate_tag("eu") == [(KIND, "a")]
            assert await put(store, value=b"after") is STORED

    @pytest.mark.parametrize("score", [2e15, 4e15, float("inf")])
    async def test_an_epoch_that_somebody_wrote_is_no_obstacle(
        self, store: RedisStore, raw: "Redis", prefix: str, score: float
    ) -> None:
        """I26: an older release writes the server's microsecond there, which is ahead."""
        await put(store, tags=("eu",))
        for member in ("#eu", "!"):
            await raw.zadd(counter_of(prefix)[:-1] + b"@", {member: score})
            async with asyncio.timeout(10):
                assert await put(store, tags=("eu",)) is STORED
                assert await store.invalidate_tag("eu") == [(KIND, "a")]
                assert await put(store, tags=("eu",)) is STORED
        await raw.delete(counter_of(prefix)[:-1] + b"@")
        await raw.set(counter_of(prefix)[:-1] + b"@", "x")
        assert await put(store, tags=("eu",)) is STORED


def make_locale(folder: Path) -> None:
    compiler = shutil.which("localedef")
    if compiler is None:
        pytest.skip("this machine has no localedef")
    target = folder / "en_US.UTF-8"
    arguments = [compiler, "-i", "en_US", "-f", "UTF-8", str(target)]
    made = subprocess.run(arguments, capture_output=True, check=False)
    if not target.exists():
        pytest.skip(f"this machine has no sources of locales: {made.stderr.decode()}")


DAMAGES = {
    "no kind of copy": (4, b"\7"),
    "no mark": (5, b"\7"),
    "no time": (6, pack(">d", float("nan"))),
    "no freshness": (14, pack(">d", -1)),
    "no end of staleness": (22, pack(">d", float("inf"))),
    "no number": (30, pack(">d", float("nan"))),
    "no generation": (38, b"\xff"),
    "no version": (FULL_HEAD, b"x"),
}
"""What another program writes into a string, and where."""


class TestS15Damaged:
    """A condition sees what a read sees: a copy that is damaged is no copy."""

    @pytest.fixture(params=DAMAGES)
    async def damaged(
        self, request: pytest.FixtureRequest, store: RedisStore, raw: "Redis", prefix: str
    ) -> RedisStore:
        await put(store, version=packed_version(7))
        client: Any = raw
        await client.setrange(key_of(prefix), *DAMAGES[request.param])
        assert await copy_in(store) is None
        return store

    async def test_a_damaged_row_has_no_live_copy(self, damaged: RedisStore) -> None:
        assert await put(damaged, when=When.NO_LIVE_COPY, value=b"new") is STORED
        copy = await copy_in(damaged)
        assert copy is not None
        assert copy.value == b"new"

    async def test_nothing_can_be_kept_of_it(self, damaged: RedisStore) -> None:
        new = new_put(damaged, when=When.LIVE_COPY)
        touched = replace(new, copy=replace(new.copy, value=UNREAD))
        assert await attempt(damaged, touched) is REFUSED
        assert await put(damaged, when=When.LIVE_COPY) is REFUSED

    async def test_a_damaged_row_counts_as_not_seen(self, damaged: RedisStore) -> None:
        assert await put(damaged, when=When.UNCHANGED, value=b"new") is STORED

    async def test_the_version_of_a_damaged_row_is_ignored(self, damaged: RedisStore) -> None:
        assert await put(damaged, version=packed_version("a")) is STORED

    async def test_an_entry_that_was_cut_within_its_fields_is_leased_and_published_again(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        """The server's scripts failed on it for ever, so the key was loaded at every read."""
        await put(store)
        client: Any = raw
        whole = await client.get(key_of(prefix))
        for size in range(FULL_HEAD):
            await client.set(key_of(prefix), whole[:size])
            lease = await lease_of(store)
            new = Copy(lease.token, time.time(), Policy(60), b"new")
            assert await store.publish(KIND, {"a": (lease, new)}) == set()
            copy = await copy_in(store)
            assert copy is not None
            assert copy.value == b"new"

    async def test_an_entry_that_was_cut_can_be_evicted_and_counted_beside(
        self, store: RedisStore, raw: "Redis", prefix: str
    ) -> None:
        copies = (await store.stats()).copies
        await put(store)
        await put(store, "b")
        client: Any = raw
        await client.set(key_of(prefix), (await client.get(key_of(prefix)))[: FULL_HEAD - 1])
        assert (await store.stats()).copies == copies + 1
        assert await store.evict(time.time() - 1) == 0

    @pytest.mark.parametrize(
        "damage",
        [(COPY.size, pack(">d", float("inf"))), (FAILURE_AT, pack(">Id", 1, float("inf")))],
    )
    async def test_a_damaged_lease_or_failure_leaves_the_copy(
        self, store: RedisStore, raw: "Redis", prefix: str, damage: tuple[int, bytes]
    ) -> None:
        """Each part is read by itself."""
        await put(store)
        await lease_of(store)
        client: Any = raw
        await client.setrange(key_of(prefix), *damage)
        assert await copy_in(store) is not None
        assert await put(store, when=When.LIVE_COPY) is STORED


class TestS13Versions:
    async def test_versions_are_compared_byte_by_byte_in_any_locale(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E35: Lua compares texts as the server's language does, where `a` is before `B`."""
        await asyncio.to_thread(make_locale, tmp_path)
        monkeypatch.setenv("LOCPATH", str(tmp_path))
        monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
        binary = binary_of("valkey")
        assert binary is not None
        with serving(binary, tmp_path) as server:
            async with Redis.from_url(server.address) as raw:
                assert await raw.eval("return ('a' < 'B') and 1 or 2", 0) == 1  # as in a dictionary
            async with opened(server.address, "shop") as store:
                ordered = ["A", "B", "a", "a b", "aB", "aa", "b", "é"]
                assert ordered == sorted(ordered, key=str.encode)
                for smaller, greater in pairwise(map(packed_version, ordered)):
                    assert await put(store, version=smaller) is STORED
                    assert await put(store, version=greater) is STORED
                    assert await put(store, version=smaller) is PutOutcome.KEPT


class TestS8OtherServers:
    async def test_stamps_are_not_carried_to_another_server(
        self, store: RedisStore, proxy: FlakyProxy, raw: "Redis", mortal: Server, prefix: str
    ) -> None:
        """A number of the old server may be higher than all that the new one gives for years."""
        await put(store)
        await raw.hset(counter_of(prefix), "n", "2500000000000000")
        assert await attempt(store, new_put(store)) is STORED
        async with opened(mortal.address, prefix) as there:
            await teach(there)
            proxy.lead_to(HOST, mortal.port)
            proxy.cut()
            late = await given_up(store, proxy, new_put(store, b"late"))
            await there.delete(KIND, ["a"])
            await late()
            assert await there.read(KIND, ["a"]) == {}
            assert await put(store) is STORED

    async def test_a_replica_that_became_the_primary_is_another_life(
        self, mortal: Server, prefix: str
    ) -> None:
        """It may have missed the last stamps, although it is the same program."""
        async with opened(mortal.address, prefix) as store:
            await put(store)
            link = store._link
            assert link is not None
            first = link._life  # type: ignore[union-attr]
            mortal.command(f"REPLICAOF {HOST} 1")
            mortal.command("REPLICAOF NO ONE")
            mortal.command("CLIENT KILL TYPE normal")
            await store.read(KIND, ["a"])
            second = link._life  # type: ignore[union-attr]
        assert first is not None
        assert second is not None
        assert first[1] is not second[1]


async def given_up(store: RedisStore, proxy: FlakyProxy, put: Put, id_: str = "a") -> Any:
    """The put is on its way when its caller gives up; what delivers it, however often."""
    proxy.held.clear()
    proxy.lose("late", to=b"EVALSHA")
    with pytest.raises(StoreError):
        await store.put(KIND, {id_: put})
    proxy.heal()
    assert proxy.held
    await store.invalidate(KIND, ["another entry"])  # the server answers again
    return proxy.deliver


class TestS8LatePuts:
    """A put that its sender gave up arrives after something else has happened: it does nothing."""

    @pytest.mark.parametrize("is_there", [True, False])
    @pytest.mark.parametrize(
        "change", ["invalidate", "soft", "tag", "late tag", "delete", "put", "load"]
    )
    async def test_a_late_put_does_nothing_to_what_came_after_it(
        self,
        store: RedisStore,
        other: RedisStore,
        proxy: FlakyProxy,
        change: str,
        *,
        is_there: bool,
    ) -> None:
        """Neither to an invalidation or a deletion, nor to a put or a load."""
        tags: dict[str, Any] = {"tags": ("eu",), "late": ("us",)} if "tag" in change else {}
        if is_there:
            await put(store, **tags)
        late = await given_up(store, proxy, new_put(store, b"late", **tags))
        match change:
            case "invalidate" | "soft":
                await other.invalidate(KIND, ["a"], soft=change == "soft")
            case "tag":
                await other.invalidate_tag("eu")
            case "late tag":
                await other.invalidate_tag("us")
            case "delete":
                await other.delete(KIND, ["a"])
            case "put":
                await put(other, value=b"theirs")
            case _:
                lease = await lease_of(other)
                copy = Copy(lease.token, time.time(), POLICY, b"theirs")
                assert await other.publish(KIND, {"a": (lease, copy)}) == set()
        expected = await other.read(KIND, ["a"])
        for _ in range(2):
            await late()
            assert await other.read(KIND, ["a"]) == expected

    async def test_a_late_put_acts_only_if_nothing_has_happened_since(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Its caller was told that the outcome is not known; a load under way is superseded."""
        lease = await lease_of(other)
        late = await given_up(store, proxy, new_put(store, b"late"))
        await late()
        copy = await copy_in(other)
        assert copy is not None
        assert copy.value == b"late"
        assert await other.renew(KIND, [lease], 30) == {"a"}
        await other.delete(KIND, ["a"])
        await late()
        assert await copy_in(other) is None

    @pytest.mark.parametrize("knows_time", [True, False])
    async def test_an_add_that_was_refused_is_never_stored(
        self,
        store: RedisStore,
        other: RedisStore,
        proxy: FlakyProxy,
        raw: "Redis",
        prefix: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        knows_time: bool,
    ) -> None:
        """It was sent twice, and the second refused. The first arrives when the copy is old."""
        await put(other, value=b"theirs")
        await store.read(KIND, ["a"])
        if not knows_time:
            monkeypatch.setattr(HeardStamps, "_good_until", lambda _: 0.0)
        proxy.lose("late", to=b"EVALSHA", times=1)
        late = new_put(store, b"late", when=When.NO_LIVE_COPY)
        assert await attempt(store, late) is REFUSED
        monkeypatch.undo()
        assert len(proxy.held) == 1
        just_over = pack(">d", time.time() - POLICY.fresh_for)
        await raw.setrange(key_of(prefix), 6, just_over)
        expected = await copy_in(other)
        await proxy.deliver()
        assert await copy_in(other) == expected
        assert await put(store, value=b"next", when=When.NO_LIVE_COPY) is STORED

    async def test_a_cancelled_put_does_nothing_to_what_came_after_it(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy
    ) -> None:
        """And leaves no connection behind: the next put works."""
        proxy.lose("silently", to=b"EVALSHA", waits=True, times=1)
        putting = asyncio.create_task(attempt(store, new_put(store, b"first")))
        await until(lambda: proxy.lost)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        proxy.heal()
        await other.invalidate(KIND, ["a"])
        for _ in range(60):  # more than there are connections
            assert await put(store, value=b"second") is STORED

    async def test_late_invalidations_and_deletions_void_no_put(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Rule 3a: they were given up before the put began."""
        await put(store, tags=("eu",))
        for change in ("invalidate", "delete", "tag"):
            proxy.held.clear()
            proxy.lose("late", to=b"EVALSHA")
            step = store.invalidate_tag("eu")
            if change != "tag":
                step.close()
                step = getattr(store, change)(KIND, ["a"])
            with pytest.raises(StoreError):
                await step
            proxy.heal()
            await put(other, value=change.encode(), tags=("eu",))
            expected = await other.read(KIND, ["a"])
            for _ in range(2):
                await proxy.deliver()
                assert await other.read(KIND, ["a"]) == expected

    async def test_a_late_put_is_too_old_when_the_trace_is_gone(
        self,
        store: RedisStore,
        other: RedisStore,
        proxy: FlakyProxy,
        raw: "Redis",
        prefix: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It creates an entry for half a minute only, and the trace lives for a whole one."""
        monkeypatch.setattr("stillfresh.stores.redis.heard.GOOD_FOR", -0.001)
        late = await given_up(store, proxy, new_put(store, b"late"))
        monkeypatch.undo()
        await other.delete(KIND, ["a"])
        await raw.delete(key_of(prefix))
        await late()
        assert await other.read(KIND, ["a"]) == {}
        await lease_of(other)  # which is no change
        await late()
        assert await copy_in(other) is None

    async def test_a_flushed_server_accepts_no_put_from_before(
        self, mortal: Server, prefix: str
    ) -> None:
        """Its counter is new: the sender has not heard of it."""
        await self._forgotten(mortal, prefix, lambda: mortal.command("FLUSHALL"))

    async def test_a_restarted_server_accepts_no_put_from_before(
        self, mortal: Server, prefix: str
    ) -> None:
        """The same; and the next put is stored."""

        def restart() -> None:
            mortal.stop()
            mortal.start()

        await self._forgotten(mortal, prefix, restart)

    async def _forgotten(self, mortal: Server, prefix: str, forget: Any) -> None:
        async with (
            FlakyProxy(HOST, mortal.port) as proxy,
            opened(f"redis://{HOST}:{proxy.port}/0", prefix) as store,
            opened(mortal.address, prefix) as other,
        ):
            await teach(other)
            await put(store)
            late = await given_up(store, proxy, new_put(store, b"late"))
            await other.delete(KIND, ["a"])
            forget()
            with_script = new_put(other)
            await eventually_put(other, with_script, "b")
            await late()
            assert await copy_in(other) is None
            for id_ in [str(number) for number in range(100)]:
                assert await put(other, id_) is STORED
            await late()
            assert await copy_in(other) is None
            assert await put(store) is STORED


async def eventual_outcome(store: RedisStore, given: Put) -> PutOutcome:
    """The outcome of a put, as the engine asks for it: until the store has settled it."""
    while True:
        outcome = await attempt(store, given)
        if outcome is not AGAIN:
            return outcome


async def eventually_put(store: RedisStore, given: Put, id_: str) -> None:
    for _ in range(100):
        try:
            while await attempt(store, given, id_) is AGAIN:
                pass
        except StoreError:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError("the server does not come back")


class TestS2LostAnswers:
    @pytest.mark.parametrize("changes", [0, 1, 4, 5])
    async def test_a_put_is_recognised_by_its_generation(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, changes: int
    ) -> None:
        """STORED, or REPLACED after up to four changes; after five it is stored once more."""
        await put(store)

        async def meanwhile() -> None:
            for number in range(changes):
                assert await put(other, value=b"%d" % number) is STORED

        given = new_put(store, b"unanswered")
        proxy.lose("replies", to=b"EVALSHA", times=1, meanwhile=meanwhile)
        outcome = await attempt(store, given)
        expected = {0: STORED, 1: PutOutcome.REPLACED, 4: PutOutcome.REPLACED, 5: STORED}
        assert outcome is expected[changes]
        copy = await copy_in(other)
        assert copy is not None
        assert copy.value == (b"unanswered" if changes in {0, 5} else b"%d" % (changes - 1))

    @pytest.mark.parametrize("changes", [0, 1, 3, 4, 6])
    @pytest.mark.parametrize("is_stored", [True, False])
    async def test_no_increment_is_done_twice(
        self,
        store: RedisStore,
        other: RedisStore,
        proxy: FlakyProxy,
        changes: int,
        *,
        is_stored: bool,
    ) -> None:
        """E35: a put of UNCHANGED whose answer was lost is known, or the store says so."""
        await put(store)
        seen = await copy_in(store)
        assert seen is not None

        async def meanwhile() -> None:
            for number in range(changes):
                assert await put(other, value=b"%d" % number) is STORED

        if not is_stored:
            await put(other, value=b"another")
        given = new_put(store, b"plus one", when=When.UNCHANGED, seen=seen.generation)
        proxy.lose("replies", to=b"EVALSHA", times=1, meanwhile=meanwhile)
        if changes > (4 if is_stored else 3):  # the server remembers four copies
            with pytest.raises(StoreError, match="not known whether the value was stored"):
                await attempt(store, given)
            return
        outcome = await eventual_outcome(store, given)
        stored = STORED if changes == 0 else PutOutcome.REPLACED
        assert outcome is (stored if is_stored else REFUSED)

    @pytest.mark.parametrize("when", [When.UNCHANGED, When.NO_LIVE_COPY])
    async def test_a_value_for_an_empty_key_is_stored_once_although_the_key_is_empty_again(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, when: When
    ) -> None:
        """E35: its condition holds again, but the server has forgotten that it was stored."""
        await put(store, id_="b")  # the connection knows the counter of the bucket

        async def meanwhile() -> None:
            for number in range(4):
                assert await put(other, value=b"%d" % number) is STORED
            await other.delete(KIND, ["a"])

        given = new_put(store, b"one", when=when)
        proxy.lose("replies", to=b"EVALSHA", times=1, meanwhile=meanwhile)
        with pytest.raises(StoreError, match="not known whether the value was stored"):
            await eventual_outcome(store, given)
        assert await copy_in(other) is None

    @pytest.mark.parametrize("change", ["delete", "invalidate", "load"])
    async def test_other_changes_do_not_hide_it(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, change: str
    ) -> None:
        """A deletion and a load replace it; an invalidation leaves it there, marked."""

        async def meanwhile() -> None:
            if change == "load":
                lease = await lease_of(other)
                copy = Copy(lease.token, time.time(), POLICY, b"load")
                assert await other.publish(KIND, {"a": (lease, copy)}) == set()
            else:
                await getattr(other, change)(KIND, ["a"])

        proxy.lose("replies", to=b"EVALSHA", times=1, meanwhile=meanwhile)
        outcome = await attempt(store, new_put(store, b"unanswered"))
        assert outcome is (STORED if change == "invalidate" else PutOutcome.REPLACED)
        copy = await copy_in(other)
        match change:
            case "delete":
                assert copy is None
            case "invalidate":
                assert copy is not None
                assert (copy.value, copy.mark) == (b"unanswered", Mark.HARD)
            case _:
                assert copy is not None
                assert copy.value == b"load"

    async def test_two_lost_answers_are_an_error(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Nothing is claimed."""
        proxy.lose("replies", to=b"EVALSHA")
        with pytest.raises(StoreError, match="unavailable"):
            await attempt(store, new_put(store))


class TestS5FullServers:
    async def test_a_full_server_refuses_a_put_and_says_what_to_do(
        self, mortal: Server, prefix: str
    ) -> None:
        """The old value stays; when there is room, it is stored."""
        async with opened(mortal.address, prefix) as store:
            await put(store, value=b"old")
            mortal.command("CONFIG SET maxmemory 1")
            with pytest.raises(StoreError, match="raise maxmemory, or shorten"):
                await put(store, value=b"new")
            copy = await copy_in(store)
            assert copy is not None
            assert copy.value == b"old"
            mortal.command("CONFIG SET maxmemory 0")
            assert await put(store, value=b"new") is STORED

    async def test_a_server_that_drops_keys_drops_no_fence(
        self, mortal: Server, prefix: str
    ) -> None:
        """It may have dropped the trace of a deletion: a new entry takes two attempts there."""
        mortal.command("CONFIG SET maxmemory 100mb")
        mortal.command("CONFIG SET maxmemory-policy allkeys-lru")
        async with (
            FlakyProxy(HOST, mortal.port) as proxy,
            opened(f"redis://{HOST}:{proxy.port}/0", prefix) as store,
            opened(mortal.address, prefix) as other,
            Redis.from_url(mortal.address) as raw,
        ):
            await teach(other)
            await put(store)
            for is_leased in (False, True):
                late = await given_up(store, proxy, new_put(store, b"late"))
                await other.delete(KIND, ["a"])
                assert await raw.delete(key_of(prefix)) == 1
                if is_leased:
                    await lease_of(other)
                await late()
                assert await copy_in(other) is None
            await raw.delete(key_of(prefix))
            await put(store, "b")
            given = new_put(store)
            assert await attempt(store, given) is AGAIN
            assert await attempt(store, given) is STORED

    async def test_dropped_epochs_are_not_taken_for_none(self, mortal: Server, prefix: str) -> None:
        """I26: a tag may have been invalidated, and the server may have dropped that, too."""
        async with (
            FlakyProxy(HOST, mortal.port) as proxy,
            opened(f"redis://{HOST}:{proxy.port}/0", prefix) as store,
            opened(mortal.address, prefix) as other,
            Redis.from_url(mortal.address) as raw,
        ):
            await teach(other)
            await put(store, tags=("eu",))
            late = await given_up(store, proxy, new_put(store, b"late", tags=("us",)))
            await other.invalidate_tag("us")
            assert await raw.delete(counter_of(prefix)[:-1] + b"@") == 1
            await late()
            copy = await copy_in(other)
            assert copy is not None
            assert copy.value == b"put"


@pytest.mark.proof
async def test_e35_puts_of_eight_processes_at_once_leave_one_of_the_values(
    valkey: Server, prefix: str
) -> None:
    """All are acknowledged; the value is whole, one of theirs, and without a mark."""
    url = f"{valkey.address}?prefix={prefix}&timeout=30s"
    with ExitStack() as stack:
        numbers = range(8)
        writers = [Process(stack, "store_puts", url, it, is_ready=False) for it in numbers]
        assert [writer.line() for writer in writers] == ["ready"] * 8
        async with opened(valkey.address, prefix) as store:
            await put(store)
            for turn in range(20):
                for writer in writers:
                    writer.go()
                outcomes = {writer.line() for writer in writers}
                assert outcomes <= {"stored", "replaced"}
                copy = await copy_in(store)
                assert copy is not None
                assert copy.value in [f"{number} of {turn}".encode() for number in numbers]
                assert copy.mark is Mark.NONE


async def test_s13_conditions_are_judged_by_the_servers_clock(valkey: Server, prefix: str) -> None:
    """E35: a machine whose clock is wrong agrees with the others on what is fresh."""
    async with opened(valkey.address, prefix) as store:
        old = new_put(store)
        old = replace(old, copy=replace(old.copy, fetched_at=time.time() - 61))
        while await attempt(store, old) is AGAIN:
            pass
        assert await put(store, when=When.LIVE_COPY) is REFUSED
        assert await put(store, when=When.NO_LIVE_COPY) is STORED
        assert await put(store, when=When.LIVE_COPY) is STORED
