"""The protocol of a Redis server (RESP2): commands as bytes, and replies from bytes.

The client library opens connections: addresses, TLS, signing in. But its packing and its readers
take longer for one step than all the rest, so both are here. Pure: the drivers are `streams.py` for
an event loop and `threads.py` for threads.

A reader that stands in the middle of a reply keeps what it has read so far, and goes on there: a
long reply is read once, however many pieces it comes in.
"""

from collections.abc import Sequence
from typing import Any, Final

from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

from stillfresh.stores.redis.layout import Command

CLOSED: Final = "Connection closed by server."
LOST: Final = (RedisConnectionError, RedisTimeoutError, TimeoutError, OSError)
"""The server did not answer: it may have done the step or not."""
LINE_END: Final = b"\r\n"
STATUS, ERROR, NUMBER, BULK, ARRAY = b"+-:$*"
MORE: Final = object()
"""The next reply is not complete."""
OPENED: Final = object()
"""A list has begun."""


class ReplyReader:
    """Bytes in, replies out. An error that the server sent is a reply, and is not raised."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        """Up to here the data is read."""
        self._open: list[tuple[list[Any], int]] = []
        """Lists that are not complete, each inside the one before it, with their sizes."""

    def feed(self, data: bytes) -> list[Any]:
        """The replies that are complete with these bytes. InvalidResponse for another protocol."""
        self._data += data
        replies: list[Any] = []
        try:
            while self._at < len(self._data):
                reply = self._next()
                if reply is MORE:
                    break
                replies.append(reply)
        except ValueError as exc:  # a size that is no number
            raise InvalidResponse(f"Protocol Error: {exc}") from exc
        if self._at == len(self._data):
            self._data.clear()
        else:
            del self._data[: self._at]
        self._at = 0
        return replies

    def _next(self) -> Any:  # noqa: ANN401 (whatever the server says)
        """The next complete reply, or MORE."""
        while True:
            value = self._next_part()
            if value is MORE:
                return MORE
            if value is OPENED:
                continue
            while self._open:
                items, size = self._open[-1]
                items.append(value)
                if len(items) < size:
                    break
                value = items
                self._open.pop()
            else:
                return value

    def _next_part(self) -> Any:  # noqa: ANN401
        """The next value that is no list, an empty list, MORE, or OPENED for a list's beginning."""
        data = self._data
        end = data.find(LINE_END, self._at)
        if end < 0:
            return MORE
        kind = data[self._at]
        line = data[self._at + 1 : end]
        after = end + 2
        if kind == BULK:
            size = int(line)
            if size >= 0:
                if len(data) < after + size + 2:
                    return MORE
                self._at = after + size + 2
                return bytes(data[after : after + size])
            self._at = after
            return None
        self._at = after
        if kind == NUMBER:
            return int(line)
        if kind == STATUS:
            return bytes(line)
        if kind == ERROR:
            return error_of(line.decode(errors="replace"))
        if kind != ARRAY:
            raise InvalidResponse(f"Protocol Error: {bytes(data[end - len(line) - 1 : end])!r}")
        size = int(line)
        if size > 0:
            self._open.append(([], size))
            return OPENED
        return [] if size == 0 else None


def error_of(text: str) -> Exception:
    """The client library's exception for an error that the server sent."""
    error: Exception = BaseParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


def packed(commands: Sequence[Command]) -> bytes:
    """The commands as they are sent; the client library would take three times as long."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for part in command:
            data = part if isinstance(part, bytes) else str(part).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
