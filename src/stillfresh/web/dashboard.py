"""The operator's page, under `/_stillfresh/`: live numbers, entries, and what to do to one (G6).

Without a token it is there for this machine alone. With one, its files are for everybody (they say
nothing), its numbers and its actions for who has the token. An action is never reached by a form
of another site: it needs a header field that forms cannot send, and its own origin.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from stillfresh.clock import Clock
from stillfresh.engine import Cache
from stillfresh.errors import StillfreshError
from stillfresh.isr import PageCache
from stillfresh.web.entries import ACTIONS, PAGES, Place, Shelves
from stillfresh.web.guard import Operators, bearer, is_local, is_of_this_page
from stillfresh.web.numbers import Numbers
from stillfresh.web.replies import (
    Problem,
    Reply,
    header,
    json_reply,
    method_of,
    problem_reply,
    send_file,
)

FILES: Final = {
    "/": "dashboard.html",
    "/dashboard.css": "dashboard.css",
    "/dashboard.js": "dashboard.js",
    "/dashboard-draw.js": "dashboard-draw.js",
    "/dashboard-entries.js": "dashboard-entries.js",
    "/dashboard-reasons.js": "dashboard-reasons.js",
    "/icon.svg": "icon.svg",
    "/stillfresh.css": "stillfresh.css",
}
LIMIT: Final = 25
MOST: Final = 500
"""Entries in one answer."""
OWN_FIELD: Final = b"x-stillfresh"
"""A form cannot send it, and a script of another origin may not."""


class Dashboard:
    """An ASGI app; `scope["root_path"]` ends where its own paths begin."""

    def __init__(
        self,
        cache: Cache,
        *,
        live: Callable[[], dict[str, Any]],
        page_cache: PageCache | None = None,
        token: str | None = None,
        has_site: bool = False,
        clock: Clock = time.time,
    ) -> None:
        caches = {"entities": cache}
        if page_cache is not None:
            caches[PAGES] = page_cache.cache
        self._shelves = Shelves(caches)
        self._numbers = Numbers(caches, live, pages=page_cache, clock=clock)
        self._has_site = has_site
        self.operators = Operators(token)
        self._noting: asyncio.Task[NoReturn] | None = None

    def open(self) -> None:
        """From now on the last minutes are remembered."""
        if self._noting is None:
            self._noting = asyncio.get_running_loop().create_task(self._numbers.note_now_and_then())

    async def close(self) -> None:
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.cancel()
            await asyncio.wait([noting])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive  # no request of this page has a body
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if (name := FILES.get(path)) is not None:
                self._check_files(scope)
                await send_file(scope, send, name)
                return
            reply = await self._api(path, scope)
        except Problem as problem:
            reply = problem_reply(problem)
        except StillfreshError as exc:
            reply = problem_reply(Problem(503, "store_away", "The store is away", str(exc)))
        await reply.send(scope, send)

    async def snapshot(self) -> dict[str, Any]:
        """The numbers of the moment, as `api/stats` and the live connection tell them."""
        return {**await self._numbers.snapshot(), "has_site": self._has_site}

    async def _api(self, path: str, scope: Scope) -> Reply:
        match path.split("/", 5)[1:]:
            case ["api", "entries", kind, *rest]:
                return await self._entry(scope, kind, "/".join(rest))
            case ["api", "access"]:
                method_of(scope)
                return self._access(scope)
            case ["api", ("stats" | "history" | "entries") as what]:
                method_of(scope)
                self._check_reader(scope)
                if what == "stats":
                    return _told(await self.snapshot())
                if what == "history":
                    return _told(self._numbers.history())
                return _told(await self._entries(QueryParams(scope["query_string"])))
            case _:
                raise Problem(404, "not_found", "Not found", f"nothing is at {path}")

    def _access(self, scope: Scope) -> Reply:
        """Whether a token is wanted, and whether this one is it: no error in either case."""
        needs_token = self.operators.has_token
        may = self._is_operator(scope) and is_of_this_page(scope)
        if not may and not needs_token:
            raise _refused()
        return _told({"needs_token": needs_token, "is_operator": may})

    async def _entries(self, query: QueryParams) -> dict[str, Any]:
        found = await self._shelves.entries(
            query.get("kind") or None,
            query.get("search", ""),
            _place(query),
            _limit(query.get("limit")),
        )
        return {**found, "kinds": self._shelves.kinds()}

    async def _entry(self, scope: Scope, kind: str, rest: str) -> Reply:
        """`rest` is the id, and for an action its name after it; an id may hold anything."""
        if method_of(scope, "GET", "HEAD", "POST") != "POST":
            self._check_reader(scope)
            return _told(await self._shelves.explain(kind, _id(scope, rest)))
        self._check_actor(scope)
        id_, _, action = rest.rpartition("/")
        if action not in ACTIONS:
            raise Problem(404, "not_found", "Not found", f"an action is one of {ACTIONS}")
        id_ = _id(scope, id_)
        said = await self._shelves.act(action, kind, id_)
        return _told({"said": said, "entry": await self._shelves.explain(kind, id_)})

    def _is_operator(self, scope: Scope) -> bool:
        return self.operators.admits(scope, bearer(scope))

    def _check_files(self, scope: Scope) -> None:
        if not self.operators.has_token and not is_local(scope):
            raise _refused()

    def _check_reader(self, scope: Scope) -> None:
        if not is_of_this_page(scope):
            raise Problem(403, "another_origin", "Not for pages of another origin")
        if self._is_operator(scope):
            return
        if not self.operators.has_token:
            raise _refused()
        raise Problem(401, "sign_in", "The token, please", www_authenticate="Bearer")

    def _check_actor(self, scope: Scope) -> None:
        self._check_reader(scope)
        if not self.operators.has_token and not header(scope, OWN_FIELD):
            said = "without a token, an action needs the header field X-Stillfresh"
            raise Problem(403, "not_ours", "Not from this page", said)


def _refused() -> Problem:
    said = (
        "without a token the dashboard is for this machine alone, under the name localhost or "
        "127.0.0.1; give the gateway a token to use it from elsewhere"
    )
    return Problem(403, "this_machine_only", "For this machine alone", said)


def _told(value: object) -> Reply:
    return json_reply(value, cache_control="no-store")


def _id(scope: Scope, from_path: str) -> str:
    """`?id=` for the two that no path can hold: a browser takes `.` and `..` for steps."""
    id_ = QueryParams(scope["query_string"]).get("id") or from_path
    if not id_:
        raise Problem(404, "not_found", "Not found", "an id has at least one character")
    return id_


def _place(query: QueryParams) -> Place | None:
    """Where the page before ended, as its `next` said."""
    match query.getlist("after"):
        case [cache, kind, id_]:
            return cache, kind, id_
        case []:
            return None
        case _:
            said = "after: a cache's name, a kind and an id, each in an `after` of its own"
            raise Problem(422, "bad_after", "No such place", said)


def _limit(text: str | None) -> int:
    if text is None:
        return LIMIT
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST):
        raise Problem(422, "bad_limit", "No such limit", f"limit: from 1 to {MOST}")
    return int(text)
