"""E33: wait a little for a load, then take the old copy."""

import asyncio
import threading
from typing import Any

import pytest

from stillfresh import Answer, Cache, ConfigError, LoadFailed, LoadTimeout, SyncCache, Verdict
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


async def expired(prices: Prices, clock: ManualClock, *keys: str) -> None:
    """There are copies that may be served only if loading fails."""
    await prices.get_many(keys or ["a"])
    clock.advance(100)


async def give_up(sleeper: Sleeper, seconds: float = 0.2) -> None:
    """The caller waits for the load; then its patience is over."""
    await until(lambda: seconds in sleeper.asked)
    sleeper.wake(seconds)


class TestE33Patience:
    async def test_after_its_patience_a_caller_gets_the_old_copy(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, sleeper: Sleeper, cache: Cache
    ) -> None:
        """EXPIRED, with a LoadTimeout; the load goes on, and is stored."""
        await expired(prices, clock)
        upstream.version = 2
        waiting = await upstream.holding(prices.get("a", patience="200ms"))
        await give_up(sleeper)
        answer = await waiting
        assert (answer.verdict, version(answer)) == (Verdict.EXPIRED, 1)
        assert isinstance(answer.error, LoadTimeout)
        assert "its load takes longer than 0.2 s (patience); it goes on" in str(answer.error)
        upstream.let_go()
        await idle(cache)
        answer = await prices.get("a")
        assert (answer.verdict, version(answer)) == (Verdict.FRESH, 2)
        assert len(upstream.calls) == 2
        assert (await prices.stats()).failed == 0

    async def test_without_a_copy_load_timeout_is_raised(
        self, prices: Prices, upstream: Upstream, sleeper: Sleeper, cache: Cache
    ) -> None:
        """It is a LoadFailed; no cooldown begins, and the value is stored when it comes."""
        waiting = await upstream.holding(outcome(prices.get("a", patience=0.2)))
        await give_up(sleeper)
        error = await waiting
        assert isinstance(error, LoadTimeout)
        assert isinstance(error, LoadFailed)
        upstream.let_go()
        await idle(cache)
        assert (await prices("a")).version == 1
        assert len(upstream.calls) == 1

    async def test_a_load_that_ends_in_time_is_the_answer(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        await expired(prices, clock)
        upstream.version = 2
        assert version(await prices.get("a", patience="200ms")) == 2
        await turns()
        tasks = [task for task in asyncio.all_tasks() if "Sleeper" in repr(task)]
        assert not tasks

    async def test_a_failure_that_is_remembered_is_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        await expired(prices, clock)
        upstream.error = ConnectionError("no route")
        await prices.get("a")
        clock.advance(2)  # the cooldown is over
        waiting = await upstream.holding(prices.get("a", patience="200ms"))
        await give_up(sleeper)
        error = (await waiting).error
        assert not isinstance(error, LoadTimeout)
        assert "ConnectionError: no route" in str(error)
        upstream.let_go()

    async def test_the_resource_may_say_it_for_all_callers(
        self, cache: Cache, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """A call's own patience comes first."""
        prices = declare(cache, upstream, patience="200ms")
        await expired(prices, clock)
        waiting = await upstream.holding(prices("a"))
        patient = asyncio.create_task(prices.get("a", patience="1h"))
        await until(lambda: 3600.0 in sleeper.asked)
        await give_up(sleeper)
        assert (await waiting).version == 1
        assert not patient.done()
        upstream.version = 2
        upstream.let_go()
        assert (await patient).error is None

    async def test_in_get_many_each_key_has_its_own_end(
        self, cache: Cache, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Keys that are not loaded in time have old copies, or an answer with an error."""
        prices = declare(cache, upstream, max_batch=1)
        await expired(prices, clock, "a")
        await prices("c")
        waiting: asyncio.Task[dict[str, Answer[Any]]] = await upstream.holding(
            prices.get_many(["a", "b", "c"], patience="200ms")
        )
        await give_up(sleeper)
        answers = await waiting
        assert answers["a"].verdict is Verdict.EXPIRED
        assert isinstance(answers["a"].error, LoadTimeout)
        assert not answers["b"].found
        assert isinstance(answers["b"].error, LoadTimeout)
        assert answers["c"].error is None
        upstream.let_go()
        await idle(cache)

    async def test_a_load_that_has_not_begun_runs_all_the_same(
        self, cache: Cache, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """There is no place for it yet; nobody waits when it gets one."""
        prices = declare(cache, upstream, max_batch=1, concurrency=1)
        first = await upstream.holding(prices("x"))
        waiting = asyncio.create_task(outcome(prices.get("a", patience="200ms")))
        await give_up(sleeper)
        assert isinstance(await waiting, LoadTimeout)
        upstream.let_go()
        await first
        await idle(cache)
        assert upstream.calls == [["x"], ["a"]]

    async def test_a_copy_that_is_too_old_for_the_call_is_served_too(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        await prices("a")
        clock.advance(10)
        waiting = await upstream.holding(prices.of("a").get("5s", patience="200ms"))
        await give_up(sleeper)
        assert (await waiting).verdict is Verdict.EXPIRED
        upstream.let_go()

    async def test_a_cached_function_has_it(
        self, cache: Cache, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        gate = asyncio.Event()

        @cache.cached("report", fresh_for=30, error_for=3600, patience="200ms")
        async def report(year: int) -> int:
            if clock() > 1_700_000_050:
                await gate.wait()
            return year

        await report(2026)
        sleeper.asked.clear()
        clock.advance(100)
        waiting = asyncio.create_task(report(2026))
        await give_up(sleeper)
        assert await waiting == 2026
        gate.set()

    @pytest.mark.parametrize("bad", ["soon", -1, float("inf")])
    async def test_a_wrong_duration_is_refused(
        self, cache: Cache, prices: Prices, bad: Any
    ) -> None:
        with pytest.raises(ConfigError, match="patience"):
            await prices.get("a", patience=bad)
        with pytest.raises(ConfigError, match="other: patience"):
            cache.batched("other", fresh_for=1, patience=bad)(prices.__wrapped__)

    async def test_a_wrong_duration_is_refused_while_it_is_not_needed(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Not at the first outage: there, it would be an error in place of the old copy."""
        await prices.get("a")
        with pytest.raises(ConfigError, match="patience: cannot read 'soon'"):
            await prices.get("a", patience="soon")


class TestE33Sync:
    def test_a_wrong_duration_is_refused_while_it_is_not_needed(self) -> None:
        """Although this thread finds the copies in memory."""
        with SyncCache("memory://") as cache:
            report = cache.cached("report", fresh_for="1h")(lambda: 1)
            prices = cache.batched("price", fresh_for="1h")(lengths)
            report()
            prices("a")
            with pytest.raises(ConfigError, match="patience: cannot read 'soon'"):
                report.of().get(patience="soon")
            with pytest.raises(ConfigError, match="patience: cannot read 'soon'"):
                prices.get_many(["a"], patience="soon")

    def test_a_thread_waits_a_little_too(self) -> None:
        """The loader runs in another thread, since this one would have to wait for its end."""
        clock = ManualClock()
        gate = threading.Event()
        gate.set()
        ran_in: list[int] = []
        with SyncCache("memory://", clock=clock) as cache:

            @cache.cached("report", fresh_for=30, error_for=3600)
            def report(year: int) -> int:
                ran_in.append(threading.get_ident())
                assert gate.wait(20)
                return year + len(ran_in)

            assert report(2026) == 2027
            clock.advance(100)
            gate.clear()
            answer = report.of(2026).get(patience="10ms")
            assert (answer.value, answer.verdict) == (2027, Verdict.EXPIRED)
            assert isinstance(answer.error, LoadTimeout)
            gate.set()
            assert report(2026) == 2028
            assert ran_in[0] == threading.get_ident() != ran_in[1]


def lengths(keys: list[str]) -> dict[str, int]:
    return {key: len(key) for key in keys}
