"""Asking an ASGI app for a page: by its key alone, or by a visitor's own request (I13, I15, I24).

The app runs in a task of its own. What it does after its answer (background work) goes on.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.isr.collecting import (
    NOT_MODIFIED,
    App,
    AppAnswer,
    GoingAnswer,
    Handover,
    ended,
)
from stillfresh.isr.model import Headers, Page, Rendered, Stored
from stillfresh.isr.rules_fields import Raw, members, values
from stillfresh.isr.rules_forward import as_asked, judged_for, selected
from stillfresh.isr.rules_freshness import Terms
from stillfresh.isr.rules_keys import normalised
from stillfresh.isr.rules_pages import is_of, made_of, rendered, unshared
from stillfresh.isr.rules_routes import Scope, Visit
from stillfresh.isr.rules_storage import Judgement, Shared, judged
from stillfresh.isr.rules_validation import conditions, is_refresh, refreshed

LOAD: Final = "stillfresh.load"
"""In a scope: a load for the cache by a visitor's own request, and its answer."""
AGENT: Final = ((b"user-agent", b"stillfresh"), (b"accept", b"*/*"))

logger = logging.getLogger(__name__)


class Renderer:
    """Renders pages of one app."""

    def __init__(self, app: App, clock: Clock, *, max_body: int, keep_for: float) -> None:
        self._app = app
        self._clock = clock
        self._max_body = max_body
        self._keep_for = keep_for
        self._behind: set[asyncio.Future[None]] = set()

    async def render(
        self,
        visit: Visit,
        state: Mapping[str, Any],
        own: Terms | None,
        given: Mapping[str, str],
        old: Stored | None,
    ) -> Rendered:
        """With `old` as what upstream is asked to compare; as it was, if that still holds."""
        asked = conditions(old.head.headers) if old is not None else ()
        fetched_at = self._clock()

        def judge(status: int, headers: Raw) -> Judgement:
            return judged(status, headers, fetched_at, own)

        answer = AppAnswer(judge, self._max_body, keeps_own=own is None)
        page = await self._page(_scope(visit, state, given, asked), answer)
        if page is not None and old is not None and asked and page.status == NOT_MODIFIED:
            again = self._again(old, page)
            if again is None:
                return await self.render(visit, state, own, given, None)
            page = again
        if page is None:
            return unshared(Page(), answer.reason, is_whole=False)
        return rendered(_varying(page, visit), fetched_at, own, given, self._keep_for)

    async def forward(
        self,
        visit: Visit,
        scope: Scope,
        own: Terms | None,
        old: Stored | None,
        *,
        request: Raw,
        credentials: frozenset[bytes],
        handover: Handover,
    ) -> Rendered:
        """I24: by a visitor's own `request`; a response that is not for all goes on to him."""
        fetched_at = self._clock()

        def judge(status: int, headers: Raw) -> Judgement:
            return judged_for(request, credentials, status, headers, fetched_at=fetched_at, own=own)

        if old is not None and not is_of(old, selected(old.head.vary, request, frozenset())):
            old = None  # of another variant, which stood under this key before
        asked = conditions(old.head.headers) if old is not None else ()
        has_old = old is not None
        answer = GoingAnswer(judge, self._max_body, handover, has_old=has_old)
        fields = (*as_asked(request, visit.host, is_vouched=visit.is_vouched), *asked)
        page = await self._page(_own_scope(visit, scope, fields, answer), answer)
        if answer.is_going or page is None:
            status = answer.status if 200 <= answer.status <= 599 else 200
            head = Page(status=status, headers=Headers.of(answer.headers))
            return unshared(head, answer.reason, is_whole=False)
        if page.status == NOT_MODIFIED and asked and old is not None:
            again = self._again(old, page)
            if again is None:
                return await self.forward(
                    visit,
                    scope,
                    own,
                    None,
                    request=request,
                    credentials=credentials,
                    handover=handover,
                )
            page = again
        page = _varying(page, visit)
        judgement = judge(page.status, page.headers.raw)
        vary = judgement.vary if isinstance(judgement, Shared) else ()
        given = selected(vary, request, frozenset()) or {}
        is_own, keep_for = own is not None, self._keep_for
        return made_of(page, judgement, fetched_at, given, is_own=is_own, keep_for=keep_for)

    def _again(self, old: Stored, page: Page) -> Page | None:
        """RFC 9111 §4.3.4: the stored page, refreshed by this 304; None: it is about another."""
        if not is_refresh(old.head.headers, page.headers.raw):
            return None
        headers = refreshed(old.head.headers, page.headers.raw, self._clock())
        return Page(bytes(old.body), old.head.status, Headers.of(headers))

    async def _page(self, scope: dict[str, Any], answer: AppAnswer) -> Page | None:
        """None: given up, or handed over."""
        app = self._app(scope, answer.receive, answer.send)
        running = answer.running = asyncio.ensure_future(app)
        waiting = asyncio.ensure_future(answer.settled.wait())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await ended(running)
            raise
        finally:
            waiting.cancel()
        if isinstance(answer, GoingAnswer) and answer.is_going:
            self._behind.add(running)
            running.add_done_callback(self._over_for_one)
            return None
        if answer.is_given_up:
            await ended(running)
            return answer.failure()
        if not answer.is_whole:
            await running
            raise ConnectionError("the app ended without a whole answer")
        self._leave(running)
        return answer.page()

    def _leave(self, running: "asyncio.Future[None]") -> None:
        """Background work of the app's own; an error in it is told as a server would tell it."""
        self._behind.add(running)
        running.add_done_callback(self._over)

    def _over(self, running: "asyncio.Future[None]") -> None:
        self._behind.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.error("the app raised after its answer", exc_info=error)

    def _over_for_one(self, running: "asyncio.Future[None]") -> None:
        """Its visitor is told of an error, if he is still there."""
        self._behind.discard(running)
        if not running.cancelled():
            running.exception()

    async def close(self) -> None:
        for task in list(self._behind):
            await ended(task)


