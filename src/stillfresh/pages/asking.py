"""One caller's read of a page: from the cache, or by a load of its own or of another.

`PageCache.ask` comes here when no acceptable answer can be given without waiting. Often a load is
needed. But the engine may also answer with a stored copy: a stale one, whose load then runs in the
background; or a fresh one that it must first read from a server, for example on Redis without
`memory_for`.

The engine joins callers of one key into one load, so each caller runs `PageAsking.answer`, and the
load calls `_load` of one of them. A caller waits for the first of three things:

1. *The read ends*: the caller gets the stored page, the failure, or a response that is only for
   the caller whose load it was.
2. *The page begins to grow*: its load takes long, and its head says that it is shared. The
   `Beginning` of the key hands the response to every caller. The caller that began the load reads
   the body from the start. The others may, if nothing has invalidated the page before they came;
   the lease of the load shows that.
3. *The time is over* (`wait`), for callers whose load it is not: they raise `Busy`.

The body of a growing page (`GrowingBody`) is read at each reader's own pace while it arrives. Its
last bytes are sent when the load has ended, so that a reader's next request finds the stored page.
"""

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from stillfresh.engine import Answer, Loaded, Origin, Private, Span, inside_hooks
from stillfresh.freshness import Verdict
from stillfresh.http import why_asked
from stillfresh.pages.model import (
    Busy,
    Message,
    PageCaller,
    PageKey,
    PageRead,
    ReadOutcome,
    Render,
    Rendered,
    Send,
    StoredPage,
)
from stillfresh.pages.on_demand import KIND
from stillfresh.tasks import looked_at

if TYPE_CHECKING:
    from stillfresh.pages.answers import AppAnswer
    from stillfresh.pages.page_cache import PageCache

MOST_AT_ONCE: Final = 65_536
"""Bytes that a reader is sent in one part."""


class GrowingBody:
    """The part of a body that has arrived.

    While it is to be stored, all of it stays, and nobody waits for its readers. Otherwise it is for
    one reader: bytes that were read are dropped, and `taken` waits for the reader.
    """

    def __init__(self) -> None:
        self._bytes: bytearray | bytes = bytearray()
        """All of it, or the part that its reader has not taken."""
        self._dropped = 0
        """Bytes that its reader has taken, and that are no longer here."""
        self._grown = asyncio.Event()
        """Set when bytes have come, or the end."""
        self._taken = asyncio.Event()
        """Set when a reader has read bytes, or has left."""
        self.size = 0
        """Bytes that have come, with those that were dropped."""
        self.readers = 0
        self.is_kept = True
        """All of it stays here, to be stored."""
        self.is_whole = False
        self.error: BaseException | None = None
        """Why it will never be complete."""

    def add(self, part: bytes) -> None:
        self._bytes += part
        self.size += len(part)
        self._grown.set()

    def end(self, error: BaseException | None = None) -> None:
        """It is complete, or broke off; the first call counts."""
        if not self.is_whole and self.error is None:
            self.is_whole = error is None
            self.error = error
            self._grown.set()

    def whole(self) -> bytes:
        """All bytes, to be stored; readers continue with the same bytes."""
        self._bytes = bytes(self._bytes)
        return self._bytes

    async def taken(self) -> None:
        """Wait until its reader has read everything so far, or has left."""
        while self.readers and self.size > self._dropped:
            self._taken.clear()
            await self._taken.wait()

    async def pour(
        self, send: Send, head: Message, over: "asyncio.Future[Any] | None" = None
    ) -> None:
        """Send all of it as it arrives. Raises if it breaks off, so that it does not look complete.

        `head`: sent before it. `over`: its end is sent when this is done.
        """
        position = 0
        self.readers += 1
        try:
            await send(head)
            while position < self.size or not self.is_whole:
                if position == self.size:
                    if self.error is not None:
                        raise self.error
                    self._grown.clear()
                    await self._grown.wait()
                    continue
                start = position - self._dropped
                part = bytes(self._bytes[start : start + MOST_AT_ONCE])
                position += len(part)
                more = position < self.size or not self.is_whole or over is not None
                await send({"type": "http.response.body", "body": part, "more_body": more})
                self._drop(position)
                if not more:
                    return
            if over is not None:
                await asyncio.wait([over])
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.readers -= 1
            self._taken.set()

    def _drop(self, position: int) -> None:
        if not self.is_kept and isinstance(self._bytes, bytearray):
            del self._bytes[: position - self._dropped]
            self._dropped = position
            self._taken.set()


class Beginning:
    """The head of a page being loaded, for waiting callers; and when its lease was last live."""

    def __init__(self) -> None:
        self.head: asyncio.Future[AppAnswer] = asyncio.Future()
        self.asking = asyncio.Lock()
        self.numbers = count(1)
        """Numbers of the callers, in the order in which they come."""
        self.held_at = 0
        """The number at which the lease was last seen to be live."""
        self.over: asyncio.Future[ReadOutcome] | None = None
        """Done when the load has ended and the page is stored, or when its caller has left."""


