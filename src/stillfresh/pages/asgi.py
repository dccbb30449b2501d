"""IsrMiddleware: a page cache in front of any ASGI app.

It decides nothing: `routes` says which requests are for the cache, `visits` finds the page,
`stored` sends it. A page that `page_memo` knows is a lookup and two sends, written out here.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from stillfresh.errors import ConfigError, NotOpen, StillfreshError, StoreError, shown
from stillfresh.http import CREDENTIALS, Reason, cache_status
from stillfresh.http.fields import Raw, untagged, values, with_field
from stillfresh.http.own_writes import own_writes, token_in, with_token, without_token
from stillfresh.pages.answers import AppAnswer
from stillfresh.pages.clients import BoundedNames, Forward, PageAddress
from stillfresh.pages.facetheory import HYDRATION
from stillfresh.pages.model import (
    App,
    Busy,
    FoundPage,
    Full,
    Message,
    PageRead,
    Receive,
    Scope,
    Send,
    Unavailable,
)
from stillfresh.pages.on_demand import Changes
from stillfresh.pages.page_cache import RETRY_AFTER, PageCache
from stillfresh.pages.page_memo import MARKS, WHOLE_PAGE_MARKS, PageMemo
from stillfresh.pages.parts import PART
from stillfresh.pages.render import Renderer
from stillfresh.pages.routes import RoutesLike, Site, Visit, parameter_names
from stillfresh.pages.sharing import Allowed, is_pool_full
from stillfresh.pages.stored import send_page, send_stored, too_busy
from stillfresh.pages.visits import Served, Visits

SHARED: Final = ("asgi", "path_params", "server", "app")
"""The parts of a scope that say nothing about the visitor."""
MAX_BODY: Final = 1_048_576
"""Bytes of the largest page that is stored, unless `max_body` is given."""
MAX_HOSTS: Final = 1_000
"""Hosts whose pages one process keeps at a time; further hosts pass uncached."""
SAFE: Final = frozenset({"OPTIONS", "TRACE"})

logger = logging.getLogger(__name__)


class IsrMiddleware:
    """Caches the pages of an ASGI app: `IsrMiddleware(app, pages, routes={"/blog/*": "60s"})`.

    Raises ConfigError for an option that cannot be used. docs/isr.md explains the options.

    Args:
        app: The ASGI app whose pages are cached.
        pages: The page cache.
        routes: For each path, how long its pages are fresh: a duration, a `Route`, or None (as long
            as the response says). Other paths pass uncached. Without `routes`, each response says.
        hosts: Allowed hosts, such as `*.example.com`; others pass uncached. None: all hosts.
        max_body: The largest page that is stored, in bytes.
        max_variants: The most variants of a page (`Vary`); further ones pass uncached.
        max_queries: The most queries of a path; further ones pass uncached.
        forward: Send the app the visitor's request (`"request"`), or one made from the page's key
            (`"key"`). None: `"key"` on routes with a duration, else `"request"`.
        credentials: Request fields that identify a client, besides `Authorization` and `Cookie`.
        heuristic: Store pages that have only `Last-Modified`, for a tenth of their age.
        cdn_override: Obey `CDN-Cache-Control` in place of `Cache-Control` and `Expires`.
        normalise_query: Sort the parameters of a query by name, in the key and for the app.
        ignore_cookies: Cookies that the app does not receive with a GET or HEAD, such as `_ga*`.
    """

    def __init__(
        self,
        app: App,
        pages: PageCache,
        routes: RoutesLike | None = None,
        *,
        hosts: Collection[str] | None = None,
        max_body: int = MAX_BODY,
        max_variants: int = 32,
        max_queries: int = 100_000,
        forward: Forward | None = None,
        credentials: Iterable[str] = CREDENTIALS,
        heuristic: bool = False,
        cdn_override: bool = True,
        normalise_query: bool = False,
        ignore_cookies: Iterable[str] = (),
    ) -> None:
        if not isinstance(pages, PageCache):
            raise ConfigError(f"pages: must be a PageCache, not {shown(pages)}")
        if not isinstance(routes, Mapping | None):
            raise ConfigError(f'routes: write {{"/blog/*": "60s"}}, not {shown(routes)}')
        self._app = app
        self._pages = pages
        self._site = Site(
            routes,
            hosts,
            forward,
            credentials,
            normalise_query=normalise_query,
            ignore_cookies=ignore_cookies,
        )
        named = self._site.credentials
        self._marks = MARKS | named
        self._whole_page_marks = WHOLE_PAGE_MARKS | named
        self._renderer = Renderer(app, pages.clock, max_body=max_body)
        allowed = Allowed(heuristic, cdn_override)
        self._visits = Visits(
            pages, self._renderer, named, max_variants, max_queries, allowed=allowed
        )
        self._changes = Changes(pages)
        self._state: dict[str, Any] = {}
        self._hosts = BoundedNames(MAX_HOSTS)
        self._memo = PageMemo(pages, self._has_places, self._marks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = self._site.without_ignored_cookies(scope)
        if scope["type"] == "http" and scope["method"] == "GET":
            stored = self._memo.find(scope, self._whole_page_marks)
            if stored is None:
                await self._visit(scope, receive, send)
                return
            page = stored.ready
            status = stored.head.status
            headers = [*page.said, *page.length]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = stored.body if isinstance(stored.body, bytes) else bytes(stored.body)
            await send({"type": "http.response.body", "body": body})
        else:
            await self._other(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._visit(scope, receive, send)
        elif scope["method"] in SAFE:
            await self._pass_method(scope, receive, send)
        else:
            await self._change(scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        stored = self._memo.find(scope, self._marks)
        if stored is not None:
            is_head = scope["method"] == "HEAD"
            await send_stored(send, stored, stored.ready.said, scope["headers"], is_head=is_head)
            return
        headers = tuple(scope["headers"])
        token = token_in(headers)
        cleaned = without_token(headers)
        visit = self._site.visit(scope if cleaned is headers else {**scope, "headers": cleaned})
        if token:
            scope = {**scope, "headers": with_token(headers, token)}
        if token and isinstance(visit, Visit):
            visit = replace(visit, token=token)
        query = scope.get("query_string", b"")
        if query and HYDRATION in parameter_names(query):
            visit = Reason.HYDRATION
        if isinstance(visit, Reason):
            await self._pass(visit, None, scope, receive, send)
        elif not self._has_room(visit.host, self._pages.clock()):
            await self._pass(Reason.FULL, None, scope, receive, send)
        else:
            await self._answer(visit, scope, receive, send)

    async def _pass(
        self, reason: Reason, visit: Visit | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """A response that passes uncached says why, and is counted.

        The app's answer to one visitor shows whether the next answer can be shared.
        """

        def what(status: int, headers: Raw) -> str:
            why = reason
            if is_pool_full(headers):
                why = Reason.SITE_FULL
            elif visit is not None:
                judgement = self._visits.hear(visit, status, headers)
                if reason is Reason.PRIVATE:
                    # The last answer was not shared. If this one could be, it is not private.
                    why = judgement if isinstance(judgement, Reason) else Reason.REMEMBERED
            self._pages.count_bypass(why)
            return f"fwd=bypass; detail={why}"

        await self._app(scope, receive, self._marking(send, what))

    async def _answer(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        match await self._find(visit, scope):
            case Reason() as reason:
                await self._pass(reason, visit, scope, receive, send)
            case AppAnswer(reason=reason) as answer:
                self._pages.count_bypass(reason)
                marked = self._marking(send, lambda _, __: f"fwd=miss; detail={reason}")
                await answer.pass_to(receive, marked, is_head=visit.is_head)
            case Unavailable(page, what, reason):
                if reason is not None:
                    self._pages.count_bypass(reason)
                await send_page(send, page, what, is_head=visit.is_head)
            case FoundPage(read=PageRead(growing=AppAnswer() as answer) as read, fields=fields):
                try:
                    await answer.show(fields, read, receive, send)
                finally:
                    self._count_going(answer)
            case FoundPage() as page:
                if page.stored.head.status != PART and not visit.token:
                    self._memo.remember(scope, visit, page)
                await send_stored(
                    send, page.stored, page.fields, visit.headers, is_head=visit.is_head
                )

    def _count_going(self, answer: AppAnswer) -> None:
        if answer.is_going:  # its head was sent before that was known
            self._pages.count_bypass(answer.reason)

    async def _find(self, visit: Visit, scope: Scope) -> Served:
        if self._changes.pending and self._changes.concern(visit.url):
            return Reason.CHANGED
        try:
            if visit.token:
                return await self._find_at_least(visit, scope)
            return await self._visits.find(visit, scope, self._render_scope(scope))
        except Full:
            return Reason.FULL
        except (StoreError, NotOpen):
            return Reason.STORE  # the site works without its cache
        except Busy:
            return Unavailable(too_busy(RETRY_AFTER), "fwd=miss; collapsed; detail=timeout")

    async def _find_at_least(self, visit: Visit, scope: Scope) -> Served:
        """A page that is no older than the changes that the visitor has seen."""
        pages = self._pages
        with pages.at_least(visit.token):
            if not await pages.cache.outboxes.have_delivered(visit.token):
                return Reason.CHANGED
            return await self._visits.find(visit, scope, self._render_scope(scope))

    def _has_places(self, address: PageAddress, ids: Sequence[str], now: float) -> bool:
        return self._has_room(address[0], now) and self._visits.places.has(address, ids, now)

    def _has_room(self, host: str, now: float) -> bool:
        return self._site.is_named(host) or self._hosts.has(host, now)

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """RFC 9111 §4.4: a successful change invalidates its own URL.

        Its client is given a token of that, and of the changes that the app has made.
        """
        with own_writes((), token_in(scope["headers"])) as writes:
            await self._change_noting(scope, receive, writes.given_with(send, scope))

    async def _change_noting(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = self._site.place(scope)

        async def invalidate_and_send(message: Message) -> None:
            is_done = message["type"] == "http.response.start" and 200 <= message["status"] < 400
            if is_done and isinstance(place, Visit):
                urls = self._site.changed(scope, place, tuple(message.get("headers", ())))
                await asyncio.gather(*map(self._changes.invalidate, urls))
            await send(message)

        await self._pass_method(scope, receive, invalidate_and_send)

    async def _pass_method(self, scope: Scope, receive: Receive, send: Send) -> None:
        def what(_: int, headers: Raw) -> str:
            why = Reason.SITE_FULL if is_pool_full(headers) else Reason.METHOD
            self._pages.count_bypass(why)
            return f"fwd=method; detail={why}"

        await self._app(scope, receive, self._marking(send, what))

    def _marking(self, send: Send, what: Callable[[int, Raw], str]) -> Send:
        """RFC 9211: mark a response that passes; `what` makes the text from status and fields."""
        shows_tags = self._pages.expose_tags

        async def mark_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = tuple(message.get("headers", ()))
                before = values(headers, b"cache-status")
                status = cache_status(before, what(message["status"], headers))
                shown = headers if shows_tags else untagged(headers)
                message = {**message, "headers": [*with_field(shown, b"cache-status", status)]}
            await send(message)

        return mark_and_send

    def _render_scope(self, scope: Scope) -> dict[str, Any]:
        """The scope of a render: what the app set up at its start, without this request's notes."""
        shared = {name: scope[name] for name in SHARED if name in scope}
        return {**shared, "state": dict(self._state)}

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The cache opens after its app, and closes after it."""
        self._state = scope.get("state", {})
        has_received = False

        async def receive_and_note() -> Message:
            nonlocal has_received
            has_received = True
            return await receive()

        async def follow_and_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._open()
            elif message["type"].startswith("lifespan.shutdown."):
                await self._close()
            await send(message)

        try:
            await self._app(scope, receive_and_note, follow_and_send)
        except Exception:
            if has_received:
                raise
            # An app without lifespan (Django): the cache still has one.
            while (message := await receive())["type"] != "lifespan.shutdown":
                await follow_and_send({"type": f"{message['type']}.complete"})
            await follow_and_send({"type": "lifespan.shutdown.complete"})

    async def _open(self) -> None:
        """The site starts even if the store is unavailable."""
        try:
            await self._pages.open()
        except StillfreshError as exc:
            logger.warning("the page cache could not be opened, and is tried again: %s", exc)

    async def _close(self) -> None:
        await self._changes.close()
        await self._renderer.close()
        await self._pages.close()
