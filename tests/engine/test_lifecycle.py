"""E13: opened once, closed cleanly, opened again; one loop, and threads through a door."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_kit import Price, Sleeper, Upstream, declare, outcome, turns, until

from stillfresh import Cache, LoadFailed, NotOpen, Resource, StillfreshError, StoreError
from stillfresh.stores.contract import Ask, Copy, Lease
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock


class Slow(MemoryStore):
    """A store whose publications and opening wait for a word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opened = 0
        self.failing = False
        self.publishing = asyncio.Event()
        self.go = asyncio.Event()
        self.published: list[str] = []

    async def open(self) -> None:
        self.opened += 1
        await asyncio.sleep(0)
        if self.failing:
            raise StoreError("cannot be opened")
        await super().open()

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        self.publishing.set()
        await self.go.wait()
        self.published += copies
        return await super().publish(kind, copies)


def left() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


class TestE13Open:
    async def test_the_first_read_opens_it(self, url: str, upstream: Upstream) -> None:
        """Without `async with`."""
        cache = Cache(url)
        assert await declare(cache, upstream)("a") == Price("a", 1)
        await cache.close()
        assert not left()

    async def test_two_tasks_open_it_once(self, upstream: Upstream) -> None:
        """Both wait for the same opening."""
        store = Slow()
        store.go.set()
        cache = Cache(store)
        prices = declare(cache, upstream)
        await asyncio.gather(prices("a"), prices("b"))
        assert store.opened == 1
        await cache.close()

    async def test_an_opening_that_failed_can_be_tried_again(self, upstream: Upstream) -> None:
        """The error is the store's; nothing is broken by it."""
        store = Slow()
        store.go.set()
        store.failing = True
        cache = Cache(store)
        prices = declare(cache, upstream)
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be opened"):
                await prices("a")
        store.failing = False
        assert await prices("a") == Price("a", 1)
        await cache.close()


