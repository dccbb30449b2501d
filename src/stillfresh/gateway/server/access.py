"""The access log: a line for each request: how the cache answered, and how long it took.

Never the query, a header field or an address: they may hold secrets, or identify a visitor. An
answer that is sent again from its kept bytes (`hits`) is logged too, as it was the first time.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillfresh.clock import Clock, monotonic
from stillfresh.gateway.server.hits import ConfirmRepeat
from stillfresh.gateway.server.tunnels import ClientEnd
from stillfresh.logs import Hidden, LineWriter, moment
from stillfresh.pages.edge import TUNNEL
from stillfresh.pages.routes import KEEP

LONGEST_PATH: Final = 1_000
"""Bytes."""
UNSEEN: Final = re.compile(rb"[^\x21-\x7e]")
OURS: Final = b"stillfresh; "
"""How our member of Cache-Status begins; it is the last one."""
SWITCHED: Final = 101
REFUSED: Final = 403
"""The status of a WebSocket that is closed before it is accepted."""
BROKEN: Final = 500


class LoggedRequest:
    """What is known about a request, and then about its answer."""

    __slots__ = ("again", "cache", "method", "path", "size", "status")

    def __init__(self, method: str, path: bytes) -> None:
        self.method = method
        self.path = path[:LONGEST_PATH]
        self.status: int | None = None
        self.size = 0
        self.cache: bytes | None = None
        self.again: bytes | None = None
        """Its line without the time, for an answer that is sent again."""

    def hear(self, message: Message) -> None:
        match message["type"]:
            case "http.response.body":
                self.size += len(message.get("body", b""))
            case "http.response.start" | "websocket.http.response.start":
                self.status = message["status"]
                headers = message.get("headers", ())
                statuses = (value for name, value in headers if name == b"cache-status")
                self.cache = next(statuses, None)
            case "websocket.accept":
                self.status = SWITCHED
            case "websocket.close":
                self.status = self.status or REFUSED


class AccessLog:
    """Goes around an app; `refused` is for answers that no app gives."""

    def __init__(
        self,
        writer: LineWriter,
        hide: Hidden,
        *,
        is_json: bool,
        clock: Clock = time.time,
        ticks: Clock = monotonic,
    ) -> None:
        self._put = writer.put
        self._hide = hide
        self._line = json_line if is_json else text_line
        self._facts = json_facts if is_json else text_facts
        """Encode what is known of a request, without the time, which the line begins with."""
        self._clock = clock
        self._ticks = ticks

    def around(self, app: ASGIApp) -> ASGIApp:
        return partial(self._answer, app)

    def refused(self, status: int, size: int) -> None:
        """A request that could not be read."""
        request = LoggedRequest("-", b"-")
        request.status = status
        request.size = size
        self._note(request, 0.0)

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        began = self._ticks()
        path = scope.get("raw_path") or scope["path"].encode()
        request = LoggedRequest(scope.get("method", "GET"), path)
        if (keep := scope.get(KEEP)) is not None:
            scope[KEEP] = self._log_repeats(keep, request)

        async def hear_and_send(message: Message) -> None:
            request.hear(message)
            await send(message)

        try:
            await app(scope, receive, hear_and_send)
        except Exception:
            request.status = request.status or BROKEN  # the server then answers with it
            raise
        finally:
            if isinstance(tunnel := scope.get(TUNNEL), ClientEnd):
                request.status = request.status or tunnel.status
            self._note(request, self._ticks() - began)

    def _log_repeats(
        self, keep: Callable[[ConfirmRepeat], None], request: LoggedRequest
    ) -> Callable[[ConfirmRepeat], None]:
        """Log another line each time when the answer is sent again."""

        def keep_logged(confirm_repeat: ConfirmRepeat) -> None:
            def confirm_and_log() -> bool:
                if not confirm_repeat():
                    return False
                if request.again is None:
                    request.again = self._facts(self._hide, request, 0.0)
                self._put(partial(self._line, self._clock(), request.again))
                return True

            keep(confirm_and_log)

        return keep_logged

    def _note(self, request: LoggedRequest, seconds: float) -> None:
        at = self._clock()
        self._put(lambda: self._line(at, self._facts(self._hide, request, seconds)))


def shown_path(path: bytes) -> str:
    """Any path as one word: percent-encoded."""
    return UNSEEN.sub(lambda match: b"%%%02X" % match[0][0], path).decode("ascii")


def shown_status(cache: bytes | None) -> str | None:
    """How our cache answered: `hit; ttl=20; detail=fresh`; None if it was not asked."""
    _, ours, status = (cache or b"").rpartition(OURS)
    return status.decode("ascii", "backslashreplace") if ours else None


def text_facts(hide: Hidden, request: LoggedRequest, seconds: float) -> bytes:
    path = hide(shown_path(request.path))
    size = 0 if request.method == "HEAD" else request.size
    status = request.status or "-"
    cache = shown_status(request.cache) or "-"
    return f"{request.method} {path} {status} {size} {seconds:.6f} {cache}\n".encode()


def text_line(at: float, facts: bytes) -> bytes:
    return moment(at).encode() + b" ACCESS " + facts


def json_facts(hide: Hidden, request: LoggedRequest, seconds: float) -> bytes:
    return msgspec.json.encode(
        {
            "level": "access",
            "method": request.method,
            "path": hide(shown_path(request.path)),
            "status": request.status,
            "bytes": 0 if request.method == "HEAD" else request.size,
            "cache": shown_status(request.cache),
            "seconds": round(seconds, 6),
        }
    )


def json_line(at: float, facts: bytes) -> bytes:
    return b'{"time":"' + moment(at).encode() + b'",' + facts[1:] + b"\n"
