"""The base of stores on a server: connections, requests whose answer was lost, opening.

If the answer of a request was lost, the link sends it once more. Every step can tell whether it was
done already, and none does harm if the first request arrives later. While the server is
unavailable, one step at a time tries it (`breaker.py`).
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

from stillfresh.clock import Clock
from stillfresh.durations import Duration, seconds
from stillfresh.errors import STORE_CLOSED, NotOpen, StoreError
from stillfresh.stores.breaker import TRIED_AGAIN, Breaker
from stillfresh.stores.capabilities import (
    CountsEntries,
    EvictsEntries,
    HasAddress,
    ListsEntries,
    PushesChanges,
)
from stillfresh.stores.channel import Channel, Tell
from stillfresh.stores.contract import After, Store, StoredEntry, StoreStats
from stillfresh.stores.rules import checked_limit

T = TypeVar("T")
L = TypeVar("L")
W = TypeVar("W")

Step: TypeAlias = Callable[[], Awaitable[T]]

SLICE: Final = 500
"""The most steps in one request."""
SLICE_BYTES: Final = 1 << 20
"""The most bytes in one request, unless one step alone is larger."""


def slices(sizes: Sequence[int], is_bound: Callable[[int], bool]) -> Iterator[slice]:
    """The requests for steps of these sizes. `is_bound(at)`: it must follow the step before it."""
    first = total = 0
    for at, size in enumerate(sizes):
        is_full = at - first >= SLICE or total + size > SLICE_BYTES
        if at > first and is_full and not is_bound(at):
            yield slice(first, at)
            first = at
            total = 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def error_text(error: BaseException) -> str:
    """The error's class and message, for the message of a StoreError."""
    text = str(error).removesuffix(".")  # more may follow, after a semicolon
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class AnswerTimer:
    """Ends the exchange of one connection that takes too long: `give_up` is called then.

    A connection has one exchange after the other, and hardly any of them takes too long. So the
    timer of the event loop is set once for many of them, and looks when it rings: to set and cancel
    one for each would take as long as to read the answer.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._give_up = give_up
        self._context = Context()
        """Empty: the timer may outlive the caller whose exchange has set it."""
        self._until: float | None = None
        """By the loop's clock; None: nobody waits."""
        self._timer: asyncio.TimerHandle | None = None

    def wait_until(self, until: float) -> None:
        """An exchange has begun or goes on, and may take until then: not earlier than before."""
        self._until = until
        if self._timer is None:
            self._timer = self._loop.call_at(until, self._look, context=self._context)

    def end(self) -> None:
        """The exchange has ended."""
        self._until = None

    def stop(self) -> None:
        """The connection is closed."""
        self._until = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._until is None:
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look, context=self._context)
        else:
            self._until = None
            self._give_up()


