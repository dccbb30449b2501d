"""T5: what was tampered with in the stores that are servers.

As in files: a reader is given its own key's value, an older one or none, never a mistake of ours;
and what is loaded next is stored whole. The same stores are given keys and tags of any bytes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import example as also
from hypothesis import strategies as st
from redis.asyncio import Redis

from stillfresh import Cache, LoadFailed, Resource
from stillfresh.errors import ConfigError
from stillfresh.stores.contract import Store
from stillfresh.stores.dynamodb.schema import Names
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.layout import FULL_HEAD, packed_tags
from stillfresh.testing import ManualClock
from tests.kit.examples import examples
from tests.kit.feed import NOW
from tests.kit.servers.aws import Aws, Raw
from tests.kit.servers.valkey import Server

FEW = settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FEWER = settings(FEW, max_examples=examples(5))
"""A round of DynamoDB and S3 takes most of a second."""
LIMIT = 60
"""Seconds for one example, which takes one at most: a slow machine makes it, a circle does not."""
SLOW = pytest.mark.timeout(900)
"""For all examples, and for finding the smallest that fails."""
IDS = ("a", "b", "none")
Value = tuple[str, int]
Spoil = Callable[[], Awaitable[None]]


class Upstream:
    """Says of each id which it is, and how new."""

    def __init__(self, kind: str = "thing") -> None:
        self.kind = kind
        self.version = 1

    def on(self, cache: Cache, memory_for: float = 0) -> Resource[str, Value]:
        options: dict[str, Any] = {"memory_for": memory_for, "absent_for": 60}
        return cache.batched(self.kind, fresh_for=60, tags=lambda _: ["all"], **options)(self._load)

    async def _load(self, ids: list[str]) -> dict[str, Value]:
        return {id_: (id_, self.version) for id_ in ids if id_ != "none"}


async def look(cache: Cache, things: Resource[str, Value]) -> None:
    """Every way to read; a cooldown that somebody has written is one."""
    for id_, answer in (await things.get_many(IDS)).items():
        assert not answer.found or answer.value[0] == id_
    for id_ in IDS:
        with suppress(LoadFailed):
            await things.get(id_)
        await things.explain(id_)
    await cache.entries()
    await cache.stats()


async def used(new_store: Callable[[ManualClock], Store], spoil: Spoil) -> None:
    """By one who was there before, and has it in memory, and by one who came after."""
    clock, upstream = ManualClock(NOW), Upstream()
    async with Cache(new_store(clock), clock=clock) as before:
        there = upstream.on(before, memory_for=1)
        await look(before, there)
        await spoil()
        clock.advance(2)
        async with Cache(new_store(clock), clock=clock) as cache:
            await look(cache, upstream.on(cache))
        await look(before, there)
    upstream.version = 2
    async with Cache(new_store(clock), clock=clock) as cache:
        things = upstream.on(cache)
        clock.advance(200)  # a lease that somebody has written ends
        for id_ in IDS:
            await things.refresh(id_)
            assert (await things.get(id_)).value == (None if id_ == "none" else (id_, 2))
    async with Cache(new_store(clock), clock=clock) as cache:
        things = upstream.on(cache)
        for id_ in ("a", "b"):
            assert (await things.known([id_]))[id_].value == (id_, 2)
        reached = await cache.invalidate_tag("all")
        assert {("thing", "a"), ("thing", "b")} <= set(reached)


async def put_over(new_store: Callable[[ManualClock], Store], spoil: Spoil) -> None:
    """S13: what is put next is stored, whatever there was, and can be invalidated and deleted."""
    clock, upstream = ManualClock(NOW), Upstream()
    async with Cache(new_store(clock), clock=clock) as before:
        there = upstream.on(before, memory_for=1)
        await there.put_many({id_: (id_, 1) for id_ in IDS}, version=7)
        await before.invalidate_tag("all")
        await there.put_many({id_: (id_, 1) for id_ in IDS}, version=8)
        await spoil()
        clock.advance(2)
        async with Cache(new_store(clock), clock=clock) as cache:
            things = upstream.on(cache)
            await look(cache, things)
            for turn in range(2, 5):
                for id_ in IDS:
                    assert (await things.put(id_, (id_, turn))).stored
                    assert (await things.known([id_]))[id_].value == (id_, turn)
                reached = await cache.invalidate_tag("all")
                assert {("thing", id_) for id_ in IDS} <= set(reached)


CHANGES = st.sampled_from(["bytes", "number", "cut", "other", "list", "set", "gone"])
TAGS = packed_tags(["all"])
NUMBERS = st.sampled_from(
    [b"\0" * 8, b"\xff" * 8, b"\x7f\xf0" + b"\0" * 6, b"\x7f\xf8" + b"\0" * 6]
)


async def tamper(raw: "Redis", prefix: str, data: st.DataObject) -> None:
    """Up to three keys: strings of ids, sets of tags; any byte, any length, any type.

    Not the bytes of a value: nobody can tell that `a` was not always `b`.
    """
    keys = sorted([key async for key in raw.scan_iter(match=f"{prefix}:*")])
    for _ in range(data.draw(st.integers(1, 3))):
        key, how = data.draw(st.sampled_from(keys)), data.draw(CHANGES)
        is_text = await raw.type(key) == b"string"
        found: Any = await raw.get(key) if is_text else b""
        text = bytearray(found)
        if len(text) > 4 and how == "bytes":
            places = st.integers(4, min(len(text), FULL_HEAD + len(TAGS)) - 1)
            changes = st.dictionaries(places, st.integers(0, 255), min_size=1, max_size=9)
            for place, byte in data.draw(changes).items():
                text[place] = byte
        elif text and how == "number":
            place = data.draw(st.integers(4, max(4, min(FULL_HEAD, len(text)) - 8)))
            text[place : place + 8] = data.draw(NUMBERS)
        elif text and how == "cut":
            del text[data.draw(st.integers(0, len(text) - 1)) :]
        await raw.delete(key)
        if how == "list":
            await raw.rpush(key, "x")
        elif how == "set":
            await raw.sadd(key, b"\xff:\xff", b"thing:b", b"")
        elif how != "gone":
            await raw.set(key, bytes(text) if text else data.draw(st.binary(max_size=9)))


def tampered_redis(
    valkey: Server, data: st.DataObject
) -> tuple[Callable[[ManualClock], Store], Spoil]:
    """How to open a store on keys of its own, and how to tamper with them."""
    prefix = f"t-{uuid4().hex}"

    async def spoil() -> None:
        async with Redis.from_url(valkey.address) as raw:
            await tamper(raw, prefix, data)

    def new_store(clock: ManualClock) -> RedisStore:
        return RedisStore(valkey.address, prefix=prefix, clock=clock, timeout=30)

    return new_store, spoil


@SLOW
class TestT5TamperedRedis:
    @FEW
    @given(st.data())
    def test_each_key_of_a_tampered_redis_store_has_its_own_value_or_none(
        self, valkey: Server, data: st.DataObject
    ) -> None:
        """Of whatever version; and what is refreshed is stored, with its tags."""
        new_store, spoil = tampered_redis(valkey, data)
        asyncio.run(asyncio.wait_for(used(new_store, spoil), LIMIT))

    @FEW
    @given(st.data())
    def test_a_put_replaces_a_tampered_redis_entry(
        self, valkey: Server, data: st.DataObject
    ) -> None:
        """S15: stamps, versions, counters and epochs, too: no put is refused for ever."""
        new_store, spoil = tampered_redis(valkey, data)
        asyncio.run(asyncio.wait_for(put_over(new_store, spoil), LIMIT))


ATTRIBUTES = st.one_of(
    st.sampled_from(["x", "0", "-1"]).map(lambda it: {"S": it}),
    st.sampled_from(["0", "-1", "1.5", "1e125", "-1e125", "1e-130", str(int(NOW) + 30)]).map(
        lambda it: {"N": it}
    ),
    st.binary(min_size=1, max_size=5).map(lambda it: {"B": it}),
    st.sampled_from(
        [{"NULL": True}, {"BOOL": True}, {"L": []}, {"M": {}}, {"SS": ["x"]}, {"NS": ["1"]}]
    ),
    st.none(),
)
NAMES = st.sampled_from(
    [
        "s3_key", "generated_at", "revalidate_seconds", "etag", "ttl", "fetched_at", "fresh_for",
        "stale_for", "error_for", "mark", "body_size", "generation", "absent", "extra", "tags",
        "kind", "id", "failures", "retry_at", "error", "lease_token", "lease_expires_at",
    ]
)  # fmt: skip


async def tamper_rows(raw: Raw, pks: set[str], data: st.DataObject) -> None:
    """Up to four attributes: another value, another type, another row's, none."""
    rows = [row for row in await raw.rows() if row["pk"]["S"] in pks]
    metas = [row for row in rows if row["sk"]["S"] == "META"]
    locks = [{**row, "sk": {"S": "LOCK"}} for row in metas]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows + locks))
        for name in data.draw(st.lists(NAMES, min_size=1, max_size=2)):
            others = [it[name] for it in rows if name in it]
            value = data.draw(ATTRIBUTES | st.sampled_from(others) if others else ATTRIBUTES)
            row.pop(name, None)
            row |= {name: value} if value is not None else {}
        await raw.dynamodb.put_item(TableName=raw.table, Item=row)


