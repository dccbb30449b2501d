"""The access log: a line for each request: how the cache answered, and how long it took.

Never the query, a header field or an address: they may hold secrets, or identify a visitor. An
answer that is sent again from its kept bytes (`hits`) is logged too, as it was the first time.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillfresh.clock import Clock, monotonic
from stillfresh.gateway.server.tunnels import ClientEnd
from stillfresh.http.fields import Raw
from stillfresh.logs import Hidden, LineWriter, moment
from stillfresh.pages.edge import KEEP, TUNNEL, Repeatable, Response

LONGEST_PATH: Final = 1_000
"""Bytes."""
UNSEEN: Final = re.compile(rb"[^\x21-\x7e]")
OURS: Final = b"stillfresh; "
"""How our member of Cache-Status begins; it is the last one."""
SWITCHED: Final = 101
REFUSED: Final = 403
"""The status of a WebSocket that is closed before it is accepted."""
BROKEN: Final = 500


EncodeFacts: TypeAlias = Callable[[Hidden, "LoggedRequest", float], bytes]
"""Encodes what is known of a request that took so many seconds."""


class LoggedRequest:
    """What is known about a request, and then about its answer."""

    __slots__ = ("cache", "method", "path", "size", "status")

    def __init__(self, method: str, path: bytes) -> None:
        self.method = method
        self.path = path[:LONGEST_PATH]
        self.status: int | None = None
        self.size = 0
        self.cache: bytes | None = None

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


class RepeatedLine:
    """The line of an answer that is given again, without the time.

    It is encoded again only if the answer has other fields.
    """

    __slots__ = ("_encode", "_facts", "_fields", "_hide", "_method", "_path")

    def __init__(self, encode: EncodeFacts, hide: Hidden, method: str, path: bytes) -> None:
        self._encode = encode
        self._hide = hide
        self._method = method
        self._path = path
        self._fields: Raw | None = None
        self._facts = b""

    def facts(self, response: Response) -> bytes:
        if response.fields is not self._fields:
            request = LoggedRequest(self._method, self._path)
            start = {"type": "http.response.start", "status": response.status}
            request.hear({**start, "headers": response.fields})
            request.hear({"type": "http.response.body", "body": response.body})
            self._facts = self._encode(self._hide, request, 0.0)
            self._fields = response.fields
        return self._facts


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
            scope[KEEP] = partial(self._log_repeats, keep, request.method, request.path)

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
        self,
        keep: Callable[[Repeatable], None],
        method: str,
        path: bytes,
        repeatable: Repeatable,
    ) -> None:
        """Log another line each time when the answer is given again."""
        line = RepeatedLine(self._facts, self._hide, method, path)

        def repeat_and_log() -> Response | None:
            response = repeatable.repeat()
            if response is not None:
                self._put(partial(self._line, self._clock(), line.facts(response)))
            return response

        keep(repeatable._replace(repeat=repeat_and_log))

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
    # What is hidden leaves "cookie: ***": the path stays one word.
    path = hide(shown_path(request.path)).replace(" ", "%20")
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