def _scope(
    visit: Visit, state: Mapping[str, Any], given: Mapping[str, str], asked: Raw
) -> dict[str, Any]:
    """I13: the page's own URL, the headers that are in its key, and nothing of who asks."""
    told = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items())
    names = {name for name, _ in told}
    agent = tuple(it for it in AGENT if it[0] not in names)
    return {
        **state,
        "type": "http",
        "method": "GET",
        "http_version": "1.1",
        "scheme": visit.scheme,
        "root_path": visit.root_path,
        "path": visit.app_path,
        "raw_path": visit.raw_path.encode("ascii"),
        "query_string": visit.query.encode("ascii"),
        "headers": [(b"host", visit.host.encode("ascii")), *agent, *told, *asked],
        "client": None,
        "extensions": {},
    }


def _own_scope(visit: Visit, scope: Scope, fields: Raw, answer: GoingAnswer) -> dict[str, Any]:
    """I24: the visitor's own, for the whole page; no extension, since its answer is read here."""
    return {
        **scope,
        "method": "GET",
        "http_version": "1.1",
        "path": visit.app_path,
        "raw_path": visit.raw_path.encode("ascii"),
        "query_string": visit.query.encode("ascii"),
        "headers": list(fields),
        "extensions": {},
        LOAD: answer,
    }


def _varying(page: Page, visit: Visit) -> Page:
    """RFC 9111 §4.1: what the route declares, caches behind this one are told too."""
    raw = page.headers.raw
    named = {it.lower() for it in members(values(raw, b"vary"))}
    declared = sorted({name.lower().encode("latin-1") for name in visit.route.vary} - named)
    if not declared:
        return page
    return Page(page.body, page.status, Headers.of((*raw, (b"vary", b", ".join(declared)))))


def given_to(visit: Visit) -> dict[str, str]:
    """Encodings are always offered: what is encoded says so itself."""
    encoding = normalised("accept-encoding", visit.headers)
    return {**visit.declared, **({"accept-encoding": encoding} if encoding else {})}
