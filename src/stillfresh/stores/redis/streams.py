"""Connections of an event loop to one Redis server, with our own reader of replies.

The client library connects and signs in. Then `ReplyStream` takes the place of its stream: a reply
wakes its caller once, without the library's tasks and time limits for each line.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

from stillfresh.stores.redis.heard import HeardStamps
from stillfresh.stores.redis.layout import Command
from stillfresh.stores.redis.replies import CLOSED, ReplyReader, packed
from stillfresh.stores.server import AnswerTimer
from stillfresh.tasks import looked_at

MANY_BYTES: Final = 1 << 16
"""The sender of a longer request waits until the server takes it."""


class ReplyStream(asyncio.Protocol):
    """What arrives on an open connection. It takes the place of the library's stream.

    That stream still learns when the connection is lost, and when writing has to pause: closing and
    writing wait for it.
    """

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 (the library's own)
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._timer = AnswerTimer(self._give_up)
        self._reader = ReplyReader()
        self._replies: list[Any] = []
        self._lost: Exception | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._count = 0
        """So many replies does the caller wait for."""
        self._within = 0.0

    async def next_replies(self, count: int, until: float, within: float) -> list[Any]:
        """The next replies. Raises what the client library raises for a lost connection.

        TimeoutError if the first has not come at `until`, by the loop's clock, or if the next one
        takes longer than `within` seconds.
        """
        if len(self._replies) < count:
            if self._lost is not None:
                raise self._lost
            self._count = count
            self._within = within
            arrived: asyncio.Future[None] = self._loop.create_future()
            self._arrived = arrived
            self._timer.wait_until(until)
            try:
                await arrived
            finally:
                self._arrived = None
                self._timer.end()
        replies = self._replies[:count]
        del self._replies[:count]
        return replies

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._reader.feed(data)
        except InvalidResponse as exc:
            self._end(exc)
            return
        self._replies += replies
        if self._arrived is None or self._arrived.done():
            return
        if len(self._replies) >= self._count:
            self._arrived.set_result(None)
        elif replies:
            self._timer.wait_until(self._loop.time() + self._within)

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
        self._timer.stop()
        if self._lost is None:
            self._lost = error
        self._fail(self._lost)

    def _give_up(self) -> None:
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(error)
            looked_at(self._arrived)  # its caller may be cancelled before it looks


class OpenConnection:
    """A connection of the client library, after its handshake, with our reader of its replies."""

    stamps: HeardStamps
    """Those that count on it: of the server's life in which it was opened."""

    def __init__(self, connection: AbstractConnection, until: float | None) -> None:
        """`until`: when connecting, greeting and the first reply must be over."""
        self._connection = connection
        self._first_until = until
        writer: Any = connection._writer  # noqa: SLF001 (it has no other name)
        self._writer = writer
        self._transport = writer.transport
        self._replies = ReplyStream(self._transport.get_protocol())
        self._transport.set_protocol(self._replies)
        self._clock = asyncio.get_running_loop().time

    def end_first_request(self) -> None:
        """From now on, each request has its own time."""
        self._first_until = None

    async def exchange(self, commands: Sequence[Command], within: float) -> list[Any]:
        """One round trip; a command that the server refused has its error as reply.

        TimeoutError if the first reply or any next one takes longer than `within` seconds.
        """
        until = self._clock() + within if self._first_until is None else self._first_until
        data = packed(commands)
        if self._transport.is_closing():  # uvloop would raise a RuntimeError
            raise RedisConnectionError(CLOSED)
        self._transport.write(data)
        if len(data) > MANY_BYTES:
            async with asyncio.timeout_at(until):
                await self._writer.drain()
        return await self._replies.next_replies(len(commands), until, within)

    async def disconnect(self, *, nowait: bool = False) -> None:
        await self._connection.disconnect(nowait=nowait)
