"""Asking an ASGI app for a page: by its key alone, or by a visitor's own request (I13, I15, I24).

The app runs in a task of its own. What it does after its answer (background work) goes on.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.http.fields import Raw, members, values
from stillfresh.http.freshness import PageTerms
from stillfresh.http.validation import conditions, is_refresh, refreshed
from stillfresh.isr.collecting import NOT_MODIFIED, App, AppAnswer, Handover, ended
from stillfresh.isr.model import Headers, Page, Rendered, Stored
from stillfresh.isr.rules_forward import as_asked, judged_for, selected
from stillfresh.isr.rules_keys import normalised
from stillfresh.isr.rules_routes import Scope, Visit
from stillfresh.isr.rules_storage import Judgement, Shared, judged, made_of, unshared

LOAD: Final = "stillfresh.load"
"""In a scope: a load for the cache by a visitor's own request, and its answer."""
AGENT: Final = ((b"user-agent", b"stillfresh"), (b"accept", b"*/*"))
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppRequest:
    """How the app is asked for a page."""

    visit: Visit
    base: Mapping[str, Any]
    """The parts of the scope that are not the page's own."""
    fields: Raw
    own: PageTerms | None
    """The route's own duration."""
    judge: Callable[[int, Raw, float], Judgement]
    given: Callable[[Sequence[str]], Mapping[str, str]]
    """Of these request fields, those that the app was given."""
    handover: Handover | None = None

    def scope(self, asked: Raw) -> dict[str, Any]:
        """The page's own URL; no extension, since its response is read here."""
        return {
            **self.base,
            "type": "http",
            "method": "GET",
            "http_version": "1.1",
            "scheme": self.visit.scheme,
            "root_path": self.visit.root_path,
            "path": self.visit.app_path,
            "raw_path": self.visit.raw_path.encode("ascii"),
            "query_string": self.visit.query.encode("ascii"),
            "headers": [*self.fields, *asked],
            "extensions": {},
        }


def by_key(
    visit: Visit, state: Mapping[str, Any], own: PageTerms | None, given: Mapping[str, str]
) -> AppRequest:
    """I13: with the headers that are in the page's key, and nothing of the client."""
    told = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items())
    names = {name for name, _ in told}
    agent = (it for it in AGENT if it[0] not in names)

    def judge(status: int, headers: Raw, fetched_at: float) -> Judgement:
        return judged(status, headers, fetched_at, own)

    fields = ((b"host", visit.host.encode("ascii")), *agent, *told)
    return AppRequest(visit, {**state, "client": None}, fields, own, judge, lambda _: given)


def by_request(
    visit: Visit,
    scope: Scope,
    own: PageTerms | None,
    *,
    request: Raw,
    credentials: frozenset[bytes],
    handover: Handover,
) -> AppRequest:
    """I24: by a visitor's own `request`; a response that is not for all goes on to him."""

    def judge(status: int, headers: Raw, fetched_at: float) -> Judgement:
        return judged_for(request, credentials, status, headers, fetched_at=fetched_at, own=own)

    def given(vary: Sequence[str]) -> Mapping[str, str]:
        return selected(vary, request, frozenset()) or {}

    fields = as_asked(request, visit.host, is_vouched=visit.is_vouched)
    return AppRequest(visit, scope, fields, own, judge, given, handover)


class Renderer:
    """Renders pages of one app."""

    def __init__(self, app: App, clock: Clock, *, max_body: int, keep_for: float) -> None:
        self._app = app
        self._clock = clock
        self._max_body = max_body
        self._keep_for = keep_for
        self._behind: set[asyncio.Future[None]] = set()

    async def render(self, asking: AppRequest, old: Stored | None) -> Rendered:
        """With `old` as what upstream is asked to compare; as it was, if that still holds."""
        fetched_at = self._clock()

        def judge(status: int, headers: Raw) -> Judgement:
            return asking.judge(status, headers, fetched_at)

        asked = () if old is None else conditions(old.head.headers)
        is_own, handover = asking.own is not None, asking.handover
        answer = AppAnswer(
            judge,
            self._max_body,
            has_old=old is not None,
            keeps_own=handover is None and not is_own,
            handover=handover,
        )
        page = await self._page(asking.scope(asked), answer, is_load=handover is not None)
        if page is None:
            return unshared(answer.head(), answer.reason, is_whole=False)
        if page.status == NOT_MODIFIED and asked and old is not None:
            again = self._again(old, page)
            if again is None:
                return await self.render(asking, None)
            page = again
        page = _varying(page, asking.visit)
        judgement = judge(page.status, page.headers.raw)
        given = asking.given(judgement.vary) if isinstance(judgement, Shared) else {}
        return made_of(page, judgement, fetched_at, given, is_own=is_own, keep_for=self._keep_for)

    def _again(self, old: Stored, page: Page) -> Page | None:
        """RFC 9111 §4.3.4: the stored page, refreshed by this 304; None: it is about another."""
        if not is_refresh(old.head.headers, page.headers.raw):
            return None
        headers = refreshed(old.head.headers, page.headers.raw, self._clock())
        return Page(bytes(old.body), old.head.status, Headers.of(headers))

    async def _page(
        self, scope: dict[str, Any], answer: AppAnswer, *, is_load: bool
    ) -> Page | None:
        """None: given up, or handed over."""
        if is_load:
            scope[LOAD] = answer
        running = asyncio.ensure_future(self._app(scope, answer.receive, answer.send))
        answer.running = running
        waiting = asyncio.ensure_future(answer.settled.wait())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await ended(running)
            raise
        finally:
            waiting.cancel()
        if answer.is_going:
            self._leave(running, self._over_for_one)
            return None
        if answer.is_given_up:
            await ended(running)
            return answer.failure()
        if not answer.is_whole:
            await running
            raise ConnectionError("the app ended without a whole answer")
        self._leave(running, self._over)
        return answer.page()

    def _leave(
        self, running: "asyncio.Future[None]", over: "Callable[[asyncio.Future[None]], None]"
    ) -> None:
        self._behind.add(running)
        running.add_done_callback(over)

    def _over(self, running: "asyncio.Future[None]") -> None:
        """Background work of the app's own; an error in it is told as a server would tell it."""
        self._behind.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.error("the app raised after its answer", exc_info=error)

    def _over_for_one(self, running: "asyncio.Future[None]") -> None:
        """The visitor is told of an error, if it is still there."""
        self._behind.discard(running)
        if not running.cancelled():
            running.exception()

    async def close(self) -> None:
        for task in list(self._behind):
            await ended(task)


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
