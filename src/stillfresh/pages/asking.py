"""One caller's read of a page: from the cache, or by a load of its own or of another.

A page whose load takes long is a body that grows. As soon as its head says that it is shared, the
caller that began the load reads it from the start, and waiting callers too if the law allows it.
"""

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from stillfresh.engine import Answer, Loaded, Origin, Private, Span, told
from stillfresh.freshness import Verdict
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
from stillfresh.pages.sharing import why_asked
from stillfresh.tasks import looked_at

if TYPE_CHECKING:
    from stillfresh.pages.answers import AppAnswer
    from stillfresh.pages.page_cache import PageCache

MOST_AT_ONCE: Final = 262_144
"""Bytes that a reader is sent in one part."""


class GrowingBody:
    """The part of a body that has arrived.

    While it is to be stored, all of it stays, and nobody waits for its readers. Otherwise it is for
    one reader: bytes that were read are dropped, and `taken` waits for the reader.
    """

    def __init__(self) -> None:
        self._came: bytearray | bytes = bytearray()
        self._dropped = 0
        self._grown, self._moved = asyncio.Event(), asyncio.Event()
        self.size, self.readers = 0, 0
        self.is_kept, self.is_whole = True, False
        self.error: BaseException | None = None
        """Why it will never be complete."""

    def add(self, part: bytes) -> None:
        self._came += part
        self.size += len(part)
        self._grown.set()

    def end(self, error: BaseException | None = None) -> None:
        """It is complete, or broke off; the first call counts."""
        if not self.is_whole and self.error is None:
            self.is_whole, self.error = error is None, error
            self._grown.set()

    def whole(self) -> bytes:
        """All bytes, to be stored; readers continue with the same bytes."""
        self._came = bytes(self._came)
        return self._came

    async def taken(self) -> None:
        """Wait until its reader has read everything so far, or has left."""
        while self.readers and self.size > self._dropped:
            self._moved.clear()
            await self._moved.wait()

    async def pour(
        self, send: Send, head: Message, over: "asyncio.Future[Any] | None" = None
    ) -> None:
        """Send all of it as it arrives. Raises if it breaks off, so that it does not look complete.

        `head`: sent before it. `over`: its end is sent when this is done.
        """
        at = 0
        self.readers += 1
        try:
            await send(head)
            while at < self.size or not self.is_whole:
                if at == self.size:
                    if self.error is not None:
                        raise self.error
                    self._grown.clear()
                    await self._grown.wait()
                    continue
                start = at - self._dropped
                part = bytes(self._came[start : start + MOST_AT_ONCE])
                at += len(part)
                more = at < self.size or not self.is_whole or over is not None
                await send({"type": "http.response.body", "body": part, "more_body": more})
                self._drop(at)
                if not more:
                    return
            if over is not None:
                await asyncio.wait([over])
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.readers -= 1
            self._moved.set()

    def _drop(self, at: int) -> None:
        if not self.is_kept and isinstance(self._came, bytearray):
            del self._came[: at - self._dropped]
            self._dropped = at
            self._moved.set()


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
    """A caller that needs a load, or waits for one."""

    def __init__(
        self, pages: "PageCache", key: PageKey, render: Render, caller: PageCaller
    ) -> None:
        self._pages, self._key, self._render, self._caller = pages, key, render, caller
        self._is_own, self._before = False, "miss"
        self._mine: AppAnswer | None = None
        self._made: Loaded[StoredPage] | Private[Rendered] | None = None
        self._beginning = pages.beginnings.get(key) or Beginning()
        pages.beginnings[key] = self._beginning

    async def answered(self, known: Answer[StoredPage] | None, *, anew: bool) -> PageRead:
        pages, head = self._pages, self._beginning.head if self._caller.reads_along else None
        asking = asyncio.ensure_future(self._read(known, anew=anew))
        resting = asyncio.ensure_future(pages.rest(pages.wait))
        is_begun = False
        try:
            while not asking.done():
                others = [it for it in (head, None if self._is_own else resting) if it is not None]
                await asyncio.wait([asking, *others], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    break
                if head is not None and head.done():
                    growing, head = head.result(), None
                    if is_begun := growing is self._mine:
                        asking.add_done_callback(looked_at)
                        self._beginning.over = asking
                    if is_begun or await self._may_read(growing):
                        return self._begun(growing)
                elif resting.done() and not self._is_own:
                    text = f"not rendered by another within {pages.wait:g} s"
                    raise Busy(f"{self._key!r}: {text}")
            return PageRead(pages.judged(await asking), self._is_own, self._before)
        finally:
            resting.cancel()
            if not is_begun:
                asking.cancel()

    async def _read(self, known: Answer[StoredPage] | None, *, anew: bool) -> ReadOutcome:
        resource, key = self._pages.resource, self._key
        if known is None:
            outcome = await resource.read(key, self._load, anew=anew)
            if anew or self._pages.takes(outcome, self._caller.wish):
                return outcome
        outcome = await resource.read(key, self._load, anew=True)
        return self._made if isinstance(self._made, Private) else outcome

    async def _load(self) -> Loaded[StoredPage] | Private[Rendered]:
        pages, key = self._pages, self._key
        self._is_own, self._before = True, why_asked(pages.at_hand(key), pages.clock())
        try:
            span = Span("render", KIND, [key.id], "", (), is_waited=True)
            span.origin = Origin.LOADED
            with told(pages.cache.hooks, span):
                rendered = await self._render(pages.old(key), self._offer)
                if (page := rendered.page) is not None:
                    span.status = page.head.status
                span.verdict = Verdict.FRESH if rendered.reason is None else Verdict.GONE
        finally:
            if pages.beginnings.get(key) is self._beginning:
                del pages.beginnings[key]
        self._made = pages.loaded(key, rendered, is_noted=self._caller.is_noted)
        return self._made

    def _offer(self, growing: "AppAnswer") -> None:
        self._mine = growing
        if not self._beginning.head.done():
            self._beginning.head.set_result(growing)

    async def _may_read(self, page: "AppAnswer") -> bool:
        """Whether this caller may read another's load: nothing invalidated it before it came.

        The lease shows that. One look at it answers for all callers that came before the look.
        """
        beginning, pages = self._beginning, self._pages
        number = next(beginning.numbers)
        async with beginning.asking:
            is_under_way = pages.beginnings.get(self._key) is beginning
            if beginning.held_at < number and page.is_for_many and is_under_way:
                until = next(beginning.numbers)
                if await pages.resource.has_live_load(self._key):
                    beginning.held_at = until
        return beginning.held_at > number and page.body.error is None

    def _begun(self, page: "AppAnswer") -> PageRead:
        is_own, clock = page is self._mine, self._pages.clock
        origin, head = Origin.LOADED if is_own else Origin.ANOTHER, self._pages.shows(page.head())
        answer = Answer(head, True, Verdict.FRESH, page.fetched_at, origin, clock)  # noqa: FBT003
        if not is_own:  # the load counts its own caller when it ends
            self._pages.resource.count_read(self._key, answer, is_recorded=True)
        return PageRead(answer, is_own, self._before, page, self._beginning.over)
