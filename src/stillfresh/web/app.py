"""The gateway: one ASGI app of REST, live updates, health, dashboard and pages (G1).

It routes and it opens and closes what it is made of; everything else is in the parts.
"""

import logging
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final, Self

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from stillfresh.clock import Clock
from stillfresh.coordinator import Kind
from stillfresh.engine import Cache
from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.isr import KIND as PAGE
from stillfresh.isr import PageCache
from stillfresh.live import Hub, Live
from stillfresh.live.sign_in import Authenticate
from stillfresh.web.dashboard import Dashboard
from stillfresh.web.guard import SECRET, bearer, checked_hosts, checked_origins, is_called_rightly
from stillfresh.web.life import Life, NotStarted
from stillfresh.web.numbers import Health
from stillfresh.web.openapi import openapi
from stillfresh.web.replies import Problem, Reply, json_reply, method_of, problem_reply, send_file
from stillfresh.web.rest import Rest
from stillfresh.web.signing import Authority

FILES: Final = {"/stillfresh.js": "stillfresh.js", "/stillfresh.d.ts": "stillfresh.d.ts"}
SHOWN: Final = ("Age", "Cache-Status", "Date", "ETag", "Retry-After")
"""Header fields that a page of another origin may read."""
DASHBOARD: Final = "/_stillfresh"

logger = logging.getLogger(__name__)


def gateway(
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
    clock: Clock = time.time,
) -> "Gateway":
    """An ASGI app to run or to mount; what it is not asked for by name goes to `pages`.

    A cache that is given has its own clock, and stays its maker's to close. With `hosts`, who comes
    from this machine is answered under these names and loopback's alone.
    """
    return Gateway(
        store if isinstance(store, Cache) else Cache(store, clock=clock),
        owns_cache=not isinstance(store, Cache),
        kinds=kinds,
        pages=pages,
        page_cache=page_cache,
        authenticate=authenticate,
        origins=checked_origins(origins),
        hosts=checked_hosts(hosts),
        token=checked_token(token),
        max_connections=max_connections,
    )


