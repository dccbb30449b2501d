"""E3, E13, E16: the tasks of an open cache, and what watches over a call of the loader."""

import asyncio
import logging

import pytest

from stillfresh import Cache, LoadFailed
from stillfresh.engine.loader import RENEWALS, Tasks, is_cancelled, looked_at
from tests.kit.engine import Prices, Sleeper, Upstream, declare, turns
from tests.kit.held_store import SteppedStore


class TestE13Tasks:
    async def test_the_end_cancels_some_and_waits_for_others(self) -> None:
        """Those that run on after `grace` are logged."""
        tasks, done = Tasks(), list[str]()

        async def work(name: str, turns: int) -> None:
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
                done.append(name)
            except asyncio.CancelledError:
                done.append(f"{name} cancelled")
                raise

        spawned = tasks.spawn(work("spawned", 1000))
        child, step = tasks.child(work("child", 5)), tasks.step(work("step", 9))
        await asyncio.sleep(0)
        await tasks.end(60)
        assert done == ["spawned cancelled", "child", "step"]
        assert (spawned.cancelled(), child.done(), step.done()) == (True, True, True)
        await tasks.end(60)

    async def test_what_outlives_grace_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """By its name, once."""
        tasks, gate = Tasks(), asyncio.Event()
        late = tasks.step(gate.wait())
        late.set_name("late one")
        await tasks.end(0)
        assert ["late one" in it.getMessage() for it in caplog.records] == [True]
        assert "still running 0 s after close" in caplog.text
        gate.set()
        await late

    async def test_a_step_is_not_cancelled_by_the_end_of_the_loop(self) -> None:
        """`asyncio.run` cancels all tasks that it knows."""
        tasks, gate = Tasks(), asyncio.Event()
        step, child = tasks.step(gate.wait()), tasks.child(gate.wait())
        assert (step in asyncio.all_tasks(), child in asyncio.all_tasks()) == (False, True)
        gate.set()
        await asyncio.gather(step, child)

    async def test_a_task_knows_whether_it_was_cancelled_itself(self) -> None:
        """Or something that it waited for."""
        found = list[bool]()

        async def wait_for(other: "asyncio.Future[None]") -> None:
            try:
                await other
            except asyncio.CancelledError:
                found.append(is_cancelled())

        for cancels_itself in (True, False):
            other = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(wait_for(other))
            await asyncio.sleep(0)
            (task if cancels_itself else other).cancel()
            await asyncio.wait([task])
        assert found == [True, False]

    async def test_an_error_that_was_looked_at_is_not_reported(self) -> None:
        """Also of one that was cancelled."""
        loop, said = asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _, context: said.append(context))
        for end in ("raise", "cancel"):
            future = loop.create_future()
            future.add_done_callback(looked_at)
            future.cancel() if end == "cancel" else future.set_exception(OSError())
            await asyncio.sleep(0)
            del future
        assert said == []


class TestE3Guard:
    async def test_a_lease_is_renewed_three_times_in_its_time(
        self, here: Cache, upstream: Upstream, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """Until `load_timeout`; then the load has failed."""
        prices = declare(here, upstream, lease_for=6, load_timeout=5)
        reading = await upstream.holding(prices.get("a"))
        await turns()
        for number in range(3):
            assert store.count("renew") == number
            sleeper.wake()
            await turns()
        assert (RENEWALS, sleeper.asked[:3]) == (3, [2, 2, 1])
        assert store.count("renew") == 2
        with pytest.raises(LoadFailed, match=r"no answer within 5 s \(load_timeout\)"):
            await reading

    async def test_a_load_that_is_too_slow_to_be_fresh_is_logged_once(
        self, ours: Prices, caplog: pytest.LogCaptureFixture
    ) -> None:
        """E16: from `fresh_for` on, and only where something is fresh at all."""
        await ours("a")
        loader = ours.core.loads._loader
        with caplog.at_level(logging.WARNING):
            for took in (29.9, 30.0, 31.0):
                loader._report_slow(took)
        assert ["took 30 s" in it.getMessage() for it in caplog.records] == [True]
