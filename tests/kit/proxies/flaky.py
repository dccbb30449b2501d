"""A TCP proxy on the loopback that loses what a test tells it to lose.

    async with FlakyProxy(host, port) as proxy:
        proxy.lose("replies")        # requests arrive, their replies do not: the connection breaks
        ... "requests"               # neither arrives: the connection breaks
        ... "silently"               # requests arrive, and then nothing is heard any more
        proxy.lose("replies", to=b"EVALSHA", times=1)
        proxy.lose("late", times=1)  # the connection breaks; the request is on its way still
        await proxy.deliver()        # and arrives now, as often as this is called
        proxy.heal()

With `hurry(...)`, nobody waits for what was lost silently: the client's time-out ends at once, and
what is answered has all its time, on the busiest machine.

A request is whatever a client sent in one go. Only `deliver` knows the protocol: it asks for a PONG
to know that what it sent before was done.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal, Self

import pytest

from stillfresh.stores.server import AnswerTimer

__all__ = ["FlakyProxy", "Loss"]

Loss = Literal["replies", "requests", "silently", "late"]
Meanwhile = Callable[[], Awaitable[object]]
PING = b"*1\r\n$4\r\nPING\r\n"


class Ailment:
    """What is lost, of which requests, and how often yet."""

    def __init__(
        self, loss: Loss, to: bytes, times: float, *, waits: bool, meanwhile: Meanwhile | None
    ) -> None:
        self.loss = loss
        self.waits = waits
        self.meanwhile = meanwhile
        self.to = to
        self.times = times

    def strikes(self, request: bytes) -> bool:
        if self.times < 1 or self.to not in request:
            return False
        self.times -= 1
        return True


class HastyAsyncio:
    """`asyncio` for a module: its time-outs can be made to end now."""

    def __init__(self) -> None:
        self._limits: list[asyncio.Timeout] = []
        self._timers: set[AnswerTimer] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def timeout(self, delay: float | None) -> asyncio.Timeout:
        limit = asyncio.timeout(delay)
        if delay is not None:
            self._limits.append(limit)
        return limit

    def note_timer(self, timer: AnswerTimer) -> None:
        """It ends the exchanges of a connection, as `timeout` does elsewhere."""
        self._timers.add(timer)

    def end(self) -> None:
        timers = self._timers
        self._timers = set()
        for timer in timers:
            timer._give_up()
        limits = self._limits
        self._limits = []
        for limit in limits:
            with suppress(RuntimeError):  # over already
                limit.reschedule(asyncio.get_running_loop().time())


class FlakyProxy:
    """Stands between a client and a server; `requests` and `lost` count what went through it."""

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.requests = 0
        self.lost = 0
        self.held: list[bytes] = []
        """What was held back, and may yet arrive."""
        self._to = host, port
        self._hasty = HastyAsyncio()
        self._ailment: Ailment | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def lose(
        self,
        loss: Loss,
        *,
        to: bytes = b"",
        times: float = float("inf"),
        waits: bool = False,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """From now on, for requests that contain `to`, so many times. `waits`: without hurry.

        `meanwhile` is called when the server has done it, before the client learns of the loss.
        """
        self._ailment = Ailment(loss, to, times, waits=waits, meanwhile=meanwhile)

    def hurry(self, patch: pytest.MonkeyPatch, *modules: str) -> None:
        """The time-outs of these modules end when something was lost silently."""
        for module in modules:
            patch.setattr(f"stillfresh.stores.{module}.asyncio", self._hasty)
        wait_until = AnswerTimer.wait_until

        def noted(timer: AnswerTimer, until: float) -> None:
            self._hasty.note_timer(timer)
            wait_until(timer, until)

        patch.setattr(AnswerTimer, "wait_until", noted)

    def heal(self) -> None:
        self._ailment = None

    async def deliver(self) -> None:
        """All that was held back arrives, and is done when this returns."""
        for request in self.held:
            far, server = await asyncio.open_connection(*self._to)
            server.write(request + PING)
            await far.readuntil(b"+PONG\r\n")
            server.close()
            await server.wait_closed()

    def lead_to(self, host: str, port: int) -> None:
        """Connections made from now on reach another server, as after a failover."""
        self._to = host, port

    def cut(self) -> None:
        """Every connection there is breaks."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    async def _serve(self, near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(client)
        try:
            far, server = await asyncio.open_connection(*self._to)
            self._writers.add(server)
            await self._relay(near, client, far, server)
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            client.transport.abort()
            self._writers.discard(client)

    async def _relay(
        self,
        near: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        far: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        """Until one side ends it, or something is lost."""
        replies = asyncio.create_task(self._replies(far, client))
        try:
            while (request := await near.read(1 << 20)) and not replies.done():
                self.requests += 1
                ailment = self._ailment
                if ailment is None or not ailment.strikes(request):
                    server.write(request)
                    await server.drain()
                    continue
                self.lost += 1
                replies.cancel()
                await asyncio.gather(replies, return_exceptions=True)
                if ailment.loss == "late":
                    self.held.append(request)
                    return
                if ailment.loss != "requests":
                    server.write(request)
                    await server.drain()
                    await far.read(1 << 20)  # it was done
                if ailment.meanwhile is not None:
                    await ailment.meanwhile()
                if ailment.loss == "silently":
                    if not ailment.waits:
                        self._hasty.end()
                    await near.read(1)
                return
        finally:
            replies.cancel()
            await asyncio.gather(replies, return_exceptions=True)
            server.transport.abort()
            self._writers.discard(server)

    async def _replies(self, far: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while reply := await far.read(1 << 20):
            client.write(reply)
            await client.drain()
        client.transport.abort()
