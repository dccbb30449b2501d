"""E30: exceptions that `raises=` names reach callers as themselves, and are no failures."""

import asyncio
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

from stillfresh import Cache, ConfigError, LoadFailed, Origin, RetryAfter, Stored, Verdict
from stillfresh.engine import Span
from stillfresh.errors import RaisedByLoader
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    outcome,
    read_with,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on


class NotFound(Exception):
    """The upstream has no such item."""


class Gone(NotFound):
    """It had one."""


@pytest.fixture
def prices(cache: Cache, upstream: Upstream) -> Prices:
    return declare(cache, upstream, raises=NotFound)


async def stale(prices: Prices, clock: ManualClock) -> None:
    await prices("a")
    clock.advance(31)


class TestE30RaisesReachCallers:
    async def test_every_waiting_caller_gets_the_exception_itself(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """One load, the same object for all, by a call and by `get`; a subclass counts too."""
        upstream.error = Gone("a")
        told = await asyncio.gather(outcome(prices("a")), outcome(prices.get("a")))
        assert all(error is upstream.error for error in told)
        assert len(upstream.calls) == 1

    async def test_no_cooldown_begins(self, prices: Prices, upstream: Upstream) -> None:
        """The next caller calls the loader again, and gets its value."""
        upstream.error = NotFound("a")
        for _ in range(3):
            assert await outcome(prices("a")) is upstream.error
        assert len(upstream.calls) == 3
        upstream.error = None
        assert (await prices("a")).version == 1

    async def test_it_is_no_failure_in_the_statistics_and_no_warning_in_the_log(
        self, prices: Prices, upstream: Upstream, caplog: pytest.LogCaptureFixture
    ) -> None:
        upstream.error = NotFound("a")
        await outcome(prices("a"))
        stats = await prices.stats()
        assert (stats.failed, stats.failing, stats.error) == (0, 0, None)
        assert stats.reads_by_origin[Origin.LOADED][Verdict.GONE] == 0
        assert stats.reads[Verdict.FRESH] == 1
        assert not caplog.records

    async def test_it_ends_a_failure_that_was_counted(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        upstream.error = ConnectionError("down")
        await outcome(prices("a"))
        assert (await prices.stats()).failing == 1
        clock.advance(2)
        upstream.error = NotFound("a")
        await outcome(prices("a"))
        assert (await prices.stats()).failing == 0

    async def test_one_key_of_a_batch_may_raise_alone(self, cache: Cache) -> None:
        """In `get_many` it is the cause of the answer's error; the others have values."""
        missing = NotFound("b")

        @cache.batched("item", fresh_for=30, raises=(NotFound,))
        async def items(keys: list[str]) -> Mapping[str, int | Exception]:
            return {key: missing if key == "b" else 1 for key in keys}

        answers = await items.get_many(["a", "b"])
        assert answers["a"].value == 1
        assert isinstance(answers["b"].error, LoadFailed)
        assert answers["b"].error.__cause__ is missing
        assert await outcome(items("b")) is missing
        with pytest.raises(NotFound):
            await items.refresh("a", "b")
        results = await items.refresh_many(["a", "b"])
        assert results["b"].answer.error is not None
        assert results["b"].answer.error.__cause__ is missing

    async def test_the_traceback_does_not_grow_with_the_callers(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        upstream.error = NotFound("a")
        await asyncio.gather(*(outcome(prices("a")) for _ in range(20)))
        assert len(traceback.extract_tb(upstream.error.__traceback__)) < 20

    async def test_another_exception_is_load_failed_with_its_cause(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        upstream.error = ConnectionError("down")
        error = await outcome(prices("a"))
        assert isinstance(error, LoadFailed)
        assert not isinstance(error, RaisedByLoader)
        assert error.__cause__ is upstream.error
        assert "not tried again" in str(await outcome(prices("a")))

    async def test_a_cached_function_raises_it_too(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30, raises=(NotFound, KeyError))
        async def report(year: int) -> int:
            raise KeyError(year)

        with pytest.raises(KeyError) as caught:
            await report(2026)
        assert caught.value.args == (2026,)

    async def test_past_the_cache_it_is_the_same(
        self, prices: Prices, cache: Cache, upstream: Upstream
    ) -> None:
        upstream.error = NotFound("a")
        with cache.bypassed():
            assert await outcome(prices("a")) is upstream.error

    async def test_a_caller_with_its_own_loader_receives_it_as_a_cause(self, cache: Cache) -> None:
        missing = NotFound("x")

        @cache.batched("own", fresh_for=30, max_batch=1, raises=NotFound)
        async def own(keys: list[str]) -> dict[str, int]:
            return {}

        async def load() -> int:
            raise missing

        read = await read_with(own, "x", load)
        assert isinstance(read, RaisedByLoader)
        assert read.__cause__ is missing

    async def test_a_hook_sees_no_error(self, clock: ManualClock, upstream: Upstream) -> None:
        spans: list[Span] = []

        class Hook:
            def __init__(self, span: Span) -> None:
                spans.append(span)

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        async with Cache("memory://", clock=clock, hooks=[Hook]) as cache:
            prices = declare(cache, upstream, raises=NotFound)
            upstream.error = NotFound("a")
            await outcome(prices("a"))
        (load,) = [span for span in spans if span.what == "load"]
        assert (load.verdict, load.error) == (Verdict.GONE, None)

    async def test_a_load_that_took_too_long_is_a_failure(
        self, cache: Cache, upstream: Upstream, sleeper: Sleeper
    ) -> None:
        """The time-out is the cache's own error, although it is a TimeoutError."""
        prices = declare(cache, upstream, raises=OSError)
        waiting = await upstream.holding(outcome(prices("a")))
        while not waiting.done():
            sleeper.wake()
            await turns()
        failed = await waiting
        upstream.let_go()
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.__cause__, TimeoutError)
        assert (await prices.stats()).failing == 1

    async def test_an_exception_of_stillfresh_is_for_the_cache(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """A loader that asks for a pause gets it, although `raises` names all exceptions."""
        prices = declare(cache, upstream, raises=Exception)
        upstream.error = RetryAfter(60)
        failed = await outcome(prices("a"))
        assert isinstance(failed, LoadFailed)
        assert failed.__cause__ is upstream.error
        await outcome(prices("a"))
        assert len(upstream.calls) == 1

    @pytest.mark.parametrize("bad", ["NotFound", KeyboardInterrupt, 404, LoadFailed])
    async def test_a_wrong_option_is_refused(self, cache: Cache, bad: Any) -> None:
        with pytest.raises(ConfigError, match="raises names exception"):
            declare(cache, Upstream(), raises=(bad,))

    async def test_a_cache_may_pass_exceptions_on_for_all_resources(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """As integrations of web frameworks do; resources that exist already included."""
        prices = declare(cache, upstream)
        cache.pass_on(lambda error: isinstance(error, PermissionError))
        upstream.error = PermissionError("no")
        assert await outcome(prices("a")) is upstream.error


class TestE30RaisesWithACopy:
    async def test_a_caller_that_waits_gets_the_exception_and_not_the_copy(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        await prices("a")
        clock.advance(100)
        assert (await prices.get_many(["a"]))["a"].verdict is Verdict.FRESH
        clock.advance(100)
        upstream.error = NotFound("a")
        assert await outcome(prices("a")) is upstream.error

    async def test_a_background_refresh_makes_the_copy_expired(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """The reader of the stale copy gets it; the next caller waits, and gets the exception."""
        await stale(prices, clock)
        upstream.error = NotFound("a")
        assert (await prices.get("a")).verdict is Verdict.STALE
        await idle(cache)
        stored = await prices.get_stored("a")
        assert stored is not None
        assert stored.verdict is Verdict.EXPIRED
        assert await outcome(prices("a")) is upstream.error

    async def test_a_refresh_of_a_fresh_copy_makes_it_expired_for_the_next_caller(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        await prices("a")
        upstream.error = NotFound("a")
        assert await outcome(prices.refresh("a")) is upstream.error
        assert await outcome(prices("a")) is upstream.error

    async def test_a_copy_becomes_expired_also_if_other_keys_of_the_batch_have_values(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """E4: and its lease is released, so that the next caller need not wait for its end."""
        gone: set[str] = set()

        @cache.batched("item", fresh_for=30, stale_for=60, error_for=3600, raises=NotFound)
        async def items(keys: list[str]) -> dict[str, int | Exception]:
            return {key: NotFound(key) if key in gone else 1 for key in keys}

        await items.get_many(["a", "b"])
        clock.advance(31)
        gone.add("a")
        await items.get_many(["a", "b"])
        await idle(cache)
        stored = await items.get_stored("a")
        assert stored is not None
        assert stored.verdict is Verdict.EXPIRED
        gone.clear()
        assert (await items.get("a")).verdict is Verdict.FRESH

    async def test_if_the_next_load_fails_the_expired_copy_is_served(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """An outage is no answer of the upstream: the copy is better than nothing."""
        await prices("a")
        upstream.error = NotFound("a")
        await outcome(prices.refresh("a"))
        upstream.error = ConnectionError("down")
        answer = await prices.get("a")
        assert answer.verdict is Verdict.EXPIRED
        assert version(answer) == 1

    async def test_a_put_during_the_load_stays(self, prices: Prices, upstream: Upstream) -> None:
        """It is newer than what the loader was told."""
        await prices("a")
        upstream.error = NotFound("a")
        refreshing = await upstream.holding(outcome(prices.refresh("a")))
        assert await prices.put("a", Price("a", 7)) == Stored(stored=True)
        upstream.let_go()
        assert await refreshing is upstream.error
        answer = await prices.get("a")
        assert (answer.verdict, version(answer)) == (Verdict.FRESH, 7)

    async def test_a_put_of_another_process_during_the_load_stays(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        async with (
            cache_on(store, clock, sleeper) as here,
            cache_on(store, clock, sleeper) as there,
        ):
            prices = declare(here, upstream, raises=NotFound)
            others = declare(there, Upstream())
            await prices("a")
            upstream.error = NotFound("a")
            refreshing = await upstream.holding(outcome(prices.refresh("a")))
            await others.put("a", Price("a", 7))
            upstream.let_go()
            assert await refreshing is upstream.error
            answer = await prices.get("a")
            assert (answer.verdict, version(answer)) == (Verdict.FRESH, 7)

    async def test_callers_that_came_during_the_load_are_told_too(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """The load's own invalidation does not make its answer too old for them."""
        await prices("a")
        upstream.error = NotFound("a")
        first = await upstream.holding(outcome(prices.refresh("a")))
        second = asyncio.create_task(outcome(prices.refresh("a")))
        await until(lambda: prices.core.counted().coalesced > 0)
        upstream.let_go()
        assert await first is upstream.error
        assert await second is upstream.error
        assert len(upstream.calls) == 2

    async def test_if_the_store_does_not_answer_callers_still_get_the_exception(
        self, here: Cache, store: SteppedStore, upstream: Upstream
    ) -> None:
        prices = declare(here, upstream, raises=NotFound)
        await prices("a")
        upstream.error = NotFound("a")
        store.broken |= {"renew", "invalidate", "release"}
        assert await outcome(prices.refresh("a")) is upstream.error


class TestE30RefreshesThatNobodyWaitsFor:
    async def test_they_begin_at_most_once_in_absent_for(
        self, here: Cache, store: SteppedStore, upstream: Upstream, clock: ManualClock
    ) -> None:
        """The store could not mark the copy, so it stays STALE; the loader is not hammered."""
        prices = declare(here, upstream, raises=NotFound, absent_for=10)
        await stale(prices, clock)
        upstream.error = NotFound("a")
        store.broken |= {"invalidate"}
        for _ in range(20):
            assert (await prices.get("a")).verdict is Verdict.STALE
            await idle(here)
            clock.advance(1)
        assert len(upstream.calls) == 1 + 2

    async def test_a_watched_key_is_asked_for_once_in_absent_for(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """`absent_for` is a tenth of `fresh_for` here: 3 s."""
        upstream.error = NotFound("a")
        with prices.watch("a"):
            await until(lambda: len(upstream.calls) == 1)
            for _ in range(90):
                clock.advance(0.1)
                await turns(20)
                sleeper.wake(0.1)
                await turns(20)
            assert len(upstream.calls) <= 4
            before = len(upstream.calls)

            def is_asked_again() -> bool:
                clock.advance(0.5)  # again and again: an answer may still be on its way
                sleeper.wake()
                return len(upstream.calls) > before

            await until(is_asked_again)

    async def test_an_invalidation_ends_the_pause_of_a_watched_key(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        upstream.error = NotFound("a")
        with prices.watch("a"):
            await until(lambda: len(upstream.calls) == 1)
            await turns(100)
            assert len(upstream.calls) == 1
            upstream.error = None
            await prices.invalidate("a")
            await until(lambda: len(upstream.calls) == 2)
        assert (await prices.get("a")).value.version == 1

    async def test_an_invalidation_during_the_load_leaves_no_pause(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """The load began before the change, so its answer says nothing of what is there now."""
        upstream.error = NotFound("a")
        upstream.hold()
        with prices.watch("a"):
            await until(lambda: len(upstream.calls) == 1)
            await prices.invalidate("a")
            upstream.let_go()
            await until(lambda: len(upstream.calls) == 2)

    async def test_a_watch_hears_of_it(self, prices: Prices, upstream: Upstream) -> None:
        upstream.error = NotFound("a")
        heard: list[Any] = []
        with prices.watch("a", fail=heard.append):
            await until(lambda: bool(heard))
        assert heard[0].answer.error.__cause__ is upstream.error
