"""What a hostile reading of the engine found, each kept as a test: E3, E5, E6, E8, E9."""

import asyncio
import gc
from typing import Any

import pytest

from stillfresh import Answer, Cache, LoadFailed, NotOpen, Verdict
from stillfresh.stores.contract import Ask
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Sleeper, Upstream, declare, outcome, turns, until
from tests.kit.held_store import SteppedStore, cache_on, lease_of


class TestE6Deleted:
    async def test_who_asks_after_a_deletion_is_not_told_what_was_published_before_it(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Published, then deleted by another process, before our answer has arrived."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            before = await store.holding("publish:done", prices.get("a"))
            upstream.version = 2
            await store.inner.delete("price", ["a"])
            after = asyncio.create_task(prices.get("a"))
            await turns()
            store.let_go("publish:done")
            await before
            assert (await after).value == Price("a", 2)

    async def test_who_only_lost_the_lease_does_not_load_for_ever(
        self, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """A load that always takes longer than its lease: a few rounds, then it is left."""
        calls = 0
        cache = Cache(MemoryStore(clock=clock), clock=clock, sleep=sleeper)

        @cache.batched("slow", fresh_for=60, lease_for=1)
        async def slow(keys: list[str]) -> dict[str, int]:
            nonlocal calls
            calls += 1
            clock.advance(5)
            return dict.fromkeys(keys, calls)

        async with cache:
            assert (await slow.get("a")).verdict is Verdict.STALE
            await turns(500)
            assert calls <= 4


class Alarm(BaseException):
    """What a handler of a signal raises, in whatever code runs just then: pytest-timeout's does."""


class TestE3Interrupted:
    @pytest.mark.parametrize("step", ["acquire", "publish", "release"])
    async def test_whatever_ends_a_load_nobody_waits_for_ever(
        self, step: str, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Who asked is told; the next who asks has it loaded."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            upstream.error = OSError("away") if step == "release" else None
            store.alarms = {step: Alarm()}
            with pytest.raises(LoadFailed, match="interrupted"):
                await asyncio.wait_for(prices.get("a"), 10)
            upstream.error = None
            clock.advance(120)
            assert (await asyncio.wait_for(prices.get("a"), 10)).value == Price("a", 1)

    async def test_nor_for_the_load_of_another(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The same of one who looks now and then."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await lease_of(store.inner, "a")
            task = asyncio.create_task(prices.get("a"))
            await until(lambda: bool(sleeper.asked))
            store.alarms = {"read": Alarm()}
            sleeper.wake()
            with pytest.raises(LoadFailed, match="interrupted"):
                await asyncio.wait_for(task, 10)


class TestE8TagsInMemory:
    async def test_reach_what_the_store_has_dropped(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Memory knows its own keys, and so their tags."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream, tags=lambda _: ["all"])
            await prices("a")
            await cache._store.delete("price", ["a"])
            upstream.version = 2
            await cache.invalidate_tag("all")
            assert (await prices("a")).version == 2

    async def test_a_function_that_fails_stops_nothing(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Who cannot say whether it is tagged counts as tagged."""

        def tags(sku: str) -> list[str]:
            if sku == "bad":
                raise KeyError(sku)
            return ["all"]

        prices = declare(cache, upstream, tags=tags)
        await prices("a")
        upstream.hold()
        bad = asyncio.create_task(outcome(prices("bad")))
        await turns(1)
        upstream.version = 2
        await cache.invalidate_tag("all")
        upstream.let_go()
        await bad
        assert (await prices("a")).version == 2


class TestE9Dropped:
    async def test_memory_lets_go_of_what_was_invalidated(self, prices: Prices) -> None:
        """An entry's place in the ring keeps neither its value nor its copy."""
        for _ in range(5):
            await prices("a")
            await prices.invalidate("a")
        ring = prices._core.memory._ring
        assert not any(getattr(entry, name, None) for entry in ring for name in ("answer", "copy"))


class TestE5StoreAway:
    async def test_a_lease_is_given_back_if_publishing_failed(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The next who asks need not wait for it to run out."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            store.broken = {"publish"}
            await declare(cache, upstream)("a")
            assert (await store.inner.read("price", ["a"])) == {}

    async def test_a_loader_may_use_up_its_list(self, cache: Cache) -> None:
        """It is its own."""

        @cache.batched("eager", fresh_for=60)
        async def eager(keys: list[str]) -> dict[str, int]:
            found: dict[str, Any] = {}
            while keys:
                found[keys.pop()] = 1
            return found

        assert (await eager.get_many(["a", "b"]))["a"].value == 1

    async def test_who_follows_a_store_that_goes_away_is_answered(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """By a load without a lease."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await cache.open()
            await store.inner.acquire("price", [Ask("a")], 60)
            task = asyncio.create_task(prices.get("a"))
            await until(lambda: bool(sleeper.asked))
            store.broken = {"read", "acquire", "publish"}
            sleeper.wake()
            assert (await task).value == Price("a", 1)

    async def test_two_values_that_could_not_be_stored_are_not_taken_for_one(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Found by simulation: who read the first, and had its copy in hand while the second came
        (which said that there is none), was told that it is there, without a value.
        """
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            store.broken = {"acquire", "publish"}
            await prices.get("a")
            clock.advance(2)
            upstream.hold()
            upstream.absent = {"a"}
            renewing = asyncio.create_task(prices.refresh("a"))
            await upstream.asked.wait()
            reading = await store.holding("read", prices.get("a"))
            upstream.let_go()
            await renewing
            store.broken |= {"read"}
            store.let_go("read")
            answer = await reading
            assert (answer.found, answer.value) in [(True, Price("a", 1)), (False, None)]


class TestE13Closed:
    async def test_who_reads_while_the_store_fails_and_the_cache_closes_does_not_wait_for_ever(
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

    async def test_a_store_that_cannot_be_opened_for_nobody_is_not_complained_of(
        self, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Whoever had opened the cache was cancelled before the store refused."""
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        store = SteppedStore(MemoryStore(clock=clock))
        store.broken = {"open"}
        opening = await store.holding("open", cache_on(store, clock, sleeper).open())
        opening.cancel()
        await asyncio.wait([opening])
        del opening
        store.let_go("open")
        await turns()
        gc.collect()
        assert complaints == []
