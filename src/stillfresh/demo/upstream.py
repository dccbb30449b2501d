"""The upstream that breaks: a real HTTP server on a loopback port of its own (G8).

Its switch is real: *fine* answers after 1–3 s, *slow* much later, *failing* with 500, and *down*
closes its port and every connection, until it is switched on again.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import MutableMapping
from typing import Any, Final, Literal, TypeAlias, get_args

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from stillfresh.demo.pace import Pace
from stillfresh.demo.quiet import QuietServer
from stillfresh.errors import ConfigError, shown
from stillfresh.web.serving import bound

Mode: TypeAlias = Literal["fine", "slow", "failing", "down"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
QUICK: Final = 0.1
"""A game's own requests take this share of a lookup: somebody is playing."""


class Switch:
    """The mode, how long an answer takes in it, and how many requests there were."""

    def __init__(self, pace: Pace, dice: random.Random) -> None:
        self.mode: Mode = "fine"
        self.requests: Counter[str] = Counter()
        """By what was asked for: posts, users, days, …"""
        self.hung_up = asyncio.Event()
        self._pace = pace
        self._dice = dice

    async def pause(self, share: float) -> None:
        """As long as a lookup takes, or until the power is gone: then nobody waits any more."""
        span = self._pace.slow_lookup if self.mode == "slow" else self._pace.lookup
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dice.uniform(*span) * share):
                await self.hung_up.wait()


def breakable(app: ASGIApp, switch: Switch) -> ASGIApp:
    """Late, and in *failing* not at all: every request is counted, whatever becomes of it."""

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        what = _kind_of(scope["path"])
        switch.requests[what] += 1
        await switch.pause(QUICK if what == "games" else 1.0)
        if switch.mode == "failing" or switch.hung_up.is_set():
            await _fail(send)
        else:
            with contextlib.suppress(ClientDisconnect):  # switched off while it was asked
                await app(scope, receive, send)

    return late


def _kind_of(path: str) -> str:
    """`/v0/stream/posts/by_ids` asks for posts, `/topics/…/comments` for comments."""
    known = ("posts", "users", "comments", "waiting-longest", "games", "days", "topics", "prices")
    return next((name for name in known if name in path), "other")


async def _fail(send: Send) -> None:
    body = b'{"error": "this upstream was told to fail"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start: MutableMapping[str, Any] = {"type": "http.response.start", "status": 500}
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Upstream:
    """`async with Upstream(app, switch) as upstream:`; `await upstream.turn("down")`."""

    def __init__(self, app: ASGIApp, switch: Switch) -> None:
        self.switch = switch
        self._app = breakable(app, switch)
        self._port = 0
        self._server: QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._turning = asyncio.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def turn(self, mode: str) -> None:
        """Whoever else turns it at the same time waits for that."""
        known = next((it for it in MODES if it == mode), None)
        if known is None:
            raise ConfigError(f"mode: one of {', '.join(MODES)}, not {shown(mode)}")
        async with self._turning:
            if known == "down":
                await self._hang_up()
            elif self._server is None:
                await self._listen()
            self.switch.mode = known

    async def __aenter__(self) -> "Upstream":
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._hang_up()

    async def _listen(self) -> None:
        """Always on the same port, once it has one."""
        self.switch.hung_up.clear()
        listener = bound("127.0.0.1", self._port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        is_listening = asyncio.Event()
        self._server = QuietServer(config, is_listening.set)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await is_listening.wait()

    async def _hang_up(self) -> None:
        """As a machine that loses its power: no farewell to anybody."""
        server, serving, self._server = self._server, self._serving, None
        if server is None or serving is None:
            return
        self.switch.hung_up.set()
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = server.force_exit = True
        await asyncio.wait([serving])
