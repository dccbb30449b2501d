"""A site elsewhere as an ASGI app: a request is passed on over HTTP, its answer streamed back.

What `IsrMiddleware` stands in front of when it is a reverse proxy (I12). RFC 9110 §7.6: hop-by-hop
fields stay behind, Via and Date are added. Needs `stillfresh[web]`.
"""

import logging
from typing import Final
from urllib.parse import urlsplit

import h11
import httpx

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, shown_address
from stillfresh.isr.collecting import Receive
from stillfresh.isr.rendering import LOAD
from stillfresh.isr.responses import Send, refuse
from stillfresh.isr.rules_fields import Raw, date_text, values
from stillfresh.isr.rules_headers import end_to_end
from stillfresh.isr.rules_routes import Scope
from stillfresh.isr.site_connections import Broken, Connection, Pool
from stillfresh.isr.visitor import Left, Stalled, Visitor

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 100
"""To one site: so many for visitors, and as many for renders."""
VIA: Final = b"1.1 stillfresh"
OURS: Final = frozenset(
    {b"content-length", b"expect", b"host", b"via", b"x-forwarded-host", b"x-forwarded-proto"}
)
"""Request headers that a proxy answers for itself."""


def checked_upstream(url: str) -> httpx.URL:
    """`http://host[:port]`; a path would have to be cut out of every link."""
    if "@" in url:  # a parser's own words could repeat a part of it
        raise ConfigError(f"upstream {shown_address(url)}: write it without a name and a password")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"upstream {shown_address(url)}: not a URL ({exc})") from None
    is_site = parts.scheme in {"http", "https"} and parts.hostname
    if not is_site or parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ConfigError(f"upstream {shown_address(url)}: write http://host:port or https://host")
    try:
        found = httpx.URL(f"{parts.scheme}://{parts.netloc}")
        _ = found.raw_host.decode("ascii").encode("idna")
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise ConfigError(f"upstream {shown_address(url)}: not a host's name ({exc})") from None
    return found


class Upstream:
    """`keep_host`: it is told the Host that was asked for; else its own."""

    def __init__(
        self, url: str, *, clock: Clock, timeout: float = 30.0, keep_host: bool = False
    ) -> None:
        self._base = base = checked_upstream(url)
        self._origin = f"{base.scheme}://".encode() + base.netloc
        self._clock = clock
        self._keep_host = keep_host
        self._is_reached = True
        self._timeout = timeout
        self._visitors, self._renders = (Pool(base, CONNECTIONS, timeout) for _ in range(2))

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
        self._visitors.close()
        self._renders.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        visitor = Visitor(receive, self._timeout, has_body=_has_body(scope))
        try:
            await self._exchange(scope, visitor, send)
        except Left:
            pass  # nobody is there to be told anything
        except Stalled:
            await refuse(send, 408, b"The rest of the request did not come.\n", is_last=True)
        except h11.LocalProtocolError:
            await refuse(send, 400, b"This cannot be passed on.\n")
        except TimeoutError:
            await refuse(send, 504, b"The site did not answer in time.\n")
        except Broken as exc:
            self._note(exc)
            await refuse(send, 502, b"The site cannot be reached.\n")
        finally:
            visitor.end()

    async def _exchange(self, scope: Scope, visitor: Visitor, send: Send) -> None:
        """Loads have connections of their own: visitors cannot take them all.

        An answer that turns out to be one visitor's own (I24) takes a visitor's place.
        """
        request = self._request(scope)
        await visitor.begin()
        load = scope.get(LOAD)
        pool = self._visitors if scope.get("client") and load is None else self._renders
        connection, answer = await _answer(pool, request, visitor)
        self._note(None)

        async def leaves() -> bool:
            nonlocal pool
            has_left = await pool.leave_to(self._visitors)
            pool = self._visitors if has_left else pool
            return has_left

        if load is not None:
            load.leaves = leaves
        try:
            visitor.watch()
            await self._stream(connection, answer, send)
        except (Broken, TimeoutError) as exc:
            if visitor.is_gone:
                raise Left from exc
            raise ConnectionError(f"{self._base}: broke off its answer: {exc!r}") from exc
        finally:
            visitor.end()
            pool.give(connection)
        await send({"type": "http.response.body", "body": b""})

    def _note(self, error: Broken | None) -> None:
        """Told once, not for each request."""
        if error is not None and self._is_reached:
            logger.warning("%s: cannot be reached: %s", self._base, error)
        self._is_reached = error is None

    def _request(self, scope: Scope) -> h11.Request:
        raw: Raw = tuple(scope["headers"])
        host = b"".join(values(raw, b"host")[:1]) if self._keep_host else b""
        kept = [it for it in end_to_end(raw) if it[0] not in OURS]
        told = [(b"via", _via(raw)), (b"x-forwarded-proto", scope["scheme"].encode("ascii"))]
        if host:  # only where it is in the key of what is asked for
            told.append((b"x-forwarded-host", host))
        return h11.Request(
            method=scope["method"],
            target=_target(scope),
            headers=[(b"host", host or self._base.netloc), *kept, *_framing(scope), *told],
        )

    async def _stream(self, connection: Connection, answer: h11.Response, send: Send) -> None:
        headers = self._told(_framed(answer))
        start = {"type": "http.response.start", "status": answer.status_code}
        await send({**start, "headers": headers})
        async for part in connection.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if _is_framed_twice(answer):
            connection.close()

    def _told(self, raw: Raw) -> list[tuple[bytes, bytes]]:
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


def _is_framed_twice(answer: h11.Response) -> bool:
    """RFC 9112 §6.3: chunked wins, and what else comes on such a connection is not trusted."""
    names = {bytes(name) for name, _ in answer.headers}
    return names >= {b"content-length", b"transfer-encoding"}


def _framed(answer: h11.Response) -> Raw:
    """With one statement of how long the body is."""
    fields = tuple((bytes(name), bytes(value)) for name, value in answer.headers)
    if not _is_framed_twice(answer):
        return fields
    return tuple(it for it in fields if it[0] != b"content-length")


async def _answer(
    pool: Pool, request: h11.Request, visitor: Visitor
) -> tuple[Connection, h11.Response]:
    """A connection that was kept too long is no reason to fail a request that is safe."""
    is_safe = request.method in {b"GET", b"HEAD"} and visitor.upload() is None
    for is_last in (False, True):
        connection = await pool.take(is_new=is_last)
        visitor.attach(connection)
        try:
            return connection, await connection.ask(request, visitor.upload())
        except BaseException as exc:
            visitor.attach(None)
            pool.give(connection)
            if visitor.is_gone:
                raise Left from exc
            if not isinstance(exc, Broken) or is_last or connection.is_new or not is_safe:
                raise
    raise AssertionError("the second try returns or raises")


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _framing(scope: Scope) -> list[tuple[bytes, bytes]]:
    """RFC 9112 §6.3: how long the body is, by one field only."""
    if not values(scope["headers"], b"transfer-encoding"):
        lengths = values(scope["headers"], b"content-length")[:1]
        if not lengths and scope["method"] in {"PATCH", "POST", "PUT"}:
            lengths = [b"0"]
        return [(b"content-length", length) for length in lengths]
    return [(b"transfer-encoding", b"chunked")]


def _via(raw: Raw) -> bytes:
    return b", ".join([*values(raw, b"via"), VIA])


def _target(scope: Scope) -> bytes:
    """Byte for byte as it was asked for: what an escape means is the site's to say."""
    query = scope["query_string"]
    target: bytes = (scope["raw_path"] or b"/") + (b"?" + query if query else b"")
    return target
