"""One exchange with the app for a page: is its response stored, shown while it grows, or passed on?

`AppAnswer` is the exchange. It runs the app in a task of its own and is the app's `send` and
`receive`. When the head has come, it decides (`_start`):

- *Shared, and not too big*: the body is collected. If that takes longer than `PATIENCE`, it is
  offered to the waiting visitors, and they read it while it grows (`show`).
- *Not to be shared, or too big*: it is not collected. If it answers a visitor's own request, it
  goes on to that visitor (`pass_to`), part by part, at the visitor's pace. Otherwise it is given
  up: the app is told that its client has left, and a visitor that waits sends its own request.
  There is one exception: a response to a request by the key, on a route without a duration, is
  collected though it is not shared. It may be right for the visitor that began the load.
- *A 304, or an error for which an old page may be served*: collected, and `Renderer` decides.

`settled` is done when one of these is clear: the response is complete, is given up, or goes on to
one visitor. The load waits for that. A visitor that sends its own request gives it a `Handover`,
the one place where exchange and visitor meet: the exchange puts itself there, or the visitor has
left. So a load is never kept waiting by the pace of one visitor, and a visitor that has left is
sent nothing.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from stillfresh.http import Reason, is_failure
from stillfresh.http.fields import TAG_FIELDS, Raw, lowered, members, values
from stillfresh.pages.asking import GrowingBody
from stillfresh.pages.model import (
    App,
    Headers,
    Message,
    Page,
    PageRead,
    Receive,
    Rendered,
    Send,
    StoredPage,
)
from stillfresh.pages.routes import Visit
from stillfresh.pages.sharing import Shared, is_of_gateway
from stillfresh.pages.stored import bare, made_of

if TYPE_CHECKING:
    from stillfresh.pages.render import AppRequest

LOAD: Final = "stillfresh.load"
"""Key in a scope: the request is a load for the cache, with its `LoadPlace`."""
NOT_MODIFIED: Final = 304
MOST_DIGITS: Final = 18
"""The most digits of a length."""
PATIENCE: Final = 0.05
"""Seconds from a page's head to its end; if it takes longer, it is shown while it grows."""


class LoadPlace:
    """The place of a load. `leaves` is called before its response goes on to one visitor.

    False: there is no place among the visitors' requests; the visitor waits for one and asks again.
    An app may keep its scope, so this holds nothing of the response.
    """

    leaves: Callable[[], Awaitable[bool]] | None = None


class Handover:
    """Where one visitor takes over the response to its own request, if it cannot be shared."""

    def __init__(self) -> None:
        self.answer: AppAnswer | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """True while the visitor waits, and has no response yet."""
        return self.answer is None and not self._is_closed

    def take(self) -> "AppAnswer | None":
        """The response, which only the visitor keeps from now on; None if there is none.

        The handover forgets it. A response keeps its request, which keeps the handover: only the
        garbage collector could free such a circle.
        """
        answer = self.answer
        self.answer = None
        self._is_closed = True
        return answer

    def leave(self) -> None:
        """The visitor takes nothing, or no more. A response that goes on to it ends."""
        self._is_closed = True
        if self.answer is not None:
            self.answer.abandon()


