"""Asking an ASGI app for a page: by its key alone, or by a visitor's own request (I13, I15, I24).

The app runs in a task of its own, and its response is collected to be kept. One that cannot be
shared, or is too big, is given up as soon as that is known; if it is the response to a visitor's
own request, it goes on to that visitor instead. What the app does after its answer (background
work) goes on.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.http.fields import Raw, members, normalised, values
from stillfresh.http.freshness import PageTerms
from stillfresh.http.validation import conditions, is_refresh, refreshed
from stillfresh.isr.clients import as_asked
from stillfresh.isr.model import (
    App,
    Headers,
    Message,
    Page,
    Reason,
    Receive,
    Rendered,
    Send,
    Stored,
)
from stillfresh.isr.parts import PART, fits, joined
from stillfresh.isr.routes import Visit
from stillfresh.isr.sharing import (
    BY_DEFAULT,
    Allowed,
    Judgement,
    Shared,
    is_failure,
    is_of_gateway,
    judged_for,
    selected,
)
from stillfresh.isr.stored import bare, made_of

LOAD: Final = "stillfresh.load"
"""In a scope: a load for the cache by a visitor's own request, and its answer."""
AGENT: Final = {b"user-agent": b"stillfresh", b"accept": b"*/*"}
NOT_MODIFIED: Final = 304
MOST_DIGITS: Final = 18
"""Of a length; no body has more."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppRequest:
    """How the app is asked for a page.

    I13, by its key: with the headers that are in the key (`given`), and nothing of the client.
    I24, as asked: with the visitor's own `request`; a response that is not for all goes on to him,
    by the `handover`, while he waits for it.
    """

    visit: Visit
    base: Mapping[str, Any]
    """The parts of the scope that are not the page's own."""
    own: PageTerms | None
    """The route's own duration."""
    given: Mapping[str, str] = field(default_factory=dict)
    request: Raw = ()
    credentials: frozenset[bytes] = frozenset()
    handover: "asyncio.Future[AppAnswer] | None" = None
    allowed: Allowed = BY_DEFAULT

    def scope(self, asked: Raw) -> dict[str, Any]:
        """The page's own URL; no extension, since its response is read here."""
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
            "headers": [*self._fields(), *asked],
            "extensions": {},
        }

    def _fields(self) -> Raw:
        visit = self.visit
        if visit.is_as_asked:
            ranges = tuple(it for it in self.request if visit.is_part and it[0] == b"range")
            return (*as_asked(self.request, visit.host, is_vouched=visit.is_vouched), *ranges)
        told = {it.encode("latin-1"): value.encode("latin-1") for it, value in self.given.items()}
        return ((b"host", visit.host.encode("ascii")), *{**AGENT, **told}.items())

    def judge(self, fetched_at: float, status: int, headers: Raw) -> Judgement:
        """By its key it says nothing of any visitor: the request is empty."""
        if self.visit.is_part:  # only such as can be cut or put together
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
        )

    def given_of(self, vary: Sequence[str]) -> Mapping[str, str]:
        """Of these request fields, those that the app was given."""
        return selected(vary, self.request) or {} if self.visit.is_as_asked else self.given


