"""Reads by threads: one round trip on a blocking connection, without an event loop.

Reads only: steps that change something run on the event loop (`link.py`). A read that fails here is
repeated there.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from stillfresh.errors import StoreError
from stillfresh.stores.breaker import TRIED_AGAIN, Breaker
from stillfresh.stores.redis.link import LOOK_EVERY, drops_keys

LOOK: Final = b"*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n"
DROPS_KEYS: Final = "this Redis server drops keys: a thread's MGET cannot tell of tags"


class ThreadReads:
    """Blocking connections, as many as threads read at once."""

    def __init__(self, url: str, *, timeout: float, options: Mapping[str, Any]) -> None:
        limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        given = {**limits, **options, "retry": Retry(NoBackoff(), 0), "protocol": 2}
        self._factory: ConnectionPool = ConnectionPool.from_url(url, **given)
        self._idle: deque[Any] = deque()
        self._breaker = Breaker()
        self._drops_keys = False
        self._looked_at = float("-inf")
        """When the server last said whether it drops keys, by the monotonic clock."""

    def texts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The strings of these keys. A connection with an unread reply is closed.

        Once a second, ask in the same request whether the server drops keys. If it does, raise a
        StoreError: only the event loop's reads can tell whether a tag's set was dropped.
        """
        began = time.monotonic()
        if not self._breaker.allows(began):
            raise StoreError(f"the Redis server is unavailable; {TRIED_AGAIN}")
        is_look = began - self._looked_at >= LOOK_EVERY
        if self._drops_keys and not is_look:
            raise StoreError(DROPS_KEYS)
        requests = [_mget(keys), LOOK] if is_look else [_mget(keys)]
        try:
            connection: Any = self._idle.pop()
        except IndexError:
            connection = self._factory.make_connection()
        try:
            connection.send_packed_command(requests, check_health=False)
            texts: list[bytes | None] = connection.read_response()
            if is_look:
                self._drops_keys = _said_to_drop(connection)
                self._looked_at = began
        except BaseException as exc:
            connection.disconnect()
            self.close()
            if not isinstance(exc, RedisError | OSError):
                raise
            self._breaker.failed(began, time.monotonic())
            raise StoreError(f"the Redis server is unavailable: {exc}") from exc
        self._breaker.succeeded()
        self._idle.append(connection)
        if self._drops_keys:
            raise StoreError(DROPS_KEYS)
        return texts

    def close(self) -> None:
        """Close idle connections: they would meet the same failure."""
        while self._idle:
            try:
                self._idle.pop().disconnect()
            except IndexError:  # another thread took it
                return


def _said_to_drop(connection: Any) -> bool:  # noqa: ANN401 (the library's own)
    """True also if the server does not say."""
    try:
        about: bytes = connection.read_response()
    except ResponseError:
        return True
    return drops_keys(about)


def _mget(keys: Sequence[bytes]) -> bytes:
    """One MGET as it is sent; the client library would take three times as long to write it."""
    named = b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys])
    return b"*%d\r\n$4\r\nMGET\r\n%b" % (len(keys) + 1, named)
