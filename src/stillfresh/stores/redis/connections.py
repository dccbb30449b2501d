"""The client library's connections to one server: commands out, replies in, one round trip (S5).

A connection on which anything was left unsaid (an error, a cancellation) is closed, never used
again: its next reply would be somebody else's. Taking and giving back await nothing, so that no
cancellation can lose a place.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from stillfresh.stores.redis.layout import Command


class Connections:
    """At most `most` at once; who comes then waits for a place."""

    def __init__(self, url: str, *, most: int, timeout: float, options: dict[str, Any]) -> None:
        never = Retry(NoBackoff(), 0)  # a step that may have been done is not theirs to repeat
        self._factory: ConnectionPool = ConnectionPool.from_url(
            url,
            retry=never,
            socket_timeout=None,
            socket_connect_timeout=None,
            protocol=2,
            **options,
        )
        self._timeout = timeout
        self._places = asyncio.Semaphore(most)
        self._idle: list[AbstractConnection] = []
        self._lost = 0
        """Round trips that failed, one after the other."""
        self._closed = False

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies; a command that the server refused has the error for its reply.

        TimeoutError if the first reply, the connection included, or any next one takes too long:
        a long answer may take its time as long as it goes on, and so may those before us.
        """
        lost = self._lost
        async with self._places, asyncio.timeout(self._timeout) as limit:
            if self._lost > lost:  # else a long queue would find out one by one
                raise TimeoutError("others lost the server while this waited for a connection")
            connection = self._idle.pop() if self._idle else self._new()
            try:
                if not connection.is_connected:
                    await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_packed_command(connection.pack_commands(commands))
                replies = await self._replies(connection, len(commands), limit)
            except BaseException as exc:
                self._lost += isinstance(exc, Exception) or limit.expired()
                await connection.disconnect(nowait=True)
                raise
            self._lost = 0
            if self._closed:
                await connection.disconnect()
            else:
                self._idle.append(connection)
            return replies

    async def _replies(
        self, connection: AbstractConnection, count: int, limit: asyncio.Timeout
    ) -> list[Any]:
        replies = [await _reply(connection)]
        clock, moved_at = asyncio.get_running_loop().time, 0.0
        while len(replies) < count:
            now = clock()
            if now - moved_at > self._timeout / 8:  # moving a timer costs as much as a reply
                limit.reschedule(now + self._timeout)
                moved_at = now
            replies.append(await _reply(connection))
        return replies

    def _new(self) -> AbstractConnection:
        return cast("AbstractConnection", self._factory.make_connection())  # type: ignore[no-untyped-call]

    async def drop_idle(self) -> None:
        """What one has met, the others would meet: begin anew."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()


async def _reply(connection: AbstractConnection) -> Any:  # noqa: ANN401 (whatever the server says)
    try:
        return await connection.read_response()
    except ResponseError as exc:
        return exc
