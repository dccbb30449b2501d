"""Requesting a page from an app: by its key alone, or by a visitor's own request.

The app's response becomes a page, or the reason why there is none. Background work of the app after
its response goes on.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.http import Reason, conditions, is_answer_to, is_refresh, refreshed, selected
from stillfresh.http.fields import Raw, normalised
from stillfresh.http.own_writes import ANY_CHANGE, with_token
from stillfresh.pages.answers import NOT_MODIFIED, AppAnswer, Handover
from stillfresh.pages.clients import as_asked
from stillfresh.pages.model import App, Headers, Page, Rendered, StoredPage
from stillfresh.pages.parts import PART, fits, joined
from stillfresh.pages.routes import Visit
from stillfresh.pages.sharing import BY_DEFAULT, Allowed, Judgement, RouteTimes, judged_for

AGENT: Final = {b"user-agent": b"stillfresh", b"accept": b"*/*"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppRequest:
    """The request to the app for a page.

    *By its key*, it has the fields that are in the key (`given`), and nothing of the client. *As
    asked*, it has the visitor's own `request`; a response that is not shared goes to that visitor,
    by the `handover`, while the visitor waits.

    In both ways it has a token of any change that was made so far, for the caches of the app. A
    page that is made of what such a cache has in memory, which may lag, could not be served to a
    visitor with a token. That visitor's own token stays here: with an outbox's position that was
    made up, the app would wait in vain, and the load would fail for everybody.
    """

    visit: Visit
    base: Mapping[str, Any]
    """The parts of the scope that do not depend on the page."""
    own: RouteTimes | None
    """The route's own duration."""
    given: Mapping[str, str] = field(default_factory=dict)
    request: Raw = ()
    credentials: frozenset[bytes] = frozenset()
    handover: Handover | None = None
    offer: "Callable[[AppAnswer], None] | None" = None
    """Called with a shared page that takes long: its body may be read while it grows."""
    allowed: Allowed = BY_DEFAULT

    def scope(self, asked_if: Raw) -> dict[str, Any]:
        """The scope of the page's URL, without extensions, because its response is read here."""
        visit = self.visit
        return {
            **self.base,
            "type": "http",
            "method": "GET",
            "http_version": "1.1",
            "scheme": visit.scheme,
            "root_path": visit.root_path,
            "path": visit.app_path,
            "raw_path": visit.raw_path.encode("ascii"),
            "query_string": visit.query.encode("ascii"),
            "headers": [*self._fields(), *asked_if],
            "extensions": {},
        }

    def _fields(self) -> Raw:
        visit = self.visit
        if visit.is_as_asked:
            fields = as_asked(self.request, visit.host, is_vouched=visit.is_vouched)
            if visit.is_part:
                ranges = tuple((name, value) for name, value in self.request if name == b"range")
                fields = (*fields, *ranges)
            return with_token(fields, ANY_CHANGE)
        own = AGENT | {
            name.encode("latin-1"): value.encode("latin-1") for name, value in self.given.items()
        }
        fields = ((b"host", visit.host.encode("ascii")), *own.items())
        return with_token(fields, ANY_CHANGE)

    def judge(self, fetched_at: float, status: int, headers: Raw) -> Judgement:
        """By its key the request is empty, so the response is about no visitor."""
        if self.visit.is_part:  # only responses that can be cut or combined
            if status != 200 and not (status == PART and fits(self.request, headers)):
                return Reason.RANGE
            status = 200
        return judged_for(
            self.request,
            self.credentials,
            status,
            headers,
            fetched_at=fetched_at,
            own=self.own,
            allowed=self.allowed,
            keyed=self.visit.keyed,
        )

    def given_of(self, vary: Sequence[str]) -> Mapping[str, str]:
        """Those of these request fields that the app received."""
        if self.visit.is_as_asked:
            return selected(vary, self.request) or {}
        return self.given


class Renderer:
    """Renders pages of one app."""

    def __init__(self, app: App, clock: Clock, *, max_body: int) -> None:
        self._app = app
        self._clock = clock
        self._max_body = max_body
        self._behind: set[asyncio.Future[None]] = set()

    async def render(self, asking: AppRequest, old: StoredPage | None) -> Rendered:
        """Render; the site compares with `old`, which is returned if it has not changed."""
        fetched_at = self._clock()
        asked_if: Raw | None = None
        if old is not None:
            asked_if = () if asking.visit.is_part else conditions(old.head.headers)
        answer = AppAnswer(self._app, asking, fetched_at, self._max_body, asked_if)
        page = await self._page(answer)
        if page is None:
            return Rendered(None, answer.reason)
        if page.status == NOT_MODIFIED and asked_if and old is not None:
            stored = old.head.headers
            new = page.headers.raw
            if not is_refresh(stored, new):  # RFC 9111 §4.3.4: it is about another page
                return await self.render(asking, None)
            headers = Headers.of(refreshed(stored, new, self._clock()))
            page = Page(bytes(old.body), old.head.status, headers)
        rendered = answer.rendered(page)
        is_part = rendered.page is not None and rendered.page.head.status == PART
        if rendered.page is not None and is_part and rendered.reason is None:
            return Rendered(joined(rendered.page, old, self._clock(), self._max_body))
        return rendered

    async def _page(self, answer: AppAnswer) -> Page | None:
        """None if it was given up, or handed over."""
        running = answer.running
        try:
            settled = [running, answer.settled]
            await asyncio.wait(settled, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await ended(running)
            raise
        if answer.is_given_up:
            await ended(running)
        elif answer.settled.done():
            self._behind.add(running)
            running.add_done_callback(partial(self._over, answer))
        else:
            await running
            raise ConnectionError("the app ended without a whole answer")
        is_kept = not answer.is_given_up and not answer.is_going
        return answer.page() if is_kept else answer.failure()

    def _over(self, answer: AppAnswer, running: "asyncio.Future[None]") -> None:
        """An error after a complete response is logged; otherwise the visitor gets it."""
        self._behind.discard(running)
        error = None if running.cancelled() else running.exception()
        if error is not None and answer.body.is_whole:
            logger.error("the app raised after its answer", exc_info=error)

    async def close(self) -> None:
        for task in list(self._behind):
            await ended(task)


async def ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.debug("the app raised while its answer was given up: %r", error)


def given_to(visit: Visit) -> dict[str, str]:
    """Codings are always offered: an encoded response names its coding."""
    encoding = normalised("accept-encoding", visit.headers)
    return {**visit.declared, **({"accept-encoding": encoding} if encoding else {})}


def is_ones_own(visit: Visit, rendered: Rendered) -> bool:
    """True if the visitor's own request would have got the same, or it only had no place.

    `rendered`: the app's response to a request by the page's key. That request had the fields of
    the stored variant, or of the visitor that began the load, which need not be this visitor's.
    """
    page = rendered.page
    reason = rendered.reason
    if page is None:
        return False
    if reason is Reason.ENCODED:
        return True
    is_own_request = visit.is_as_asked  # only the caller that sent it is given the response
    if not is_own_request and not is_answer_to(visit.headers, rendered.sent, page.head.headers):
        return False
    if reason is Reason.FULL:
        return True
    if reason is Reason.SITE_COPY and not visit.is_open:
        return True  # on a route with a duration a page is for everybody, also an old one
    return visit.is_open and not visit.carried
