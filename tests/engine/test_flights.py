"""One load per key, whoever asks and whoever leaves: E3."""

import asyncio
import gc
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import pytest

from stillfresh import Answer, Cache, LoadFailed, Origin, Verdict
from stillfresh.stores.contract import Failure
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    is_settled_within,
    outcome,
    renew,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on, lease_of

REQUEST: ContextVar[str] = ContextVar("request", default="nobody")


class Quit(BaseException):
    """Not an Exception."""


async def ask(prices: Prices, count: int) -> list["asyncio.Task[Answer[Price]]"]:
    """So many tasks, all waiting for one key."""
    tasks = [asyncio.create_task(prices.get("a")) for _ in range(count)]
    await turns(3)
    return tasks


class TestE3Flights:
    @pytest.mark.parametrize("count", [1, 2, 100])
    async def test_one_load_whatever_number_of_tasks_ask(
        self, prices: Prices, upstream: Upstream, count: int
    ) -> None:
        """All get the same copy; one of them is told that it was its own load."""
        answers = await asyncio.gather(*(prices.get("a") for _ in range(count)))
        assert upstream.calls == [["a"]]
        assert {(version(answer), answer.verdict) for answer in answers} == {(1, Verdict.FRESH)}
        origins = [answer.origin for answer in answers]
        assert (origins.count(Origin.LOADED), origins.count(Origin.ANOTHER)) == (1, count - 1)

    async def test_settled_says_whether_a_load_still_runs(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """I22: it waits for the load, but no longer than it is told."""
        loading = await upstream.holding(prices.get("a"))
        assert not await is_settled_within(prices, 0)
        settled = asyncio.create_task(is_settled_within(prices, 60))
        await turns()
        assert not settled.done()
        upstream.let_go()
        assert await settled
        assert loading.done()

    async def test_settled_waits_for_a_load_that_is_about_to_begin(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Loads begin in the next turn of the loop."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream)
            loading = asyncio.create_task(prices.get("a"))
            await asyncio.sleep(0)
            assert upstream.calls == []
            assert await is_settled_within(prices, 60)
            assert upstream.calls == [["a"]]
            await loading

    async def test_a_caller_that_comes_during_the_load_joins_it(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """By get, by call, by get_many, by refresh, by handle: no second load."""
        upstream.hold()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(prices.get("a"))]
        await upstream.asked.wait()
        tasks += [
            asyncio.ensure_future(work)
            for work in (
                prices.get("a"),
                prices("a"),
                prices.get_many(["a"]),
                prices.refresh("a"),
                prices.of("a").get(),
            )
        ]
        await turns()
        upstream.let_go()
        await asyncio.gather(*tasks)
        assert upstream.calls == [["a"]]

    async def test_a_load_after_a_load_is_a_new_one(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Nothing is left of the first."""
        await prices.refresh("a")
        await prices.refresh("a")
        assert upstream.calls == [["a"], ["a"]]

    async def test_a_failure_is_told_to_all_by_errors_of_their_own(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """One cause, a new LoadFailed for each, so that tracebacks do not pile up."""
        upstream.error = ConnectionError("down")
        errors = await asyncio.gather(*(outcome(prices.get("a")) for _ in range(3)))
        assert {type(error) for error in errors} == {LoadFailed}
        assert len({id(error) for error in errors}) == 3
        assert {error.__cause__ for error in errors if isinstance(error, LoadFailed)} == {
            upstream.error
        }

    async def test_a_refresh_that_waits_for_the_next_load_ignores_cooldowns_too(
        self, ours: Prices, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """E7: the load that it joined was invalidated, and another process has failed since."""
        upstream.hold()
        first = asyncio.create_task(outcome(ours.refresh("a")))
        await upstream.asked.wait()
        await ours.invalidate("a")
        second = asyncio.create_task(outcome(ours.refresh("a")))
        await turns()
        lease = await lease_of(store.inner, "a")
        failure = Failure(1, clock() + 60, "down there")
        await store.inner.release("price", [lease], {"a": failure})
        upstream.let_go()
        await first
        assert not isinstance(await second, Exception)
        assert len(upstream.calls) == 2


class TestE28Behind:
    async def test_background_refreshes_that_wait_are_at_most_ten_thousand(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Stale answers are served all the same, and callers that must wait are queued beyond."""
        keys = [str(number) for number in range(10_100)]
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream, max_batch=1, concurrency=1, max_entries=20_000)
            await prices.put_many({key: Price(key, 1) for key in keys})
            clock.advance(31)
            upstream.hold()
            answers = await prices.get_many(keys)
            assert {answer.verdict for answer in answers.values()} == {Verdict.STALE}
            await turns()
            queued = (await cache.stats()).resources["price"].queued
            assert 9_000 < queued <= 10_000
            waiting = asyncio.create_task(outcome(prices.get("missing")))
            await turns()
            assert (await cache.stats()).resources["price"].queued == queued + 1
        assert isinstance(await waiting, LoadFailed)


class TestE3Cancellation:
    @pytest.mark.parametrize("which", [[0], [2], [4], [0, 1, 2, 3]])
    async def test_cancelling_some_waiters_never_touches_the_others(
        self, prices: Prices, upstream: Upstream, which: list[int]
    ) -> None:
        """First, middle, last, or all but one."""
        upstream.hold()
        tasks = await ask(prices, 5)
        for number in which:
            tasks[number].cancel()
        await turns()
        upstream.let_go()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for number, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError if number in which else Answer)
        assert upstream.calls == [["a"]]

    async def test_cancelling_all_waiters_does_not_waste_the_load(
        self, prices: Prices, upstream: Upstream, cache: Cache
    ) -> None:
        """It runs to its end and is published: the next reader has it."""
        upstream.hold()
        tasks = await ask(prices, 3)
        await upstream.asked.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        upstream.let_go()
        await idle(cache)
        answer = await prices.get("a")
        assert (version(answer), answer.verdict) == (1, Verdict.FRESH)
        assert upstream.calls == [["a"]]

    async def test_cancelling_a_caller_of_many_keys_leaves_them_to_others(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """A caller of many leaves each of its keys, and no other caller's."""
        upstream.hold()
        many = asyncio.create_task(prices.get_many(["a", "b"]))
        one = asyncio.create_task(prices.get("b"))
        await upstream.asked.wait()
        many.cancel()
        await turns()
        upstream.let_go()
        assert version(await one) == 1
        assert many.cancelled()

    async def test_cancelling_the_last_waiter_before_the_load_began_drops_the_key(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """The loader is never asked for it."""
        prices = declare(cache, upstream, concurrency=1)
        first = await upstream.holding(prices.get("a"))
        waiting = [asyncio.create_task(prices.get(key)) for key in ("b", "b", "c")]
        await turns()
        waiting[0].cancel()
        waiting[1].cancel()
        await turns()
        upstream.let_go()
        await asyncio.gather(first, waiting[2])
        await idle(cache)
        assert upstream.calls == [["a"], ["c"]]
        assert version(await prices.get("b")) == 1

    async def test_cancelling_one_waiter_before_the_load_began_leaves_the_key_to_others(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Only its last waiter takes a key along."""
        prices = declare(cache, upstream, concurrency=1)
        first = await upstream.holding(prices.get("a"))
        leaves, stays = (asyncio.create_task(prices.get("b")) for _ in range(2))
        await turns()
        leaves.cancel()
        await turns()
        upstream.let_go()
        await first
        assert version(await stays) == 1

    async def test_a_loader_that_cancels_itself_has_failed(self, cache: Cache) -> None:
        """It cancels nobody: those who wait get LoadFailed."""

        @cache.batched("odd", fresh_for=1)
        async def odd(keys: list[str]) -> dict[str, int]:
            raise asyncio.CancelledError(keys)

        errors = await asyncio.gather(*(outcome(odd("a")) for _ in range(3)))
        assert {type(error) for error in errors} == {LoadFailed}
        assert "the loader cancelled itself" in str(errors[0])
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def test_a_loader_that_cancels_its_own_task_has_failed(self, cache: Cache) -> None:
        """The same, by the other way of doing it."""

        @cache.batched("odd", fresh_for=1)
        async def odd(keys: list[str]) -> dict[str, int]:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
            return dict.fromkeys(keys, 1)

        with pytest.raises(LoadFailed, match="cancelled itself"):
            await odd("a")

    @pytest.mark.parametrize(
        "error", [Quit("now"), GeneratorExit("now"), StopAsyncIteration("now"), LoadFailed("now")]
    )
    async def test_whatever_a_loader_raises_is_a_failure(
        self, prices: Prices, upstream: Upstream, error: BaseException
    ) -> None:
        """Also what is no Exception, and what is our own; the cause says which."""
        upstream.error = error
        with pytest.raises(LoadFailed, match=r"price 'a': loading failed: .*now") as caught:
            await prices.get("a")
        assert caught.value.__cause__ is error

    async def test_an_error_that_cannot_be_printed_is_a_failure_too(
        self, prices: Prices, upstream: Upstream, cache: Cache
    ) -> None:
        """Nobody hangs, and the next load goes on."""

        class Mute(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        upstream.error = Mute()
        assert isinstance(await outcome(prices.get("a")), LoadFailed)
        await idle(cache)

    async def test_a_renewal_that_is_closed_between_two_keys_drops_the_loads_that_have_not_begun(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """A watcher that stops after the first key drops the loads that have not begun."""
        prices = declare(cache, upstream, max_batch=1, concurrency=1)
        renewal = renew(prices, ["a", "b", "c"])
        upstream.hold()

        async def let_go() -> None:
            await upstream.asked.wait()
            upstream.let_go()

        letting_go = asyncio.create_task(let_go())
        assert list(await anext(renewal)) == ["a"]
        await renewal.aclose()
        await letting_go
        await idle(cache)
        assert upstream.calls == [["a"]]


class Alarm(BaseException):
    """What a handler of a signal raises, in whatever code runs just then: pytest-timeout's does."""


class TestE3Interrupted:
    @pytest.mark.parametrize("step", ["acquire", "publish", "release"])
    async def test_whatever_ends_a_load_nobody_waits_for_ever(
        self, store: SteppedStore, ours: Prices, clock: ManualClock, upstream: Upstream, step: str
    ) -> None:
        """Who asked is told; the next who asks has it loaded."""
        upstream.error = OSError("away") if step == "release" else None
        store.alarms = {step: Alarm()}
        with pytest.raises(LoadFailed, match="interrupted"):
            await asyncio.wait_for(ours.get("a"), 60)
        upstream.error = None
        clock.advance(120)
        assert (await asyncio.wait_for(ours.get("a"), 60)).value == Price("a", 1)

    async def test_an_error_that_nobody_expects_is_told_and_logged(
        self, store: SteppedStore, ours: Prices, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A store may not raise this; the next who asks has it loaded."""
        store.alarms = {"acquire": ZeroDivisionError()}
        with pytest.raises(LoadFailed, match="price: internal error of stillfresh; see the log"):
            await asyncio.wait_for(ours.get("a"), 10)
        assert "ZeroDivisionError" in caplog.text
        assert version(await ours.get("a")) == 1

    async def test_nobody_waits_for_ever_for_the_load_of_another_process(
        self, store: SteppedStore, ours: Prices, sleeper: Sleeper
    ) -> None:
        """The same of one who looks now and then."""
        await lease_of(store.inner, "a")
        task = asyncio.create_task(ours.get("a"))
        await until(lambda: bool(sleeper.asked))
        store.alarms = {"read": Alarm()}
        sleeper.wake()
        with pytest.raises(LoadFailed, match="interrupted"):
            await asyncio.wait_for(task, 10)


class TestE3LoadTimeout:
    async def test_load_timeout_ends_a_loader_that_never_returns(
        self, prices: Prices, upstream: Upstream, sleeper: Sleeper, clock: ManualClock
    ) -> None:
        """After exactly `load_timeout`, with the resource and the reason."""
        task = await upstream.holding(prices.get("a"))
        slept = 0.0
        while not task.done():
            await until(lambda: sleeper.sleeping > 0 or task.done())
            slept = sum(sleeper.asked)
            clock.advance(sleeper.asked[-1])
            sleeper.wake()
            await turns()
        assert slept == pytest.approx(30)
        with pytest.raises(
            LoadFailed, match=r"price 'a'.*TimeoutError: no answer within 30 s \(load_timeout\)"
        ) as caught:
            await task
        assert isinstance(caught.value.__cause__, TimeoutError)

    async def test_load_timeout_is_an_option(
        self, cache: Cache, upstream: Upstream, sleeper: Sleeper
    ) -> None:
        """As long as said; the key then cools down as after any failure."""
        prices = declare(cache, upstream, load_timeout="250ms")
        task = await upstream.holding(prices.get("a"))
        await until(lambda: bool(sleeper.asked))
        assert sleeper.asked == [0.25]
        sleeper.wake()
        with pytest.raises(LoadFailed, match=r"within 0\.25 s"):
            await task
        with pytest.raises(LoadFailed, match="not tried again"):
            await prices.get("a")
        assert upstream.calls == [["a"]]

    async def test_load_timeout_cancels_the_loader(self, cache: Cache, sleeper: Sleeper) -> None:
        """It may clean up."""
        ended: list[str] = []

        @cache.batched("slow", fresh_for=1, load_timeout=1)
        async def slow(keys: list[str]) -> dict[str, int]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.extend(keys)
            return {}

        task = asyncio.create_task(outcome(slow("a")))
        await until(lambda: sleeper.sleeping > 0)
        sleeper.wake()
        assert isinstance(await task, LoadFailed)
        await until(lambda: ended == ["a"])

    async def test_a_loader_that_ignores_cancellation_blocks_nobody(
        self, cache: Cache, sleeper: Sleeper
    ) -> None:
        """Its waiters have their answer, its place is free, and what it says later is dropped."""
        stuck, calls = asyncio.Event(), []

        @cache.batched("stubborn", fresh_for=60, load_timeout=1, concurrency=1)
        async def stubborn(keys: list[str]) -> dict[str, int]:
            calls.append(keys)
            while keys == ["a"] and not stuck.is_set():
                try:
                    await stuck.wait()
                except asyncio.CancelledError:
                    continue
            return dict.fromkeys(keys, 1)

        task = asyncio.create_task(outcome(stubborn("a")))
        await until(lambda: sleeper.sleeping > 0)
        sleeper.wake()
        assert isinstance(await task, LoadFailed)
        assert await stubborn("b") == 1
        stuck.set()
        await turns()
        assert isinstance(await outcome(stubborn("a")), LoadFailed)
        assert calls == [["a"], ["b"]]

    async def test_a_loader_that_fails_while_it_is_cancelled_says_nothing_more(
        self, cache: Cache, sleeper: Sleeper
    ) -> None:
        """No "Task exception was never retrieved" in anybody's log."""
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))

        @cache.batched("rude", fresh_for=1, load_timeout=1)
        async def rude(keys: list[str]) -> dict[str, int]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError(keys) from None
            return {}

        task = asyncio.create_task(outcome(rude("a")))
        await until(lambda: sleeper.sleeping > 0)
        sleeper.wake()
        assert isinstance(await task, LoadFailed)
        del task
        await turns()
        gc.collect()
        assert told == []


class TestE3Circles:
    async def test_a_loader_that_reads_its_own_key_is_told(self, cache: Cache) -> None:
        """A loader that asks for the very key it loads."""

        @cache.batched("self", fresh_for=60)
        async def own(keys: list[str]) -> dict[str, int]:
            return {key: await own(key) for key in keys}

        with pytest.raises(LoadFailed, match=r"own.* in a circle|self 'a': .*in a circle"):
            await own("a")

    async def test_a_loader_that_reads_a_key_of_its_own_batch_is_told(self, cache: Cache) -> None:
        """A key that another key of the same call asks for."""

        @cache.batched("pair", fresh_for=60)
        async def pair(keys: list[str]) -> dict[str, int]:
            return {key: await pair("b") if key == "a" else 1 for key in keys}

        answers = await pair.get_many(["a", "b"])
        assert "in a circle" in str(answers["a"].error)
        answers = await pair.get_many(["b"])

    async def test_a_loader_that_was_told_waits_no_longer(self, cache: Cache) -> None:
        """It has its answer for B, and waits for C: the next load of B may wait for it."""
        gates = {"b": asyncio.Event(), "c": asyncio.Event()}
        loads: list[str] = []

        @cache.cached("whole", fresh_for=60)
        async def whole() -> int:
            return sum(it.value for it in (await parts.get_many(["b", "c"])).values())

        @cache.batched("part", fresh_for=60, max_batch=1)
        async def parts(keys: list[str]) -> dict[str, int]:
            loads.extend(keys)
            if loads.count("b") == 2:
                return {"b": await whole()}
            await gates[keys[0]].wait()
            return {keys[0]: 1}

        asking = asyncio.create_task(whole())
        await until(lambda: loads == ["b", "c"])
        await parts.invalidate("b")
        later = asyncio.create_task(parts("b"))
        gates["b"].set()
        await until(lambda: loads == ["b", "c", "b"])
        await turns()
        gates["c"].set()
        assert [await asking, await later] == [2, 2]

    async def test_a_circle_of_two_resources_is_told(self, cache: Cache) -> None:
        """A waits for B, which waits for A."""

        @cache.batched("one", fresh_for=60)
        async def one(keys: list[str]) -> dict[str, int]:
            return {key: await two(key) for key in keys}

        @cache.cached("two", fresh_for=60)
        async def two(key: str) -> int:
            return await one(key)

        with pytest.raises(LoadFailed, match="in a circle"):
            await one("a")

    async def test_a_circle_of_three_resources_is_told(self, cache: Cache) -> None:
        """A, B, C and back to A."""

        @cache.batched("one", fresh_for=60)
        async def one(keys: list[str]) -> dict[str, int]:
            return {key: await two(key) for key in keys}

        @cache.batched("two", fresh_for=60)
        async def two(keys: list[str]) -> dict[str, int]:
            return {key: await three(key) for key in keys}

        @cache.batched("three", fresh_for=60)
        async def three(keys: list[str]) -> dict[str, int]:
            answers = await asyncio.gather(*(one(key) for key in keys))
            return dict(zip(keys, answers, strict=True))

        with pytest.raises(LoadFailed, match="in a circle"):
            await one("a")
        with pytest.raises(LoadFailed):
            await two("a")

    async def test_a_circle_of_two_loads_begun_apart_is_told(self, cache: Cache) -> None:
        """Both run already when each asks for the other."""
        both = asyncio.Barrier(2)

        @cache.batched("one", fresh_for=60)
        async def one(keys: list[str]) -> dict[str, int]:
            await both.wait()
            return {key: await two(key) for key in keys}

        @cache.batched("two", fresh_for=60)
        async def two(keys: list[str]) -> dict[str, int]:
            await both.wait()
            return {key: await one(key) for key in keys}

        results = await asyncio.gather(outcome(one("a")), outcome(two("a")))
        assert {type(result) for result in results} == {LoadFailed}

    async def test_a_circle_by_way_of_a_task_is_told(self, cache: Cache) -> None:
        """What a loader starts belongs to it."""

        @cache.batched("own", fresh_for=60)
        async def own(keys: list[str]) -> dict[str, int]:
            return {key: await asyncio.create_task(own(key)) for key in keys}

        with pytest.raises(LoadFailed, match="in a circle"):
            await own("a")

    async def test_a_loader_may_catch_the_error_of_a_circle(self, cache: Cache) -> None:
        """The error is raised where the circle closes, and can be caught there."""

        @cache.batched("own", fresh_for=60)
        async def own(keys: list[str]) -> dict[str, int]:
            return {
                key: 7 if isinstance(await outcome(own(key)), LoadFailed) else 0 for key in keys
            }

        assert await own("a") == 7

    async def test_loads_that_wait_without_a_circle_end(self, cache: Cache) -> None:
        """Two ways to the same key meet, and load it once."""
        calls: list[str] = []

        @cache.batched("leaf", fresh_for=60)
        async def leaf(keys: list[str]) -> dict[str, int]:
            calls.extend(keys)
            return dict.fromkeys(keys, 1)

        @cache.cached("left", fresh_for=60)
        async def left(key: str) -> int:
            return await leaf(key)

        @cache.cached("right", fresh_for=60)
        async def right(key: str) -> int:
            return await leaf(key)

        @cache.cached("top", fresh_for=60)
        async def top(key: str) -> int:
            return sum(await asyncio.gather(left(key), right(key), leaf(key)))

        assert await top("a") == 3
        assert calls == ["a"]

    async def test_a_circle_through_a_load_that_another_process_left_is_told(
        self, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """A waits for B, which another held; when it is B's turn here, B waits for A."""
        store = MemoryStore(clock=clock)
        async with cache_on(store, clock, sleeper) as cache:

            @cache.batched("one", fresh_for=60)
            async def one(keys: list[str]) -> dict[str, int]:
                return {key: await two(key) for key in keys}

            @cache.batched("price", fresh_for=60)
            async def two(keys: list[str]) -> dict[str, int]:
                return {key: await one(key) for key in keys}

            await lease_of(store, "a")
            task = asyncio.create_task(outcome(one("a")))
            await until(lambda: sleeper.sleeping == 2)
            clock.advance(5)
            sleeper.wake()
            await turns(200)
            assert task.done()
            assert isinstance(await task, LoadFailed)

    async def test_a_load_inside_a_load_takes_no_place_when_its_turn_comes_late(
        self, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E4, E5: the only place is taken by the one who waits."""
        store = MemoryStore(clock=clock)
        async with cache_on(store, clock, sleeper) as cache:

            @cache.batched("price", fresh_for=60, concurrency=1, max_batch=1)
            async def tree(keys: list[str]) -> dict[str, int]:
                (key,) = keys
                return {key: 1 + await tree("leaf") if key == "root" else 1}

            await lease_of(store, "leaf")
            task = asyncio.create_task(outcome(tree("root")))
            await until(lambda: sleeper.sleeping == 2)
            clock.advance(5)
            sleeper.wake()
            await turns(200)
            assert task.done()
            assert await task == 2


class TestE3Context:
    async def test_the_context_of_the_caller_does_not_leak_into_a_shared_load(
        self, cache: Cache
    ) -> None:
        """What many share must not depend on who came first."""
        seen: list[str] = []

        @cache.batched("who", fresh_for=60, stale_for=60)
        async def who(keys: list[str]) -> Mapping[str, str]:
            seen.append(REQUEST.get())
            REQUEST.set("loader")
            return dict.fromkeys(keys, REQUEST.get())

        REQUEST.set("caller")
        await who("a")
        await who.refresh("a")
        await who.invalidate("a")
        await who("a")
        assert (seen, REQUEST.get()) == (["nobody"] * 3, "caller")