class Gateway:
    """Open it by lifespan or by `async with`; `hub`, `live` and `dashboard` are its parts."""

    def __init__(
        self,
        cache: Cache,
        *,
        owns_cache: bool,
        kinds: Iterable[Kind],
        pages: ASGIApp | None,
        page_cache: PageCache | None,
        authenticate: Authenticate | None,
        origins: tuple[str, ...],
        hosts: tuple[str, ...] | None,
        token: str | None,
        max_connections: int,
    ) -> None:
        clock = cache.clock
        self.cache = cache
        self.page_cache = page_cache
        self.hub = Hub(cache, kinds=kinds)
        if page_cache is not None and PAGE in self.hub.kinds:
            raise ConfigError(f"kind {PAGE!r}: pages are kept under this name; choose another one")
        self._owns_cache = owns_cache
        self._pages = pages
        self._life = Life(pages) if pages is not None else None
        self._hosts = hosts
        self._has_v1 = bool(self.hub.kinds) or pages is None
        self.dashboard = Dashboard(
            cache,
            live=self._live_now,
            page_cache=page_cache,
            token=token,
            has_site=pages is not None,
            clock=clock,
        )
        self.live = Live(
            self.hub,
            authenticate=authenticate,
            origins=origins,
            stats=self.dashboard.snapshot,
            is_operator=self._may_see_figures,
            max_connections=max_connections,
        )
        caches = {"entities": cache, **({"pages": page_cache.cache} if page_cache else {})}
        self._health = Health(caches, self._live_now, page_cache)
        of_reads = authenticate.remembered if isinstance(authenticate, Authority) else authenticate
        self._rest = Rest(self.hub, clock, of_reads)
        self._v1: ASGIApp = CORSMiddleware(
            self._answer_v1,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("Authorization", "Content-Type", "If-None-Match"),
            expose_headers=SHOWN,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)

    async def open(self) -> None:
        """Ready for requests; a store that cannot be opened raises, and is tried again by reads."""
        if self._life is not None:
            await self._life.start()
        self.dashboard.open()
        await self.cache.open()
        if self.page_cache is not None:
            await self.page_cache.open()

    async def close(self) -> None:
        """No new work; connections are told, and what is ours is closed."""
        await self.live.close()
        await self.dashboard.close()
        if self._life is not None:
            await self._life.end()
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
        """A store that is away does not keep the gateway from starting: `/readyz` tells."""
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

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = path_of(scope) == "/v1/live"
        if is_ours and self._is_called_rightly(scope):
            await self.live(scope, receive, send)
        else:
            code, why = (4403, "not under this name") if is_ours else (4404, "not here")
            await receive()
            await send({"type": "websocket.close", "code": code, "reason": why})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        try:
            await self._route(path, scope, receive, send)
        except Problem as problem:
            await problem_reply(problem).send(scope, send)

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_v1 and path.startswith("/v1/"):
            self._check_host(scope)
            await self._v1(scope, receive, send)
        elif path in FILES:
            await send_file(scope, send, FILES[path])
        elif path == DASHBOARD or path.startswith(f"{DASHBOARD}/"):
            await self._dashboard(path, scope, receive, send)
        elif (reply := await self._own(path, scope)) is not None:
            await reply.send(scope, send)
        elif self._pages is not None:
            await self._pages(self._behind(scope), receive, send)
        else:
            raise Problem(404, "not_found", "Not found", f"nothing is at {path}")

    async def _own(self, path: str, scope: Scope) -> Reply | None:
        match path:
            case "/healthz":
                method_of(scope)
                return await self._health.healthz()
            case "/readyz":
                method_of(scope)
                return await self._health.readyz()
            case "/openapi.json" if self._has_v1:
                method_of(scope)
                return json_reply(self._openapi(scope), cache_control="no-cache")
            case "/metrics":
                method_of(scope)
                self._check_host(scope)
                self._check_token(scope)
                return await self._health.metrics()
            case _:
                return None

    async def _answer_v1(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._rest.answer(path_of(scope).removeprefix("/v1/"), scope, receive, send)

    async def _dashboard(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "") + DASHBOARD
        if path == DASHBOARD:
            await Reply(308, headers={"location": f"{root}/"}).send(scope, send)
        else:
            await self.dashboard({**scope, "root_path": root}, receive, send)

    def _openapi(self, scope: Scope) -> dict[str, Any]:
        return openapi(
            {name: self.hub.is_per_viewer(name) for name in self.hub.kinds},
            version=version("stillfresh"),
            root=scope.get("root_path", ""),
            has_token=self.dashboard.operators.has_token,
        )

    def _behind(self, scope: Scope) -> Scope:
        state = self._life.state if self._life is not None else {}
        return {**scope, "state": {**scope.get("state", {}), **state}}

    def _may_see_figures(self, scope: Scope, given: str | None) -> bool:
        try:
            return self.dashboard.operators.admits(scope, given)
        except Problem:  # too many guesses
            return False

    def _is_called_rightly(self, scope: Scope) -> bool:
        return self._hosts is None or is_called_rightly(scope, self._hosts)

    def _check_host(self, scope: Scope) -> None:
        if not self._is_called_rightly(scope):
            said = (
                "from this machine: localhost, 127.0.0.1, ::1, or what is written in server.hosts"
            )
            raise Problem(421, "another_host", "Not under this name", said)

    def _check_token(self, scope: Scope) -> None:
        """Everybody may read the metrics, unless there is a token."""
        operators = self.dashboard.operators
        if operators.has_token and not operators.admits(scope, bearer(scope)):
            raise Problem(401, "sign_in", "Sign in first", www_authenticate="Bearer")

    def _live_now(self) -> dict[str, Any]:
        return self.live.snapshot()


def checked_token(token: str | None) -> str | None:
    """Never shown, not even where it is wrong."""
    if token is not None and (not isinstance(token, str) or not SECRET.fullmatch(token)):
        raise ConfigError("token: must be printable ASCII text without spaces")
    return token


def path_of(scope: Scope) -> str:
    """Without the prefix under which the gateway is mounted."""
    path, root = str(scope["path"]), scope.get("root_path", "").rstrip("/")
    return path.removeprefix(root) or "/" if f"{path}/".startswith(f"{root}/") else path
