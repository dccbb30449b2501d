"""The writer of a file: one at a time, in its own thread or in the thread that calls.

An event loop never waits for the file: it puts a job on the queue and awaits its future. The
writer's thread commits the queued jobs in groups. A thread that may wait (`run_here`) needs no
other thread: it takes the writer's turn, and commits its job itself. A file that another process
keeps locked is tried now and then only.

A caller on the loop that is cancelled has given up, and nothing may happen for it afterwards:
a write that has not begun is withdrawn, and one that has begun is waited for.

Locks: `_gate` is held while a job is queued or refused, so that none is queued behind the end of
the queue. `_turn` is held while the file is used, so that one thread at a time uses it, and a fork
happens between two groups. The database's `claims` decides between a job that begins and a caller
that withdraws it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

import apsw

from stillfresh.errors import NotOpen, StoreError
from stillfresh.forks import hold_for_forks
from stillfresh.stores.breaker import Breaker
from stillfresh.stores.sqlite.connection import (
    BUSY,
    PATIENCE,
    READ_PATIENCE,
    connect_reader,
    translated,
)
from stillfresh.stores.sqlite.database import WriteDatabase, WriteJob
from stillfresh.stores.sqlite.files import locked
from stillfresh.stores.sqlite.ownership import Format

T = TypeVar("T")

MAX_QUEUED: Final = 1024
"""The most steps that wait for the writer: a slow disk must not fill memory."""
MAX_GROUP: Final = 256
"""Jobs in one transaction: enough to share its cost, few enough to be short for others."""
PROBE: Final = 0.25
"""Seconds that a step waits for a file that was locked for others before."""
CLOSING: Final = 5.0
"""Seconds that a step waits for the file when its owner closes it, and a thread for the loop."""
LOCKED_OUT: Final = (*BUSY, BlockingIOError)
"""Another process kept the file locked until patience ran out."""

log = logging.getLogger("stillfresh.sqlite")


class Writer:
    """Writes to a file, from its making to `stop`.

    `adopt` receives each connection for reading. With an event loop, one callback reports a whole
    group of steps; without one, it serves threads.
    """

    def __init__(
        self,
        path: Path,
        file_format: Format,
        adopt: Callable[[apsw.Connection], None],
        loop: asyncio.AbstractEventLoop | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._path = path
        self._loop = loop
        self._room = asyncio.Semaphore(MAX_QUEUED)
        self._patience = patience
        self._breaker = Breaker()
        self._queue: SimpleQueue[WriteJob | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._turn = threading.Lock()
        """Held while the file is used."""
        self._is_closed = False
        """The file was closed for good; changed while `_turn` is held."""
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._adopt = adopt
        self._adopted: Future[None] = Future()
        """Done when the owner reads the file that was opened last."""
        self.database = WriteDatabase(path, file_format, self._begin_to_read, patience)
        self._thread = threading.Thread(target=self._main, name="stillfresh-sqlite", daemon=True)
        self.is_stopping = False
        self._is_woken = self._is_held = False
        self._start()

    def _start(self) -> None:
        hold_for_forks(self)
        self._thread.start()

    def hold(self) -> None:
        """Before a fork: SQLite must not be copied in the middle of a step."""
        self._is_held = self._turn.acquire(timeout=CLOSING)

    def go_on(self) -> None:
        if self._is_held:
            self._turn.release()

    def forked(self) -> None:
        """In the child: SQLite would take the parent's locks for its own."""
        if self._is_held:
            self.database.leave()

    def wait_until_open(self) -> None:
        """Raise the error if it could not be opened."""
        self._opened.result()

    async def opened(self) -> None:
        """As `wait_until_open`; any number of callers may wait, and may be cancelled."""
        await asyncio.shield(asyncio.wrap_future(self._opened))

    def submit(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> "Future[T]":
        """Queue a job. It is done even if its caller no longer waits."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        try:
            self._put(WriteJob(job, future, writes, urgent))
        except StoreError as exc:
            future.set_exception(exc)
        return future

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        """As `submit`, on the loop; waits if the queue is full.

        If it is cancelled, the job is withdrawn, or has been done when this raises.
        """
        await self._room.acquire()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        work = WriteJob(job, future, writes, urgent)
        try:
            self._put(work)
        except (NotOpen, StoreError):
            self._room.release()
            raise
        try:
            return await future
        except asyncio.CancelledError:
            if writes and not self._withdraw(work):
                await _until_settled(work)
            raise

    def run_here(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        """As `run`, in the calling thread, which waits for the writer's turn and for the file."""
        work = WriteJob(job, writes=writes, urgent=urgent)
        with self._gate:
            self._admit(work)
        with self._turn:
            if self._is_closed:
                raise _closed()
            self._do([work])
        if not self._adopted.done():
            # Else this thread could read an earlier file next, in which nothing has changed.
            with suppress(TimeoutError):
                self._adopted.result(CLOSING)
        if work.error is not None:
            raise work.error
        result: T = work.result
        return result

    def _withdraw(self, work: WriteJob) -> bool:
        """Withdraw a job that has not begun. It keeps its place in the queue, and never runs.

        False if it has begun.
        """
        with self.database.claims:
            work.is_withdrawn = not work.has_begun
            return work.is_withdrawn

    def put(self, job: Callable[[apsw.Connection], object]) -> bool:
        """Queue a job that nobody waits for. False if it cannot be queued now."""
        try:
            self._put(WriteJob(job, urgent=False))
        except (NotOpen, StoreError):
            return False
        return True

    def _away(self) -> StoreError:
        return StoreError(
            f"{self._path}: another process keeps it locked for writing; "
            "it is tried again in a moment"
        )

    def mend(self, damaged: apsw.Connection) -> None:
        """A reader found corruption: start a group, which renames the file first."""
        if self.database.damaged is not damaged and not self.is_stopping:
            self.database.damaged = damaged
            self.wake()

    def check_file(self) -> bool:
        """Call now and then before reading, in any thread. Raises StoreError if the file is lost.

        False if it is no longer the same file: the writer's thread finds out why, and opens it
        again or parts from it.
        """
        is_same = self.database.is_same()
        if not is_same:
            self.wake()
        return is_same

    def connect_reader(self) -> apsw.Connection:
        """Return one more connection for reading, in any thread.

        It connects under the lock, so that no process renames the file meanwhile. The caller may
        be on an event loop, so it waits for the lock only for a moment. StoreError if it is no
        longer the same file.
        """
        path = self.database.file.path
        with translated(path), locked(path, READ_PATIENCE):
            if not self.check_file():
                raise StoreError(f"{path}: is no longer the file that was opened; try again")
            return connect_reader(path)

    def wake(self) -> None:
        """Start an empty group, which looks at the file."""
        if not self._is_woken:
            self._is_woken = True
            self._queue.put(WriteJob(lambda _: None, writes=False))

    def stop(self) -> None:
        """Do the queued jobs first; return when the thread has ended."""
        self._refuse()
        self._thread.join()

    async def stopped(self) -> None:
        """As `stop`, without blocking the loop."""
        self._refuse()
        await asyncio.shield(asyncio.wrap_future(self._closed))
        self._thread.join()

    def _put(self, work: WriteJob) -> None:
        with self._gate:
            self._admit(work)
            self._queue.put(work)

    def _admit(self, work: WriteJob) -> None:
        """StoreError if the file was locked just now, and another step will try it."""
        if self._breaker.is_open and not work.urgent and not self._breaker.allows(work.queued_at):
            raise self._away()
        if self.is_stopping:
            raise _closed()

    def _refuse(self) -> None:
        with self._gate:
            if not self.is_stopping:
                self.is_stopping = True
                self._limit_patience()
                self._queue.put(None)

    def _tell(self, callback: Callable[[T], None], argument: T) -> bool:
        """False if the loop ended without closing its store."""
        if self._loop is None:
            callback(argument)
            return True
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True

    def _begin_to_read(self, reader: apsw.Connection) -> None:
        """The file was opened: hand its owner the connection for reading."""
        adopted: Future[None] = Future()
        self._adopted = adopted

        def adopt(reader: apsw.Connection) -> None:
            try:
                self._adopt(reader)
            finally:
                adopted.set_result(None)

        if not self._tell(adopt, reader):
            adopted.set_result(None)

    def _settle(self, group: list[WriteJob]) -> None:
        for work in group:
            work.is_settled = True
            if work.settled is not None:
                work.settled.set()
            if self._loop is not None and work.future is not None:
                self._room.release()
            if work.future is None or work.future.done():
                continue  # its caller was cancelled
            if work.error is not None:
                work.future.set_exception(work.error)
            else:
                work.future.set_result(work.result)

    def _main(self) -> None:
        try:
            with self._turn:
                self.database.open()
        except BaseException as exc:  # noqa: BLE001 (handed to the callers that open)
            self._opened.set_exception(exc)
        else:
            self._opened.set_result(None)
            self._work()
        finally:
            with self._turn:
                self._is_closed = True
                self.database.close()
            self._closed.set_result(None)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            group, is_last = self._next_group()
            self._is_woken = False
            with self._turn:
                self._do(group)
            is_last |= not self._tell(self._settle, group)

    def _do(self, group: list[WriteJob]) -> None:
        began = time.monotonic()
        writes = [work for work in group if work.writes and not work.is_withdrawn]
        if self._breaker.is_open:
            for work in writes:
                if not work.urgent and self._breaker.is_overtaken(work.queued_at):
                    work.error = self._away()  # it waited behind a step that failed, and would too
            writes = [work for work in writes if work.error is None]
        if writes:
            self.database.write(writes)
            self._note(began, writes)
        for work in group:
            if not work.writes:
                self.database.run_read(work)

    def _limit_patience(self) -> None:
        """Under the gate, when the breaker has changed, or the end has begun."""
        limits = [self._patience]
        if self._breaker.is_open:
            limits.append(PROBE)
        if self.is_stopping:
            limits.append(CLOSING)
        self.database.patience.limit = min(limits)

    def _note(self, began: float, group: list[WriteJob]) -> None:
        """Note whether the file could be written; log when that changes."""
        was_open = self._breaker.is_open
        errors = [work.error for work in group if work.error is not None]
        if errors and any(isinstance(error.__cause__, LOCKED_OUT) for error in errors):
            with self._gate:
                self._breaker.failed(began, time.monotonic())
                self._limit_patience()
            if not was_open:
                log.warning("%s; stillfresh tries it again every 2 s or sooner", errors[0])
        elif was_open:
            with self._gate:
                self._breaker.succeeded()
                self._limit_patience()
            log.warning("%s: can be written again", self._path)

    def _next_group(self) -> tuple[list[WriteJob], bool]:
        """All queued jobs, up to a limit; waits for the first."""
        group: list[WriteJob] = []
        try:
            while len(group) < MAX_GROUP:
                work = self._queue.get(block=not group)
                if work is None:
                    return group, True
                group.append(work)
        except Empty:
            pass
        return group, False


def _closed() -> NotOpen:
    return NotOpen("this file is closed; open its store again with open()")


async def _until_settled(work: WriteJob) -> None:
    """Wait for the end of a job that has begun, however often the caller is cancelled."""
    while not work.is_settled:
        if work.settled is None:
            work.settled = asyncio.Event()
        with suppress(asyncio.CancelledError):
            await work.settled.wait()
