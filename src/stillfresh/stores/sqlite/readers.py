"""Connections for reading that threads borrow, each for one read.

A thread opens one when it needs it, up to a few. They belong to one file: if another one is opened,
they are closed.
"""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final

import apsw

from stillfresh.errors import StoreError
from stillfresh.forks import hold_for_forks
from stillfresh.stores.sqlite.connection import abandon

MOST: Final = 16
"""The most connections of one process: so many threads read at once."""
REST: Final = 5.0
"""Seconds that a fork waits for reads to end."""


class SpareReaders:
    """The idle connections of one file."""

    def __init__(self, path: Path, connect: Callable[[], apsw.Connection]) -> None:
        self._path = path
        self._connect = connect
        self._idle: list[apsw.Connection] = []
        self._held_for_fork: list[apsw.Connection] = []
        self._open_count = 0
        """Open connections, idle or borrowed; changed under `_lock`."""
        self._is_closed = False
        self._lock = Lock()
        hold_for_forks(self)

    def take(self) -> apsw.Connection:
        """A connection for this thread until it is given back. StoreError if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            with self._lock:
                if self._open_count >= MOST or self._is_closed:
                    raise StoreError(
                        f"{self._path}: {MOST} threads read it already, the most allowed"
                    ) from None
                self._open_count += 1
        try:
            return self._connect()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        with self._lock:
            self._open_count -= 1

    def give_back(self, reader: apsw.Connection) -> None:
        self._idle.append(reader)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Close the idle ones; a borrowed one is closed when it is given back."""
        self._is_closed = True
        while self._idle:
            try:
                reader = self._idle.pop()
            except IndexError:  # another thread closed it
                return
            abandon(reader)
            self._forget()

    def hold(self) -> None:
        """Before a fork: take all of them, so that no thread is in the middle of a read."""
        patience = time.monotonic() + REST
        while len(self._held_for_fork) < self._open_count and time.monotonic() < patience:
            try:
                self._held_for_fork.append(self._idle.pop())
            except IndexError:
                time.sleep(0.0005)

    def go_on(self) -> None:
        readers = self._held_for_fork
        self._held_for_fork = []
        for reader in readers:
            self.give_back(reader)

    def forked(self) -> None:
        """In the child: close the copies, with the parent's locks that SQLite remembers."""
        self._lock = Lock()  # the copy may be held by a thread that the child does not have
        self._is_closed = True
        while self._held_for_fork:
            abandon(self._held_for_fork.pop())
