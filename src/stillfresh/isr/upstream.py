"""A site elsewhere as an ASGI app: a request is passed on over HTTP, its answer streamed back.

What `IsrMiddleware` stands in front of when it is a reverse proxy (I12). RFC 9110 §7.6: hop-by-hop
fields stay behind, Via and Date are added. Needs `stillfresh[web]`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, shown
from stillfresh.isr.rendering import Receive
from stillfresh.isr.responses import Send, refuse
from stillfresh.isr.rules_fields import Raw, date_text, values
from stillfresh.isr.rules_headers import end_to_end
from stillfresh.isr.rules_routes import Scope

__all__ = ["Upstream", "checked_upstream"]

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 100
VIA: Final = b"1.1 stillfresh"
OURS: Final = frozenset({b"host", b"via", b"expect", b"x-forwarded-host", b"x-forwarded-proto"})
"""Request headers that a proxy answers for itself."""


def checked_upstream(url: str) -> httpx.URL:
    """`http://host[:port]`; a path would have to be cut out of every link."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"upstream {shown(url)}: not a URL ({exc})") from None
    is_site = parts.scheme in {"http", "https"} and parts.hostname and parts.username is None
    if not is_site or parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ConfigError(f"upstream {shown(url)}: write http://host:port or https://host")
    try:
        found = httpx.URL(f"{parts.scheme}://{parts.netloc}")
        _ = found.raw_host.decode("ascii").encode("idna")
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise ConfigError(f"upstream {shown(url)}: not a host's name ({exc})") from None
    return found


class Upstream:
    """`keep_host`: it is told the Host that was asked for; else its own."""

    def __init__(
        self, url: str, *, clock: Clock, timeout: float = 30.0, keep_host: bool = False
    ) -> None:
        self._base = checked_upstream(url)
        self._origin = f"{self._base.scheme}://".encode() + self._base.netloc
        self._clock = clock
        self._keep_host = keep_host
        self._is_reached = True
        self._timeout = dict.fromkeys(("connect", "read", "write", "pool"), timeout)
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        self._transport = httpx.AsyncHTTPTransport(limits=limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._pass(scope, receive, send)
        else:
            raise ConfigError(f"{scope['type']}: only HTTP is passed on")

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await self._transport.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(scope, receive)
        except httpx.TimeoutException:
            await refuse(send, 504, b"The site did not answer in time.\n")
            return
        except httpx.LocalProtocolError:
            await refuse(send, 400, b"This cannot be passed on.\n")
            return
        except httpx.TransportError as exc:
            self._note(exc)
            await refuse(
                send, 502, f"The site cannot be reached ({type(exc).__name__}).\n".encode()
            )
            return
        self._note(None)
        try:
            await self._stream(response, scope, receive, send)
        except httpx.TransportError as exc:
            raise ConnectionError(f"{self._base}: broke off its answer: {exc!r}") from exc
        finally:
            await response.aclose()

    def _note(self, error: httpx.TransportError | None) -> None:
        """Told once, not for each request."""
        if error is not None and self._is_reached:
            logger.warning("%s: cannot be reached: %r", self._base, error)
        self._is_reached = error is None

    async def _answer(self, scope: Scope, receive: Receive) -> httpx.Response:
        """A connection that was kept too long is no reason to fail a request without a body."""
        for is_last in (False, True):
            request = self._request(scope, receive)
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if is_last or scope["method"] not in {"GET", "HEAD"} or _has_body(scope):
                    raise
        raise AssertionError("the second try returns or raises")

    def _request(self, scope: Scope, receive: Receive) -> httpx.Request:
        raw: Raw = tuple(scope["headers"])
        host = b"".join(values(raw, b"host")[:1]) if self._keep_host else b""
        kept = [it for it in end_to_end(raw) if it[0] not in OURS]
        told = [(b"via", _via(raw)), (b"x-forwarded-proto", scope["scheme"].encode("ascii"))]
        if host:  # only where it is in the key of what is asked for
            told.append((b"x-forwarded-host", host))
        return httpx.Request(
            scope["method"],
            self._base,
            headers=[(b"host", host or self._base.netloc), *kept, *told],
            content=_sent(receive) if _has_body(scope) else None,
            extensions={"timeout": self._timeout, "target": _target(scope)},
        )

    async def _stream(
        self, response: httpx.Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """To its end, or until nobody listens any more."""
        if not 200 <= response.status_code <= 599:  # RFC 9110 §15: no such answer can be final
            await refuse(send, 502, b"The site answered with a status that is none.\n")
            return
        headers = self._told(response)
        start = {"type": "http.response.start", "status": response.status_code}
        await send({**start, "headers": headers})
        left = asyncio.ensure_future(_left(receive)) if not _has_body(scope) else None
        try:
            parts = _parts(response)
            while (part := await _next(parts, left)) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if left is None or not left.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            if left is not None:
                left.cancel()

    def _told(self, response: httpx.Response) -> list[tuple[bytes, bytes]]:
        raw: Raw = tuple((name.lower(), value) for name, value in response.headers.raw)
        headers = [self._relative(it) for it in end_to_end(raw) if it[0] != b"via"]
        if not values(raw, b"date"):
            headers.append((b"date", date_text(self._clock())))
        return [*headers, (b"via", _via(raw))]

    def _relative(self, field: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        """Where the site is told its own name, its redirects to itself lead here."""
        name, value = field
        if name == b"location" and not self._keep_host and value.startswith(self._origin + b"/"):
            return name, value.removeprefix(self._origin)
        return field


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _via(raw: Raw) -> bytes:
    return b", ".join([*values(raw, b"via"), VIA])


def _target(scope: Scope) -> bytes:
    """Byte for byte as it was asked for: what an escape means is the site's to say."""
    query = scope["query_string"]
    target: bytes = (scope["raw_path"] or b"/") + (b"?" + query if query else b"")
    return target


async def _sent(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise httpx.ReadError("the client left")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(parts: AsyncIterator[bytes], left: "asyncio.Future[None] | None") -> bytes | None:
    """None: there is no more, or nobody is there to have it."""
    if left is None:
        return await anext(parts, None)
    coming = asyncio.ensure_future(_one(parts))
    try:
        awaited: list[asyncio.Future[Any]] = [coming, left]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        return None if left.done() else coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait([coming])


async def _one(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    """As they came over the wire: encoded content stays encoded."""
    stream: Any = response.stream
    parts: AsyncIterator[bytes] = aiter(stream)
    return parts
