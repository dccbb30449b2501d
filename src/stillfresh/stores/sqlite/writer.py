"""The one thread that writes: jobs come from the event loop and are committed in groups (S4).

The loop never waits for the file: it puts a job on the queue and awaits its future.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import apsw

from stillfresh.errors import NotOpen
from stillfresh.stores.sqlite.connection import Format
from stillfresh.stores.sqlite.database import Database, Job, Outcome

__all__ = ["Writer"]

T = TypeVar("T")

MAX_QUEUED: Final = 1024
"""More than this wait on the loop for room: a slow disk must not fill memory."""
MAX_GROUP: Final = 256
"""Jobs in one transaction: enough to share its cost, few enough to be short for others."""


@dataclass(frozen=True, slots=True)
class Work:
    """A job, and who waits for it."""

    job: Job
    future: asyncio.Future[Any] | None
    writes: bool


class Writer:
    """Lives from `open` to `close` of the store, on the loop that opened it."""

    def __init__(
        self, path: Path, file_format: Format, adopt: Callable[[apsw.Connection], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(MAX_QUEUED)
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._database = Database(path, file_format, partial(self._tell, adopt))
        self._thread = threading.Thread(target=self._main, name="stillfresh-sqlite", daemon=True)
        self.is_stopping = False
        self._thread.start()

    async def opened(self) -> None:
        """Raises why it could not be opened; any number may wait, and give up waiting."""
        await asyncio.shield(asyncio.wrap_future(self._opened))

    async def run(self, job: Callable[[apsw.Connection], T], *, writes: bool = True) -> T:
        """What is queued is done, whether or not its caller waits for it."""
        await self._room.acquire()
        if self.is_stopping:
            self._room.release()
            raise NotOpen("this store is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(Work(job, future, writes))
        return await future

    def mend(self, damaged: apsw.Connection) -> None:
        """A reader met corruption: the next group sets the file aside first, so have one."""
        if self._database.damaged is not damaged and not self.is_stopping:
            self._database.damaged = damaged
            self.wake()

    def wake(self) -> None:
        """An empty group: it looks whether the file is still the one that was opened."""
        self._queue.put(Work(lambda _: None, None, writes=False))

    async def stop(self) -> None:
        """What is queued is done first; returns when the thread has ended."""
        if not self.is_stopping:
            self.is_stopping = True
            self._queue.put(None)
        await asyncio.shield(asyncio.wrap_future(self._closed))
        self._thread.join()

    def _main(self) -> None:
        try:
            self._database.open()
        except BaseException as exc:  # noqa: BLE001 (handed to who opens)
            self._opened.set_exception(exc)
        else:
            self._opened.set_result(None)
            self._work()
        finally:
            self._database.close()
            self._closed.set_result(None)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            group, is_last = self._next_group()
            writes = [work for work in group if work.writes]
            looks = [work for work in group if not work.writes]
            outcomes = self._database.write([work.job for work in writes]) if writes else []
            outcomes += [self._database.look(work.job) for work in looks]
            is_last |= not self._tell(self._settle, [*zip(writes + looks, outcomes, strict=True)])

    def _next_group(self) -> tuple[list[Work], bool]:
        """All that is there, up to a limit; waits for the first."""
        group: list[Work] = []
        try:
            while len(group) < MAX_GROUP:
                work = self._queue.get(block=not group)
                if work is None:
                    return group, True
                group.append(work)
        except Empty:
            pass
        return group, False

    def _tell(self, callback: Callable[[Any], None], argument: object) -> bool:
        """False if nobody is left to tell: the loop ended without closing its store."""
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True

    def _settle(self, settled: list[tuple[Work, Outcome]]) -> None:
        for work, outcome in settled:
            if work.future is None:
                continue
            self._room.release()
            if work.future.done():
                continue  # its caller was cancelled
            if outcome.error is not None:
                work.future.set_exception(outcome.error)
            else:
                work.future.set_result(outcome.result)
