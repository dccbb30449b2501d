"""T1: the event loop in virtual time, by its own rules; simulations and `plan` run on it."""

import asyncio
import random
from collections.abc import Callable
from contextlib import closing

import pytest

from stillfresh.virtual_loop import Deadlock, VirtualLoop


def nothing() -> None:
    """Called after every step."""


def ran(loop: VirtualLoop, work: Callable[[list[str]], object]) -> list[str]:
    """What the callbacks noted until an hour has passed."""
    noted = list[str]()

    async def main() -> None:
        work(noted)
        await asyncio.sleep(3600)

    with closing(loop):
        loop.run(main(), nothing)
    return noted


class TestT1VirtualLoop:
    def test_callbacks_run_in_their_order_and_timers_at_their_time(self) -> None:
        """Without dice: first come, first served; of two timers, the earlier."""
        loop = VirtualLoop(None)

        def work(noted: list[str]) -> None:
            loop.call_later(2, lambda: noted.append(f"late {loop.time():g}"))
            loop.call_later(1, lambda: noted.append(f"early {loop.time():g}"))
            for name in "ab":
                loop.call_soon(noted.append, name)
            loop.call_soon(noted.append, "never").cancel()
            loop.call_later(1, noted.append, "never").cancel()

        assert ran(loop, work) == ["a", "b", "early 1", "late 2"]
        assert loop.time() == 3600

    def test_the_seed_chooses_among_all_ready_callbacks(self) -> None:
        """The same seed, the same order; another seed, another one."""

        def order(seed: int) -> str:
            loop = VirtualLoop(random.Random(seed))
            return "".join(
                ran(loop, lambda noted: [loop.call_soon(noted.append, it) for it in "abcdef"])
            )

        orders = {seed: order(seed) for seed in range(5)}
        assert {"".join(sorted(it)) for it in orders.values()} == {"abcdef"}
        assert len(set(orders.values())) > 1
        assert {seed: order(seed) for seed in range(5)} == orders

    def test_every_step_of_the_virtual_loop_is_counted_and_checked(self) -> None:
        """Also the last one; and the result is the coroutine's."""
        loop, seen = VirtualLoop(None), list[int]()

        async def main() -> str:
            await asyncio.sleep(0)
            await asyncio.sleep(5)
            return "done"

        with closing(loop):
            assert loop.run(main(), lambda: seen.append(loop.steps)) == "done"
        assert seen == [*range(1, loop.steps + 1)]

    def test_a_callback_belongs_to_the_owner_that_scheduled_it(self) -> None:
        """And so do those that it schedules itself, and its tasks."""
        loop, owners = VirtualLoop(None), list[int]()

        async def task() -> None:
            owners.append(loop.owner)
            await asyncio.sleep(1)
            owners.append(loop.owner)

        def work(_: list[str]) -> None:
            with loop.acting(7):
                loop.call_soon(lambda: loop.call_later(1, lambda: owners.append(loop.owner)))
                loop.create_task(task())
            assert loop.owner == 0

        ran(loop, work)
        assert owners == [7, 7, 7]
        assert [owner for _, owner in loop.tasks.values()] == [0], "the main task, at its very end"

    def test_a_paused_owner_continues_where_it_was(self) -> None:
        """Others run meanwhile; to pause it twice loses nothing."""
        loop = VirtualLoop(None)

        def work(noted: list[str]) -> None:
            with loop.acting(1):
                loop.call_soon(noted.append, "one")
                loop.call_later(1, noted.append, "one later")
            loop.pause(1)
            loop.call_later(5, loop.pause, 1)
            loop.call_soon(noted.append, "two")
            loop.call_later(10, loop.resume, 1)
            loop.call_later(9, noted.append, "before")
            loop.call_later(11, noted.append, "after")

        assert ran(loop, work) == ["two", "before", "one", "one later", "after"]

    def test_a_killed_owner_never_runs_again(self) -> None:
        """Paused or not; not even its cleanup, until the world ends."""
        loop, noted = VirtualLoop(None), list[str]()

        async def work(name: str) -> None:
            try:
                await asyncio.sleep(1)
                noted.append(f"{name} worked")
            finally:
                noted.append(f"{name} cleaned up")

        async def main() -> None:
            for owner, name in ((1, "a"), (2, "b"), (3, "c")):
                with loop.acting(owner):
                    loop.create_task(work(name))
            await asyncio.sleep(0)
            loop.pause(2)
            loop.kill(1)
            loop.kill(2)
            loop.resume(2)
            await asyncio.sleep(10)

        loop.run(main(), nothing)
        assert noted == ["c worked", "c cleaned up"]
        loop.end()
        assert sorted(noted[2:]) == ["a cleaned up", "b cleaned up"]
        assert (loop.tasks, loop.errors, loop.is_closed()) == ({}, [], True)

    def test_virtual_time_can_be_moved_by_hand(self) -> None:
        """Everything that is due until then has run; never backwards."""
        loop, noted = VirtualLoop(None), list[float]()
        with closing(loop), loop.running():
            assert loop.is_running()
            for at in (1.0, 2.0, 3.0):
                loop.call_at(at, lambda: noted.append(loop.time()))
            loop.call_at(1.5, noted.append, -1.0).cancel()
            loop.call_at(1.0, lambda: loop.call_soon(lambda: noted.append(-loop.time())))
            loop.call_soon(noted.append, -2.0).cancel()
            loop.advance(2.0)
            assert (noted, loop.time()) == ([1.0, -1.0, 2.0], 2.0)
            loop.advance(1.0)
            assert loop.time() == 2.0
        assert not loop.is_running()

    def test_a_coroutine_that_waits_for_nothing_is_a_deadlock(self) -> None:
        """It is said, and nobody hangs."""
        loop = VirtualLoop(None)

        async def main() -> None:
            await loop.create_future()

        with pytest.raises(Deadlock):
            loop.run(main(), nothing)
        loop.end()

    def test_an_error_that_nobody_handles_is_noted_with_its_owner(self) -> None:
        """Until the world ends: then tasks are cut off anywhere."""
        loop = VirtualLoop(None)

        def work(_: list[str]) -> None:
            with loop.acting(4):
                loop.call_soon(lambda: 1 // 0)

        ran(loop, work)
        ((owner, said),) = loop.errors
        assert owner == 4
        assert "ZeroDivisionError" in said

    def test_the_virtual_loop_has_no_threads(self) -> None:
        """Nothing could be told about their order."""
        with closing(VirtualLoop(None)) as loop, pytest.raises(RuntimeError, match="one thread"):
            loop.run_in_executor(None, nothing)