class AppAnswer:
    """What an app sends; `settled` when it is whole, given up, or goes on to its visitor.

    `asked`: the conditions by which it is asked for, if there is an older page to serve should
    this one be an error, or not modified.
    """

    def __init__(
        self, app: App, asking: AppRequest, fetched_at: float, max_body: int, asked: Raw | None
    ) -> None:
        self.judge = partial(asking.judge, fetched_at)
        self._max_body = max_body
        self._has_old = asked is not None
        self._handover = asking.handover
        is_as_asked = asking.visit.is_as_asked
        self._keeps_own = not is_as_asked and asking.own is None
        """Also one that is not to be shared is collected."""
        scope = asking.scope(asked or ())
        if is_as_asked:
            scope[LOAD] = self
        self.running = asyncio.ensure_future(app(scope, self.receive, self.send))
        self.settled: asyncio.Future[None] = asyncio.Future()
        self._is_asked = self.is_given_up = self.is_going = self.is_whole = False
        self._status = 0
        self._headers: Raw = ()
        self._said: list[Message] = []
        self._parts: list[bytes] = []
        self._size, self._is_ones_own = 0, False
        self.reason = Reason.SIZE
        """Why it was given up, or went on to one visitor."""
        self._visitor: asyncio.Future[tuple[Receive, Send]] = asyncio.Future()
        """Who takes the response over."""
        self.leaves: Callable[[], Awaitable[bool]] | None = None
        """Called before it goes on: it is no longer a load, but a visitor's exchange.

        False: there is no place for it, and the visitor has to wait for one, and ask again."""

    async def send(self, message: Message) -> None:
        if self.is_going:
            _, send = await asyncio.shield(self._visitor)
            await send(message)
        elif not self.settled.done():
            if self._handover is not None:
                self._said.append(message)
            if message["type"] == "http.response.start":
                self._start(message)
            elif message["type"] == "http.response.body":
                self._body(message.get("body", b""), more=message.get("more_body", False))
            if self.is_given_up:
                await self._go_on()

    def _start(self, message: Message) -> None:
        self._status, fields = message["status"], message.get("headers", ())
        self._headers = tuple((bytes(name).lower(), bytes(value)) for name, value in fields)
        if self._status == NOT_MODIFIED and self._has_old:
            return
        judgement = self.judge(self._status, self._headers)
        if isinstance(judgement, Reason):
            if self._is_error():
                self.reason = Reason.FAILED
                is_ours = self._handover is None or is_of_gateway(self._headers)
                self.is_given_up = not is_ours and not self._has_old
                return
            self._is_ones_own, self.reason = True, judgement
        is_wanted = not self._is_ones_own or (self._keeps_own and 200 <= self._status <= 599)
        self.is_given_up = (self._length() or 0) > self._max_body or not is_wanted

    def _is_error(self) -> bool:
        """A number over 599 is no status, and no page's."""
        return is_failure(self._status) and self._status <= 599

    def _length(self) -> float | None:
        """As it is announced, which may be beyond all measure; None: it is not."""
        told = next(iter(values(self._headers, b"content-length")), b"")
        is_number = told.isdigit() and len(told) <= MOST_DIGITS
        return (int(told) if is_number else math.inf) if told else None

    def _body(self, part: bytes, *, more: bool) -> None:
        self._size += len(part)
        is_endless = more and self._is_ones_own and self._length() is None
        if self._size > self._max_body or is_endless:
            self.is_given_up = True
            return
        self._parts.append(bytes(part))
        if not more:
            self.is_whole = True
            self.settled.set_result(None)

    async def _go_on(self) -> None:
        """To the visitor, if one still waits."""
        handover = self._handover
        if handover is not None and not handover.done():
            has_left = self.leaves is None or await self.leaves()
            if has_left and not handover.done():
                self.is_going, self.is_given_up = True, False
                handover.set_result(self)
        self.settled.set_result(None)

    def failure(self) -> Page | None:
        """I8: an error is one however big it is, and to whomever it goes; its status is told."""
        return bare(self._status, self._headers) if self._is_error() else None

    def page(self) -> Page:
        """Whole, of the length that was announced."""
        body, length = b"".join(self._parts), self._length()
        has_body = self._status not in {204, NOT_MODIFIED}
        if has_body and length not in {None, len(body)}:
            raise ConnectionError(f"{len(body):,} bytes came of {length:,}")
        return Page(body, self._status, Headers.of(self._headers))

    async def receive(self) -> Message:
        """An empty request; then that its visitor has left, or that the response is over."""
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.shield(self.settled)
        if self.is_going:
            receive, _ = await asyncio.shield(self._visitor)
            while (await receive())["type"] != "http.disconnect":
                pass
        return {"type": "http.disconnect"}

    async def pass_to(self, receive: Receive, send: Send, *, is_head: bool) -> None:
        """What came so far, and then the rest as it comes."""
        try:
            for message in self._said[:1] if is_head else self._said:
                await send(message)
            if is_head:
                await send({"type": "http.response.body", "body": b""})
                return
            self._said.clear()
            self._visitor.set_result((receive, send))
            await asyncio.wait([self.running])
            if self.running.cancelled():
                raise ConnectionError("the cache was closed")
            self.running.result()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Nobody takes the rest."""
        self.running.cancel()


class Renderer:
    """Renders pages of one app."""

    def __init__(self, app: App, clock: Clock, *, max_body: int) -> None:
        self._app = app
        self._clock = clock
        self._max_body = max_body
        self._behind: set[asyncio.Future[None]] = set()

    async def render(self, asking: AppRequest, old: Stored | None) -> Rendered:
        """With `old` as what upstream is asked to compare; as it was, if that still holds."""
        fetched_at = self._clock()
        asked: Raw | None = None
        if old is not None:
            asked = () if asking.visit.is_part else conditions(old.head.headers)
        answer = AppAnswer(self._app, asking, fetched_at, self._max_body, asked)
        if (page := await self._page(answer)) is None:
            return Rendered(None, answer.reason)
        if page.status == NOT_MODIFIED and asked and old is not None:
            stored, new = old.head.headers, page.headers.raw
            if not is_refresh(stored, new):  # RFC 9111 §4.3.4: it is about another page
                return await self.render(asking, None)
            headers = Headers.of(refreshed(stored, new, self._clock()))
            page = Page(bytes(old.body), old.head.status, headers)
        page = _varying(page, asking.visit)
        judgement = answer.judge(page.status, page.headers.raw)
        given = asking.given_of(judgement.vary) if isinstance(judgement, Shared) else {}
        made = made_of(page, judgement, fetched_at, given, is_own=asking.own is not None)
        if made.reason is None and made.page is not None and made.page.head.status == PART:
            return Rendered(joined(made.page, old, self._clock(), self._max_body))
        return made

    async def _page(self, answer: AppAnswer) -> Page | None:
        """None: given up, or handed over."""
        running = answer.running
        try:
            settled = [running, answer.settled]
            await asyncio.wait(settled, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await ended(running)
            raise
        if answer.is_given_up:
            await ended(running)
        elif answer.is_going or answer.is_whole:
            self._behind.add(running)
            running.add_done_callback(partial(self._over, answer))
        else:
            await running
            raise ConnectionError("the app ended without a whole answer")
        return answer.page() if answer.is_whole else answer.failure()

    def _over(self, answer: AppAnswer, running: "asyncio.Future[None]") -> None:
        """An error after a whole answer is logged, as by a server; else the visitor hears of it."""
        self._behind.discard(running)
        error = None if running.cancelled() else running.exception()
        if error is not None and answer.is_whole:
            logger.error("the app raised after its answer", exc_info=error)

    async def close(self) -> None:
        for task in list(self._behind):
            await ended(task)


async def ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.debug("the app raised while its answer was given up: %r", error)


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