class ServerLink(ABC):
    """At most `most` connections, of one event loop; further callers wait for a permit.

    A connection with an unread answer (after an error or a cancellation) is closed and never used
    again: its next answer would be of another request. A caller that got a permit releases it in
    `finally`, so no cancellation can lose one.
    """

    failures: ClassVar[tuple[type[Exception], ...]]  # of the client library and the network
    lost: ClassVar[tuple[type[Exception], ...]]  # no server answered: it may have done the step
    _error_text = staticmethod(error_text)

    def __init__(self, server_name: str, *, most: int, timeout: float) -> None:
        self._server_name = server_name
        self._most = most
        self._timeout = timeout
        self._permits = asyncio.Semaphore(most)
        """One for each connection that may be in use."""
        self._idle: list[Any] = []
        self._lost_in_a_row = 0
        """Requests that were not answered, since the last one that was."""
        self._closed = False
        self._breaker = Breaker()
        self._why = ""  # the last failure
        self._log = logging.getLogger(type(self).__module__)

    @abstractmethod
    async def _connect(self) -> Any: ...  # noqa: ANN401 (the library's own)

    @abstractmethod
    async def _hello(self) -> None:
        """The first request: raises if the server refuses this cache."""

    @abstractmethod
    def _store_error(self, error: Exception) -> StoreError: ...

    def _is_lost(self, error: BaseException) -> bool:
        return isinstance(error, self.lost)

    def _is_clean(self, _: Any) -> bool:  # noqa: ANN401
        """True if a connection can be used again after a request that failed."""
        return False

    async def greet(self) -> None:
        """Raise if the server refuses this cache. Without an answer, it is tried again later."""
        began = time.monotonic()
        try:
            await self._hello()
        except self.failures as exc:
            if not self._is_lost(exc):
                raise self._store_error(exc) from exc
            self._note_failure(began, exc)

    async def _take_permit(self) -> None:
        await self._permits.acquire()

    async def _once(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """One request over one connection. Connecting and the work each limit their time."""
        lost_before = self._lost_in_a_row
        await self._take_permit()
        try:
            # Otherwise the requests of a long queue would find out one by one.
            if self._lost_in_a_row > lost_before:
                raise TimeoutError("the server failed while this request waited for a connection")
            connection = self._idle.pop() if self._idle else None
            try:
                if connection is None:
                    connection = await self._connect()
                result = await work(connection)
            except BaseException as exc:
                self._lost_in_a_row += self._is_lost(exc)
                if connection is not None:
                    await self._give_back(connection, is_clean=self._is_clean(connection))
                raise
            self._lost_in_a_row = 0
            await self._give_back(connection)
            return result
        finally:
            self._permits.release()

    async def _give_back(self, connection: Any, *, is_clean: bool = True) -> None:  # noqa: ANN401
        if self._closed or not is_clean:
            await connection.disconnect(nowait=not is_clean)
        else:
            self._idle.append(connection)

    async def _try_twice(self, first: Step[T], again: Step[T], *, urgent: bool) -> T:
        """Try twice, the second time on a new connection; once if the last step failed too."""
        began = time.monotonic()
        was_away = self._breaker.is_open
        if not self._breaker.allows(began) and not urgent:
            raise StoreError(f"{self._server_name} is unavailable: {self._why}; {TRIED_AGAIN}")
        try:
            try:
                result = await first()
            except self.failures as exc:
                if was_away or not self._is_lost(exc):
                    raise
                await self.drop_idle()
                result = await again()
        except self.failures as exc:
            if self._is_lost(exc):
                self._note_failure(began, exc)
            else:
                self._note_answer()
            raise self._store_error(exc) from exc
        self._note_answer()
        return result

    def _note_answer(self) -> None:
        if self._breaker.is_open:
            self._breaker.succeeded()
            self._log.warning("%s answers again", self._server_name)

    def _note_failure(self, began: float, error: BaseException) -> None:
        self._why = self._error_text(error)
        if not self._breaker.is_open:
            self._log.warning("%s is unavailable: %s", self._server_name, self._why)
        self._breaker.failed(began, time.monotonic())

    async def drop_idle(self, *, nowait: bool = True) -> None:
        """Close idle connections: they would meet the same failure."""
        idle = self._idle
        self._idle = []
        for connection in idle:
            await connection.disconnect(nowait=nowait)

    async def close(self) -> None:
        self._closed = True
        await self.drop_idle(nowait=False)


class ServerStore(
    Store, ListsEntries, EvictsEntries, CountsEntries, PushesChanges, HasAddress, Generic[L, W]
):
    """A store over one link, `L`, whose entries are at one place, `W`: a prefix or a schema."""

    _new_link: Callable[[], L]
    _list: ClassVar[Callable[..., Awaitable[list[StoredEntry]]]]
    _count: ClassVar[Callable[..., Awaitable[StoreStats]]]
    _listening: ClassVar[Callable[..., AbstractAsyncContextManager[Channel]]]

    def __init__(self, place: W, timeout: Duration, clock: Clock | None) -> None:
        self._place = place
        self._timeout = seconds(timeout, name="timeout", positive=True)
        self._clock = clock
        self._link: L | None = None

    @abstractmethod
    def _now(self) -> object:
        """The time that the steps use; if no clock is given, they use the server's."""

    async def open(self) -> None:
        """Open. Raises if the server refuses us, not if it is unavailable."""
        if self._link is not None:
            return
        link: Any = self._new_link()
        try:
            await link.greet()
        except BaseException:
            await link.close()
            raise
        if self._link is None:
            self._link = link
        else:  # two calls opened it at once
            await link.close()

    async def close(self) -> None:
        link: Any = self._link
        self._link = None
        if link is not None:
            await link.close()

    def _opened(self) -> L:
        if self._link is None:
            raise NotOpen(STORE_CLOSED)
        return self._link

    async def stats(self) -> StoreStats:
        """Counted in slices; an estimate for a very large store."""
        return await self._count(self._opened(), self._place, self._now())

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        checked_limit(limit)
        link = self._opened()
        return await self._list(link, self._place, kind, search, after=after, limit=limit)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        return self._listening(self._opened(), self._place, tell, self._timeout)