class PageAsking:
    """A caller that could not be answered without waiting."""

    def __init__(
        self, pages: "PageCache", key: PageKey, render: Render, caller: PageCaller
    ) -> None:
        self._pages = pages
        self._key = key
        self._render = render
        self._caller = caller
        self._is_own = False
        """A load has begun that is this caller's, perhaps in the background."""
        self._before = "miss"
        """Why the app is asked, for `Cache-Status`."""
        self._own_answer: AppAnswer | None = None
        """The growing response of its own load."""
        self._result: Loaded[StoredPage] | Private[Rendered] | None = None
        """What its own load brought."""
        self._beginning = pages.beginnings.get(key) or Beginning()
        pages.beginnings[key] = self._beginning

    async def answer(self, known: Answer[StoredPage] | None, *, anew: bool) -> PageRead:
        """Wait for the first of the three things. `known`: a copy that is not good enough."""
        pages = self._pages
        reading = asyncio.ensure_future(self._read(known, anew=anew))
        resting = asyncio.ensure_future(pages.rest(pages.wait))
        head = self._beginning.head if self._caller.reads_along else None
        is_begun = False
        try:
            while not reading.done():
                waited_for: list[asyncio.Future[Any]] = [reading]
                if head is not None:
                    waited_for.append(head)
                if not self._is_own:
                    waited_for.append(resting)
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    break
                if head is not None and head.done():
                    growing = head.result()
                    head = None
                    is_begun = growing is self._own_answer
                    if is_begun:
                        reading.add_done_callback(looked_at)
                        self._beginning.over = reading
                    if is_begun or await self._may_read(growing):
                        return self._begun(growing)
                elif resting.done() and not self._is_own:
                    text = f"not rendered by another within {pages.wait:g} s"
                    raise Busy(f"{self._key!r}: {text}")
            return PageRead(pages.judged(await reading), self._is_own, self._before)
        finally:
            resting.cancel()
            if not is_begun:
                reading.cancel()

    async def _read(self, known: Answer[StoredPage] | None, *, anew: bool) -> ReadOutcome:
        resource = self._pages.resource
        key = self._key
        if known is None:
            outcome = await resource.read(key, self._load, anew=anew)
            if anew or self._pages.takes(outcome, self._caller.wish):
                return outcome
        outcome = await resource.read(key, self._load, anew=True)
        return self._result if isinstance(self._result, Private) else outcome

    async def _load(self) -> Loaded[StoredPage] | Private[Rendered]:
        pages = self._pages
        key = self._key
        self._is_own = True
        self._before = why_asked(pages.at_hand(key), pages.clock(), absent="miss")
        try:
            span = Span("render", KIND, [key.id], "", (), is_waited=True)
            span.origin = Origin.LOADED
            with inside_hooks(pages.cache.hooks, span):
                rendered = await self._render(pages.old(key), self._offer)
                if rendered.page is not None:
                    span.status = rendered.page.head.status
                span.verdict = Verdict.FRESH if rendered.reason is None else Verdict.GONE
        finally:
            if pages.beginnings.get(key) is self._beginning:
                del pages.beginnings[key]
        self._result = pages.loaded(key, rendered, is_noted=self._caller.is_noted)
        return self._result

    def _offer(self, growing: "AppAnswer") -> None:
        self._own_answer = growing
        if not self._beginning.head.done():
            self._beginning.head.set_result(growing)

    async def _may_read(self, page: "AppAnswer") -> bool:
        """Whether this caller may read another's load: nothing invalidated it before it came.

        The lease shows that. One look at it answers for all callers that came before the look.
        """
        beginning = self._beginning
        pages = self._pages
        number = next(beginning.numbers)
        async with beginning.asking:
            is_under_way = pages.beginnings.get(self._key) is beginning
            if beginning.held_at < number and page.is_for_many and is_under_way:
                until = next(beginning.numbers)
                if await pages.resource.has_live_load(self._key):
                    beginning.held_at = until
        return beginning.held_at > number and page.body.error is None

    def _begun(self, page: "AppAnswer") -> PageRead:
        is_own = page is self._own_answer
        origin = Origin.LOADED if is_own else Origin.ANOTHER
        head = self._pages.shows(page.head())
        clock = self._pages.clock
        answer = Answer(head, True, Verdict.FRESH, page.fetched_at, origin, clock)  # noqa: FBT003
        if not is_own:  # the load counts its own caller when it ends
            self._pages.resource.count_read(self._key, answer, is_recorded=True)
        return PageRead(answer, is_own, self._before, page, self._beginning.over)
