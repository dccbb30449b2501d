"""The operator's page, under `/_stillfresh/`: live numbers, entries, and actions on them.

Without a token only this machine may open it. With a token, anybody may load its files, which hold
no data; its numbers and actions need the token. A form of another site cannot cause an action: that
needs a header field that forms cannot send, and the page's own origin.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stillfresh.engine import Cache
from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.gateway.entries import ACTIONS, PAGES, Listing, Place
from stillfresh.gateway.guard import Operators, bearer, checked_token, is_local, is_of_this_page
from stillfresh.gateway.numbers import Numbers
from stillfresh.gateway.purging import Purge, purge
from stillfresh.gateway.replies import (
    Problem,
    file_reply,
    json_body,
    json_reply,
    problem_app,
    problem_reply,
)
from stillfresh.gateway.sync_dashboard import (
    WholeReply,
    body_of,
    scope_of,
    send_reply,
    whole_reply,
    wsgi_body,
)
from stillfresh.pages import PageCache
from stillfresh.sync import SyncCache

FILES: Final = (
    "dashboard.css",
    "dashboard.js",
    "dashboard-draw.js",
    "dashboard-entries.js",
    "dashboard-reasons.js",
    "icon.svg",
    "stillfresh.css",
)
LIMIT: Final = 25
MOST: Final = 500
"""Entries in one answer."""
OWN_FIELD: Final = "x-stillfresh"
"""A form cannot send it, and a script of another origin may not."""


class Dashboard:
    """The operator's page as an ASGI app, to mount: `app.mount("/cache", Dashboard(cache))`.

    `token` lets other machines than this one see it. `page_cache` adds the pages of a site, `live`
    the viewers of a gateway. Call `open` and `close` to remember the figures of the last minutes.
    With a `SyncCache`, it runs on the cache's own thread, and remembers from the first request on;
    `reply_to` answers a WSGI request.
    """

    def __init__(
        self,
        cache: Cache | SyncCache,
        *,
        live: Callable[[], dict[str, Any]] | None = None,
        page_cache: PageCache | None = None,
        token: str | None = None,
        has_site: bool = False,
    ) -> None:
        if not isinstance(cache, Cache | SyncCache):
            raise ConfigError(f"cache: must be a Cache or a SyncCache, not {shown(cache)}")
        self._sync = cache if isinstance(cache, SyncCache) else None
        own = cache.on_loop if isinstance(cache, SyncCache) else cache
        caches = {"entities": own}
        if page_cache is not None:
            caches[PAGES] = page_cache.cache
        self.numbers = Numbers(caches, live or _no_viewers, pages=page_cache, clock=own.clock)
        self.operators = Operators(None if token is None else checked_token(token))
        self._listing = Listing(caches)
        self._pages = page_cache
        self._facts = {"has_site": has_site, "has_live": live is not None}
        self._noting: asyncio.Task[NoReturn] | None = None
        self._app = problem_app(
            [
                Route("/", partial(self._file, "dashboard.html")),
                *(Route(f"/{name}", partial(self._file, name)) for name in FILES),
                Route("/api/access", self._access),
                Route("/api/stats", self._stats),
                Route("/api/history", self._history),
                Route("/api/entries", self._entries),
                Route("/api/purge", self._purge, methods=["POST"]),
                Route("/api/entries/{kind}/{id:any}", self._entry, methods=["GET", "POST"]),
            ],
            {StillfreshError: _store_away},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sync is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await body_of(receive)
        except Problem as problem:
            await problem_reply(problem)(scope, receive, send)
            return
        reply = await asyncio.to_thread(self._sync.run, self._on_loop, scope, body)
        await send_reply(reply, send)

    def reply_to(self, environ: Mapping[str, Any], path: str) -> WholeReply:
        """Answer a WSGI request; `path`: what follows the dashboard's own, as `/api/stats`."""
        if self._sync is None:
            raise ConfigError("a dashboard in a WSGI app needs a SyncCache, not a Cache")
        return self._sync.run(self._on_loop, scope_of(environ, path), wsgi_body(environ))

    async def _on_loop(self, scope: Scope, body: bytes) -> WholeReply:
        """On the thread of a SyncCache: remember figures from now on, and answer."""
        if self._noting is None or self._noting.get_loop() is not asyncio.get_running_loop():
            self._noting = None  # the process forked, or the cache was closed and opened again
            self._note()
        return await whole_reply(self._app, scope, body)

    def open(self) -> None:
        """Start to remember the figures of the last minutes."""
        if self._sync is None:
            self._note()

    def _note(self) -> None:
        if self._noting is None:
            self._noting = asyncio.get_running_loop().create_task(self.numbers.note_now_and_then())

    async def close(self) -> None:
        """Stop remembering figures. Those of a SyncCache end with its thread."""
        if self._sync is not None:
            return
        noting = self._noting
        self._noting = None
        if noting is not None:
            noting.cancel()
            await asyncio.wait([noting])
            await self.numbers.write()

    async def snapshot(self) -> dict[str, Any]:
        """Return the current figures, as `api/stats` sends them."""
        return {**await self.numbers.snapshot(), **self._facts}

    async def _file(self, name: str, request: Request) -> Response:
        if not self.operators.has_token and not is_local(request.scope):
            raise _refusal()
        return await file_reply(name, request)

    async def _access(self, request: Request) -> Response:
        """Whether a token is needed, and whether this one is right; never an error."""
        needs_token = self.operators.has_token
        may = self._is_operator(request) and is_of_this_page(request.scope)
        if not may and not needs_token:
            raise _refusal()
        return json_reply({"needs_token": needs_token, "is_operator": may})

    async def _stats(self, request: Request) -> Response:
        self._check_reader(request)
        return json_reply(await self.snapshot())

    async def _history(self, request: Request) -> Response:
        self._check_reader(request)
        return json_reply(self.numbers.history())

    async def _entries(self, request: Request) -> Response:
        self._check_reader(request)
        query = request.query_params
        listing = await self._listing.entries(
            query.get("kind") or None,
            query.get("search", ""),
            _place(query),
            _limit(query.get("limit")),
        )
        return json_reply({**listing, "kinds": self._listing.kinds()})

    async def _entry(self, request: Request) -> Response:
        """The path ends with the id and, for an action, its name; an id may contain anything."""
        self._check_reader(request)
        kind = request.path_params["kind"]
        id_ = request.path_params["id"]
        if request.method != "POST":
            return json_reply(await self._listing.explain(kind, _id(request, id_)))
        self._check_own(request)
        id_, _, action = id_.rpartition("/")
        if action not in ACTIONS:
            raise Problem(404, "not_found", "Not found", f"an action is one of {ACTIONS}")
        id_ = _id(request, id_)
        result = await self._listing.act(action, kind, id_)
        return json_reply({"said": result, "entry": await self._listing.explain(kind, id_)})

    async def _purge(self, request: Request) -> Response:
        """By URLs and tags; returns how many pages each reached."""
        self._check_reader(request)
        self._check_own(request)
        if self._pages is None:
            raise Problem(404, "no_pages", "No pages", "this gateway has no site behind it")
        request_body = await json_body(request, Purge, '{"urls": […], "tags": […], "soft": true}')
        return json_reply(await purge(self._pages, request_body))

    def _check_own(self, request: Request) -> None:
        if not self.operators.has_token and not request.headers.get(OWN_FIELD):
            why = "without a token, an action needs the header field X-Stillfresh"
            raise Problem(403, "not_ours", "Header field missing", why)

    def _is_operator(self, request: Request) -> bool:
        return self.operators.admits(request.scope, bearer(request.scope))

    def _check_reader(self, request: Request) -> None:
        if not is_of_this_page(request.scope):
            raise Problem(403, "another_origin", "Not for pages of another origin")
        if self._is_operator(request):
            return
        if not self.operators.has_token:
            raise _refusal()
        why = "send the operator's token: Authorization: Bearer …"
        raise Problem(401, "sign_in", "Token needed", why, www_authenticate="Bearer")


