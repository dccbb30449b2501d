"""E16: loaders that take longer than what they load is fresh."""

import asyncio
import logging

import pytest

from stillfresh import Answer, Cache, StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Sleeper, Upstream, declare, idle, turns
from tests.kit.held_store import SteppedStore, cache_on


async def slow_read(
    prices: Prices, upstream: Upstream, clock: ManualClock, takes: float
) -> Answer[Price]:
    """Read a key that has to be loaded, by a loader that takes so long."""
    reading = await upstream.holding(prices.get("a"))
    clock.advance(takes)
    upstream.let_go()
    return await reading


class TestE16SlowLoads:
    async def test_an_absence_is_believed_from_its_arrival(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """The load took longer than `absent_for`: the answer is kept for that time all the same.
        Its age counts from when it was sent."""
        prices = declare(cache, upstream, fresh_for=20, absent_for=2)
        upstream.absent = {"a"}
        answer = await slow_read(prices, upstream, clock, takes=3)
        assert (answer.found, answer.verdict, answer.age) == (False, Verdict.FRESH, 3)
        clock.advance(1.9)
        assert not (await prices.get("a")).found
        assert len(upstream.calls) == 1
        clock.advance(0.1)
        assert not (await prices.get("a")).found
        assert len(upstream.calls) == 2

    async def test_an_absence_is_believed_for_a_second_at_least(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """A tenth of a short `fresh_for` is no protection for the upstream."""
        prices = declare(cache, upstream, fresh_for=1)
        upstream.absent = {"a"}
        await prices.get("a")
        clock.advance(0.9)
        await prices.get("a")
        assert len(upstream.calls) == 1

    async def test_all_processes_believe_an_absence_as_long(
        self, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Its terms are stored with it."""
        store = MemoryStore(clock=clock)
        async with cache_on(store, clock, sleeper) as one, cache_on(store, clock, sleeper) as two:
            here, there = (declare(it, upstream, absent_for=2) for it in (one, two))
            upstream.absent = {"a"}
            await slow_read(here, upstream, clock, takes=3)
            clock.advance(1.9)
            assert (await there.get("a")).verdict is Verdict.FRESH
            assert len(upstream.calls) == 1

    async def test_a_value_just_loaded_is_stale_at_worst(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """To all callers that waited for it, the first and those that joined."""
        prices = declare(cache, upstream, fresh_for=1, stale_for=0, error_for=0)
        joined = asyncio.create_task(prices.get_many(["a"]))
        answer = await slow_read(prices, upstream, clock, takes=1.2)
        for one in (answer, (await joined)["a"]):
            assert (one.verdict, one.error) == (Verdict.STALE, None)
            assert one.age == pytest.approx(1.2)
        assert upstream.calls == [["a"]]
        await prices.get("a")
        assert len(upstream.calls) == 2

    async def test_a_watch_is_told_of_a_slow_load_as_stale(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """It waited for it too."""
        prices = declare(cache, upstream, fresh_for=1, stale_for=0, error_for=0)
        upstream.hold()
        with prices.watch("a") as watch:
            await upstream.asked.wait()
            clock.advance(1.2)
            upstream.let_go()
            assert (await anext(watch)).answer.verdict is Verdict.STALE

    async def test_callers_that_waited_in_another_process_are_served_it(
        self, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """They waited for the holder of the lease, and do not load once more."""
        store = MemoryStore(clock=clock)
        async with cache_on(store, clock, sleeper) as one, cache_on(store, clock, sleeper) as two:
            here, there = (
                declare(it, upstream, fresh_for=1, stale_for=0, error_for=0) for it in (one, two)
            )
            first = await upstream.holding(here.get("a"))
            second = asyncio.create_task(there.get("a"))
            await turns()
            clock.advance(1.2)
            upstream.let_go()
            await first
            await turns()
            sleeper.wake()
            answer = await second
            assert (answer.verdict, answer.value) == (Verdict.STALE, Price("a", 1))
            assert len(upstream.calls) == 1

    async def test_one_that_was_invalidated_meanwhile_is_not_served_there(
        self, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E6: it came while they waited, and is wrong: they wait for the next load."""
        store = MemoryStore(clock=clock)
        async with cache_on(store, clock, sleeper) as one, cache_on(store, clock, sleeper) as two:
            here, there = (declare(it, upstream, fresh_for=1) for it in (one, two))
            first = await upstream.holding(here.get("a"))
            second = asyncio.create_task(there.get("a"))
            await turns()
            upstream.let_go()
            await first
            upstream.version = 2
            await here.invalidate("a")
            await turns()
            sleeper.wake()
            assert (await second).value == Price("a", 2)

    async def test_an_old_copy_that_could_not_be_read_is_not_new(
        self, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """The store failed to say that it has one: that copy did not come while anybody waited."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as one, cache_on(store, clock, sleeper) as two:
            here, there = (declare(it, upstream, fresh_for=1) for it in (one, two))
            await here.get("a")
            clock.advance(7200)
            upstream.version = 2
            store.alarms["read"] = StoreError("lost")
            assert (await there.get("a")).value == Price("a", 2)

    async def test_a_loader_slower_than_its_freshness_is_reported_once(
        self, cache: Cache, upstream: Upstream, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One warning for the resource, with both figures."""
        prices = declare(cache, upstream, fresh_for=1)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                await slow_read(prices, upstream, clock, takes=1.25)
                await idle(cache)
                clock.advance(3600 * 2)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "price: the loader took 1.25 s, and what it loads is fresh for 1 s" in warning

    @pytest.mark.parametrize(("fresh_for", "takes"), [(0, 1), (2, 1)])
    async def test_other_loaders_are_not_reported(
        self,
        cache: Cache,
        upstream: Upstream,
        clock: ManualClock,
        caplog: pytest.LogCaptureFixture,
        fresh_for: float,
        takes: float,
    ) -> None:
        """One that is fast enough, and one whose values are never meant to be fresh."""
        prices = declare(cache, upstream, fresh_for=fresh_for)
        with caplog.at_level(logging.WARNING):
            await slow_read(prices, upstream, clock, takes=takes)
        assert not caplog.records