async def tamper_bodies(raw: Raw, pks: set[str], data: st.DataObject) -> None:
    """Truncated, changed, gone."""
    names = Names(raw.table)
    for key in sorted(it for it in await raw.objects() if names.pk_of_body(it) in pks):
        found = await raw.s3.get_object(Bucket=raw.bucket, Key=key)
        body = await found["Body"].read()
        match data.draw(st.sampled_from(["as it was", "cut", "changed", "gone"])):
            case "cut":
                await raw.put_object(key, body[: data.draw(st.integers(0, len(body) - 1))])
            case "changed":
                await raw.put_object(key, data.draw(st.binary(max_size=9)))
            case "gone":
                await raw.s3.delete_object(Bucket=raw.bucket, Key=key)


TamperDynamo = Callable[[Raw, set[str], st.DataObject], Awaitable[None]]


@contextmanager
def opened(aws: Aws) -> Iterator["Bench"]:
    """Once for all examples, each of which has a kind of its own: a client takes long to open."""
    with asyncio.Runner() as runner:
        bench = Bench(aws)
        runner.run(bench.open())
        bench.run = lambda work: runner.run(asyncio.wait_for(work, LIMIT))
        try:
            yield bench
        finally:
            runner.run(bench.stack.aclose())


class Bench:
    """Two caches on one table, and the bare clients."""

    run: Callable[[Coroutine[Any, Any, None]], None]

    def __init__(self, aws: Aws) -> None:
        self.aws = aws
        self.table = aws.new_table()
        self.clock = ManualClock(NOW)
        self.stack = AsyncExitStack()
        self.numbers = count()

    async def open(self) -> None:
        enter = self.stack.enter_async_context
        stores = [self.aws.store(self.table, self.clock) for _ in range(2)]
        self.before = await enter(Cache(stores[0], clock=self.clock))
        self.after = await enter(Cache(stores[1], clock=self.clock))
        self.raw = await enter(self.aws.raw(self.table))

    async def tampered(self, how: TamperDynamo, data: st.DataObject) -> None:
        upstream = Upstream(f"thing{next(self.numbers)}")
        there, things = upstream.on(self.before, memory_for=1), upstream.on(self.after)
        await look(self.before, there)
        pks = {Names(self.table).pk(upstream.kind, id_) for id_ in IDS}
        await how(self.raw, pks, data)
        self.clock.advance(2)
        await look(self.after, things)
        await look(self.before, there)
        upstream.version = 2
        self.clock.advance(200)
        for id_ in IDS:
            await things.refresh(id_)
            assert (await things.get(id_)).value == (None if id_ == "none" else (id_, 2))
            assert (await there.known([id_]))[id_].value == (None if id_ == "none" else (id_, 2))


