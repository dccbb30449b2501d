"""E28: what is merely held costs nothing."""

import asyncio
import gc
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from stillfresh import (
    Answer,
    Cache,
    LoadFailed,
    NotOpen,
    Origin,
    Policy,
    Resource,
    StoreError,
    Verdict,
)
from stillfresh.bounded import SLICE, TagIndex
from stillfresh.stores.contract import Ask, Copy, Failure, Record
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.memory_rows import MemoryRow
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Sleeper, Upstream, declare, outcome, turns, until, version
from tests.kit.held_store import SteppedStore, cache_on

T = TypeVar("T")
MANY = [f"sku-{number}" for number in range(300)]


class CountedTags:
    """A `tags=` function: `eu` for three keys, `us` for the others."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, sku: str) -> list[str]:
        self.calls[sku] += 1
        return ["eu" if sku in MANY[:3] else "us"]


class TestE28Tags:
    def test_a_key_that_has_no_such_tag(self) -> None:
        """Takes the tag from no other key, not even from the number zero."""
        index: TagIndex[int] = TagIndex()
        index.add(0, ["t"])
        index.remove(5, ["t"])
        assert index.keys("t") == [0]
        index.remove(0, ["t"])
        assert index.keys("t") == []

    async def test_an_invalidation_by_tag_asks_for_no_tags_of_what_is_held(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Memory has an index from tag to entries."""
        tags = CountedTags()
        prices = declare(cache, upstream, tags=tags)
        await prices.get_many(MANY)
        tags.calls.clear()
        upstream.version = 2
        await cache.invalidate_tag("eu")
        assert not tags.calls
        found = await prices.get_many(MANY)
        assert [key for key in MANY if version(found[key]) == 2] == MANY[:3]

    async def test_what_is_under_way_says_its_tags(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """A read of the store and a load are asked for theirs; nothing else is."""
        store, tags = SteppedStore(MemoryStore(clock=clock)), CountedTags()
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream, tags=tags)
            await prices.get_many(MANY[2:])
            loading = await upstream.holding(outcome(prices.get(MANY[0])))
            reading = await store.holding("read:done", outcome(prices.get(MANY[2])))
            tags.calls.clear()
            upstream.version = 2
            await cache.invalidate_tag("eu")
            assert tags.calls.keys() == {MANY[0], MANY[2]}
            store.let_go("read:done")
            upstream.let_go()
            await asyncio.gather(loading, reading)
            found = await prices.get_many(MANY[:4])
            assert [version(found[key]) for key in MANY[:4]] == [2, 2, 2, 1]

    async def test_memory_forgets_though_the_store_is_away(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The index is memory's own: it does not need the store to name the entries."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream, tags=CountedTags(), memory_for=60)
            await prices.get_many(MANY)
            store.broken = {"invalidate_tag"}
            with pytest.raises(StoreError):
                await cache.invalidate_tag("eu")
            assert [key for key in MANY if prices.peek(key) is None] == MANY[:3]

    async def test_an_entry_that_cannot_say_its_tags_has_every_tag(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """E8: its copy was stored while its tags were known; now nobody can say."""
        told = ["eu"]
        prices = declare(cache, upstream, tags=lambda _: [told[0]])
        await prices("a")
        prices.core.memory.clear()
        told.clear()
        await prices("a")
        assert prices.peek("a") is not None
        await cache.invalidate_tag("other")
        assert prices.peek("a") is None

    async def test_the_index_keeps_nothing_of_what_was_dropped(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """It is as bounded as the entries are."""
        prices = declare(cache, upstream, tags=lambda sku: [sku, "all"], max_entries=10)
        await prices.get_many(MANY)
        await prices.invalidate(*MANY[-5:])
        await turns(1)
        memory = prices.core.memory
        assert len(memory.tagged("all")) == len(memory.entries) <= 10
        assert sum(len(memory.tagged(key)) for key in MANY) == len(memory.entries)
        memory.clear()
        assert not memory.tagged("all")


class Node:
    """A value of a user's that can refer to anything."""

    answer: Answer["Node"] | None = None


class NodeCodec:
    def encode(self, _: Node, /) -> bytes:
        return b""

    def decode(self, _: bytes, /) -> Node:
        return Node()


class TestE28Collection:
    def test_what_a_store_holds_is_not_walked_over(self) -> None:
        """It is text, numbers and bytes: it cannot be part of a cycle."""
        copy = Copy("g", 1.0, Policy(1), b"value")
        failure = Failure(1, 2.0, "no")
        held = [
            copy,
            failure,
            Record(copy, 3.0, failure),
            Ask("a", tags=("t",)),
            MemoryRow(copy),
        ]
        assert not any(gc.is_tracked(it) for it in held)

    async def test_a_cycle_through_a_users_value_is_collected(self, cache: Cache) -> None:
        """A value that refers to its own answer goes when the cache and its caller let go of it."""

        @cache.batched("node", fresh_for=60, codec=NodeCodec())
        async def nodes(keys: list[str]) -> dict[str, Node]:
            return {key: Node() for key in keys}

        answer = await nodes.get("a")
        answer.value.answer = answer
        seen = weakref.ref(answer.value)
        await nodes.delete("a")
        del answer
        await turns()
        gc.collect()
        assert seen() is None

    def test_a_cycle_through_an_error_is_collected(self) -> None:
        """An answer's error has a traceback, whose frames may hold the answer."""

        def raised() -> weakref.ref[LoadFailed]:
            error = LoadFailed("no")
            answer = Answer(
                1,
                found=True,
                verdict=Verdict.STALE,
                fetched_at=0.0,
                origin=Origin.MEMORY,
                clock=time.time,
                error=error,
            )
            with pytest.raises(LoadFailed):
                raise error
            del error
            return weakref.ref(answer.error or LoadFailed())

        seen = raised()
        gc.collect()
        assert seen() is None


class TestE28Slices:
    """Nothing that walks over memory does it in one turn of the loop."""

    @pytest.fixture
    async def many(
        self, cache: Cache, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> Resource[str, Price]:
        """Entries of one tag, and slices of a hundred."""
        monkeypatch.setattr("stillfresh.bounded.sliced.__init__.__defaults__", (100,))
        prices = declare(cache, upstream, tags=lambda _: ["all"], max_batch=len(MANY))
        await prices.get_many(MANY)
        return prices

    async def test_counting_hits(self, cache: Cache, many: Resource[str, Price]) -> None:
        """E12: exact all the same, also while entries come and go."""
        for key in MANY:
            await many.get(key)
        before = asyncio.create_task(cache.stats())
        await asyncio.sleep(0)
        await many.get("another")
        await many.invalidate(MANY[-1])
        counts = (await before).resources["price"]
        assert counts.hits <= len(MANY)
        assert (await cache.stats()).resources["price"].hits == len(MANY)

    async def test_an_invalidation_of_many(
        self, cache: Cache, many: Resource[str, Price], upstream: Upstream
    ) -> None:
        """All of them are gone from memory when it returns."""
        held = many.core.memory.entries
        work = asyncio.create_task(cache.invalidate_tag("all"))
        await until(lambda: len(held) < len(MANY))
        assert held or work.done() is False
        await work
        assert not held
        upstream.version = 2
        assert (await many(MANY[0])).version == 2

    async def test_what_is_asked_of_many_keys_in_one_call(
        self, many: Resource[str, Price], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A turn is about a hundred of them; the answers are in the order of the keys."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 100)
        monkeypatch.setattr(many.core.spec, "max_batch", 50)
        touched: list[int] = [0]

        def noted(work: Callable[..., T]) -> Callable[..., T]:
            def noting(*given: Any, **named: Any) -> T:
                touched[-1] += len(given[0]) if isinstance(given[0], list) else 1
                return work(*given, **named)

            return noting

        async def follow(work: Awaitable[T]) -> T:
            touched[:] = [0]
            task = asyncio.ensure_future(work)
            while not task.done():
                touched.append(0)
                await asyncio.sleep(0)
            assert 0 < max(touched) <= 200  # an invalidation drops a key twice
            return task.result()

        monkeypatch.setattr(many.core, "_unheld", noted(many.core._unheld))
        monkeypatch.setattr(many.core.memory, "drop", noted(many.core.memory.drop))
        upstream.calls.clear()
        assert list(await follow(many.get_many(MANY[::-1]))) == MANY[::-1]
        assert upstream.calls == []
        await follow(many.invalidate(*MANY))
        assert list(await follow(many.get_many(MANY))) == MANY
        assert [len(batch) for batch in upstream.calls] == [50] * 6
        await follow(many.delete(*MANY))
        assert not many.core.memory.entries

    @pytest.mark.parametrize("max_batch", [4, 10, 50])
    async def test_missing_keys_of_many_slices_are_loaded_together(
        self,
        many: Resource[str, Price],
        upstream: Upstream,
        monkeypatch: pytest.MonkeyPatch,
        max_batch: int,
    ) -> None:
        """E4: as many calls as full batches need, though the keys are read slice by slice."""
        scattered = MANY[::30]
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 100)
        monkeypatch.setattr(many.core.spec, "max_batch", max_batch)
        calls = [scattered[at : at + max_batch] for at in range(0, len(scattered), max_batch)]
        for lose in (many.delete, many.invalidate, partial(many.invalidate, soft=True)):
            await lose(*scattered)
            upstream.calls.clear()
            assert list(await many.get_many(MANY)) == MANY
            assert await many.core.settled(5)
            assert sorted(upstream.calls) == sorted(calls)  # leases come in any order

    async def test_a_call_of_many_keys_that_fails(
        self, many: Resource[str, Price], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Leaves no task behind but the loads that have begun (E3)."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 100)
        monkeypatch.setattr(many.core.spec, "max_batch", 50)
        await many.delete(*MANY)
        before, unheld = asyncio.all_tasks(), many.core._unheld

        def failing(keys: list[str], *given: Any) -> object:
            if MANY[150] in keys:
                raise ZeroDivisionError
            return unheld(keys, *given)

        monkeypatch.setattr(many.core, "_unheld", failing)
        with pytest.raises(ZeroDivisionError):
            await many.get_many(MANY)
        left = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before}  # type: ignore[union-attr]
        assert left <= {"Loads._lead"}
        assert not any(it.waiters for it in many.core.queue.flights.values())

    async def test_a_caller_of_many_keys_that_leaves(
        self, many: Resource[str, Price], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E3: takes every slice along; what had not begun is not loaded."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 100)
        monkeypatch.setattr(many.core.spec, "max_batch", 50)
        await many.delete(*MANY)
        upstream.calls.clear()
        upstream.hold()
        for wanted in (1, len(MANY)):  # between two slices, and when all are under way
            leaving = asyncio.create_task(many.get_many(MANY))
            await until(lambda: len(many.core.queue.flights) >= wanted)  # noqa: B023
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await turns()
            assert not any(it.waiters for it in many.core.queue.flights.values())
        upstream.let_go()
        assert await many.core.settled(5)
        assert len(upstream.calls) <= many.core.spec.concurrency
        assert not many.core.queue.flights

    @pytest.mark.parametrize("ask", ["get_many", "known"])
    async def test_a_cache_that_closes_between_two_slices(
        self,
        cache: Cache,
        many: Resource[str, Price],
        upstream: Upstream,
        monkeypatch: pytest.MonkeyPatch,
        ask: str,
    ) -> None:
        """E13: the call ends, and nothing that it read is in the memory of the next opening."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 10)
        monkeypatch.setattr("stillfresh.bounded.SLICE", 10)
        await many.delete(*MANY[::2])
        upstream.hold()
        for later in range(1, 6):
            call = asyncio.create_task(outcome(getattr(many, ask)(MANY)))
            await turns(later)
            await cache.close()
            ended = await asyncio.wait_for(call, 10)
            is_cut = isinstance(ended, NotOpen)
            assert is_cut or all(isinstance(it, LoadFailed | Answer) for it in ended.values())  # type: ignore[attr-defined]
            assert not many.core.queue.flights
            assert not many.core.memory.entries
            await cache.open()
        upstream.let_go()

    async def test_an_override_between_two_slices(
        self,
        cache: Cache,
        many: Resource[str, Price],
        upstream: Upstream,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """E22: a call that began outside leaves nothing inside the block, and vice versa."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 10)
        outside = asyncio.create_task(outcome(many.get_many(MANY)))
        await turns(3)
        upstream.version = 2
        async with cache.override("memory://"):
            await outside
            assert {version(it) for it in (await many.get_many(MANY)).values()} == {2}
            upstream.version = 3
            await many.invalidate(*MANY)
            inside = asyncio.create_task(outcome(many.get_many(MANY)))
            await turns(3)
        await inside
        assert {version(it) for it in (await many.get_many(MANY)).values()} == {1}

    async def test_a_loader_that_asks_for_many_keys_in_a_circle(
        self, cache: Cache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E3: the circle is seen before the last of the keys was asked for."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 10)

        @cache.batched("outer", fresh_for="1h")
        async def outer(names: list[str]) -> dict[str, str]:
            await inner.get_many(MANY)
            return dict.fromkeys(names, "value")

        @cache.batched("inner", fresh_for="1h", max_batch=10)
        async def inner(skus: list[str]) -> dict[str, str]:
            if MANY[0] in skus:
                await outer("name")
            return dict.fromkeys(skus, "value")

        assert await asyncio.wait_for(outer("name"), 10) == "value"
        failed = await outcome(inner(MANY[0]))
        assert isinstance(failed, LoadFailed)
        assert "in a circle" in str(failed)

    async def test_an_invalidation_that_is_cut_off(
        self, cache: Cache, many: Resource[str, Price]
    ) -> None:
        """E6: what is left is dropped at once."""
        work = asyncio.create_task(cache.invalidate_tag("all"))
        await until(lambda: len(many.core.memory.entries) < len(MANY))
        work.cancel()
        await outcome(asyncio.gather(work, return_exceptions=True))
        assert not many.core.memory.entries

    async def test_closing(self, cache: Cache, many: Resource[str, Price]) -> None:
        """Nothing is served from the first moment on; what was held is let go of in slices."""
        memory = many.core.memory
        await many.get(MANY[0])
        closing = asyncio.create_task(cache.close())
        await until(lambda: not memory.entries)
        assert many.peek(MANY[0]) is None
        await closing
        assert not memory._left
        await cache.open()
        assert (await cache.stats()).resources["price"].hits == 1

    async def test_closing_with_many_watches(
        self, cache: Cache, many: Resource[str, Price], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """None of them leaves key by key: there is nothing left to leave."""
        left: list[object] = []
        monkeypatch.setattr(
            "stillfresh.engine.lane.Lane.unsubscribe", lambda _, key: left.append(key)
        )
        watches = [many.watch(*MANY[:60]).__enter__() for _ in range(5)]
        await cache.close()
        assert left == []
        for watch in watches:
            assert [update async for update in watch] == []
        assert not many.core.watcher.late

    async def test_a_place_in_full_memory(self, cache: Cache, upstream: Upstream) -> None:
        """Where every entry was read, so many are passed over, not all."""
        size = SLICE + 500
        prices = declare(cache, upstream, max_entries=size, max_batch=size)
        keys = [str(number) for number in range(size)]
        for _ in range(2):
            await prices.get_many(keys)
        await prices.get("new")
        entries = prices.core.memory.entries.values()
        passed = sum(not entry.marked and not entry.hits for entry in entries)
        assert (len(entries), passed) == (size, SLICE + 1)

    async def test_closing_while_another_is_declared(
        self, cache: Cache, many: Resource[str, Price]
    ) -> None:
        """A declaration between two slices is in nobody's way."""
        closing = asyncio.create_task(cache.close())
        await until(lambda: not many.core.memory.entries)

        @cache.batched("other", fresh_for=60)
        async def others(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, 1)

        await closing
        await cache.open()
        assert await others("a") == 1
