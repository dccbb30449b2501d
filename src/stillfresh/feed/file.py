"""The feed's file as one process uses it: reads on the caller's thread, writes on one other.

Threads that read at the same time have a connection each. A file that turns out to be corrupt, or
that another process has replaced, is opened anew by the writer (F12); readers follow.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import apsw

from stillfresh.errors import NotOpen, StoreError
from stillfresh.feed.reading import FeedMemory, Sliced
from stillfresh.feed.schema import FEED, completed
from stillfresh.forks import tell_of_forks
from stillfresh.stores.sqlite import (
    CORRUPT,
    LOOK_EVERY,
    READ_PATIENCE,
    Identity,
    Writer,
    abandon,
    connect_reader,
    explained,
    identity_of,
    locked,
    real,
    translated,
)

T = TypeVar("T")


class FeedReader:
    """A connection, its memory, and which opening of the file it belongs to."""

    __slots__ = ("connection", "epoch", "memory")

    def __init__(self, connection: apsw.Connection, epoch: int) -> None:
        self.connection = connection
        self.epoch = epoch
        self.memory = FeedMemory()


class FeedFile:
    """Open from its making to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: list[FeedReader] = []
        self._first: apsw.Connection | None = None
        self._epoch = 0
        self._identity: Identity | None = None
        self._look_at = 0.0
        self._skipped = 0
        self.is_closed = self._is_forked = False
        tell_of_forks(self)
        self._writer = Writer(path, FEED, self._adopt)
        try:
            self._writer.wait_until_open()
        except BaseException:
            self._writer.stop()
            raise

    def _adopt(self, connection: apsw.Connection) -> None:
        """On the writer's thread: the file was opened, perhaps anew."""
        completed(connection)
        self._epoch += 1
        self._identity = identity_of(self.path)
        self._first = connection
        self._idle.append(FeedReader(connection, self._epoch))

    def read(self, job: Callable[[FeedMemory, apsw.Connection], Sliced[T]]) -> Sliced[T]:
        """On this thread, in slices; StoreError if the file cannot be read."""
        self.check_open()
        if time.monotonic() > self._look_at:
            self._look()
        reader = self._take()
        try:
            return (yield from job(reader.memory, reader.connection))
        except apsw.Error as exc:
            if isinstance(exc, CORRUPT) and self._first is not None:
                self._writer.mend(self._first)
            raise explained(self.path, exc) from exc
        finally:
            self._give_back(reader)

    def _take(self) -> FeedReader:
        try:
            while (reader := self._idle.pop()).epoch != self._epoch:
                self._end(reader)
        except IndexError:
            reader = self._another()
        return reader

    def _another(self) -> FeedReader:
        """Under the lock, so that nobody sets the file aside meanwhile.

        The caller's thread may be an event loop's, so it waits briefly only.
        """
        epoch, path = self._epoch, real(self.path)
        with translated(path), locked(path, READ_PATIENCE):
            if identity_of(path) != self._identity:
                self._writer.wake()
                raise StoreError(f"{path}: has been replaced; it is opened anew in a moment")
            connection = connect_reader(path)
        completed(connection)
        return FeedReader(connection, epoch)

    def _give_back(self, reader: FeedReader) -> None:
        if self.is_closed or reader.epoch != self._epoch:
            self._end(reader)
        else:
            self._idle.append(reader)

    def _end(self, reader: FeedReader) -> None:
        self._skipped += reader.memory.skipped
        abandon(reader.connection)

    def _look(self) -> None:
        self._look_at = time.monotonic() + LOOK_EVERY
        if identity_of(self.path) != self._identity:
            self._writer.wake()

    def submit(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> "Future[T]":
        """On the writer's thread, in a savepoint of its own; others may share its commit."""
        self.check_open()

        def guarded(connection: apsw.Connection) -> T:
            try:
                return job(connection)
            except (TypeError, ValueError, OverflowError, RecursionError) as exc:
                raise StoreError(f"the feed's rows hold what cannot be used: {exc!r}") from exc

        return self._writer.submit(guarded, writes=writes, urgent=urgent)

    def forked(self) -> None:
        """In the child: the thread that writes, and the connections, are the parent's."""
        self._is_forked = True

    def check_open(self) -> None:
        if self._is_forked:
            raise NotOpen(
                "this feed cache was open when the process forked; open it in the child process "
                "with FeedCache.open(path)"
            )
        if self.is_closed:
            raise NotOpen("this feed cache is closed; open it with FeedCache.open(path)")

    @property
    def skipped(self) -> int:
        return self._skipped + sum(reader.memory.skipped for reader in list(self._idle))

    def close(self) -> None:
        """What is queued is done first; the last to close leaves no log behind."""
        self.is_closed = True
        if self._is_forked:
            return
        while self._idle:
            self._end(self._idle.pop())
        self._writer.stop()
