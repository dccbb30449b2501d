"""Opened once, closed cleanly, on one loop, and from threads: E13."""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from stillfresh import Answer, Cache, LoadFailed, NotOpen, StillfreshError, StoreError
from stillfresh.engine import loads
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    outcome,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on, lease_of


@pytest.fixture
def shut(store: SteppedStore, clock: ManualClock, sleeper: Sleeper) -> Cache:
    """Not opened yet."""
    return cache_on(store, clock, sleeper)


@pytest.fixture
def goods(shut: Cache, upstream: Upstream) -> Prices:
    return declare(shut, upstream)


async def in_thread(work: Callable[[], Any]) -> object:
    """What a thread gets from calling it."""

    def call() -> object:
        try:
            return work()
        except Exception as exc:  # noqa: BLE001 (tests look at it)
            return exc

    return await asyncio.to_thread(call)


def others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


class TestE13Open:
    async def test_the_first_use_opens_the_cache(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """Once."""
        assert version(await goods.get("a")) == 1
        await goods.get("b")
        assert store.count("open") == 1
        await shut.close()

    async def test_two_tasks_open_the_store_once(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """The second waits for the first's opening."""
        await asyncio.gather(goods.get("a"), goods.get("b"), shut.open(), shut.stats())
        assert store.count("open") == 1
        await shut.close()

    async def test_a_caller_that_leaves_does_not_stop_the_opening(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """The others have their cache."""
        store.hold("open")
        leaves, stays = (asyncio.create_task(goods.get("a")) for _ in range(2))
        await store.reached("open")
        leaves.cancel()
        await turns()
        store.let_go("open")
        assert version(await stays) == 1
        await shut.close()

    async def test_an_opening_that_fails_can_be_tried_again(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """All who wait are told; the next one tries."""
        store.broken = {"open"}
        errors = await asyncio.gather(outcome(goods.get("a")), outcome(shut.open()))
        assert [type(error) for error in errors] == [StoreError] * 2
        store.broken = set()
        assert version(await goods.get("a")) == 1
        await shut.close()
        assert others() == set()

    async def test_a_resource_may_be_declared_later(self, cache: Cache, upstream: Upstream) -> None:
        """On a cache that is open already."""
        await cache.stats()
        assert version(await declare(cache, upstream).get("a")) == 1

    async def test_async_with_gives_the_cache(self, shut: Cache, store: SteppedStore) -> None:
        """Opened inside, closed behind."""
        async with shut as cache:
            assert cache is shut
            assert store.calls == ["open"]
        assert store.calls[-1] == "close"

    async def test_counts_are_there_before_and_after(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """E12: they open nothing, also where an event loop runs."""
        assert shut.counts().resources["price"].loads == 0
        assert store.calls == []
        await goods("a")
        await shut.close()
        assert shut.counts().resources["price"].loads == 1
        assert store.count("open") == 1

    @pytest.mark.parametrize("needs", [True, False])
    async def test_a_store_that_needs_eviction_is_swept(
        self, shut: Cache, store: SteppedStore, needs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Now and then, also after a failure; a store whose server sweeps is not asked."""
        monkeypatch.setattr("stillfresh.engine.lifecycle.EVICT_EVERY", 0)
        monkeypatch.setattr(store.inner, "evicts_hourly", needs)
        store.broken = {"evict"}
        async with shut:
            await turns()
        assert min(store.count("evict"), 2) == (2 if needs else 0)

    async def test_a_refusal_that_nobody_waits_for_is_not_reported(
        self, shut: Cache, store: SteppedStore
    ) -> None:
        """Whoever had opened the cache was cancelled before the store refused."""
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        store.broken = {"open"}
        opening = await store.holding("open", shut.open())
        opening.cancel()
        await asyncio.wait([opening])
        del opening
        store.let_go("open")
        await turns()
        gc.collect()
        assert complaints == []


class TestE13Close:
    async def test_a_closed_cache_refuses_new_work(
        self, shut: Cache, goods: Prices, cache: Cache, prices: Prices
    ) -> None:
        """Reads from memory as well: nothing is served any more."""
        for one, resource in ((shut, goods), (cache, prices)):
            await resource("a")
            await one.close()
            for work in (
                resource.get("a"),
                resource("a"),
                resource.get_many(["a"]),
                resource.refresh("a"),
                resource.invalidate("a"),
                resource.delete("a"),
                resource.explain("a"),
                one.stats(),
                one.evict(),
                one.invalidate_tag("x"),
            ):
                assert isinstance(await outcome(work), NotOpen)
            assert resource.peek("a") is None

    async def test_a_child_may_use_what_was_closed_before_the_fork(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """E21: nothing of it belongs to the parent."""
        await goods("a")
        await shut.close()
        shut.forked()
        async with shut:
            assert version(await goods.get("a")) == 1
        assert store.count("open") == 2

    async def test_a_child_is_refused_what_was_open_at_the_fork(
        self, shut: Cache, goods: Prices
    ) -> None:
        """E21: it belongs to the parent; nothing is served from memory either."""
        await goods("a")
        shut.forked()
        assert goods.peek("a") is None
        for work in (goods.get("a"), shut.open(), shut.close()):
            assert "open when the process forked" in str(await outcome(work))
        with pytest.raises(StillfreshError, match="open when the process forked"):
            shut.from_thread(goods.get, "a")
        assert shut.counts().resources["price"].loads == 1
        shut._is_forked = False
        await shut.close()

    async def test_a_child_may_have_a_store_of_its_own(
        self, shut: Cache, goods: Prices, store: SteppedStore, clock: ManualClock
    ) -> None:
        """E20: the parent's is left as it is, and so is its loop."""
        await goods("a")
        own, shut._loop = SteppedStore(MemoryStore(clock=clock)), asyncio.new_event_loop()
        shut.new_store = lambda: own
        with closing(shut._loop):
            shut.forked()
            assert goods.peek("a") is None
            await goods("a")
            await shut.close()
        assert (own.count("open"), own.count("close"), store.count("close")) == (1, 1, 0)

    async def test_closing_twice_closes_the_store_once(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """Also before it was ever opened."""
        await shut.close()
        await shut.open()
        await goods("a")
        await shut.close()
        await shut.close()
        assert store.count("close") == 1

    async def test_a_closed_cache_can_be_opened_again(
        self, shut: Cache, goods: Prices, upstream: Upstream
    ) -> None:
        """As new: what memory had is gone, what is asked for is loaded."""
        for number in (1, 2, 3):
            async with shut:
                upstream.version = number
                assert version(await goods.get("a")) == number
        assert len(upstream.calls) == 3

    async def test_opening_waits_until_a_closing_is_over(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """The store is never opened while it is being closed."""
        await goods("a")
        closing = await store.holding("close", shut.close())
        opening = asyncio.create_task(shut.open())
        await turns()
        assert (store.count("open"), opening.done()) == (1, False)
        store.let_go("close")
        await asyncio.gather(closing, opening)
        assert version(await goods.get("a")) == 1
        assert (store.count("open"), store.count("close")) == (2, 1)
        await shut.close()

    async def test_closing_leaves_no_task(
        self, shut: Cache, goods: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Whatever was under way: loads, refreshes, guards."""
        await goods("a")
        clock.advance(40)
        upstream.hold()
        await goods.get("a")
        waiting = [asyncio.create_task(outcome(goods.get(key))) for key in ("b", "c")]
        await upstream.asked.wait()
        await turns()
        await shut.close()
        assert {type(answer) for answer in await asyncio.gather(*waiting)} == {LoadFailed}
        assert others() == set()

    async def test_closing_gives_waiting_callers_an_error(
        self, shut: Cache, goods: Prices, upstream: Upstream
    ) -> None:
        """It says why; who has an old copy to fall back on gets that."""
        await goods("old")
        await goods.invalidate("old")
        upstream.hold()
        new, old = (asyncio.create_task(outcome(goods.get(key))) for key in ("new", "old"))
        await upstream.asked.wait()
        await shut.close()
        assert others() == set()
        error, answer = await new, await old
        assert isinstance(error, LoadFailed)
        assert "the cache was closed" in str(error)
        assert isinstance(answer, Answer)
        assert "the cache was closed" in str(answer.error)

    async def test_closing_ends_loads_that_wait_for_a_place(
        self, shut: Cache, upstream: Upstream
    ) -> None:
        """Keys whose load had not begun."""
        goods = declare(shut, upstream, concurrency=1, max_batch=1)
        upstream.hold()
        tasks = [asyncio.create_task(outcome(goods.get(key))) for key in "abc"]
        await upstream.asked.wait()
        await shut.close()
        assert {type(answer) for answer in await asyncio.gather(*tasks)} == {LoadFailed}
        assert upstream.calls == [["a"]]

    async def test_closing_ends_a_poll(
        self, shut: Cache, goods: Prices, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """Who waits for another process waits no longer."""
        await shut.open()
        await lease_of(store.inner, "a", lasts=60)
        task = asyncio.create_task(outcome(goods.get("a")))
        await until(lambda: sleeper.sleeping > 0)
        await shut.close()
        assert isinstance(await task, LoadFailed)
        assert others() == set()

    async def test_closing_frees_the_leases_of_loads_that_it_ends(
        self, shut: Cache, goods: Prices, upstream: Upstream, store: SteppedStore
    ) -> None:
        """Other processes need not wait for them to run out."""
        task = await upstream.holding(outcome(goods.get("a")))
        await shut.close()
        await task
        assert store.calls[-2:] == ["release", "close"]

    @pytest.mark.parametrize("step", ["acquire", "acquire:done"])
    async def test_closing_frees_a_lease_that_is_granted_meanwhile(
        self, shut: Cache, goods: Prices, store: SteppedStore, step: str
    ) -> None:
        """Closed while the store was asked for it, or as its answer came: nobody has to wait."""
        task = await store.holding(step, outcome(goods.get("a")))
        closing = asyncio.create_task(shut.close())
        await turns()
        store.hold("close")
        store.let_go(step)
        await store.reached("close")
        assert isinstance(await task, LoadFailed)
        assert await store.inner.read("price", ["a"]) == {}
        store.let_go("close")
        await closing
        assert others() == set()

    async def test_closing_asks_a_store_that_is_stuck_no_longer(
        self,
        shut: Cache,
        goods: Prices,
        store: SteppedStore,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Who closes does not wait for the whole grace."""
        monkeypatch.setattr(loads, "PARTING", 0.0)
        task = await store.holding("acquire", outcome(goods.get("a")))
        await shut.close()
        await task
        assert (store.calls[-1], others()) == ("close", set())
        assert "still running" not in caplog.text  # `all_tasks` does not list such a task

    async def test_closing_asks_a_stuck_store_no_longer_than_the_grace(
        self, store: SteppedStore, clock: ManualClock, upstream: Upstream
    ) -> None:
        """However short that is, nothing is left running."""
        brief = Cache(store, clock=clock, grace=0.05)
        task = await store.holding("acquire", outcome(declare(brief, upstream).get("a")))
        await brief.close()
        assert isinstance(await task, LoadFailed)
        assert (store.calls[-1], others()) == ("close", set())

    async def test_a_publish_that_had_started_finishes(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """The store is closed behind it."""
        task = await store.holding("publish", outcome(goods.get("a")))
        closing = asyncio.create_task(shut.close())
        await turns()
        assert not closing.done()
        assert task.done()
        held = store.inner
        assert isinstance(held, MemoryStore)
        store.hold("close")
        store.let_go("publish")
        await store.reached("close")
        assert (await held.read("price", ["a"]))["a"].copy is not None
        store.let_go("close")
        await closing
        assert others() == set()

    async def test_closing_gives_up_after_grace(
        self,
        store: SteppedStore,
        clock: ManualClock,
        sleeper: Sleeper,
        upstream: Upstream,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What does not end is named in the log."""
        cache = cache_on(store, clock, sleeper, grace=0)
        goods = declare(cache, upstream)
        task = await store.holding("publish", outcome(goods.get("a")))
        with caplog.at_level(logging.ERROR):
            await cache.close()
        assert "still running 0 s after close" in caplog.text
        await task
        store.broken = {"publish"}
        store.let_go("publish")
        await turns()

    async def test_closing_during_the_opening_waits_for_it(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """The opening ends, then it is closed; who waited for it does not hang."""
        task = await store.holding("open", outcome(goods.get("a")))
        closing = asyncio.create_task(shut.close())
        await turns()
        store.let_go("open")
        await closing
        await turns()
        hangs = not task.done()
        task.cancel()
        assert not hangs
        assert isinstance(await task, StillfreshError)
        assert store.count("close") == 1
        assert others() == set()

    async def test_closing_during_an_opening_that_fails_ends(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """There is nothing to close."""
        store.hold("open")
        store.broken = {"open"}
        task = asyncio.create_task(outcome(goods.get("a")))
        await store.reached("open")
        closing = asyncio.create_task(shut.close())
        await turns()
        store.let_go("open")
        await closing
        assert isinstance(await task, StoreError)
        assert others() == set()

    async def test_closing_during_a_read_leaves_nobody_hanging(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """A read of the store that was under way ends in an error."""
        await shut.open()
        task = await store.holding("read:done", outcome(goods.get("a")))
        await shut.close()
        store.let_go("read:done")
        await turns()
        hangs = not task.done()
        task.cancel()
        assert not hangs

    async def test_closing_during_a_read_lets_nothing_into_memory(
        self, shut: Cache, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """What was read before is not served after."""
        goods = declare(shut, upstream, memory_for="1h", max_entries=1)
        await goods("a")
        await goods("b")
        task = await store.holding("read:done", outcome(goods.get("a")))
        await shut.close()
        store.let_go("read:done")
        await task
        assert isinstance(await outcome(goods.get("a")), NotOpen), clock

    async def test_a_load_that_outlived_grace_does_not_land_in_the_next_life(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Closed, opened again, invalidated: a publication of the life before is not served."""
        cache = cache_on(store, clock, sleeper, grace=0)
        goods = declare(cache, upstream, memory_for="1h")
        task = await store.holding("publish:done", outcome(goods.get("a")))
        await cache.close()
        await task
        async with cache:
            await goods.invalidate("a")
            upstream.version = 2
            store.let_go("publish:done")
            await turns()
            assert version(await goods.get("a")) == 2

    async def test_a_closing_that_is_cancelled_can_be_done_again(
        self, shut: Cache, goods: Prices, store: SteppedStore
    ) -> None:
        """The store does not stay open for ever."""
        task = await store.holding("publish", outcome(goods.get("a")))
        closing = asyncio.create_task(shut.close())
        await turns()
        closing.cancel()
        await turns()
        store.let_go("publish")
        await task
        await turns()
        await shut.close()
        assert store.count("close") == 1

    async def test_loaders_are_cancelled_once_and_waited_for(self, shut: Cache) -> None:
        """Within grace; they can clean up, which may take an await."""
        ended: list[int] = []

        @shut.batched("slow", fresh_for=1, max_batch=1, concurrency=16)
        async def slow(keys: list[int]) -> dict[int, int]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await turns(5)
                ended.extend(keys)
                raise
            return {}

        task = asyncio.create_task(slow.get_many(range(16)))
        await turns()
        await shut.close()
        await task
        assert sorted(ended) == list(range(16))

    async def test_closing_while_the_store_fails_leaves_nobody_waiting(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Found by simulation: closed between the store's failure and who hears of it."""
        for later in range(12):
            store = SteppedStore(MemoryStore(clock=clock))
            cache = cache_on(store, clock, sleeper)
            prices = declare(cache, upstream)
            await cache.open()
            reading = await store.holding("read", outcome(prices.get("a")))
            store.broken = {"read"}
            store.let_go("read")
            await turns(later)
            await cache.close()
            async with asyncio.timeout(60):
                assert isinstance(await reading, Answer | NotOpen | LoadFailed)


class TestE13Loop:
    def test_another_event_loop_is_refused(self) -> None:
        """With what to do instead; closed there, it can be used here."""
        cache = Cache("memory://")

        @cache.cached("number", fresh_for=60)
        async def number(of: int) -> int:
            return of

        first = asyncio.new_event_loop()
        try:
            assert first.run_until_complete(number(1)) == 1
            with pytest.raises(StillfreshError, match=r"another event loop.*from_thread"):
                asyncio.run(number.of(2).get())
            first.run_until_complete(cache.close())
        finally:
            first.close()

        async def again() -> int:
            async with cache:
                return await number(3)

        assert asyncio.run(again()) == 3


class TestE13FromThread:
    async def test_from_thread_returns_the_value(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        """From many threads, with one load."""
        upstream.hold()
        work = [
            asyncio.create_task(in_thread(lambda: cache.from_thread(prices, "a"))) for _ in range(4)
        ]
        await upstream.asked.wait()
        upstream.let_go()
        assert await asyncio.gather(*work) == [Price("a", 1)] * 4
        assert upstream.calls == [["a"]]

    async def test_from_thread_takes_keyword_arguments(self, cache: Cache) -> None:
        """As the function does."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int, region: str = "eu") -> str:
            return f"{year} {region}"

        got = await in_thread(lambda: cache.from_thread(report, 2026, region="us"))
        assert got == "2026 us"

    async def test_from_thread_raises_the_failure(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        """As `await` would."""
        upstream.error = ConnectionError("down")
        error = await in_thread(lambda: cache.from_thread(prices.get, "a"))
        assert isinstance(error, LoadFailed)
        assert error.__cause__ is upstream.error

    async def test_from_thread_refuses_the_loops_own_thread(
        self, cache: Cache, prices: Prices
    ) -> None:
        """It would wait for itself."""
        with pytest.raises(StillfreshError, match="await it instead"):
            cache.from_thread(prices, "a")

    async def test_from_thread_refuses_a_closed_cache(self, shut: Cache, goods: Prices) -> None:
        """Neither open yet nor any more: there is no loop to call."""
        assert isinstance(await in_thread(lambda: shut.from_thread(goods, "a")), NotOpen)
        await shut.open()
        await shut.close()
        assert isinstance(await in_thread(lambda: shut.from_thread(goods, "a")), NotOpen)

    async def test_closing_tells_a_thread_that_waits(
        self, shut: Cache, goods: Prices, upstream: Upstream
    ) -> None:
        """It gets an error, and the thread ends."""
        await shut.open()
        before = threading.active_count()
        work = await upstream.holding(in_thread(lambda: shut.from_thread(goods, "a")))
        await shut.close()
        assert isinstance(await work, LoadFailed)
        assert threading.active_count() <= before + 1

    @pytest.mark.filterwarnings("ignore:coroutine")
    def test_from_thread_refuses_a_loop_that_has_ended(self) -> None:
        """A cache that nobody closed: NotOpen, and no coroutine left unawaited."""
        cache = Cache("memory://")

        @cache.cached("number", fresh_for=60)
        async def number(of: int) -> int:
            return of

        assert asyncio.run(number.of(1).get()).value == 1
        with pytest.raises(NotOpen):
            cache.from_thread(number, 1)
