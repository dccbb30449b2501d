"""Reads by threads: one round trip on a blocking connection, without an event loop (E20).

Reads only: steps that change something run on the event loop (`link.py`). A read that fails here is
repeated there.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import RedisError
from redis.retry import Retry

from stillfresh.errors import StoreError
from stillfresh.stores.breaker import TRIED_AGAIN, Breaker


class ThreadReads:
    """As many connections as threads read at once."""

    def __init__(self, url: str, *, timeout: float, options: Mapping[str, Any]) -> None:
        limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        given = {**limits, **options, "retry": Retry(NoBackoff(), 0), "protocol": 2}
        self._factory: ConnectionPool = ConnectionPool.from_url(url, **given)
        self._idle: deque[Any] = deque()
        self._breaker = Breaker()

    def texts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The strings of these keys. A connection with an unread reply is closed."""
        began = time.monotonic()
        if not self._breaker.allows(began):
            raise StoreError(f"the Redis server is unavailable; {TRIED_AGAIN}")
        try:
            connection: Any = self._idle.pop()
        except IndexError:
            connection = self._factory.make_connection()
        try:
            connection.send_packed_command([_packed(keys)], check_health=False)
            texts: list[bytes | None] = connection.read_response()
        except BaseException as exc:
            connection.disconnect()
            self.close()
            if not isinstance(exc, RedisError | OSError):
                raise
            self._breaker.failed(began, time.monotonic())
            raise StoreError(f"the Redis server is unavailable: {exc}") from exc
        self._breaker.succeeded()
        self._idle.append(connection)
        return texts

    def close(self) -> None:
        """Close idle connections: they would meet the same failure."""
        while self._idle:
            try:
                self._idle.pop().disconnect()
            except IndexError:  # another thread took it
                return


def _packed(keys: Sequence[bytes]) -> bytes:
    """One MGET; the client library would take three times as long to write it."""
    named = b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys])
    return b"*%d\r\n$4\r\nMGET\r\n%b" % (len(keys) + 1, named)
