"""One connection: statements over it, whether a task or a thread waits for its socket.

A `Talk` is a generator of what it waits for. So each exchange is written once: on an event loop,
`LoopSocket` drives it, and in a thread `talk_in_thread` does. libpq itself never blocks here.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any, Final, TypeAlias, TypeVar

from psycopg import OperationalError
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, PollingStatus
from psycopg.pq import PGconn as NewPGconn
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait, wait

from stillfresh.stores.postgres.schema import Row
from stillfresh.stores.postgres.wire import BINARY, parameters_of, rows_of

T = TypeVar("T")

Talk: TypeAlias = Generator[Wait, Ready | int, T]
"""Yields what it waits for, and is sent what is ready; nothing is, if that took too long."""
MOST_PREPARED: Final = 100
"""Statements that one connection has prepared; the store has fewer."""


class PgSession:
    """Statements over one connection of libpq. `prepare_after`: runs before one is prepared."""

    def __init__(self, pgconn: PGconn) -> None:
        self.pgconn = pgconn
        self.prepare_after: int | None = None
        self._runs: dict[str, int] = {}
        self._names: dict[str, bytes] = {}

    def rows(self, statement: str, arguments: Sequence[Any] = ()) -> Talk[list[Row]]:
        """Run a statement, return its rows."""
        values, formats = parameters_of(arguments)
        name = self._names.get(statement)
        if name is None and self._shall_prepare(statement):
            name = b"stillfresh_%d" % len(self._names)
            self.pgconn.send_prepare(name, statement.encode())
            yield from self._results()
            self._names[statement] = name
        if name is None:
            self.pgconn.send_query_params(
                statement.encode(), values, param_formats=formats, result_format=BINARY
            )
        else:
            self.pgconn.send_query_prepared(
                name, values, param_formats=formats, result_format=BINARY
            )
        result = yield from self._results()
        return rows_of(result) if result.status == ExecStatus.TUPLES_OK else []

    def _shall_prepare(self, statement: str) -> bool:
        if self.prepare_after is None or len(self._names) >= MOST_PREPARED:
            return False
        runs = self._runs.get(statement, 0)
        if runs >= self.prepare_after:
            self._runs.pop(statement, None)
            return True
        if len(self._runs) < MOST_PREPARED:
            self._runs[statement] = runs + 1
        return False

    def _results(self) -> Talk[PGresult]:
        """Send what was queued, and return the result. Raises the server's error."""
        pgconn = self.pgconn
        while pgconn.flush():
            if (yield from _ready(Wait.RW)) & Ready.R:
                pgconn.consume_input()
        last: PGresult | None = None
        while True:
            while pgconn.is_busy():
                yield from _ready(Wait.R)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                break
            last = result
        while pgconn.notifies() is not None:
            pass  # of others on a pooler's shared connection
        if pgconn.status == ConnStatus.BAD or last is None:
            raise OperationalError(f"the connection is lost: {pgconn.get_error_message()}")
        if last.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(last)
        return last


def _ready(state: Wait) -> Talk[int]:
    ready = yield state
    if not ready:
        raise TimeoutError("the server did not answer in time")
    return ready


class LoopSocket:
    """Waits for the socket of one connection on the running event loop.

    The loop goes on watching the socket between two statements, which saves a third of the time of
    each. If something arrives while nobody waits, it stops watching.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[Ready] | None = None
        self._is_watched = False

    async def drive(self, talk: Talk[T], note_part: Callable[[], None]) -> T:
        """The result of the talk. `note_part` is called whenever something has arrived."""
        try:
            state = next(talk)
            while True:
                ready = await self._wait(state)
                note_part()
                state = talk.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            self.rest()  # libpq may have closed the socket, and another one may get its number
            raise

    async def _wait(self, state: Wait) -> Ready:
        waiting: asyncio.Future[Ready] = self._loop.create_future()
        self._waiting = waiting
        if not self._is_watched:
            self._loop.add_reader(self._descriptor, self._note, Ready.R)
            self._is_watched = True
        if state & Wait.W:
            self._loop.add_writer(self._descriptor, self._note, Ready.W)
        try:
            return await waiting
        finally:
            self._waiting = None
            if state & Wait.W:
                self._loop.remove_writer(self._descriptor)

    def _note(self, ready: Ready) -> None:
        if self._waiting is None:
            self.rest()
        elif not self._waiting.done():
            self._waiting.set_result(ready)

    def rest(self) -> None:
        """Stop watching: before the connection is closed, or others wait for its socket."""
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)


def talk_in_thread(session: PgSession, talk: Talk[T], timeout: float) -> T:
    """The result of the talk, while this thread waits. Each part of the answer has its time."""
    result: T = wait(talk, session.pgconn.socket, interval=timeout)
    return result


def connect_in_thread(host: str, deadline: float) -> PGconn:
    """Connect, while this thread waits until `deadline` by the monotonic clock at most.

    libpq looks names up in the system's own time.
    """
    pgconn = NewPGconn.connect_start(host.encode())
    while True:
        status = pgconn.connect_poll()
        if status == PollingStatus.OK:
            pgconn.nonblocking = 1
            return pgconn
        if status == PollingStatus.FAILED or pgconn.status == ConnStatus.BAD:
            message = pgconn.get_error_message()
            pgconn.finish()
            raise OperationalError(f"connection failed: {message}")
        try:
            _await_socket(pgconn.socket, status, deadline)
        except BaseException:
            pgconn.finish()
            raise


def _await_socket(descriptor: int, status: int, deadline: float) -> None:
    events = EVENT_READ if status == PollingStatus.READING else EVENT_WRITE
    with DefaultSelector() as selector:
        selector.register(descriptor, events)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the server did not accept the connection in time")
