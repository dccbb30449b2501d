"""SQLite files in a simulation: real ones, written at once and without a thread (T1).

What a file's writer does for a thread is done here in the caller's turn: the same jobs, in the same
transactions. A store that is full or away is a disk that is.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import apsw

from stillfresh.errors import NotOpen, StoreError
from stillfresh.stores.sqlite.connection import PATIENCE
from stillfresh.stores.sqlite.database import Database
from stillfresh.stores.sqlite.files import Identity
from stillfresh.stores.sqlite.format import Format

if TYPE_CHECKING:
    from stillfresh.testing.simulator.world import World

T = TypeVar("T")


@contextmanager
def inline_files(world: "World") -> Iterator[None]:
    """Files that are opened in the block have their writer in the simulation."""

    class Inline(InlineWriter):
        simulated = world

    with (
        patch("stillfresh.feed.file.Writer", Inline),
        patch("stillfresh.stores.sqlite.store.LoopWriter", Inline),
    ):
        yield


class InlineWriter:
    """Both of the writers there are: for threads, which there is one of, and for the loop."""

    simulated: "World"

    def __init__(
        self,
        path: Path,
        kind: Format,
        adopt: Callable[[apsw.Connection], None],
        patience: float = PATIENCE,
    ) -> None:
        self.is_stopping = False
        self._database = Database(path, kind, adopt, patience)
        owner = self.simulated.loop.owner
        if owner:
            self.simulated.processes[owner - 1].at_end(self.stop)

    @property
    def identity(self) -> Identity | None:
        return self._database.identity

    def wait_until_open(self) -> None:
        self._database.open()

    async def opened(self) -> None:
        await asyncio.sleep(self._pause())
        self._database.open()

    def submit(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> "Future[T]":
        del urgent
        future: Future[T] = Future()
        try:
            future.set_result(self._done(job, writes=writes))
        except NotOpen:
            raise
        except Exception as exc:  # noqa: BLE001 (handed to who waits)
            future.set_exception(exc)
        return future

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        del urgent
        await asyncio.sleep(self._pause())
        result = self._done(job, writes=writes)
        await asyncio.sleep(self._pause())
        return result

    def _done(self, job: Callable[[apsw.Connection], T], *, writes: bool) -> T:
        if self.is_stopping:
            raise NotOpen("this file is closed")
        weather = self.simulated.weather
        if writes and (weather.is_full or weather.is_away):
            raise StoreError("the disk is full")
        done = self._database.write([job])[0] if writes else self._database.look(job)
        if done.error is not None:
            raise done.error
        result: Any = done.result
        return result  # type: ignore[no-any-return]

    def _pause(self) -> float:
        weather = self.simulated.weather
        return weather.dice.uniform(0, 0.01) + weather.slowness()

    def mend(self, damaged: apsw.Connection) -> None:
        self._database.damaged = damaged

    def wake(self) -> None:
        """The next job looks whether the file is still the one that was opened."""

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            self._database.close()

    async def stopped(self) -> None:
        self.stop()
