"""The upstream that breaks: a real HTTP server on a loopback port of its own.

Its switch is real: *fine* answers after 1–3 s, *slow* much later, *failing* with 500, and *down*
closes its port and every connection, until it is switched on again. It answers as the seeds'
backends do: posts and users by ids, a feed's days and comments, prices for a page, and, in a
clone of the repository, the games with their events.
"""

import asyncio
import contextlib
from collections import Counter
from datetime import date
from typing import Final, Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stillfresh.demo.rules import Pace
from stillfresh.demo.world import UpstreamData
from stillfresh.errors import ConfigError, shown
from stillfresh.gateway.server import Server, bound
from stillfresh.systems.feed import Comment

MODES: Final = ("fine", "slow", "failing", "down")
QUICK: Final = 0.1
"""Requests of a game take this share of a lookup, because a visitor waits for the board."""
PLAYER: Final = "x-player"
"""The header field with the player's id, from the site to the game service."""
KNOWN: Final = (
    "posts", "users", "comments", "waiting-longest", "games", "days", "prices", "rates",
)  # fmt: skip
"""The kinds of requests: the first of these words in the path."""


class BreakableUpstream:
    """`async with BreakableUpstream(app, …) as upstream:`; `await upstream.turn("down")`."""

    def __init__(self, app: ASGIApp, pace: Pace, world: UpstreamData) -> None:
        self.mode = "fine"
        self.requests: Counter[str] = Counter()
        """Requests by kind (posts, users, days, …), answered or not."""
        self._app = app
        self._pace = pace
        self._dice = world.dice
        self._port = 0
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._hung_up = asyncio.Event()
        self._turning = asyncio.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def turn(self, mode: str) -> None:
        """Change the mode; callers that turn it at the same time wait for each other."""
        if mode not in MODES:
            raise ConfigError(f"mode: one of {', '.join(MODES)}, not {shown(mode)}")
        async with self._turning:
            if mode == "down":
                await self._hang_up()
            elif self._server is None:
                await self._listen()
            self.mode = mode

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._hang_up()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer late, and in *failing* with an error."""
        answer = self._app
        if scope["type"] == "http":
            kind = next((name for name in KNOWN if name in scope["path"]), "other")
            self.requests[kind] += 1
            await self._pause(QUICK if kind == "games" else 1.0)
            if self.mode == "failing" or self._hung_up.is_set():
                answer = JSONResponse({"error": "this upstream was told to fail"}, 500)
        with contextlib.suppress(ClientDisconnect):  # switched off during the request
            await answer(scope, receive, send)

    async def _pause(self, share: float) -> None:
        """Wait as long as a lookup takes, or until the upstream is switched off."""
        span = self._pace.slow_lookup if self.mode == "slow" else self._pace.lookup
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dice.uniform(*span) * share):
                await self._hung_up.wait()

    async def _listen(self) -> None:
        """Listen, always on the same port."""
        self._hung_up.clear()
        listener = bound("127.0.0.1", self._port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self, ws="websockets-sansio", lifespan="off", log_config=None, access_log=False
        )
        is_listening = asyncio.Event()
        self._server = Server(config, is_listening.set)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await is_listening.wait()

    async def _hang_up(self) -> None:
        """Cut every connection at once, like a machine that loses its power."""
        server = self._server
        serving = self._serving
        self._server = None
        if server is None or serving is None:
            return
        self._hung_up.set()
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = server.force_exit = True
        await asyncio.wait([serving])


def upstream_app(world: UpstreamData, game_service: ASGIApp | None) -> Starlette:
    """Return the app of the upstream; without a game service, its paths are not found."""
    backend = _Backend(world)
    routes: list[BaseRoute] = [
        Route("/v0/stream/posts/by_ids", backend.posts, methods=["POST"]),
        Route("/v0/stream/users/by_ids", backend.users, methods=["POST"]),
        Route("/prices", backend.prices),
        Route("/rates/{currency}", backend.rate),
        Route("/days/{day}", backend.day),
        Route("/topics/{uuid}/comments", backend.comments, methods=["GET", "POST"]),
    ]
    if game_service is not None:
        routes.append(Mount("/", game_service))
    return Starlette(routes=routes)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class _Backend:
    def __init__(self, world: UpstreamData) -> None:
        self._world = world

    async def posts(self, request: Request) -> Response:
        ids = (await request.json())["post_ids"]
        posts = self._world.posts
        return _json([posts[id_] for id_ in ids if id_ in posts])

    async def users(self, request: Request) -> Response:
        ids = (await request.json())["user_ids"]
        users = self._world.users
        return _json([users[id_] for id_ in ids if id_ in users])

    async def prices(self, _: Request) -> Response:
        return _json(self._world.prices)

    async def rate(self, request: Request) -> Response:
        rate = self._world.rates.get(request.path_params["currency"])
        return Response(status_code=404) if rate is None else _json(rate)

    async def day(self, request: Request) -> Response:
        day = date.fromisoformat(request.path_params["day"])
        return _json(self._world.topics_of(day))

    async def comments(self, request: Request) -> Response:
        uuid = request.path_params["uuid"]
        if request.method == "GET":
            return _json(self._world.comments.get(uuid, []))
        comment = msgspec.json.decode(await request.body(), type=Comment)
        return Response(status_code=201 if self._world.add_comment(uuid, comment) else 404)
