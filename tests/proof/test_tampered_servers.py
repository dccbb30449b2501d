"""T5: what was tampered with in the stores that are servers.

As in files: a reader is given its own key's value, an older one or none, never a mistake of ours;
and what is loaded next is stored whole. The same stores are given keys and tags of any bytes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from feed_kit import NOW
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from valkey_server import Server

from stillfresh import Cache, LoadFailed, Resource
from stillfresh.stores.contract import Store
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.layout import HEAD
from stillfresh.testing import ManualClock

FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
IDS = ("a", "b", "none")
Value = tuple[str, int]
Spoil = Callable[[], Awaitable[None]]


class Upstream:
    """Says of each id which it is, and how new."""

    def __init__(self) -> None:
        self.version = 1

    def on(self, cache: Cache, memory_for: float = 0) -> Resource[str, Value]:
        options: dict[str, Any] = {"memory_for": memory_for, "absent_for": 60}
        return cache.batched("thing", fresh_for=60, tags=lambda _: ["all"], **options)(self._load)

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


CHANGES = st.sampled_from(["bytes", "number", "cut", "other", "list", "set", "gone"])
NUMBERS = st.sampled_from(
    [b"\0" * 8, b"\xff" * 8, b"\x7f\xf0" + b"\0" * 6, b"\x7f\xf8" + b"\0" * 6]
)


async def tamper(raw: "Redis", prefix: str, data: st.DataObject) -> None:
    """Up to three keys: strings of ids, sets of tags; any byte, any length, any type."""
    keys = sorted([key async for key in raw.scan_iter(match=f"{prefix}:*")])
    for _ in range(data.draw(st.integers(1, 3))):
        key, how = data.draw(st.sampled_from(keys)), data.draw(CHANGES)
        is_text = await raw.type(key) == b"string"
        found: Any = await raw.get(key) if is_text else b""
        text = bytearray(found)
        if text and how == "bytes":
            places = st.integers(4, len(text) - 1)
            changes = st.dictionaries(places, st.integers(0, 255), min_size=1, max_size=9)
            for place, byte in data.draw(changes).items():
                text[place] = byte
        elif text and how == "number":
            place = data.draw(st.integers(4, max(4, min(HEAD, len(text)) - 8)))
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


class TestT5TamperedRedis:
    @FEW
    @given(st.data())
    def test_each_key_has_its_own_value_or_none(self, valkey: Server, data: st.DataObject) -> None:
        """Of whatever version; and what is refreshed is stored, with its tags."""
        prefix = f"t-{uuid4().hex}"

        async def spoil() -> None:
            async with Redis.from_url(valkey.address) as raw:
                await tamper(raw, prefix, data)

        def new_store(clock: ManualClock) -> RedisStore:
            return RedisStore(valkey.address, prefix=prefix, clock=clock, timeout=30)

        asyncio.run(asyncio.wait_for(used(new_store, spoil), 20))