@SLOW
class TestT5TamperedDynamo:
    def test_each_key_of_a_tampered_dynamodb_store_has_its_own_value_or_none(
        self, aws: Aws
    ) -> None:
        """The same, of rows and of bodies."""
        with opened(aws) as bench:

            @FEWER
            @given(st.data(), st.sampled_from([tamper_rows, tamper_bodies]))
            def example(data: st.DataObject, how: TamperDynamo) -> None:
                bench.run(bench.tampered(how, data))

            example()


KEYS = st.lists(
    st.text(max_size=20)
    | st.sampled_from(
        ["\0", "\ud800", "a" * 5_000, "é" * 2_000, "thing:a", "#all", "{by}", "%", ""]
    ),
    min_size=1,
    max_size=5,
)


ALIKE = ["a", "ab", "a\0", "A", "\0a", " a"], ["t", "tt", ""]


async def keyed(cache: Cache, kind: str, keys: list[str], tags: list[str]) -> None:
    """Each has its own value, in the store; a tag reaches all that could be stored."""

    async def echo(ids: list[str]) -> dict[str, str]:
        return {id_: id_ for id_ in ids}

    things = cache.batched(kind, fresh_for="1h", memory_for=0, tags=lambda _: tags)(echo)
    kept = set()
    for key in keys:
        with suppress(ConfigError, LoadFailed):
            assert (await things.get(key)).value == key
            kept.add(key)
    assert {key: it.value for key, it in (await things.known(kept)).items()} == {
        key: key for key in kept
    }
    for tag in tags:
        with suppress(ConfigError):
            assert {id_ for name, id_ in await cache.invalidate_tag(tag) if name == kind} == kept


@SLOW
class TestT5KeysOnServers:
    def test_any_key_on_dynamodb_has_its_own_value_or_is_refused(self, aws: Aws) -> None:
        """Or is refused, as is a tag."""
        with opened(aws) as bench:

            @FEWER
            @given(KEYS, KEYS)
            @also(*ALIKE)
            def example(keys: list[str], tags: list[str]) -> None:
                bench.run(keyed(bench.after, f"thing{next(bench.numbers)}", keys, tags))

            example()

    @FEW
    @given(KEYS, KEYS)
    @also(*ALIKE)
    def test_any_key_on_redis_has_its_own_value_or_is_refused(
        self, valkey: Server, keys: list[str], tags: list[str]
    ) -> None:
        """The same."""

        async def used() -> None:
            async with Cache(valkey.url(timeout="30s")) as cache:
                await keyed(cache, "thing", keys, tags)

        asyncio.run(used())
