"""The way to the server: commands in, replies out, the client library's errors ended here (S5).

A round trip is bounded in time. One whose reply got lost is run once more: every step can tell
whether it was done already (S2). A server that is away is asked now and then only.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stillfresh.errors import StoreError
from stillfresh.stores.redis.breaker import Breaker
from stillfresh.stores.redis.scripts import BY_SHA

__all__ = ["Command", "Link"]

Command: TypeAlias = tuple[bytes | str | int, ...]

SLICE: Final = 500
SLICE_BYTES: Final = 1 << 20
"""One round trip carries no more than so many commands and, beyond the first, bytes."""
LOST: Final = (RedisConnectionError, RedisTimeoutError, TimeoutError, OSError)
"""The server did not answer: whether it did what it was asked is not known."""

logger = logging.getLogger(__name__)


class Link:
    """Belongs to the event loop that uses it."""

    def __init__(self, url: str, *, timeout: float, max_connections: int, **options: Any) -> None:  # noqa: ANN401
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(
                NoBackoff(), 0
            ),  # a step that may have been done is not the client's to repeat
            decode_responses=False,
            protocol=2,
            **options,
        )
        self._client = Redis(connection_pool=self._pool)
        self._timeout = timeout
        self._breaker = Breaker()

    async def close(self) -> None:
        await self._client.aclose()
        await self._pool.disconnect()

    async def greet(self) -> None:
        """Whether the server would have us. One that is away will be asked again."""
        began = time.monotonic()
        try:
            await self._checked(await self._once([("PING",)]))
        except AuthenticationError as exc:
            raise StoreError(f"the Redis server refused: {_said(exc)}") from exc
        except LOST as exc:
            self._breaker.failed(began, time.monotonic())
            logger.warning("the Redis server is away: %s", _said(exc))
        except RedisError as exc:
            raise StoreError(f"the Redis server refused: {_said(exc)}") from exc

    async def run(
        self, commands: Sequence[Command], *, settle: Sequence[Command] = (), urgent: bool = False
    ) -> list[Any]:
        """The replies, in order. `settle` is what to run if those of `commands` got lost.

        Urgent is what nobody can do without: it is tried whatever happened before.
        """
        replies: list[Any] = []
        for first, last in _slices(commands):
            again = (settle or commands)[first:last]
            replies += await self._round_trip(commands[first:last], again, urgent=urgent)
        return replies

    async def _round_trip(
        self, commands: Sequence[Command], settle: Sequence[Command], *, urgent: bool
    ) -> list[Any]:
        began = time.monotonic()
        if not urgent and not self._breaker.allows(began):
            raise StoreError("the Redis server is away; it is asked again in a moment")
        try:
            replies = await self._twice(commands, settle)
        except LOST as exc:
            self._breaker.failed(began, time.monotonic())
            raise StoreError(f"the Redis server is away: {_said(exc)}") from exc
        except RedisError as exc:
            raise StoreError(f"the Redis server refused: {_said(exc)}") from exc
        self._breaker.succeeded()
        return await self._checked(replies)

    async def _twice(self, commands: Sequence[Command], settle: Sequence[Command]) -> list[Any]:
        if self._breaker.is_open:
            return await self._once(commands)
        try:
            return await self._once(commands)
        except LOST:
            return await self._once(settle)

    async def _once(self, commands: Sequence[Command]) -> list[Any]:
        async with asyncio.timeout(self._timeout):
            replies = await self._send(commands)
            forgotten = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if forgotten:
                texts = {BY_SHA[str(commands[at][1])].text for at in forgotten}
                await self._send([("SCRIPT LOAD", text) for text in texts])
                rerun = await self._send([commands[at] for at in forgotten])
                for at, reply in zip(forgotten, rerun, strict=True):
                    replies[at] = reply
            return replies

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip; a command that the server refused has the error for its reply."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

    async def _checked(self, replies: list[Any]) -> list[Any]:
        for reply in replies:
            if isinstance(reply, RedisError):
                if isinstance(reply, ReadOnlyError):  # not the primary any more: find the new one
                    await self._pool.disconnect(inuse_connections=False)
                raise StoreError(f"the Redis server refused: {_said(reply)}") from reply
        return replies


def _slices(commands: Sequence[Command]) -> Iterator[tuple[int, int]]:
    first = size = 0
    for at, command in enumerate(commands):
        length = sum(len(part) for part in command if isinstance(part, bytes))
        if at > first and (at - first >= SLICE or size + length > SLICE_BYTES):
            yield first, at
            first, size = at, 0
        size += length
    if commands:
        yield first, len(commands)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
