"""IsrMiddleware: a page cache in front of any ASGI app (I12-I16).

Decides nothing: `rules_routes` says which requests it is for, `PageCache` finds the page,
`responses` sends it. A hit that memory can answer is a lookup and two sends, written out here.
"""

from collections.abc import Collection
from typing import Any, Final

from stillfresh.engine.front import Entry
from stillfresh.errors import ConfigError, NotOpen, StoreError, shown
from stillfresh.freshness import Verdict
from stillfresh.isr.changes import Changes
from stillfresh.isr.lifespan import Lifespan
from stillfresh.isr.model import PageKey, Stored
from stillfresh.isr.pages import RETRY_AFTER, Busy, PageCache
from stillfresh.isr.rendering import App, Receive, Renderer
from stillfresh.isr.responses import Message, Send, ready, send_page, send_stored
from stillfresh.isr.rules_bounds import Seats
from stillfresh.isr.rules_fields import values
from stillfresh.isr.rules_headers import cache_status
from stillfresh.isr.rules_pages import age_at, too_busy, ttl_at
from stillfresh.isr.rules_routes import RoutesLike, Scope, Site, Visit
from stillfresh.isr.visits import Found, Seat, Unavailable, Visits

__all__ = ["IsrMiddleware"]

MAX_BODY: Final = 1_048_576
MAX_HOSTS: Final = 1_000
"""Hosts of which one process keeps pages at a time; those beyond pass."""
MOST_HOT: Final = 512
"""Bytes of a request line and host that are kept at hand; what is longer takes the long way."""
FRESH: Final = Verdict.FRESH
SAFE: Final = frozenset({"OPTIONS", "TRACE"})
SLOW: Final = frozenset(
    {
        b"authorization",
        b"cache-control",
        b"if-match",
        b"if-modified-since",
        b"if-none-match",
        b"if-range",
        b"if-unmodified-since",
        b"pragma",
        b"range",
    }
)
"""Request headers that make more of a request than "this page, please"."""


