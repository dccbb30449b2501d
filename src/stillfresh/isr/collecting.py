"""What an app answers, as it comes: collected to be kept, or handed on to one visitor (I15, I24).

An answer that cannot be shared, or is too big to be kept, is given up as soon as that is known. An
answer to a visitor's own request is not given up: it goes on to that visitor as it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from stillfresh.isr.model import Headers, Page
from stillfresh.isr.responses import Message, Send
from stillfresh.isr.rules_fields import Raw, values
from stillfresh.isr.rules_pages import bare
from stillfresh.isr.rules_reasons import Reason
from stillfresh.isr.rules_storage import Judgement, Unshared, is_failure, is_of_gateway

Receive: TypeAlias = Callable[[], Awaitable[Message]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
Judge: TypeAlias = Callable[[int, Raw], Judgement]
NOT_MODIFIED: Final = 304

logger = logging.getLogger(__name__)


class AppAnswer:
    """What an app sends, as it comes; `settled` when it is whole, or nobody wants the rest."""

    def __init__(self, judge: Judge, max_body: int, *, keeps_own: bool) -> None:
        self._judge = judge
        self._max_body = max_body
        self._keeps_own = keeps_own
        self.settled = asyncio.Event()
        self._is_asked = False
        self.is_given_up = False
        self.status = 0
        self.headers: Raw = ()
        self._parts: list[bytes] = []
        self._size = 0
        self.is_whole = False
        self._is_ones_own = False
        """Not to be shared: the first visitor is given it, if that takes no longer than it must."""
        self.reason = Reason.SIZE
        """Why it was given up, or went on to one visitor."""
        self.running: asyncio.Future[None] | None = None

    async def send(self, message: Message) -> None:
        if self.settled.is_set():
            return
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            self._body(message.get("body", b""), more=message.get("more_body", False))

    def _read(self, message: Message) -> None:
        self.status = message["status"]
        fields = message.get("headers", ())
        self.headers = tuple((bytes(name).lower(), bytes(value)) for name, value in fields)

    def _start(self, message: Message) -> None:
        self._read(message)
        if self.status == NOT_MODIFIED or _is_error(self.status):
            return
        judgement = self._judge(self.status, self.headers)
        if isinstance(judgement, Unshared):
            self._is_ones_own, self.reason = True, judgement.reason
        is_wanted = not self._is_ones_own or (self._keeps_own and 200 <= self.status <= 599)
        if self._is_big() or not is_wanted:
            self._give_up()

    def _is_big(self) -> bool:
        """By the length that it announces."""
        lengths = values(self.headers, b"content-length")
        return bool(lengths) and lengths[0].isdigit() and int(lengths[0]) > self._max_body

    def _body(self, part: bytes, *, more: bool) -> None:
        self._size += len(part)
        is_endless = more and self._is_ones_own and not values(self.headers, b"content-length")
        if self._size > self._max_body or is_endless:
            self._give_up()
            return
        self._parts.append(bytes(part))
        if not more:
            self.is_whole = True
            self.settled.set()

    def _give_up(self) -> None:
        self.is_given_up = True
        self.settled.set()

    def failure(self) -> Page | None:
        """I8: an error is one however big it is; of what cannot be held, its status is told."""
        if not _is_error(self.status):
            return None
        return bare(Page(status=self.status, headers=Headers.of(self.headers)))

    def page(self) -> Page:
        """Whole, of the length that was announced."""
        body = b"".join(self._parts)
        lengths = values(self.headers, b"content-length")
        has_body = self.status not in {204, NOT_MODIFIED}
        if has_body and lengths and lengths[0] != b"%d" % len(body):
            raise ConnectionError(f"{len(body):,} bytes came of {lengths[0]!r}")
        return Page(body, self.status, Headers.of(self.headers))

    async def receive(self) -> Message:
        """An empty request; then nothing more is heard until the answer is over."""
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.settled.wait()
        return {"type": "http.disconnect"}


class GoingAnswer(AppAnswer):
    """I24: the answer to a visitor's own request, which takes it over if it is not for all.

    `has_old`: if this fails there is an older page to serve.
    """

    def __init__(self, judge: Judge, max_body: int, handover: "Handover", *, has_old: bool) -> None:
        super().__init__(judge, max_body, keeps_own=False)
        self._handover = handover
        self._has_old = has_old
        self._said: list[Message] = []
        self._visitor: tuple[Receive, Send] | None = None
        self._taken = asyncio.Event()
        self.is_going = False
        self.leaves: Callable[[], Awaitable[bool]] | None = None
        """Done before it is handed over: it is no longer a load, but a visitor's exchange.

        False: there is no place for it, and the visitor has to wait for one, and ask again."""

    async def send(self, message: Message) -> None:
        if self.is_going:
            _, send = await self._taker()
            await send(message)
        elif not self.settled.is_set():
            self._said.append(message)
            await super().send(message)
            if self.is_given_up:
                await self._go()

    async def _taker(self) -> tuple[Receive, Send]:
        """The visitor, once he takes it over."""
        while self._visitor is None:
            await self._taken.wait()
        return self._visitor

    async def _go(self) -> None:
        """On to the visitor, if there still is one."""
        is_free = self._handover.is_open and (self.leaves is None or await self.leaves())
        if is_free and self._handover.is_open:
            self.is_going, self.is_given_up = True, False
            self._handover.answer = self
        self.settled.set()

    def _give_up(self) -> None:
        self.is_given_up = True

    def _start(self, message: Message) -> None:
        self._read(message)
        if self.status == NOT_MODIFIED and self._has_old:
            return
        if _is_error(self.status):
            self.reason = Reason.FAILED
            if not self._has_old and not is_of_gateway(self.headers):
                self._give_up()
            return
        judgement = self._judge(self.status, self.headers)
        if isinstance(judgement, Unshared):
            self.reason = judgement.reason
        if isinstance(judgement, Unshared) or self._is_big():
            self._give_up()

    async def receive(self) -> Message:
        """Once it is handed over, the visitor's leaving is heard."""
        message = await super().receive()
        if message["type"] == "http.request" or not self.is_going:
            return message
        receive, _ = await self._taker()
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

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


class Handover:
    """I24: whether a visitor waits for the answer to its own request, and that answer, if it goes
    on: the visitor takes it, or it is abandoned."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self.answer: GoingAnswer | None = None

    def take(self) -> GoingAnswer | None:
        answer, self.answer = self.answer, None
        return answer

    def close(self) -> None:
        """The visitor is served, or has left."""
        self.is_open = False
        if (answer := self.take()) is not None:
            answer.abandon()


async def ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.debug("the app raised while its answer was given up: %r", error)


def _is_error(status: int) -> bool:
    """What is more than 599 is no status, and no page's."""
    return is_failure(status) and status <= 599
