"""A site elsewhere as an ASGI app: a request is passed on over HTTP, its answer streamed back.

As a reverse proxy, `IsrMiddleware` has this app behind it. RFC 9110 §7.6: hop-by-hop
fields stay behind, Via and Date are added. WebSockets pass through a tunnel, and have places of
their own, as event streams have. Needs `stillfresh[web]`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from stillfresh.clock import Clock, monotonic
from stillfresh.errors import ConfigError, needs, shown_address
from stillfresh.http.client import checked_url
from stillfresh.http.fields import Raw, end_to_end, http_date_text, names_in, values
from stillfresh.pages.answers import LOAD
from stillfresh.pages.clients import has_body, target_of
from stillfresh.pages.edge import refuse, shown_path
from stillfresh.pages.model import Receive, Scope, Send
from stillfresh.pages.places import Place, SiteFull, SitePlaces
from stillfresh.pages.routes import INTERIM
from stillfresh.pages.sharing import POOL_FULL, is_event_stream
from stillfresh.pages.site_connections import Pool, SiteBroken, SiteConnection, Tell
from stillfresh.pages.tunnels import TUNNEL, joined

with needs("web", "stillfresh.pages.upstream"):
    import h11
    import httpx2

CONNECTIONS: Final = 100
"""Connections to one site: so many for visitors, and as many for loads."""
MAX_STREAMS: Final = 1_000
"""WebSockets and event streams at once, which stay open."""
POOL_WAIT: Final = 1.0
"""Seconds that a request waits for a connection."""
SWITCH: Final[Raw] = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
VIA: Final = b"1.1 stillfresh"
OURS: Final = names_in(b"content-length expect host via x-forwarded-host x-forwarded-proto")
"""Request fields that the proxy writes itself."""
SMALL: Final = 65_536
"""Bytes of an upload that are read before a connection to the site is taken."""
MIN_UPLOAD_RATE: Final = 500
"""Bytes a second that an upload must bring."""
UPLOAD_WINDOW: Final = 10.0
"""Seconds of waiting for the client over which its rate is measured."""


logger = logging.getLogger(__name__)


class Left(Exception):
    """The client has left."""


class Stalled(Exception):
    """The client's upload has stopped, or is too slow."""


class UploadRate:
    """The lowest rate of an upload: in each window of waiting, so many bytes must come.

    An earlier burst counts for its own window only: otherwise a client could send much, and then
    hold its connection with a byte now and then. Time that the site takes to read does not count.
    """

    def __init__(self, min_rate: int) -> None:
        self._due = min_rate * UPLOAD_WINDOW
        self._waited = 0.0
        self._came = 0

    def patience(self) -> float:
        """Seconds that the client may still take for the next part."""
        return UPLOAD_WINDOW - self._waited if self._due else math.inf

    def note(self, waited: float, size: int) -> None:
        """A part of this size came, after so many seconds of waiting for it."""
        self._waited += waited
        self._came += size
        if self._came >= self._due:
            self._waited = 0.0
            self._came = 0