def _no_viewers() -> dict[str, Any]:
    return {"connections": 0, "max_connections": 0, "signed_in": 0, "subscriptions": {}}


def _refusal() -> Problem:
    why = (
        "without a token the dashboard is for this machine alone, under the name localhost or "
        "127.0.0.1; give it a token to use it from elsewhere"
    )
    return Problem(403, "this_machine_only", "For this machine only", why)


async def _store_away(request: Request, exc: StillfreshError) -> Response:
    del request
    return problem_reply(Problem(503, "store_away", "The store is unavailable", str(exc)))


def _id(request: Request, from_path: str) -> str:
    """`?id=` for `.` and `..`, which a browser would resolve in a path."""
    id_ = request.query_params.get("id") or from_path
    if not id_:
        raise Problem(404, "not_found", "Not found", "an id has at least one character")
    return id_


def _place(query: QueryParams) -> Place | None:
    """Where the previous page ended, from its `next`."""
    match query.getlist("after"):
        case [cache, kind, id_]:
            return cache, kind, id_
        case []:
            return None
        case _:
            why = "after: a cache's name, a kind and an id, each in an `after` of its own"
            raise Problem(422, "bad_after", "Invalid position", why)


def _limit(text: str | None) -> int:
    if text is None:
        return LIMIT
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST):
        raise Problem(422, "bad_limit", "Invalid limit", f"limit must be 1 to {MOST}")
    return int(text)
