"""Connections of an event loop to one Redis server, with our own reader of replies.

The client library connects and signs in. Then `ReplyStream` takes the place of its stream: a reply
wakes its caller once, without the library's tasks and time limits for each line.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

from stillfresh.stores.redis.heard import HeardStamps
from stillfresh.stores.redis.layout import Command
from stillfresh.stores.redis.replies import CLOSED, ReplyReader, packed

MANY_BYTES: Final = 1 << 16
"""The sender of a longer request waits until the server takes it."""


class ReplyStream(asyncio.Protocol):
    """What arrives on an open connection. It takes the place of the library's stream.

    That stream still learns when the connection is lost, and when writing has to pause: closing and
    writing wait for it.
    """

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 (the library's own)
        self._stream = stream
        self._reader = ReplyReader()
        self._replies: deque[Any] = deque()
        self._lost: Exception | None = None
        self._arrived: asyncio.Future[None] | None = None

    async def next_reply(self) -> Any:  # noqa: ANN401
        """The next reply. Raises what the client library raises for a lost connection."""
        while not self._replies:
            if self._lost is not None:
                raise self._lost
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return self._replies.popleft()

    def data_received(self, data: bytes) -> None:
        try:
            self._replies.extend(self._reader.feed(data))
        except InvalidResponse as exc:
            self._end(exc)
        self._wake()

    def eof_received(self) -> bool | None:
        self._end(RedisConnectionError(CLOSED))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RedisConnectionError(str(exc) if exc is not None else CLOSED))
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()

    def _end(self, error: Exception) -> None:
        if self._lost is None:
            self._lost = error
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class OpenConnection:
    """A connection of the client library, after its handshake, with our reader of its replies."""

    stamps: HeardStamps
    """Those that count on it: of the server's life in which it was opened."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        writer: Any = connection._writer  # noqa: SLF001 (it has no other name)
        self._writer = writer
        transport = writer.transport
        self._replies = ReplyStream(transport.get_protocol())
        transport.set_protocol(self._replies)
        self.next_reply = self._replies.next_reply

    async def send(self, commands: Sequence[Command]) -> None:
        data = packed(commands)
        self._writer.write(data)
        if len(data) > MANY_BYTES:
            await self._writer.drain()

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip; a command that the server refused has its error as reply."""
        await self.send(commands)
        return [await self.next_reply() for _ in commands]

    async def disconnect(self, *, nowait: bool = False) -> None:
        await self._connection.disconnect(nowait=nowait)