class Visitor:
    """The client's side of an exchange that is passed on: its upload, and its leaving.

    A small upload is whole before a connection is taken for it; one that stalls is given up. A
    client that leaves takes the connection to the site along. `timeout`: seconds for each part.
    """

    def __init__(
        self, receive: Receive, timeout: float, *, has_body: bool, min_rate: int = 0
    ) -> None:
        self._receive = receive
        self._timeout = timeout
        self._rate = UploadRate(min_rate)
        self._has_body = has_body
        self._is_whole = not has_body
        self._begun = b""
        self._watching: asyncio.Future[None] | None = None
        self._connection: SiteConnection | None = None
        self.is_gone = False

    async def begin(self) -> None:
        came = bytearray()
        while not self._is_whole and len(came) < SMALL:
            came += await self._part()
        self._begun = bytes(came)

    def upload(self) -> AsyncIterator[bytes] | None:
        return self._parts() if self._has_body else None

    async def _parts(self) -> AsyncIterator[bytes]:
        yield self._begun
        while not self._is_whole:
            yield await self._part()
        self.watch()

    async def _part(self) -> bytes:
        began = monotonic()
        try:
            async with asyncio.timeout(min(self._timeout, self._rate.patience())):
                message = await self._receive()
        except TimeoutError:
            raise Stalled from None
        if message["type"] == "http.disconnect":
            raise Left
        self._is_whole = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        self._rate.note(monotonic() - began, len(part))
        return part

    def attach(self, connection: SiteConnection | None) -> None:
        """Close this when the client leaves, which is noticed once its upload is complete."""
        self._connection = connection
        if self._is_whole:
            self.watch()

    def watch(self) -> None:
        """From now on, ignore what the client sends, except that it leaves."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._left())

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        self._connection = None
        if self._watching is not None:
            self._watching.cancel()


def checked_upstream(url: str) -> httpx2.URL:
    """`http://host[:port]`; a path would have to be removed from every link."""
    like = "write http://host:port or https://host"
    checked = checked_url(url, "upstream", like=like)
    if checked.raw_path != b"/":
        raise ConfigError(f"upstream: {like}, not {shown_address(url)}")
    return checked.copy_with(raw_path=b"")


class Upstream:
    """`keep_host`: the site receives the requested Host; otherwise its own name.

    `connections`: how many visitors may use at once, and how many loads. `pool_wait`: seconds that
    a request waits for one of them. `min_upload_rate`: bytes a second; 0: any.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        timeout: float = 30.0,
        keep_host: bool = False,
        max_streams: int = MAX_STREAMS,
        connections: int = CONNECTIONS,
        pool_wait: float = POOL_WAIT,
        min_upload_rate: int = MIN_UPLOAD_RATE,
    ) -> None:
        self._base = base = checked_upstream(url)
        self._origin = f"{base.scheme}://".encode() + base.netloc
        self._clock = clock
        self._keep_host = keep_host
        self._is_reached = True
        self._timeout = timeout
        self._pool = Pool(base, timeout)
        self._pool_wait = pool_wait
        self._min_upload_rate = min_upload_rate
        self.places = SitePlaces(connections, max_streams)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] in {"http", TUNNEL}:
            await self._pass(scope, receive, send)
        else:  # of a server that makes messages of it; `stillfresh serve` passes it on
            await send({"type": f"{scope['type']}.close", "code": 1011})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        self._pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        visitor = Visitor(
            receive,
            self._timeout,
            has_body=has_body(scope["headers"]),
            min_rate=self._min_upload_rate,
        )
        try:
            await self._exchange(scope, visitor, send)
        except Left:
            pass  # the client has left
        except SiteFull:
            text = b"All connections to the site are in use; please try again in a moment.\n"
            retry = (b"retry-after", b"1")
            await refuse(send, 503, text, is_last=True, fault=POOL_FULL, more=(retry,))
        except Stalled:
            text = b"The rest of the request did not come, or came too slowly.\n"
            await refuse(send, 408, text, is_last=True)
        except h11.LocalProtocolError:
            await refuse(send, 400, b"This cannot be passed on.\n")
        except TimeoutError:
            await refuse(send, 504, b"The site did not answer in time.\n")
        except SiteBroken as exc:
            self._note(exc, scope)
            await refuse(send, 502, b"The site cannot be reached.\n", fault=exc.fault)
        finally:
            visitor.end()

    async def _exchange(self, scope: Scope, visitor: Visitor, send: Send) -> None:
        """A response that turns out to be private takes a visitor's place."""
        request = self._request(scope)
        await visitor.begin()
        load = scope.get(LOAD)
        is_tunnel = scope["type"] == TUNNEL
        places = self.places
        if is_tunnel:
            group = places.streams
            await group.take_now()
        else:
            group = places.visitors if scope.get("client") and load is None else places.loads
            await group.take(self._pool_wait)
        place = Place(group)
        try:
            connection, answer = await self._answer(request, visitor, scope.get(INTERIM))
            self._is_reached = True
            if isinstance(answer, h11.InformationalResponse):
                await self._switch(connection, answer, visitor, scope[TUNNEL])
                return
            is_endless = is_event_stream(answer.headers)
            then = places.streams if is_endless or is_tunnel else places.visitors
            if load is not None:
                load.leaves = partial(place.move, then)
            elif is_endless and not await place.move(then):
                connection.close()
                raise SiteFull
            await self._stream(connection, answer, visitor, send)
        finally:
            place.leave()
        await send({"type": "http.response.body", "body": b""})

    async def _switch(
        self,
        connection: SiteConnection,
        answer: h11.InformationalResponse,
        visitor: Visitor,
        client: Any,  # noqa: ANN401 (the server's: see `TUNNEL`)
    ) -> None:
        """From here on, bytes pass both ways unchanged."""
        visitor.end()
        raw: Raw = tuple((bytes(name), bytes(value)) for name, value in answer.headers)
        client.open(answer.status_code, (*end_to_end(raw), *SWITCH))
        await joined(client, connection)

    async def _answer(
        self, request: h11.Request, visitor: Visitor, tell: Tell | None
    ) -> tuple[SiteConnection, h11.Response | h11.InformationalResponse]:
        """If a kept connection turns out to be closed, a safe request is sent once more."""
        is_safe = request.method in {b"GET", b"HEAD"} and visitor.upload() is None
        for is_last in (False, True):
            connection = await self._pool.take(is_new=is_last)
            visitor.attach(connection)
            try:
                return connection, await connection.ask(request, visitor.upload(), tell)
            except BaseException as exc:
                visitor.attach(None)
                self._pool.give(connection)
                if visitor.is_gone:
                    raise Left from exc
                if not isinstance(exc, SiteBroken) or is_last or connection.is_new or not is_safe:
                    raise
        raise AssertionError("the second try returns or raises")

    def _note(self, error: SiteBroken, scope: Scope) -> None:
        """Log once, not for each request."""
        if self._is_reached:
            what = f"{scope['method']} {shown_path(scope)}"
            logger.warning("%s: cannot be reached: %s (%s)", self._base, error, what)
        self._is_reached = False

    def _request(self, scope: Scope) -> h11.Request:
        raw: Raw = tuple(scope["headers"])
        host = b"".join(values(raw, b"host")[:1]) if self._keep_host else b""
        passed_on = [(name, value) for name, value in end_to_end(raw) if name not in OURS]
        own = [(b"via", _via(raw)), (b"x-forwarded-proto", scope["scheme"].encode("ascii"))]
        if host:  # only where it is in the key of what is asked for
            own.append((b"x-forwarded-host", host))
        if scope["type"] == TUNNEL:
            own += SWITCH
        return h11.Request(
            method=scope["method"],
            target=target_of(scope),
            headers=[(b"host", host or self._base.netloc), *passed_on, *_framing(scope), *own],
        )

    async def _stream(
        self, connection: SiteConnection, answer: h11.Response, visitor: Visitor, send: Send
    ) -> None:
        raw: Raw = tuple((bytes(name), bytes(value)) for name, value in answer.headers)
        # RFC 9112 §6.3: chunked wins, and what else comes on such a connection is not trusted.
        is_framed_twice = {b"content-length", b"transfer-encoding"} <= {name for name, _ in raw}
        dropped = {b"via", b"content-length"} if is_framed_twice else {b"via"}
        headers = [self._relative(field) for field in end_to_end(raw) if field[0] not in dropped]
        if not values(raw, b"date"):
            headers.append((b"date", http_date_text(self._clock())))
        headers.append((b"via", _via(raw)))
        try:
            visitor.watch()
            start = {"type": "http.response.start", "status": answer.status_code}
            await send({**start, "headers": headers})
            limit = None if is_event_stream(raw) else self._timeout
            async for part in connection.parts(limit):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if is_framed_twice:
                connection.close()
        except (SiteBroken, TimeoutError) as exc:
            if visitor.is_gone:
                raise Left from exc
            why = exc if isinstance(exc, SiteBroken) else f"no byte came for {self._timeout:g} s"
            raise ConnectionError(f"{self._base}: broke off its answer: {why}") from exc
        finally:
            visitor.end()
            self._pool.give(connection)

    def _relative(self, field: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        """If the site receives its own name, make its links to itself relative."""
        name, value = field
        is_link = name in {b"location", b"content-location"} and not self._keep_host
        if is_link and value.startswith(self._origin + b"/"):
            return name, value.removeprefix(self._origin)
        return field


def _framing(scope: Scope) -> list[tuple[bytes, bytes]]:
    """RFC 9112 §6.3: the framing of the body, by one field only."""
    if not values(scope["headers"], b"transfer-encoding"):
        lengths = values(scope["headers"], b"content-length")[:1]
        if not lengths and scope["method"] in {"PATCH", "POST", "PUT"}:
            lengths = [b"0"]
        return [(b"content-length", length) for length in lengths]
    return [(b"transfer-encoding", b"chunked")]


def _via(raw: Raw) -> bytes:
    return b", ".join([*values(raw, b"via"), VIA])
