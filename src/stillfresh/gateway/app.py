"""The gateway: one ASGI app of REST, live updates, health, dashboard and pages.

It routes and it opens and closes what it is made of; everything else is in the parts.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from importlib.metadata import version
from typing import Final, Literal, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from stillfresh.clock import Clock
from stillfresh.engine import Cache
from stillfresh.engine.recordings import Recording
from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.gateway.app_behind import AppBehind, NotStarted
from stillfresh.gateway.dashboard import Dashboard
from stillfresh.gateway.guard import bearer, checked_hosts, checked_origins, is_called_rightly
from stillfresh.gateway.live import Hub, Live
from stillfresh.gateway.live.sign_in import Authenticate
from stillfresh.gateway.openapi import Ready, openapi
from stillfresh.gateway.own_paths import BELOW, DASHBOARD, LIVE, OwnPaths
from stillfresh.gateway.replies import (
    Problem,
    file_reply,
    json_reply,
    problem_app,
    problem_reply,
    reply,
)
from stillfresh.gateway.response_counts import CountedResponse
from stillfresh.gateway.rest import Rest
from stillfresh.gateway.sources import Authority
from stillfresh.http.own_writes import own_writes, token_in
from stillfresh.pages import KIND as PAGE
from stillfresh.pages import PageCache
from stillfresh.systems.coordinator import Kind

CLIENT_FILES: Final = (
    "stillfresh.js",
    "stillfresh.d.ts",
    "stillfresh-waiting.js",
    "stillfresh-waiting.d.ts",
)
"""What a page may import, and its types."""
PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHER_NAME: Final = "from this machine: localhost, 127.0.0.1, ::1, or what is in server.hosts"

logger = logging.getLogger(__name__)


class Gateway:
    """An ASGI app to run or to mount: entities, live updates, a dashboard, and pages of a site.

    Open it by lifespan or by `async with`. `hub`, `live` and `dashboard` are its parts. Raises
    ConfigError for an option that cannot be used.

    Args:
        store: The address of a store, or a `Cache`, which has its own clock and which you close.
        kinds: The entities that it serves under `/v1/`.
        pages: The ASGI app that answers all other paths, such as an `IsrMiddleware`.
        page_cache: The page cache of that app, for the dashboard and for purging.
        authenticate: Called with a token; returns the viewer's id, or None.
        origins: Origins whose pages may read entities and connect, such as `https://example.com`.
        hosts: Host names, besides loopback's, that requests from this machine may have. None: any.
        token: The operator's token; without it the dashboard is for this machine only.
        max_connections: The most live connections.
        own_prefix: A path such as `/_cache`, below which all paths of the gateway's own are. Every
            other path is the site's.
        clock: Returns seconds since 1970.
    """

    def __init__(
        self,
        store: str | Cache = "memory://",
        *,
        kinds: Iterable[Kind] = (),
        pages: ASGIApp | None = None,
        page_cache: PageCache | None = None,
        authenticate: Authenticate | None = None,
        origins: Iterable[str] = (),
        hosts: Iterable[str] | None = None,
        token: str | None = None,
        max_connections: int = 10_000,
        own_prefix: str = "",
        clock: Clock = time.time,
    ) -> None:
        origins = checked_origins(origins)
        cache = store if isinstance(store, Cache) else Cache(store, clock=clock)
        self.cache = cache
        self.page_cache = page_cache
        self.hub = Hub(cache, kinds=kinds)
        if page_cache is not None and PAGE in self.hub.kinds:
            raise ConfigError(f"kind {PAGE!r}: pages are kept under this name; choose another one")
        self._owns_cache = cache is not store
        self.is_draining = False
        """It is ending: `/readyz` answers 503, and requests are still answered."""
        self.following: AbstractAsyncContextManager[object] | None = None
        """A source of changes: opened after the stores, closed before them."""
        self._opened = AsyncExitStack()
        self.recording: Recording | None = None
        self._pages = AppBehind(pages) if pages is not None else None
        self._hosts = checked_hosts(hosts)
        if own_prefix and pages is None:
            raise ConfigError("own_prefix: goes with pages: it leaves all other paths to the site")
        has_v1 = bool(self.hub.kinds) or pages is None
        self.dashboard = Dashboard(
            cache,
            live=lambda: self.live.snapshot(),  # noqa: PLW0108 (made below)
            page_cache=page_cache,
            token=token,
            has_site=pages is not None,
        )
        self.live = Live(
            self.hub,
            authenticate=authenticate,
            origins=origins,
            stats=self.dashboard.snapshot,
            is_operator=self._may_see_figures,
            max_connections=max_connections,
        )
        of_reads = authenticate.remembered if isinstance(authenticate, Authority) else authenticate
        self._rest = Rest(self.hub, cache.clock, of_reads, origins).app
        routes = [
            *(Route(f"/{name}", partial(file_reply, name)) for name in CLIENT_FILES),
            Route("/healthz", _healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            Route(DASHBOARD, _to_dashboard),
        ]
        if has_v1:
            routes.append(Route("/openapi.json", self._openapi))
        self._paths = OwnPaths(own_prefix, {route.path for route in routes}, has_v1=has_v1)
        self._own = problem_app(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope)(scope, receive, send)
        else:
            part, app, scope = self._route(scope)
            response = CountedResponse(self.dashboard.numbers.responses[part], scope, send)
            if app is not self._pages:
                app = self._with_own_writes(app)
            try:
                await app(scope, receive, response.send)
            except Exception:
                response.broke()
                raise

    def _with_own_writes(self, app: ASGIApp) -> ASGIApp:
        """A client with a token reads nothing older; pages look at tokens by themselves."""

        async def with_own_writes(scope: Scope, receive: Receive, send: Send) -> None:
            with own_writes((self.cache,), token_in(tuple(scope["headers"]))) as writes:
                await app(scope, receive, writes.given_with(send, scope))

        return with_own_writes

    def _websocket(self, scope: Scope) -> ASGIApp:
        path = path_of(scope)
        if self._pages is not None and self.is_site(path):
            return self._pages
        if self._paths.inside(path) != LIVE:
            return WebSocketClose(4404, "not here")
        is_right = self._is_called_rightly(scope)
        return self.live if is_right else WebSocketClose(4403, "not under this name")

    def is_site(self, path: str) -> bool:
        """True if the path is not one of the gateway's own, and there is a site behind it."""
        return self._pages is not None and self._paths.belongs_to_site(path)

    def _route(self, scope: Scope) -> tuple[str, ASGIApp, Scope]:
        """Decide by the path alone, so that a page does not pay for matching our routes."""
        path = path_of(scope)
        if self._pages is not None and self._paths.belongs_to_site(path):
            return "pages", self._pages, scope
        inside = self._paths.inside(path) or path
        below = rooted(scope, inside, self._paths.prefix)
        if self._paths.is_v1(inside):
            is_right = self._is_called_rightly(scope)
            return "kinds", self._rest if is_right else problem_reply(_misnamed()), below
        if inside.startswith(BELOW):
            root = below.get("root_path", "") + DASHBOARD
            return "own", self.dashboard, {**below, "root_path": root}
        return "own", self._own, below

    async def open(self) -> None:
        """Open the stores. If one cannot be opened, this raises, and reads try again."""
        if self._pages is not None:
            await self._pages.start()
        self.dashboard.open()
        await self.cache.open()
        if self.page_cache is not None:
            await self.page_cache.open()
        pages = self.page_cache
        for cache in (self.cache, self.cache if pages is None else pages.cache):
            if self.recording is not None and not cache.is_recording:
                await self._opened.enter_async_context(cache.recording(self.recording))
        following = self.following
        self.following = None
        if following is not None:
            await self._opened.enter_async_context(following)

    async def close(self) -> None:
        """Accept no new work, end the connections, and close the parts that the gateway opened."""
        await self._opened.aclose()
        await self.live.close()
        await self.dashboard.close()
        if self._pages is not None:
            await self._pages.end()
        if self.page_cache is not None:
            await self.page_cache.close()
        if self._owns_cache:
            await self.cache.close()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """The gateway starts even if the store is unavailable; `/readyz` says so."""
        await receive()
        try:
            await self.open()
        except NotStarted as exc:
            await self.close()
            await send({"type": "lifespan.startup.failed", "message": str(exc)})
            return
        except StillfreshError as exc:
            logger.warning("the gateway's store could not be opened, and is tried again: %s", exc)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _readyz(self, request: Request) -> Response:
        del request
        stores = await self.dashboard.numbers.reached()
        lags = self.dashboard.numbers.lags()
        is_late = any(lag.seconds > lag.limit for lag in lags.values())
        site = self.dashboard.numbers.site
        is_full = site is not None and site.places.is_full
        is_ready = set(stores.values()) == {"reachable"} and not (is_late or is_full)
        is_ready = is_ready and not self.is_draining
        late = {name: round(lag.seconds, 3) for name, lag in lags.items()}
        status: Literal["ready", "not ready", "draining"]
        if self.is_draining:
            status = "draining"
        elif is_ready:
            status = "ready"
        else:
            status = "not ready"
        body = Ready(status, stores, late)
        if is_full:
            body.site = "full"
        return json_reply(body, status=200 if is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        """Anybody may read them, unless there is a token."""
        if not self._is_called_rightly(request.scope):
            raise _misnamed()
        operators = self.dashboard.operators
        if operators.has_token and not operators.admits(request.scope, bearer(request.scope)):
            raise Problem(401, "sign_in", "Sign in first", www_authenticate="Bearer")
        text = await self.dashboard.numbers.metrics()
        return reply(text.encode(), PROMETHEUS, {"cache-control": "no-store"})

    async def _openapi(self, request: Request) -> Response:
        described = openapi(
            {name: self.hub.is_per_viewer(name) for name in self.hub.kinds},
            version=version("stillfresh"),
            root=request.scope.get("root_path", ""),
            has_token=self.dashboard.operators.has_token,
            has_pages=self.page_cache is not None,
        )
        return json_reply(described, "no-cache")

    def _may_see_figures(self, scope: Scope, given: str | None) -> bool:
        try:
            return self.dashboard.operators.admits(scope, given)
        except Problem:  # too many guesses
            return False

    def _is_called_rightly(self, scope: Scope) -> bool:
        return self._hosts is None or is_called_rightly(scope, self._hosts)


def _misnamed() -> Problem:
    return Problem(421, "another_host", "Not under this name", OTHER_NAME)


async def _healthz(_: Request) -> Response:
    return json_reply({"status": "alive"})


async def _to_dashboard(request: Request) -> Response:
    return reply(b"", None, {"location": request.scope.get("root_path", "") + BELOW}, 308)


def path_of(scope: Scope) -> str:
    """The path without the prefix under which the gateway is mounted."""
    path = str(scope["path"])
    root = scope.get("root_path", "").rstrip("/")
    is_below = root and f"{path}/".startswith(f"{root}/")
    return (path.removeprefix(root) if is_below else path) or "/"


def rooted(scope: Scope, path: str, prefix: str) -> Scope:
    """As Starlette's routes expect it: the path begins with the prefix, without a final slash.

    `prefix`: that of our own paths, behind the one under which the gateway is mounted.
    """
    if not (scope.get("root_path") or prefix):
        return scope
    root = scope.get("root_path", "").rstrip("/") + prefix
    return {**scope, "root_path": root, "path": root + path}
