"""Blocking connections to one Redis server, for threads without an event loop.

The link decides what is sent, when it is sent again and what the replies mean (`link.py`), the pool
which thread has which connection (`stores/thread_pool.py`). Here is only the exchange: bytes out,
replies in, within a limited time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from stillfresh.stores.redis.heard import HeardStamps
from stillfresh.stores.redis.layout import Command
from stillfresh.stores.redis.replies import CLOSED, LOST, ReplyReader, packed
from stillfresh.stores.thread_pool import ThreadPool

READ_AT_ONCE: Final = 1 << 16
SHORTEST: Final = 0.001
"""Seconds for a reply, if the time is nearly over; 0 would mean not to wait at all."""


class TimedReplies:
    """A connection whose replies must come before `reply_by`, if that is set.

    The client library waits for each reply of its handshake as long as for any other. A server
    that hangs would then hold a thread for several time-outs.
    """

    reply_by: float | None = None
    stamps: HeardStamps
    """Those that count on this connection."""
    replies: ReplyReader

    def read_response(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (the library's own)
        if self.reply_by is not None:
            options["timeout"] = max(SHORTEST, self.reply_by - time.monotonic())
        return super().read_response(*args, **options)  # type: ignore[misc]

    def is_clean(self) -> bool:
        """False, because a request that failed may have left a reply unread."""
        return False


class ThreadConnections(ThreadPool[Any]):
    """The connections of threads to one server. `greet` exchanges the first commands of each.

    The first request on a connection shares its time with connecting and greeting; the caller
    then calls `end_first_request`.
    """

    def __init__(
        self,
        url: str,
        *,
        most: int,
        timeout: float,
        options: Mapping[str, Any],
        greet: Callable[[Any], HeardStamps],
    ) -> None:
        super().__init__(self._greeted, most=most, lost=LOST)
        limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        given = {**options, **limits, "retry": Retry(NoBackoff(), 0), "protocol": 2}
        factory: ConnectionPool = ConnectionPool.from_url(url, **given)
        self._options = factory.connection_kwargs
        self._class: Any = type("ThreadConnection", (TimedReplies, factory.connection_class), {})
        self._reply_within = timeout
        self._greet = greet

    def _greeted(self) -> Any:  # noqa: ANN401 (the library's own)
        connection = self._class(**self._options)
        connection.reply_by = time.monotonic() + self._reply_within
        try:
            connection.connect()
            connection.replies = ReplyReader()
            connection.stamps = self._greet(connection)
        except BaseException:
            connection.disconnect()
            raise
        return connection


def end_first_request(connection: Any, timeout: float) -> None:  # noqa: ANN401 (the library's own)
    """From now on, each request on this connection has `timeout` seconds of its own."""
    connection.reply_by = None
    connection._sock.settimeout(timeout)  # noqa: SLF001 (it has no other name)


def exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:  # noqa: ANN401
    """One round trip; a command that the server refused has its error as reply.

    A long answer may take its time while parts arrive.
    """
    sock = connection._sock  # noqa: SLF001 (it has no other name)
    sock.sendall(packed(commands))
    replies: list[Any] = []
    while len(replies) < len(commands):
        if connection.reply_by is not None:
            sock.settimeout(max(SHORTEST, connection.reply_by - time.monotonic()))
        data = sock.recv(READ_AT_ONCE)
        if not data:
            raise RedisConnectionError(CLOSED)
        replies += connection.replies.feed(data)
    return replies
