"""Bytes both ways between a client and the site, once the site has switched protocols.

The handshake of a WebSocket is a request like any other. Everything after it is passed on
unchanged, so subprotocol, extensions and close codes are a matter of the two ends. `Inbox` is the
reading side of a connection, with a limit of unread bytes.
"""

import asyncio
from typing import Final, Protocol

TUNNEL: Final = "stillfresh.tunnel"
"""The scope type of a request for a WebSocket, and the scope's key of the client's end."""
MOST_BUFFERED: Final = 262_144
"""Unread bytes of a connection; beyond that its sender waits."""
LINGER: Final = 2.0
"""Seconds for the other side of a connection to read the rest; then it is cut."""
IDLE: Final = 600.0
"""Seconds without traffic after which a tunnel ends; at most twice as many."""


class Inbox:
    """Bytes that arrived over a connection and were not read yet."""

    def __init__(self, transport: asyncio.Transport, *, most: int = MOST_BUFFERED) -> None:
        self._transport = transport
        self._most = most
        self._is_paused = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None
        """Done when the reader need not wait any longer."""
        self.came = bytearray()
        self.is_over = False

    def add(self, data: bytes | bytearray) -> None:
        self.came += data
        if len(self.came) > self._most and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def read(self, until: float | None = None) -> bytes:
        """The next bytes; empty at the end. Raises TimeoutError at `until`, by the loop's clock."""
        while not self.came and not self.is_over:
            await self._wait(until)
        if not self.came and self._error is not None:
            raise ConnectionError(repr(self._error)) from self._error
        return self.take()

    def take(self) -> bytes:
        """The bytes that have come, without waiting."""
        data = bytes(self.came)
        self.came.clear()
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self, until: float | None) -> None:
        """A timer and a future add a fifth of what `asyncio.timeout` around an event adds."""
        loop = asyncio.get_running_loop()
        news = loop.create_future()
        self._news = news
        timer = None if until is None else loop.call_at(until, _time_out, news)
        try:
            await news
        finally:
            self._news = None
            if timer is not None:
                timer.cancel()


def _time_out(news: "asyncio.Future[None]") -> None:
    if not news.done():
        news.set_exception(TimeoutError())


class TunnelEnd(Protocol):
    """One of the two connections of a tunnel."""

    async def read(self) -> bytes:
        """The next bytes; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Write; waits while the other side does not read."""

    def finish(self) -> None:
        """Send what was written, and close."""


async def joined(client: TunnelEnd, site: TunnelEnd) -> None:
    """Copy bytes both ways, until one side ends or both are silent for too long."""
    has_moved = True

    async def pump(source: TunnelEnd, sink: TunnelEnd) -> None:
        nonlocal has_moved
        while data := await source.read():
            has_moved = True
            await sink.write(data)

    pumps = [asyncio.ensure_future(pump(client, site)), asyncio.ensure_future(pump(site, client))]
    try:
        while has_moved and not any(task.done() for task in pumps):
            has_moved = False
            await asyncio.wait(pumps, timeout=IDLE, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pumps:
            task.cancel()
        client.finish()
        site.finish()
    for error in await asyncio.gather(*pumps, return_exceptions=True):
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise error
