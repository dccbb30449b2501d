"""Rendering a page by an ASGI app, for everybody: the app sees the key and nothing else (I13, I15).

The app runs in a task of its own. What it does after its answer (background work) goes on; an
answer that cannot be shared, or is too big to be, is given up as soon as that is known.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from stillfresh.clock import Clock
from stillfresh.isr.model import Headers, Page, Rendered, Stored
from stillfresh.isr.responses import Message
from stillfresh.isr.rules_fields import Raw, members, values
from stillfresh.isr.rules_freshness import Terms
from stillfresh.isr.rules_keys import normalised
from stillfresh.isr.rules_pages import bare, rendered, unshared
from stillfresh.isr.rules_routes import Visit
from stillfresh.isr.rules_storage import Unshared, is_failure, judged
from stillfresh.isr.rules_validation import conditions, is_refresh, refreshed

__all__ = ["App", "Receive", "Renderer", "given_to"]

Receive: TypeAlias = Callable[[], Awaitable[Message]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
AGENT: Final = ((b"user-agent", b"stillfresh"), (b"accept", b"*/*"))
NOT_MODIFIED: Final = 304

logger = logging.getLogger(__name__)


class Answer:
    """What an app sends, as it comes; `settled` when it is whole, or nobody wants the rest."""

    def __init__(self, fetched_at: float, own: Terms | None, max_body: int) -> None:
        self._fetched_at = fetched_at
        self._own = own
        self._max_body = max_body
        self.settled = asyncio.Event()
        self.is_given_up = False
        self.status = 0
        self.headers: Raw = ()
        self._parts: list[bytes] = []
        self._size = 0
        self.is_whole = False
        self._is_ones_own = False
        """Not to be shared: who asked first is given it, if that takes no longer than it must."""

    async def send(self, message: Message) -> None:
        if self.settled.is_set():
            return
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            self._body(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        fields = message.get("headers", ())
        self.headers = tuple((bytes(name).lower(), bytes(value)) for name, value in fields)
        if self.status == NOT_MODIFIED or _is_error(self.status):
            return
        lengths = values(self.headers, b"content-length")
        is_big = bool(lengths) and lengths[0].isdigit() and int(lengths[0]) > self._max_body
        judgement = judged(self.status, self.headers, self._fetched_at, self._own)
        self._is_ones_own = isinstance(judgement, Unshared)
        is_wanted = not self._is_ones_own or (self._own is None and 200 <= self.status <= 599)
        if is_big or not is_wanted:
            self._give_up()

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
        page = await self._page(_scope(visit, state, given, asked), fetched_at, own)
        if page is not None and page.status == NOT_MODIFIED and asked and old is not None:
            if not is_refresh(old.head.headers, page.headers.raw):
                return await self.render(visit, state, own, given, None)
            headers = refreshed(old.head.headers, page.headers.raw, self._clock())
            page = Page(bytes(old.body), old.head.status, Headers.of(headers))
        if page is None:
            return unshared(Page(), is_whole=False)
        return rendered(_varying(page, visit), fetched_at, own, given, self._keep_for)

    async def _page(
        self, scope: dict[str, Any], fetched_at: float, own: Terms | None
    ) -> Page | None:
        """None: given up."""
        answer = Answer(fetched_at, own, self._max_body)
        running = asyncio.ensure_future(self._app(scope, _receive(answer), answer.send))
        waiting = asyncio.ensure_future(answer.settled.wait())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _ended(running)
            raise
        finally:
            waiting.cancel()
        if answer.is_given_up:
            await _ended(running)
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

    async def close(self) -> None:
        for task in list(self._behind):
            await _ended(task)


async def _ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.debug("the app raised while its answer was given up: %r", error)


def _is_error(status: int) -> bool:
    """What is more than 599 is no status, and no page's."""
    return is_failure(status) and status <= 599


def _receive(answer: Answer) -> Receive:
    """An empty request; then nothing more is heard until the answer is over."""
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await answer.settled.wait()
        return {"type": "http.disconnect"}

    return receive


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
