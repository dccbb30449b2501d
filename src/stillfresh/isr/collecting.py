"""An app's response, as it comes: collected to be kept, or handed on to one visitor (I15, I24).

A response that cannot be shared, or is too big to be kept, is given up as soon as that is known. If
it is the response to a visitor's own request, it goes on to that visitor instead.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from stillfresh.http.fields import Raw, values
from stillfresh.isr.model import Headers, Page, Reason
from stillfresh.isr.responses import Message, Send
from stillfresh.isr.rules_storage import Judgement, Unshared, bare, is_failure, is_of_gateway

Receive: TypeAlias = Callable[[], Awaitable[Message]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
Judge: TypeAlias = Callable[[int, Raw], Judgement]
NOT_MODIFIED: Final = 304
logger = logging.getLogger(__name__)


class Handover:
    """I24: a visitor that waits for the response to its own request, and that response.

    One that goes on is taken by the visitor, or abandoned when the visitor is served or leaves.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self.answer: AppAnswer | None = None

    def take(self) -> "AppAnswer | None":
        answer, self.answer = self.answer, None
        return answer

    def close(self) -> None:
        self.is_open = False
        if (answer := self.take()) is not None:
            answer.abandon()


class AppAnswer:
    """What an app sends; `settled` when it is whole, given up, or goes on to its visitor.

    `keeps_own`: also one that is not to be shared is collected. `has_old`: there is an older page
    to serve if this one is an error, or is not modified.
    """

    def __init__(
        self,
        judge: Judge,
        max_body: int,
        *,
        has_old: bool,
        keeps_own: bool = False,
        handover: Handover | None = None,
    ) -> None:
        self._judge = judge
        self._max_body = max_body
        self._keeps_own = keeps_own
        self._has_old = has_old
        self._handover = handover
        self.running: asyncio.Future[None] | None = None
        self.settled = asyncio.Event()
        self._is_asked = self.is_given_up = self.is_going = self.is_whole = False
        self.status = 0
        self.headers: Raw = ()
        self._said: list[Message] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._is_ones_own = False
        self.reason = Reason.SIZE
        """Why it was given up, or went on to one visitor."""
        self._visitor: tuple[Receive, Send] | None = None
        self._taken = asyncio.Event()
        self.leaves: Callable[[], Awaitable[bool]] | None = None
        """Called before it goes on: it is no longer a load, but a visitor's exchange.

        False: there is no place for it, and the visitor has to wait for one, and ask again."""

    async def send(self, message: Message) -> None:
        if self.is_going:
            _, send = await self._taker()
            await send(message)
        elif not self.settled.is_set():
            if self._handover is not None:
                self._said.append(message)
            if message["type"] == "http.response.start":
                self._start(message)
            elif message["type"] == "http.response.body":
                self._body(message.get("body", b""), more=message.get("more_body", False))
            if self.is_given_up:
                await self._go_on()

    def _start(self, message: Message) -> None:
        self.status, fields = message["status"], message.get("headers", ())
        self.headers = tuple((bytes(name).lower(), bytes(value)) for name, value in fields)
        if self.status == NOT_MODIFIED and self._has_old:
            return
        if _is_error(self.status):
            self.reason = Reason.FAILED
            is_ours = self._handover is None or is_of_gateway(self.headers)
            self.is_given_up = not is_ours and not self._has_old
            return
        judgement = self._judge(self.status, self.headers)
        if isinstance(judgement, Unshared):
            self._is_ones_own, self.reason = True, judgement.reason
        is_wanted = not self._is_ones_own or (self._keeps_own and 200 <= self.status <= 599)
        self.is_given_up = self._is_big() or not is_wanted

    def _is_big(self) -> bool:
        """By the length that it announces."""
        lengths = values(self.headers, b"content-length")
        return bool(lengths) and lengths[0].isdigit() and int(lengths[0]) > self._max_body

    def _body(self, part: bytes, *, more: bool) -> None:
        self._size += len(part)
        is_endless = more and self._is_ones_own and not values(self.headers, b"content-length")
        if self._size > self._max_body or is_endless:
            self.is_given_up = True
            return
        self._parts.append(bytes(part))
        if not more:
            self.is_whole = True
            self.settled.set()

    async def _go_on(self) -> None:
        """To the visitor, if one still waits."""
        handover = self._handover
        if handover is not None and handover.is_open:
            has_left = self.leaves is None or await self.leaves()
            if has_left and handover.is_open:
                self.is_going, self.is_given_up = True, False
                handover.answer = self
        self.settled.set()

    def failure(self) -> Page | None:
        """I8: an error is one however big it is; of what cannot be held, its status is told."""
        return bare(self.head()) if _is_error(self.status) else None

    def head(self) -> Page:
        """Without its body."""
        status = self.status if 200 <= self.status <= 599 else 200
        return Page(status=status, headers=Headers.of(self.headers))

    def page(self) -> Page:
        """Whole, of the length that was announced."""
        body = b"".join(self._parts)
        lengths = values(self.headers, b"content-length")
        has_body = self.status not in {204, NOT_MODIFIED}
        if has_body and lengths and lengths[0] != b"%d" % len(body):
            raise ConnectionError(f"{len(body):,} bytes came of {lengths[0]!r}")
        return Page(body, self.status, Headers.of(self.headers))

    async def receive(self) -> Message:
        """An empty request; then that its visitor has left, or that the response is over."""
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.settled.wait()
        if self.is_going:
            receive, _ = await self._taker()
            while (await receive())["type"] != "http.disconnect":
                pass
        return {"type": "http.disconnect"}

    async def _taker(self) -> tuple[Receive, Send]:
        """The visitor, once it takes the response over."""
        while self._visitor is None:
            await self._taken.wait()
        return self._visitor

    async def pass_to(self, receive: Receive, send: Send, *, is_head: bool) -> None:
        """What came so far, and then the rest as it comes."""
        try:
            for message in self._said[:1] if is_head else self._said:
                await send(message)
            if is_head:
                await send({"type": "http.response.body", "body": b""})
                return
            self._said.clear()
            self._visitor = receive, send
            self._taken.set()
            await self._end()
        finally:
            self.abandon()

    async def _end(self) -> None:
        if (running := self.running) is None:
            return
        await asyncio.wait([running])
        if running.cancelled():
            raise ConnectionError("the cache was closed")
        running.result()

    def abandon(self) -> None:
        """Nobody takes the rest."""
        if self.running is not None:
            self.running.cancel()


async def ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.debug("the app raised while its answer was given up: %r", error)


def _is_error(status: int) -> bool:
    """What is more than 599 is no status, and no page's."""
    return is_failure(status) and status <= 599