class TestE13Close:
    async def test_refuses_new_work(self, cache: Cache, prices: Resource[str, Price]) -> None:
        """Every door says NotOpen; memory gives nothing either."""
        await prices("a")
        await cache.close()
        asks = [prices("a"), prices.get("a"), prices.get_many(["a"]), prices.refresh("a"),
                prices.invalidate("a"), prices.delete("a"), prices.explain("a"),
                cache.invalidate_tag("t"), cache.stats(), cache.evict()]  # fmt: skip
        for ask in asks:
            with pytest.raises(NotOpen):
                await ask
        assert prices.peek("a") is None

    async def test_those_who_wait_are_told(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """A load under way ends with the cache; nobody hangs, nothing is left running."""
        upstream.hold()
        waiting = [asyncio.create_task(outcome(prices(key))) for key in "aab"]
        await upstream.asked.wait()
        queued = asyncio.create_task(outcome(prices("late")))
        await turns(1)
        await cache.close()
        for task in (*waiting, queued):
            error = await task
            assert isinstance(error, LoadFailed)
            assert "the cache was closed" in str(error)
        assert not left()

    async def test_a_publication_that_had_started_finishes(self, upstream: Upstream) -> None:
        """What was loaded is not lost."""
        store = Slow()
        cache = Cache(store)
        task = asyncio.create_task(outcome(declare(cache, upstream)("a")))
        await store.publishing.wait()
        closing = asyncio.create_task(cache.close())
        await turns()
        assert not closing.done()
        store.go.set()
        await closing
        await task
        assert store.published == ["a"]
        assert not left()

    async def test_releases_the_leases_of_what_it_ends(
        self, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Another process need not wait for them to run out."""
        store = MemoryStore(clock=clock)
        cache, other = Cache(store, clock=clock), MemoryStore(clock=clock)
        other._rows = store._rows
        await other.open()
        upstream.hold()
        task = asyncio.create_task(outcome(declare(cache, upstream)("a")))
        await upstream.asked.wait()
        assert (await other.read("price", ["a"]))["a"].held_until is not None
        closing = asyncio.create_task(cache.close())
        await until(lambda: not store._rows or closing.done())
        assert "a" not in await other.read("price", ["a"])
        await closing
        await task

    async def test_a_waiter_for_another_process_is_told(
        self, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Closing ends the polling too."""
        store = MemoryStore(clock=clock)
        await store.open()
        await store.acquire("price", [Ask("a")], 60)
        cache = Cache(store, clock=clock, sleep=sleeper)
        task = asyncio.create_task(outcome(declare(cache, upstream)("a")))
        await until(lambda: bool(sleeper.asked))
        await cache.close()
        assert isinstance(await task, LoadFailed)
        assert not left()

    async def test_what_does_not_end_is_not_waited_for_for_ever(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A loader that ignores its cancellation is named after `grace`, and the cache closes."""
        stubborn = asyncio.Event()
        cache = Cache("memory://", grace="10ms")

        @cache.cached("stubborn", fresh_for=1)
        async def load() -> int:
            while not stubborn.is_set():
                try:
                    await stubborn.wait()
                except asyncio.CancelledError:
                    continue
            return 1

        task = asyncio.create_task(outcome(load()))
        await turns()
        await cache.close()
        assert "still running" in caplog.text
        assert isinstance(await task, LoadFailed)
        stubborn.set()
        await turns()
        assert not left()

    async def test_any_number_of_times_and_open_again(self, url: str, upstream: Upstream) -> None:
        """Closed twice, opened again, it works as new; SQLite has kept what it had."""
        cache = Cache(url)
        prices = declare(cache, upstream)
        for _ in range(2):
            async with cache:
                assert await prices("a") == Price("a", 1)
            await cache.close()
        assert len(upstream.calls) == (2 if url == "memory://" else 1)
        assert not left()

    async def test_leaves_no_thread(self, url: str, upstream: Upstream) -> None:
        """The writer's thread ends with the cache."""
        before = threading.active_count()
        async with Cache(url) as cache:
            await declare(cache, upstream)("a")
        assert threading.active_count() == before


class TestE13Loops:
    def test_another_loop_is_told_so(self, url: str) -> None:
        """A cache belongs to the loop that opened it."""
        cache = Cache(url)
        prices = declare(cache, Upstream())

        async def main() -> object:
            await prices("a")
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(lambda: asyncio.run(outcome(prices("another"))))
                found = await asyncio.wrap_future(other)
            await cache.close()
            return found

        error = asyncio.run(main())
        assert isinstance(error, StillfreshError)
        assert "another event loop" in str(error)

    def test_closed_on_one_loop_it_opens_on_the_next(self, url: str) -> None:
        """Two `asyncio.run`, one after the other."""
        cache, upstream = Cache(url), Upstream()
        prices = declare(cache, upstream)

        async def main() -> Price:
            async with cache:
                upstream.asked = asyncio.Event()
                return await prices("a")

        assert [asyncio.run(main()), asyncio.run(main())] == [Price("a", 1)] * 2


class TestE13Threads:
    async def test_threads_get_values(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Sixteen threads, one cold key: one load, and each has the value."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(16) as pool:
            values = await asyncio.gather(
                *(loop.run_in_executor(pool, cache.from_thread, prices, "a") for _ in range(16))
            )
        assert values == [Price("a", 1)] * 16
        assert upstream.calls == [["a"]]

    async def test_threads_get_errors(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """What the call would raise."""
        upstream.error = ConnectionError("down")
        with pytest.raises(LoadFailed, match="ConnectionError: down"):
            await asyncio.to_thread(cache.from_thread, prices, "a")

    async def test_its_own_loop_is_refused(
        self, cache: Cache, prices: Resource[str, Price]
    ) -> None:
        """It would wait for itself."""
        with pytest.raises(StillfreshError, match="await it instead"):
            cache.from_thread(prices, "a")

    async def test_a_closed_cache_is_refused(
        self, cache: Cache, prices: Resource[str, Price]
    ) -> None:
        """There is no loop to call."""
        await cache.close()
        with pytest.raises(NotOpen):
            await asyncio.to_thread(cache.from_thread, prices, "a")
