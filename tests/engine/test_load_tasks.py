"""A load is a task of its own (E3, E39), however its first step is run."""

import asyncio
import gc
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache, LoadFailed
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper, outcome, turns
from tests.kit.held_store import SteppedStore, cache_on

REQUEST: ContextVar[str] = ContextVar("request", default="nobody")

Work = Callable[[], Awaitable[int]]
Read = Callable[[], Awaitable[int]]
Declared = Callable[[Work], Read]


@pytest.fixture(params=["memory", "sqlite", "stepped"])
async def cache(
    request: pytest.FixtureRequest, clock: ManualClock, sleeper: Sleeper, store: SteppedStore
) -> Any:
    """On a store that never waits, on one that reads inline, and on one over a network."""
    url = f"sqlite:///{request.getfixturevalue('tmp_path')}/cache.db"
    where: Any = {"memory": "memory://", "sqlite": url, "stepped": store}[request.param]
    async with cache_on(where, clock, sleeper) as cache:
        yield cache


@pytest.fixture(params=["cached", "one at a time", "in batches"])
def declared(request: pytest.FixtureRequest, cache: Cache) -> Declared:
    """Declare a resource whose loader does this work; returns how it is read."""

    def cached(work: Work) -> Read:
        @cache.cached("report", fresh_for=60)
        async def report(year: int) -> int:
            assert year == 2026
            return await work()

        return lambda: report(2026)

    def batched(work: Work) -> Read:
        most = 1 if request.param == "one at a time" else 100

        @cache.batched("report", fresh_for=60, max_batch=most)
        async def report(years: list[int]) -> dict[int, int]:
            return dict.fromkeys(years, await work())

        return lambda: report(2026)

    return cached if request.param == "cached" else batched


class TestE39LoadsAreTasks:
    async def test_a_reader_that_is_cancelled_inside_the_loader_does_not_end_the_load(
        self, declared: Declared
    ) -> None:
        """Even if the loader itself does it, in its first step."""
        calls: list[int] = []
        ended: list[str] = []
        go_on = asyncio.Event()

        async def work() -> int:
            calls.append(1)
            reader.cancel()
            await go_on.wait()
            ended.append("loaded")
            return 1

        read = declared(work)
        reader = asyncio.ensure_future(read())
        await asyncio.wait([reader])
        assert reader.cancelled()
        second = asyncio.ensure_future(read())
        await turns()
        go_on.set()
        assert await second == 1
        assert (calls, ended) == ([1], ["loaded"])

    async def test_a_time_out_inside_the_loader_is_the_loaders_own(
        self, declared: Declared
    ) -> None:
        """It ends what the loader waits for, and nobody else is cancelled."""

        async def work() -> int:
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            except TimeoutError:
                return 2
            return 1

        reader = asyncio.current_task()
        assert reader is not None
        assert await declared(work)() == 2
        assert reader.cancelling() == 0

    async def test_a_time_out_that_the_loader_lets_through_is_a_failure(
        self, declared: Declared
    ) -> None:
        """It is the cause of the error, not a cancellation of the reader."""

        async def work() -> int:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
            return 1

        failed = await outcome(declared(work)())
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.__cause__, TimeoutError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def test_a_time_out_of_the_reader_ends_the_reader_alone(self, declared: Declared) -> None:
        """The load goes on, and the next reader gets its value."""
        go_on = asyncio.Event()
        calls: list[int] = []

        async def work() -> int:
            calls.append(1)
            await go_on.wait()
            return 1

        read = declared(work)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await read()
        go_on.set()
        assert await read() == 1
        assert calls == [1]

    async def test_a_group_of_tasks_inside_the_loader_fails_the_load_alone(
        self, declared: Declared
    ) -> None:
        """A task group cancels the task that it belongs to: that is the load's."""

        async def fail() -> None:
            raise ValueError("down")

        async def work() -> int:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.Event().wait()
            return 1

        failed = await outcome(declared(work)())
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.__cause__, ExceptionGroup)

    async def test_the_loaders_task_is_not_the_readers(self, declared: Declared) -> None:
        """Before and after its first wait; the reader's own task is what it was."""
        tasks: list[object] = []

        async def work() -> int:
            tasks.append(asyncio.current_task())
            await asyncio.sleep(0)
            tasks.append(asyncio.current_task())
            return 1

        reader = asyncio.current_task()
        await declared(work)()
        assert asyncio.current_task() is reader
        assert tasks[0] is tasks[1]
        assert tasks[0] is not reader

    async def test_context_variables_of_reader_and_loader_stay_apart(
        self, declared: Declared
    ) -> None:
        """A shared load sees no reader's, and what it sets reaches no reader."""
        seen: list[str] = []

        async def work() -> int:
            seen.append(REQUEST.get())
            REQUEST.set("loader")
            await asyncio.sleep(0)
            seen.append(REQUEST.get())
            return 1

        token = REQUEST.set("reader")
        try:
            await declared(work)()
            assert (seen, REQUEST.get()) == (["nobody", "loader"], "reader")
        finally:
            REQUEST.reset(token)

    async def test_a_second_caller_during_the_first_step_of_the_loader_shares_the_load(
        self, declared: Declared
    ) -> None:
        """The loader starts it itself, before it waits for anything."""
        calls: list[int] = []
        others: list[asyncio.Future[int]] = []

        async def work() -> int:
            calls.append(1)
            others.append(outside.run(start))
            await turns()
            return 1

        def start() -> "asyncio.Future[int]":
            return asyncio.ensure_future(read())

        read = declared(work)
        outside = copy_context()  # in the loader's own context it would wait in a circle
        assert await read() == 1
        assert [await other for other in others] == [1]
        assert calls == [1]

    async def test_an_error_in_the_first_step_is_told_to_the_reader(
        self, declared: Declared
    ) -> None:
        """With the exception as its cause, although nothing was waited for."""

        async def work() -> int:
            raise ValueError("down")

        failed = await outcome(declared(work)())
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.__cause__, ValueError)


