"""E28: what is merely held costs nothing."""

import asyncio
import gc
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import (
    Answer,
    Cache,
    LoadFailed,
    NotOpen,
    Origin,
    Policy,
    StoreError,
    Verdict,
    bounded,
)
from stillfresh.bounded import CHUNK, SLICE, Line, TagIndex
from stillfresh.engine.entry import Entry
from stillfresh.stores.contract import Ask, Copy, Failure, Record, Store
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.memory_rows import MemoryRow
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    outcome,
    turns,
    until,
    version,
)
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
    def test_removing_a_tag_that_a_key_lacks_takes_it_from_no_other(self) -> None:
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

    async def test_reads_and_loads_under_way_are_asked_for_their_tags(
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
            store.let_go("read:done")
            upstream.let_go()
            await asyncio.gather(loading, reading)
            assert tags.calls.keys() == {MANY[0], MANY[2]}
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
        prices = declare(cache, upstream, tags=lambda _: [told[0]], max_entries=1)
        await prices("a")
        await prices("b")
        assert prices.peek("a") is None, "memory has room for one"
        told.clear()
        await prices("a")
        assert prices.peek("a") is not None
        await cache.invalidate_tag("other")
        assert prices.peek("a") is None

    async def test_nothing_keeps_the_tags_of_entries_that_memory_dropped(
        self, tmp_path: Path, upstream: Upstream
    ) -> None:
        """What memory knows of tags is as bounded as its entries are."""
        alive: weakref.WeakSet[Tag] = weakref.WeakSet()

        def tags(sku: str) -> list[str]:
            own = Tag(sku)
            alive.add(own)
            return [own, "all"]

        async with Cache(f"sqlite:///{tmp_path}/tags.db") as cache:
            prices = declare(cache, upstream, tags=tags, max_entries=10)
            await prices.get_many(MANY)
            await prices.invalidate(*MANY[-5:])
            await turns()
            gc.collect()
            assert len(alive) <= 10
            await cache.close()
            gc.collect()
            assert not alive


class Tag(str):
    """A text that can be referred to weakly."""

    __slots__ = ("__weakref__",)


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

    async def test_an_entry_with_a_plain_value_is_not_walked_over(
        self, prices: Prices, cache: Cache
    ) -> None:
        """E39: neither the entry nor its answer, nor the dict of all entries, nor their line."""

        @cache.batched("number", fresh_for=60, max_batch=1000)
        async def numbers(keys: list[int]) -> dict[int, int]:
            return {key: key for key in keys}

        await numbers.get_many(range(1000))
        gc.collect()
        tracked = gc.get_objects()
        assert not any(isinstance(it, Entry) for it in tracked)
        assert not gc.is_tracked(await numbers.get(5))
        chunks = [it for it in tracked if isinstance(it, tuple) and len(it) == CHUNK]
        assert not any(isinstance(it[0], Entry) for it in chunks)

    async def test_a_cycle_through_a_users_value_is_collected(self, cache: Cache) -> None:
        """A value that refers to its own answer goes when the cache and its caller let go of it."""

        @cache.batched("node", fresh_for=60, codec=NodeCodec())
        async def nodes(keys: list[str]) -> dict[str, Node]:
            return {key: Node() for key in keys}

        await nodes.get("a")
        answer = await nodes.get("a")  # from memory, which keeps this very answer
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


CROWD = [f"sku-{number}" for number in range(2 * SLICE + 500)]


async def turns_of(work: Awaitable[T]) -> tuple[int, T]:
    """How many turns of the loop the work took, and its result."""
    task = asyncio.ensure_future(work)
    taken = 0
    while not task.done():
        taken += 1
        await asyncio.sleep(0)
    return taken, task.result()


def in_memory(prices: Prices, keys: list[str]) -> int:
    return sum(prices.peek(key) is not None for key in keys)


class TestE28Slices:
    """Nothing that walks over many keys does it in one turn of the loop."""

    @pytest.fixture(params=["memory", "stepped"])
    async def cache(
        self, request: pytest.FixtureRequest, clock: ManualClock, sleeper: Sleeper
    ) -> AsyncIterator[Cache]:
        """On a store that never waits, and on one whose every step takes a turn of the loop."""
        store: Store = MemoryStore(clock=clock)
        if request.param == "stepped":
            store = SteppedStore(store)
        async with cache_on(store, clock, sleeper) as cache:
            yield cache

    @pytest.fixture
    async def many(self, cache: Cache, upstream: Upstream) -> Prices:
        """More entries of one tag than one turn of the loop goes through."""
        prices = declare(cache, upstream, tags=lambda _: ["all"], max_batch=500, concurrency=2)
        await prices.get_many(CROWD)
        upstream.calls.clear()
        return prices

    async def test_hits_are_counted_exactly_while_entries_come_and_go(
        self, cache: Cache, many: Prices
    ) -> None:
        """E12: although they are counted in slices."""
        for key in CROWD:
            await many.get(key)
        before = asyncio.create_task(cache.stats())
        await asyncio.sleep(0)
        await many.get("another")
        await many.invalidate(CROWD[-1])
        counts = (await before).resources["price"]
        assert counts.hits <= len(CROWD)
        assert (await cache.stats()).resources["price"].hits == len(CROWD)

    async def test_an_invalidation_of_many_has_emptied_memory_when_it_returns(
        self, cache: Cache, many: Prices, upstream: Upstream
    ) -> None:
        """It goes through them in slices."""
        taken, _ = await turns_of(cache.invalidate_tag("all"))
        assert taken >= len(CROWD) // SLICE
        assert in_memory(many, CROWD) == 0
        upstream.version = 2
        assert (await many(CROWD[0])).version == 2

    async def test_a_call_with_many_keys_takes_a_turn_for_each_slice(
        self, many: Prices, upstream: Upstream
    ) -> None:
        """Its answers are in the order of the keys."""
        least = len(CROWD) // SLICE
        taken, answers = await turns_of(many.get_many(CROWD[::-1]))
        assert taken >= least
        assert list(answers) == CROWD[::-1]
        assert upstream.calls == []
        taken, _ = await turns_of(many.invalidate(*CROWD))
        assert taken >= least
        taken, answers = await turns_of(many.get_many(CROWD))
        assert taken >= least
        assert list(answers) == CROWD
        assert [len(batch) for batch in upstream.calls] == [500] * (len(CROWD) // 500)
        taken, _ = await turns_of(many.delete(*CROWD))
        assert taken >= least
        assert in_memory(many, CROWD) == 0

    @pytest.mark.parametrize("max_batch", [4, 50])
    async def test_missing_keys_of_many_slices_are_loaded_together(
        self, cache: Cache, upstream: Upstream, max_batch: int
    ) -> None:
        """E4: as many calls as full batches need, though the keys are read slice by slice."""
        prices = declare(cache, upstream, max_batch=max_batch, concurrency=1000)
        await prices.get_many(CROWD)
        scattered = CROWD[::250]
        calls = [scattered[at : at + max_batch] for at in range(0, len(scattered), max_batch)]
        for lose in (prices.delete, prices.invalidate, partial(prices.invalidate, soft=True)):
            await lose(*scattered)
            upstream.calls.clear()
            assert list(await prices.get_many(CROWD)) == CROWD
            await idle(cache)
            assert sorted(upstream.calls) == sorted(calls)  # leases come in any order

    async def test_a_caller_of_many_keys_that_leaves_takes_every_slice_along(
        self, cache: Cache, many: Prices, upstream: Upstream
    ) -> None:
        """E3: what had not begun is not loaded."""
        await many.delete(*CROWD)
        upstream.hold()
        for wanted in (1, len(CROWD)):  # between two slices, and when all are under way
            leaving = asyncio.create_task(many.get_many(CROWD))
            while (await cache.stats()).resources["price"].loading < wanted:
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert leaving.cancelled()
        upstream.let_go()
        await idle(cache)
        assert len(upstream.calls) <= 2, "the calls that `concurrency` allows had begun"

    @pytest.mark.parametrize("ask", ["get_many", "known"])
    async def test_a_call_ends_if_the_cache_closes_between_two_slices(
        self, cache: Cache, many: Prices, upstream: Upstream, ask: str
    ) -> None:
        """E13: and nothing that it read is in the memory of the next opening."""
        await many.delete(*CROWD[::2])
        upstream.hold()
        for later in range(1, 6):
            call = asyncio.create_task(outcome(getattr(many, ask)(CROWD)))
            await turns(later)
            await cache.close()
            ended = await asyncio.wait_for(call, 10)
            is_cut = isinstance(ended, NotOpen)
            assert is_cut or all(isinstance(it, LoadFailed | Answer) for it in ended.values())  # type: ignore[attr-defined]
            await cache.open()
            counts = (await cache.stats()).resources["price"]
            assert (counts.loading, counts.entries, in_memory(many, CROWD)) == (0, 0, 0)
        upstream.let_go()

    async def test_an_override_between_two_slices_mixes_no_stores(
        self, cache: Cache, many: Prices, upstream: Upstream
    ) -> None:
        """E22: a call that began outside leaves nothing inside the block, and vice versa."""
        outside = asyncio.create_task(outcome(many.get_many(CROWD)))
        await turns(3)
        upstream.version = 2
        async with cache.override("memory://"):
            await outside
            assert {version(it) for it in (await many.get_many(CROWD)).values()} == {2}
            upstream.version = 3
            await many.invalidate(*CROWD)
            inside = asyncio.create_task(outcome(many.get_many(CROWD)))
            await turns(3)
        await inside
        upstream.version = 4
        after = {version(it) for it in (await many.get_many(CROWD)).values()}
        assert after <= {1, 4}, "stored before the block, or loaded after it"

    async def test_a_loader_that_asks_for_many_keys_in_a_circle_is_told(self, cache: Cache) -> None:
        """E3: the circle is seen before the last of the keys was asked for."""

        @cache.batched("outer", fresh_for="1h")
        async def outer(names: list[str]) -> dict[str, str]:
            await inner.get_many(CROWD)
            return dict.fromkeys(names, "value")

        @cache.batched("inner", fresh_for="1h", max_batch=10)
        async def inner(skus: list[str]) -> dict[str, str]:
            if CROWD[0] in skus:
                await outer("name")
            return dict.fromkeys(skus, "value")

        assert await asyncio.wait_for(outer("name"), 20) == "value"
        failed = await outcome(inner(CROWD[0]))
        assert isinstance(failed, LoadFailed)
        assert "in a circle" in str(failed)

    async def test_an_invalidation_that_is_cut_off_empties_memory_at_once(
        self, cache: Cache, many: Prices
    ) -> None:
        """E6: nothing of what it had not reached yet is served."""
        work = asyncio.create_task(cache.invalidate_tag("all"))
        await until(lambda: many.peek(CROWD[0]) is None)
        work.cancel()
        await asyncio.wait([work])
        assert in_memory(many, CROWD) == 0

    async def test_a_closing_cache_serves_nothing_from_the_first_moment_on(
        self, cache: Cache, many: Prices
    ) -> None:
        """What was held is let go of in slices; hits are counted all the same."""
        await many.get(CROWD[0])
        closing = asyncio.create_task(turns_of(cache.close()))
        await until(lambda: many.peek(CROWD[0]) is None)
        assert in_memory(many, CROWD) == 0
        taken, _ = await closing
        assert taken >= len(CROWD) // SLICE
        await cache.open()
        assert (await cache.stats()).resources["price"].hits == 1

    async def test_a_closed_cache_holds_no_values(self, cache: Cache) -> None:
        """Not even until it is opened again."""
        alive: weakref.WeakSet[Node] = weakref.WeakSet()

        class Noting(NodeCodec):
            def decode(self, _: bytes, /) -> Node:
                node = Node()
                alive.add(node)
                return node

        @cache.batched("node", fresh_for=60, codec=Noting())
        async def nodes(keys: list[str]) -> dict[str, Node]:
            return {key: Node() for key in keys}

        await nodes.get_many(MANY)
        assert alive
        await cache.close()
        gc.collect()
        assert not alive

    async def test_closing_with_many_watches_does_not_leave_them_key_by_key(
        self, cache: Cache, many: Prices, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is nothing left to leave."""
        left: list[object] = []
        monkeypatch.setattr(
            "stillfresh.engine.lane.Lane.unsubscribe", lambda _, key: left.append(key)
        )
        watches = [many.watch(*CROWD[:60]).__enter__() for _ in range(5)]
        await cache.close()
        assert left == []
        for watch in watches:
            assert [update async for update in watch] == []
        assert many.watched == ()

    async def test_full_memory_has_room_for_a_new_key_although_every_entry_was_read(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """One entry makes room, after a bounded search."""
        prices = declare(cache, upstream, max_entries=len(CROWD), max_batch=len(CROWD))
        for _ in range(2):
            await prices.get_many(CROWD)
        await prices.get("new")
        assert prices.peek("new") is not None
        assert in_memory(prices, CROWD) == len(CROWD) - 1

    async def test_a_resource_may_be_declared_while_the_cache_closes(
        self, cache: Cache, many: Prices
    ) -> None:
        """A declaration between two slices is in nobody's way."""
        closing = asyncio.create_task(cache.close())
        await until(lambda: many.peek(CROWD[0]) is None)

        @cache.batched("other", fresh_for=60)
        async def others(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, 1)

        await closing
        await cache.open()
        assert await others("a") == 1


class TestE28Line:
    @given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
    def test_a_line_is_first_in_first_out(self, joins: list[bool], chunk: int) -> None:
        """Whatever the sizes of its pieces: as a deque of the same objects."""
        line: Line[int] = Line()
        expected: deque[int] = deque()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bounded, "CHUNK", chunk)
            for number, is_join in enumerate(joins):
                if is_join:
                    line.append(number)
                    expected.append(number)
                elif expected:
                    assert line.popleft() == expected.popleft()
                assert len(line) == len(expected)
            assert [line.popleft() for _ in range(len(line))] == list(expected)

    def test_nothing_leaves_an_empty_line(self) -> None:
        with pytest.raises(IndexError):
            Line[int]().popleft()
