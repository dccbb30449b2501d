"""One connection: statements over it, whether a task or a thread waits for its socket.

A `Talk` is a generator of what it waits for. So each exchange is written once: on an event loop,
`LoopSocket` drives it, and in a thread `talk_in_thread` does. libpq itself never blocks here.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextvars import Context
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any, Final, TypeAlias, TypeVar

from psycopg import OperationalError
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, PollingStatus
from psycopg.pq import PGconn as NewPGconn
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait, wait

from stillfresh.stores.postgres.schema import Row
from stillfresh.stores.postgres.wire import BINARY, Decoder, decoders_of, parameters_of, rows_of
from stillfresh.stores.server import AnswerTimer
from stillfresh.tasks import looked_at

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
        self._decoders: dict[bytes, Sequence[Decoder | None]] = {}

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
        if result.status != ExecStatus.TUPLES_OK:
            return []
        if name is None:
            return rows_of(result, decoders_of(result))
        decoders = self._decoders.get(name)
        if decoders is None:  # the server never changes what a prepared statement returns
            decoders = decoders_of(result)
            self._decoders[name] = decoders
        return rows_of(result, decoders)

    def stop_preparing(self) -> None:
        """Send every statement with its text from now on."""
        self.prepare_after = None
        self._names.clear()

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
    """Runs the talks of one connection, one after the other, on the running event loop.

    The loop goes on watching the socket between two statements, which saves a third of the time of
    each. Its callback goes on with the talk itself and wakes the caller at the end: if it woke the
    caller to go on, the loop would meanwhile call it once more for the same answer. If something
    arrives while nobody waits, it stops watching.
    """

    def __init__(self, descriptor: int, timeout: float) -> None:
        """`timeout`: seconds for each part of an answer."""
        self._descriptor = descriptor
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._timer = AnswerTimer(self._give_up)
        self._talk: Talk[Any] | None = None
        self._ended: asyncio.Future[Any] | None = None
        self._is_watched = False
        self._is_written = False

    async def drive(self, talk: Talk[T]) -> T:
        """The result of the talk."""
        self._talk = talk
        ended: asyncio.Future[T] = self._loop.create_future()
        self._ended = ended
        try:
            self._go_on(None)
            return await ended
        except BaseException:
            self.rest()  # the connection may be closed next
            raise
        finally:
            self._talk = None
            self._ended = None
            self._timer.end()
            self._stop_writing()

    def _go_on(self, ready: Ready | None) -> None:
        """Go on with the talk until it waits again, or has ended."""
        if self._talk is None or self._ended is None or self._ended.done():
            self.rest()
            return
        try:
            state = next(self._talk) if ready is None else self._talk.send(ready)
            self._wait_for(state)
        except StopIteration as end:
            self._ended.set_result(end.value)
        except Exception as exc:  # noqa: BLE001 (the caller gets it)
            # libpq may have closed the socket. Before the caller wakes up, another connection may
            # get its number.
            self.rest()
            self._fail(exc)

    def _wait_for(self, state: Wait) -> None:
        if not self._is_watched:
            self._watch(self._loop.add_reader, Ready.R)
            self._is_watched = True
        if not state & Wait.W:
            self._stop_writing()
        elif not self._is_written:
            self._watch(self._loop.add_writer, Ready.W)
            self._is_written = True
        self._timer.wait_until(self._loop.time() + self._timeout)

    def _watch(self, add: Callable[..., object], ready: Ready) -> None:
        """Go on when it is ready; in an empty context, as the loop watches on for other callers."""
        try:
            Context().run(add, self._descriptor, self._go_on, ready)
        except RuntimeError as exc:  # uvloop has closed its watcher: the server reset the socket
            raise OperationalError(f"the connection is lost: {exc}") from exc

    def _give_up(self) -> None:
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
            looked_at(self._ended)  # its caller may be cancelled before it looks

    def rest(self) -> None:
        """Stop watching: before the connection is closed, or others wait for its socket."""
        self._timer.stop()
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._is_written:
            self._is_written = False
            self._loop.remove_writer(self._descriptor)


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