class TestE20ContextOfThreads:
    async def test_a_load_in_the_pool_sees_nothing_of_the_load_before(self, cache: Cache) -> None:
        """A thread of the pool runs many loads; each begins with a context of its own."""
        seen: list[tuple[str, str]] = []

        @cache.batched("price", fresh_for=60, concurrency=1, max_batch=1)
        def prices(skus: list[str]) -> dict[str, int]:
            seen.append((threading.current_thread().name, REQUEST.get()))
            REQUEST.set("the load before")
            return dict.fromkeys(skus, 1)

        token = REQUEST.set("reader")
        try:
            for sku in "abc":
                await prices(sku)
        finally:
            REQUEST.reset(token)
        assert seen == [("stillfresh-loader", "nobody")] * 3


class TestE39WhatEndsALoad:
    """Only the loader may be cancelled, and what it does after that counts for nothing."""

    @pytest.mark.parametrize("after", ["a value", "an error of its own", "nothing"])
    async def test_a_loader_that_outlives_its_time_is_counted_once(
        self, cache: Cache, clock: ManualClock, sleeper: Sleeper, after: str
    ) -> None:
        """E7, E12: the failure stays, and the place is free."""
        ended = asyncio.Event()

        @cache.batched("report", fresh_for=60, load_timeout=3, max_batch=1, concurrency=1)
        async def report(years: list[int]) -> dict[int, int]:
            if years == [1]:
                return {1: 1}
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set()
                if after == "an error of its own":
                    raise ValueError("mine") from None
                if after == "nothing":
                    raise
            return dict.fromkeys(years, 666)

        reading = asyncio.create_task(outcome(report.get(2026)))
        while not reading.done():
            await turns()
            sleeper.wake()
        failed = await reading
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.__cause__, TimeoutError)
        await ended.wait()
        await turns()
        stats = await report.stats()
        assert (stats.failed, stats.failing, stats.loading) == (1, 1, 0)
        assert sum(stats.load_seconds.counts) == 1
        assert isinstance(await outcome(report.get(2026)), LoadFailed)
        assert (await report.get(1)).value == 1

    async def test_a_cancellation_after_the_loader_does_not_cut_off_the_publication(
        self, cache: Cache
    ) -> None:
        """E5: the copy is stored, and no lease is left."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int) -> int:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)
            if year % 2:
                task.cancel()
            return year

        assert [await report(year) for year in range(6)] == list(range(6))
        await turns()
        stats = (await cache.stats()).resources["report"]
        assert (stats.failed, stats.loading) == (0, 0)
        for year in range(6):
            assert (await report.of(year).explain()).held_until is None

    async def test_a_loader_that_somebody_cancels_has_failed(self, cache: Cache) -> None:
        """E3, E7: it cools down like any failure."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int) -> int:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.Event().wait()
            return year

        failed = await outcome(report(2026))
        assert isinstance(failed, LoadFailed)
        assert "cancelled itself" in str(failed)
        assert (await cache.stats()).resources["report"].failing == 1

    async def test_a_value_that_is_made_after_closing_is_not_stored(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E13: its callers were told that the cache was closed."""
        async with cache_on(store, clock, sleeper) as cache:

            @cache.cached("report", fresh_for=60)
            async def report(year: int) -> int:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                return year

            reading = asyncio.create_task(outcome(report(2026)))
            await turns()
        assert isinstance(await reading, LoadFailed)
        assert store.count("publish") == 0

    async def test_a_stale_reader_does_not_wait_for_the_first_step_of_the_refresh(
        self, clock: ManualClock
    ) -> None:
        """E2: it is served at once, whatever the loader does before it waits."""
        calls: list[int] = []
        async with Cache("memory://", clock=clock) as cache:

            @cache.cached("report", fresh_for=60, stale_for=60)
            async def report(year: int) -> int:
                calls.append(year)
                return year

            await report(2026)
            clock.advance(61)
            assert await report(2026) == 2026
            assert calls == [2026]
            await turns()
            assert calls == [2026, 2026]

    @pytest.mark.parametrize("deep", [20, 200])
    async def test_loads_inside_loads_need_no_deep_stack(self, cache: Cache, deep: int) -> None:
        """Neither in the cache nor past it (E22)."""

        @cache.cached("depth", fresh_for=60, concurrency=1)
        async def depth(left: int) -> int:
            return 0 if left == 0 else 1 + await depth(left - 1)

        assert await depth(deep) == deep
        with cache.bypassed():
            assert await depth(deep) == deep

    async def test_many_loads_in_one_turn_leave_the_loop_turns(self) -> None:
        """E41: a hundred begin, then others run."""
        begun: list[int] = []
        between: list[int] = []
        async with Cache("memory://") as cache:

            @cache.cached("report", fresh_for=60)
            async def report(year: int) -> int:
                begun.append(year)
                return year

            async def others() -> None:
                while len(begun) < 1_000:
                    between.append(len(begun))
                    await asyncio.sleep(0)

            await asyncio.gather(others(), *(report(year) for year in range(1_000)))
        assert max(later - earlier for earlier, later in pairwise(between)) <= 100

    async def test_a_read_past_the_cache_does_not_wait_for_a_loader_that_ignores_its_time(
        self, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E22: it is told of the time-out, while the loader still runs."""
        go_on = asyncio.Event()
        async with Cache("memory://", clock=clock, sleep=sleeper, grace=60) as cache:

            @cache.cached("report", fresh_for=60, load_timeout=3)
            async def report(year: int) -> int:
                while not go_on.is_set():
                    with suppress(asyncio.CancelledError):
                        await go_on.wait()
                return year

            with cache.bypassed():
                reading = asyncio.create_task(outcome(report(2026)))
                for _ in range(100):
                    await turns()
                    sleeper.wake()
                assert reading.done()
            assert isinstance(await reading, LoadFailed)
            go_on.set()
            await turns()
            assert (await cache.stats()).resources["report"].leases_won == 0

    async def test_an_exception_that_is_no_error_fails_the_load_and_is_not_left_unseen(
        self, cache: Cache, caplog: pytest.LogCaptureFixture
    ) -> None:
        """E25: a GeneratorExit is what the loader made of its work, not an end of the program."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int) -> int:
            raise GeneratorExit(year)

        failed = await outcome(report(2026))
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.__cause__, GeneratorExit)
        del failed
        await turns()
        gc.collect()
        assert "never retrieved" not in caplog.text

    async def test_a_renewal_that_hangs_does_not_stop_the_clock_of_a_load(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E3: the load ends at its time, whatever the store does."""
        async with cache_on(store, clock, sleeper) as cache:

            @cache.cached("report", fresh_for=60, load_timeout=30, lease_for=6)
            async def report(year: int) -> int:
                await asyncio.Event().wait()
                return year

            store.hold("renew")
            reading = asyncio.create_task(outcome(report(2026)))
            for _ in range(60):
                await turns()
                sleeper.wake()
            assert reading.done()
            failed = await reading
            assert isinstance(failed, LoadFailed)
            assert isinstance(failed.__cause__, TimeoutError)
            store.let_go("renew")

    async def test_a_load_that_took_too_long_is_recorded_as_failed(
        self, clock: ManualClock, sleeper: Sleeper, tmp_path: Path
    ) -> None:
        """So that a replay does not take it for no load at all."""
        async with Cache("memory://", clock=clock, sleep=sleeper) as cache:

            @cache.batched("report", fresh_for=60, load_timeout=3)
            async def report(years: list[int]) -> dict[int, int]:
                await asyncio.Event().wait()
                return dict.fromkeys(years, 1)

            async with cache.recording(tmp_path / "recording.jsonl"):
                reading = asyncio.create_task(outcome(report.get(2026)))
                while not reading.done():
                    await turns()
                    sleeper.wake()
        lines = (tmp_path / "recording.jsonl").read_text().splitlines()
        loads = [json.loads(line) for line in lines if line.startswith('["load"')]
        assert [len(load[7]) for load in loads] == [1]