class IsrMiddleware:
    """`routes`: how long the pages of each path are fresh; None: as each response says itself."""

    def __init__(
        self,
        app: App,
        pages: PageCache,
        routes: RoutesLike | None = None,
        *,
        hosts: Collection[str] | None = None,
        max_body: int = MAX_BODY,
        max_variants: int = 32,
        max_queries: int = 1_000,
    ) -> None:
        if not isinstance(pages, PageCache):
            raise ConfigError(f"pages: a PageCache, not {shown(pages)}")
        self._app = app
        self._pages = pages
        self._site = Site(routes, hosts)
        self._renderer = Renderer(app, pages.clock, max_body=max_body, keep_for=pages.keep_for)
        limits = {"max_variants": max_variants, "max_queries": max_queries}
        self._visits = Visits(pages, self._renderer, **limits)
        self._lifespan = Lifespan(app, self._open, self._close)
        self._changes = Changes(pages, self._lifespan.warn)
        self._clock = pages.clock
        self._hosts = Seats(MAX_HOSTS)
        self._hot: dict[tuple[Any, ...], tuple[PageKey, Entry[PageKey, Stored], Seat]] = {}
        self._most_hot = pages.core.spec.max_entries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            hot = _hot_key(scope)
            found = self._hot.get(hot) if hot is not None else None
            if found is None or (stored := self._hit(*found)) is None:
                await self._visit(scope, receive, send, hot)
                return
            head, start = stored.head, stored.ready.start
            message = {"type": "http.response.start", "status": head.status}
            message["headers"] = start.copy()
            await send(message)
            await send({"type": "http.response.body", "body": bytes(stored.body)})
        else:
            await self._other(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._visit(scope, receive, send, None)
        elif scope["method"] in SAFE:
            await self._app(scope, receive, send)
        else:
            await self._change(scope, receive, send)

    def _hit(self, key: PageKey, entry: Entry[PageKey, Stored], seat: Seat) -> Stored | None:
        """I16: what memory can answer by itself, or after one look at a store that is at hand."""
        now = self._clock()
        if now < entry.until:
            answer, hits = entry.answer, 1
        elif (glanced := self._pages.core.glance(key)) is not None:
            answer, hits = glanced, 0  # counted there
        else:
            return None
        stored = answer.value
        if answer.verdict is not FRESH or not answer.found or stored.head.vary:
            return None
        entry.hits += hits
        made = stored.ready or ready(stored)
        if made.second != (second := int(now)):
            made.second = second
            ttl = int(ttl_at(stored, answer.fetched_at, now, FRESH))
            fields = made.told(age_at(stored, answer.fetched_at, now), f"hit; ttl={ttl}")
            made.start = [*fields, *made.length]
            self._has_room(seat[0], now)  # who is asked for keeps his places
            self._visits.has_room_for(seat, now)
        return stored

    async def _visit(
        self, scope: Scope, receive: Receive, send: Send, hot: tuple[Any, ...] | None
    ) -> None:
        visit = self._site.visit(scope)
        if visit is None or not self._has_room(visit.host, self._clock()):
            await self._app(scope, receive, send)
            return
        is_changed = visit.url in self._changes.pending
        found: Found | Unavailable | None = None
        try:
            if not is_changed:
                found = await self._visits.find(visit, self._lifespan.shared(scope))
        except (StoreError, NotOpen):
            found = None  # I10: the site works without its cache
        except Busy:
            found = Unavailable(too_busy(RETRY_AFTER), "fwd=miss; collapsed; detail=timeout")
        match found:
            case None:
                marked = _marked(send, "fwd=bypass")
                await self._app(scope, receive, self._heard(visit, marked))
            case Unavailable(page, what):
                await send_page(send, page, what, is_head=visit.is_head)
            case Found():
                self._remember(hot, found, (visit.host, visit.path, visit.query))
                await send_stored(
                    send,
                    found.stored,
                    visit.headers,
                    age=found.age,
                    what=found.what,
                    is_outdated=found.is_outdated,
                    is_head=visit.is_head,
                )

    def _has_room(self, host: str, now: float) -> bool:
        return self._site.is_named(host) or self._hosts.has(host, now)

    def _heard(self, visit: Visit, send: Send) -> Send:
        async def heard(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._visits.hear(visit, message["status"], tuple(message.get("headers", ())))
            await send(message)

        return heard

    def _remember(self, hot: tuple[Any, ...] | None, found: Found, seat: Seat) -> None:
        """Next time these very bytes lead straight to the entry."""
        entry = self._pages.core.shelf.front.entries.get(found.key)
        if hot is None or found.stored.head.vary or entry is None:
            return
        if sum(len(part) for part in hot if part is not None) > MOST_HOT:
            return
        if len(self._hot) >= self._most_hot:
            self._hot.clear()
        self._hot[hot] = entry.key, entry, seat

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """I12, RFC 9111 §4.4: a method that changes something, if it succeeds, outdates its URL."""
        place = self._site.place(scope)
        if place is None:
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and 200 <= message["status"] < 400:
                await self._changes.outdate(place.url)
            await send(message)

        await self._app(scope, receive, _marked(told, "fwd=method"))

    async def _open(self) -> None:
        await self._pages.open()

    async def _close(self) -> None:
        await self._changes.close()
        await self._renderer.close()
        await self._pages.close()


def _hot_key(scope: Scope) -> tuple[Any, ...] | None:
    """What a plain request for a page consists of; None: it asks for more than that."""
    host = None
    for name, value in scope["headers"]:
        if name == b"host":
            if host is not None:
                return None
            host = value
        elif name in SLOW:
            return None
    try:
        return (
            scope["scheme"],
            host,
            scope.get("raw_path"),
            scope["path"],
            scope["query_string"],
            scope["root_path"],
        )
    except KeyError:  # optional in ASGI; no server leaves them out
        return None


def _marked(send: Send, what: str) -> Send:
    """RFC 9211: what passes says that it did."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple(message.get("headers", ()))
            before = values(headers, b"cache-status")
            kept = [it for it in headers if it[0] != b"cache-status"]
            status = (b"cache-status", cache_status(before, what))
            message = {**message, "headers": [*kept, status]}
        await send(message)

    return marked
