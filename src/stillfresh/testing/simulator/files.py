"""SQLite files in a simulation: real ones, written at once and without a thread.

The writer's jobs are done in the caller's turn, in the same transactions. A full or unavailable
store is a disk that cannot be written.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from unittest.mock import patch

import apsw

from stillfresh.errors import NotOpen, StoreError
from stillfresh.stores.sqlite import WriteJob, Writer
from stillfresh.testing.simulator.faults import Blow

if TYPE_CHECKING:
    from stillfresh.testing.simulator.world import World

T = TypeVar("T")


@contextmanager
def inline_files(world: "World") -> Iterator[None]:
    """Files that are opened in the block have their writer in the simulation."""

    class Inline(InlineWriter):
        simulated = world

    with (
        patch("stillfresh.stores.sqlite.Writer", Inline),
        patch("stillfresh.stores.sqlite.store.Writer", Inline),
    ):
        yield


class InlineWriter(Writer):
    """A writer without a thread of its own: a job is done in its caller's turn."""

    simulated: "World"

    def _start(self) -> None:
        owner = self.simulated.loop.owner
        if owner:
            self.simulated.processes[owner - 1].at_end(self.stop)

    def wait_until_open(self) -> None:
        self.database.open()

    async def opened(self) -> None:
        await asyncio.sleep(self._pause())
        self.database.open()

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        await asyncio.sleep(self._pause())
        result = await super().run(job, writes=writes, urgent=urgent)
        await asyncio.sleep(self._pause())
        return result

    def _put(self, work: WriteJob) -> None:
        if self.is_stopping:
            raise NotOpen("this file is closed")
        weather = self.simulated.weather
        if work.writes and (weather.is_now(Blow.FULL) or weather.is_now(Blow.AWAY)):
            work.error = StoreError("the disk is full")
        else:
            self._do([work])
        self._settle([work])

    def _tell(self, callback: Callable[[T], None], argument: T) -> bool:
        callback(argument)
        return True

    def _pause(self) -> float:
        weather = self.simulated.weather
        return weather.dice.uniform(0, 0.01) + weather.slowness()

    def wake(self) -> None:
        """The next job checks whether the file was replaced."""

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            self.database.close()

    async def stopped(self) -> None:
        self.stop()