class AppAnswer:
    """The response of an app; `settled` when it is complete, given up, or goes on to one visitor.

    `asked`: the conditions of the request, if an older page exists that is served if this one is an
    error or not modified.
    """

    def __init__(
        self, app: App, asking: "AppRequest", fetched_at: float, max_body: int, asked: Raw | None
    ) -> None:
        self._asking = asking
        self.fetched_at = fetched_at
        self._max_body = max_body
        self._has_old = asked is not None
        is_as_asked = asking.visit.is_as_asked
        self._keeps_own = not is_as_asked and asking.own is None
        """True if a response that cannot be shared is collected too."""
        self.settled: asyncio.Future[None] = asyncio.Future()
        self._is_asked = False
        """The app has read the request."""
        self.is_given_up = False
        """It must not be stored. `send` asks at once whether a visitor may take it
        (`_pass_on_or_give_up`): then this is False again, and `is_going` is True."""
        self.is_going = False
        """It goes on to one visitor, and is not stored."""
        self._status = 0
        self._headers: Raw = ()
        self._head: Message = {}
        self.body = GrowingBody()
        self._is_ones_own = False
        self.reason = Reason.SIZE
        """Why it was given up, or went on to one visitor. Its size, if its head gave no reason."""
        self._visitor: asyncio.Future[Receive] = asyncio.Future()
        """The visitor that takes it over, or began the load. If it leaves, the response ends."""
        self._has_visitor_left = False
        self._place = LoadPlace()
        self._timer: asyncio.TimerHandle | None = None
        scope = {**asking.scope(asked or ()), LOAD: self._place}
        self.running = asyncio.ensure_future(app(scope, self.receive, self.send))
        self.running.add_done_callback(self._ended)

    async def send(self, message: Message) -> None:
        if self.settled.done() and not self.is_going:
            return
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            self._body(message.get("body", b""), more=message.get("more_body", False))
        if self.is_given_up:
            await self._pass_on_or_give_up()
        if self.is_going:
            await asyncio.shield(self._visitor)
            await self.body.taken()

    def _start(self, message: Message) -> None:
        self._head = message
        self._status = message["status"]
        fields = message.get("headers", ())
        self._headers = tuple((lowered(bytes(name)), bytes(value)) for name, value in fields)
        if self._status == NOT_MODIFIED and self._has_old:
            return
        judgement = self._asking.judge(self.fetched_at, self._status, self._headers)
        if isinstance(judgement, Reason):
            if self._is_error() or judgement is Reason.SITE_COPY:
                self.reason = Reason.FAILED if self._is_error() else judgement
                is_ours = self._asking.handover is None or is_of_gateway(self._headers)
                self.is_given_up = not is_ours and not self._has_old
                return
            self._is_ones_own = True
            self.reason = judgement
        is_wanted = not self._is_ones_own or (self._keeps_own and 200 <= self._status <= 599)
        self.is_given_up = (self._length() or 0) > self._max_body or not is_wanted
        if self._status == 200 and not self.is_given_up and not self._is_ones_own:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._offer)

    def _offer(self) -> None:
        if self._asking.offer is not None and not self.settled.done():
            self._asking.offer(self)

    def _is_error(self) -> bool:
        """A number over 599 is not a status."""
        return is_failure(self._status) and self._status <= 599

    def _length(self) -> float | None:
        """The announced length, which may be very large; None if there is none."""
        announced = next(iter(values(self._headers, b"content-length")), b"")
        if not announced:
            return None
        is_number = announced.isdigit() and len(announced) <= MOST_DIGITS
        return int(announced) if is_number else math.inf

    def _body(self, part: bytes, *, more: bool) -> None:
        self.body.add(part)
        is_endless = more and self._is_ones_own and self._length() is None
        if not self.is_going and (self.body.size > self._max_body or is_endless):
            self.is_given_up = True
        if not more:
            is_passed = self.is_going or self.is_given_up
            self.body.end(None if is_passed else self._fault())  # passed on: the server checks it
            if not self.is_given_up:
                self._settle()

    def _fault(self) -> Exception | None:
        """An error if its length is not the announced one."""
        length = self._length()
        size = self.body.size
        if self._status in {204, NOT_MODIFIED} or length in {None, size}:
            return None
        return ConnectionError(f"{size:,} bytes came of {length:,}")

    async def _pass_on_or_give_up(self) -> None:
        """Pass it on to the visitor that reads it, or waits for it. Without one, it is given up."""
        leaves = self._place.leaves
        if self._has_taker() and (leaves is None or await leaves()) and self._has_taker():
            self.is_going = True
            self.is_given_up = False
            self.body.is_kept = False
            if not self._visitor.done() and self._asking.handover is not None:
                self._asking.handover.answer = self
        self._settle()

    def _has_taker(self) -> bool:
        handover = self._asking.handover
        if self._visitor.done():
            return self.body.readers > 0
        return handover is not None and handover.is_open

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.settled.done():
            self.settled.set_result(None)

    def _ended(self, running: "asyncio.Future[None]") -> None:
        """Readers of a body that will never be complete get an error."""
        if self._timer is not None:
            self._timer.cancel()
        error = None if running.cancelled() else running.exception()
        self.body.end(error or ConnectionError("the app ended without a whole answer"))

    @property
    def lost(self) -> Reason | None:
        """Why it is not shown: nobody reads it yet, and it ended or goes on to one visitor."""
        if self.is_given_up or self.is_going:
            return self.reason
        return None if self.body.error is None else Reason.FAILED

    @property
    def is_for_many(self) -> bool:
        """True if several visitors may read it while it grows: it fits, and its tags are known."""
        is_tagged = any(name in TAG_FIELDS for name, _ in self._headers)
        return self._length() is not None and not is_tagged

    @property
    def status(self) -> int:
        """Its status; 0 until its head has come."""
        return self._status

    def failure(self) -> Page | None:
        """An error of any size, for any visitor, counts as a failure with its status."""
        return bare(self._status, self._headers) if self._is_error() else None

    def page(self) -> Page:
        if self.body.error is not None:
            raise self.body.error
        return Page(self.body.whole(), self._status, Headers.of(self._headers))

    def head(self) -> StoredPage:
        """The head so far: our own ETag needs the whole body."""
        empty = self.rendered(Page(b"", self._status, Headers.of(self._headers))).page
        if empty is None:
            raise AssertionError("only what is shared is shown")
        return StoredPage(replace(empty.head, etag=None))

    def rendered(self, page: Page) -> Rendered:
        """The page with the judgement about it, to be stored or not."""
        asking = self._asking
        page = _varying(page, asking.visit)
        judgement = asking.judge(self.fetched_at, page.status, page.headers.raw)
        given = asking.given_of(judgement.vary if isinstance(judgement, Shared) else ())
        return made_of(page, judgement, self.fetched_at, given, is_own=asking.own is not None)

    async def receive(self) -> Message:
        """An empty request; then that the visitor has left, or that the response is over."""
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.shield(self.settled)
        if self.is_going:
            receive = await asyncio.shield(self._visitor)
            while (await receive())["type"] != "http.disconnect":
                pass
            self._has_visitor_left = True
        return {"type": "http.disconnect"}

    async def pass_to(self, receive: Receive, send: Send, *, is_head: bool) -> None:
        """Send a response that is not shared to the visitor whose request it answers."""
        try:
            if is_head:
                await send(self._head)
                await send({"type": "http.response.body", "body": b""})
                return
            self._visitor.set_result(receive)
            await self.body.pour(send, self._head)
        except ConnectionError:
            if not self._has_visitor_left:  # otherwise that ended the response, and nobody reads it
                raise
        finally:
            self.abandon()

    async def show(self, fields: Raw, read: PageRead, receive: Receive, send: Send) -> None:
        """Send a page that is stored when it is complete; its last bytes are sent after that."""
        lengths = values(self._headers, b"content-length")
        headers = [*fields, *((b"content-length", length) for length in lengths)]
        start = {"type": "http.response.start", "status": self._status, "headers": headers}
        try:
            if read.is_own:
                self._visitor.set_result(receive)
            await self.body.pour(send, start, read.over)
        finally:
            if read.is_own and read.over is not None:
                read.over.cancel()
            if self.is_going:
                self.abandon()

    def abandon(self) -> None:
        """Nobody takes the rest. Work of the app after a complete response goes on."""
        if not self.body.is_whole:
            self.running.cancel()


def _varying(page: Page, visit: Visit) -> Page:
    """RFC 9111 §4.1: caches behind this one see the fields that the route declares."""
    raw = page.headers.raw
    named = {name.lower() for name in members(values(raw, b"vary"))}
    declared = sorted({name.lower().encode("latin-1") for name in visit.route.vary} - named)
    if not declared:
        return page
    return Page(page.body, page.status, Headers.of((*raw, (b"vary", b", ".join(declared)))))
