"""Blocking connections to one server, for threads without an event loop.

Each is used by one thread at a time, and others wait for one. A connection that may have an unread
answer, after an error or an interrupt, is closed and never used again: its next answer would be of
another request.
"""

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Generic, Protocol, TypeVar

from stillfresh.stores.permits import Permits

T = TypeVar("T")


class BlockingConnection(Protocol):
    """A connection of a pool."""

    def is_clean(self) -> bool:
        """True if it can be used again after a request that failed."""

    def disconnect(self) -> None:
        """Close it at once."""


C = TypeVar("C", bound=BlockingConnection)


class ThreadPool(Generic[C]):
    """At most `most` connections. `connect` makes one, which is ready to be used."""

    def __init__(
        self,
        connect: Callable[[], C],
        *,
        most: int,
        lost: tuple[type[Exception], ...],
        timeout: float | None = None,
        busy: Callable[[], Exception] = TimeoutError,
    ) -> None:
        """`lost`: the errors of a request that the server did not answer.

        `busy` makes the error of a thread that got no connection within `timeout` seconds.

        Without a timeout, a thread waits as long as others use the connections.
        """
        self._connect = connect
        self._lost = lost
        self._timeout = timeout
        self._busy = busy
        self._permits = Permits(most)
        self._idle: deque[C] = deque()
        self._failures = 0
        self._is_closed = False

    def exchange(self, talk: Callable[[C], T]) -> T:
        """Talk over one connection, in this thread."""
        failures_before = self._failures
        try:
            permit = self._permits.take(timeout=self._timeout)
        except Empty:
            raise self._busy() from None
        try:
            # Otherwise the threads of a long queue would find out one by one.
            if self._failures > failures_before:
                raise TimeoutError("the server failed while this thread waited for a connection")
            return self._talk(talk)
        finally:
            self._permits.give_back(permit)

    def _talk(self, talk: Callable[[C], T]) -> T:
        connection: C | None = None
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            result = talk(connection)
        except BaseException as exc:
            if connection is not None and connection.is_clean():
                self._give_back(connection)
                raise
            # The handler of a signal may have raised, which says nothing of the server.
            self._failures += isinstance(exc, self._lost)
            if connection is not None:
                connection.disconnect()
            raise
        self._give_back(connection)
        return result

    def _give_back(self, connection: C) -> None:
        if self._is_closed:
            connection.disconnect()
        else:
            self._idle.append(connection)

    def drop_idle(self) -> None:
        """Close idle connections: they would meet the same failure."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                return
            connection.disconnect()

    def close(self) -> None:
        """Close all; one that is in use, when its request ends."""
        self._is_closed = True
        self.drop_idle()
