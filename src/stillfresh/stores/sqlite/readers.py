"""Connections for reading that threads borrow, each for one read.

A thread opens one when it needs it, up to a few. They belong to one file: if another one is opened,
they are closed.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Final, NamedTuple

import apsw

from stillfresh.errors import StoreError
from stillfresh.forks import hold_for_forks
from stillfresh.stores.permits import Permit, Permits
from stillfresh.stores.sqlite.connection import abandon

MOST: Final = 16
"""The most connections of one process: so many threads read at once."""
REST: Final = 5.0
"""Seconds that a fork waits for reads to end."""


class SpareReader(NamedTuple):
    """A connection. With it goes its permit, also if an interrupt drops both."""

    connection: apsw.Connection
    permit: Permit


class SpareReaders:
    """The idle connections of one file."""

    def __init__(self, path: Path, connect: Callable[[], apsw.Connection]) -> None:
        self._path = path
        self._connect = connect
        self._idle: list[SpareReader] = []
        self._held_for_fork: list[SpareReader] = []
        self._permits = Permits(MOST)
        """One for each connection that is open, idle or borrowed."""
        self._is_closed = False
        hold_for_forks(self)

    def take(self) -> SpareReader:
        """A connection for this thread until it is given back. StoreError if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            pass
        permit = self._free_permit()
        try:
            return SpareReader(self._connect(), permit)
        except BaseException:  # whoever keeps the error must not keep the permit
            self._permits.give_back(permit)
            raise

    def _free_permit(self) -> Permit:
        if not self._is_closed:
            with suppress(Empty):
                return self._permits.take(block=False)
        raise StoreError(f"{self._path}: {MOST} threads read it already, the most allowed")

    def give_back(self, reader: SpareReader) -> None:
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
            abandon(reader.connection)

    @property
    def _open_count(self) -> int:
        return MOST - self._permits.free_count

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
        self._is_closed = True
        while self._held_for_fork:
            abandon(self._held_for_fork.pop().connection)
