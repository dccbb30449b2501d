"""IsrMiddleware: a page cache in front of any ASGI app (I12-I16).

Decides nothing: `rules_routes` says which requests it is for, `PageCache` finds the page,
`responses` sends it. A hit that `hot` has at hand is a lookup and two sends, written out here.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from stillfresh.errors import ConfigError, NotOpen, StoreError, shown
from stillfresh.isr.changes import Changes
from stillfresh.isr.collecting import App, Receive
from stillfresh.isr.found import Found, Going, Passed, Served, Unavailable
from stillfresh.isr.hot import ON_CONDITIONS, PLAIN, HotPages
from stillfresh.isr.lifespan import Lifespan
from stillfresh.isr.model import PageKey
from stillfresh.isr.pages import RETRY_AFTER, Busy, Full, PageCache
from stillfresh.isr.rendering import Renderer
from stillfresh.isr.responses import (
    Message,
    Send,
    send_page,
    send_stored,
    told,
    told_outdated,
)
from stillfresh.isr.rules_bounds import Seats
from stillfresh.isr.rules_fields import Raw, values
from stillfresh.isr.rules_forward import CREDENTIALS, Forward
from stillfresh.isr.rules_headers import cache_status
from stillfresh.isr.rules_pages import too_busy
from stillfresh.isr.rules_reasons import Reason
from stillfresh.isr.rules_routes import Place, RoutesLike, Scope, Site, Visit
from stillfresh.isr.rules_storage import Unshared
from stillfresh.isr.visits import Seat, Visits

MAX_BODY: Final = 1_048_576
MAX_HOSTS: Final = 1_000
"""Hosts of which one process keeps pages at a time; those beyond pass."""
SAFE: Final = frozenset({"OPTIONS", "TRACE"})


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
        forward: Forward | None = None,
        credentials: Iterable[str] = CREDENTIALS,
    ) -> None:
        if not isinstance(pages, PageCache):
            raise ConfigError(f"pages: a PageCache, not {shown(pages)}")
        self._app = app
        self._pages = pages
        self._site = Site(routes, hosts, forward, credentials)
        named = self._site.credentials
        self._plain, self._on_conditions = PLAIN | named, ON_CONDITIONS | named
        self._renderer = Renderer(app, pages.clock, max_body=max_body, keep_for=pages.keep_for)
        limits = {"max_variants": max_variants, "max_queries": max_queries}
        self._visits = Visits(pages, self._renderer, credentials=named, **limits)
        self._lifespan = Lifespan(app, self._open, self._close)
        self._changes = Changes(pages, self._lifespan.warn)
        self._clock = pages.clock
        self._hosts = Seats(MAX_HOSTS)
        self._hot = HotPages(pages, self._has_places, self._on_conditions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            stored = self._hot.find(scope, self._plain)
            if stored is None:
                await self._visit(scope, receive, send)
                return
            made, status = stored.ready, stored.head.status
            headers = [*made.said, *made.length]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": bytes(stored.body)})
        else:
            await self._other(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._visit(scope, receive, send)
        elif scope["method"] in SAFE:
            await self._app(scope, receive, send)
        else:
            await self._change(scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (stored := self._hot.find(scope, self._on_conditions)) is not None:
            is_head, asked = scope["method"] == "HEAD", scope["headers"]
            await send_stored(send, stored, stored.ready.said, asked, is_head=is_head)
            return
        visit = self._site.visit(scope)
        if isinstance(visit, Reason):
            await self._bypass(visit, scope, receive, send)
        elif not self._has_room(visit.host, self._clock()):
            await self._bypass(Reason.FULL, scope, receive, send)
        else:
            await self._answer(visit, scope, receive, send)

    async def _bypass(self, reason: Reason, scope: Scope, receive: Receive, send: Send) -> None:
        """I28: what passes uncached says why, and is counted."""
        self._pages.count_bypass(reason)
        await self._app(scope, receive, _marked(send, lambda _, __: f"fwd=bypass; detail={reason}"))

    async def _answer(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        """The long way."""
        match await self._found(visit, scope):
            case Passed() as passed:
                await self._app(scope, receive, self._heard(visit, passed, send))
            case Going(answer, reason):
                self._pages.count_bypass(reason)
                marked = _marked(send, lambda _, __: f"fwd=miss; detail={reason}")
                await answer.pass_to(receive, marked, is_head=visit.is_head)
            case Unavailable(page, what, reason):
                if reason is not None:
                    self._pages.count_bypass(reason)
                await send_page(send, page, what, is_head=visit.is_head)
            case Found() as found:
                self._hot.remember(scope, visit, found)
                tells = told_outdated if found.is_outdated else told
                fields = tells(found.stored, found.age, found.what)
                asked, is_head = visit.headers, visit.is_head
                await send_stored(send, found.stored, fields, asked, is_head=is_head)

    async def _found(self, visit: Visit, scope: Scope) -> Served:
        if visit.url in self._changes.pending:
            return Passed(Reason.CHANGED)
        try:
            return await self._visits.find(visit, scope, self._lifespan.shared(scope))
        except Full:
            return Passed(Reason.FULL)
        except (StoreError, NotOpen):
            return Passed(Reason.STORE)  # I10: the site works without its cache
        except Busy:
            return Unavailable(too_busy(RETRY_AFTER), "fwd=miss; collapsed; detail=timeout")

    def _has_places(self, seat: Seat, keys: Sequence[PageKey], now: float) -> bool:
        return self._has_room(seat[0], now) and self._visits.has_places(seat, keys, now)

    def _has_room(self, host: str, now: float) -> bool:
        return self._site.is_named(host) or self._hosts.has(host, now)

    def _heard(self, visit: Visit, passed: Passed, send: Send) -> Send:
        """What the app answers one visitor says whether the next answer is for all."""

        def what(status: int, headers: Raw) -> str:
            judgement = self._visits.judge(visit, status, headers)
            self._visits.hear(visit, judgement)
            reason = passed.reason
            if passed.is_by_answer and isinstance(judgement, Unshared):
                reason = judgement.reason
            self._pages.count_bypass(reason)
            return f"fwd=bypass; detail={reason}"

        return _marked(send, what)

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """I12, RFC 9111 §4.4: what changes something, and succeeds, invalidates its own URL."""
        place = self._site.place(scope)
        self._pages.count_bypass(Reason.METHOD)

        async def told(message: Message) -> None:
            is_done = message["type"] == "http.response.start" and 200 <= message["status"] < 400
            if is_done and isinstance(place, Place):
                await self._changes.invalidate(place.url)
            await send(message)

        await self._app(scope, receive, _marked(told, lambda _, __: "fwd=method; detail=method"))

    async def _open(self) -> None:
        await self._pages.open()

    async def _close(self) -> None:
        await self._changes.close()
        await self._renderer.close()
        await self._pages.close()


def _marked(send: Send, what: Callable[[int, Raw], str]) -> Send:
    """RFC 9211: what passes says that it did; `what` is told by the answer's status and fields."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple(message.get("headers", ()))
            before = values(headers, b"cache-status")
            kept = [it for it in headers if it[0] != b"cache-status"]
            status = (b"cache-status", cache_status(before, what(message["status"], headers)))
            message = {**message, "headers": [*kept, status]}
        await send(message)

    return marked
