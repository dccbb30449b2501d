"""A site elsewhere as an ASGI app: a request is passed on over HTTP, its answer streamed back.

As a reverse proxy, `IsrMiddleware` has this app behind it. RFC 9110 §7.6: hop-by-hop
fields stay behind, Via and Date are added. WebSockets pass through a tunnel, and have places of
their own, as event streams have. Needs `stillfresh[web]`.
"""

import asyncio
import logging
import math
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from stillfresh.clock import Clock, monotonic
from stillfresh.errors import ConfigError, needs, shown, shown_address
from stillfresh.http import is_event_stream
from stillfresh.http.client import checked_url
from stillfresh.http.fields import Raw, end_to_end, http_date_text, names_in, values
from stillfresh.pages.answers import LOAD
from stillfresh.pages.clients import has_body, target_of
from stillfresh.pages.edge import refuse, shown_path
from stillfresh.pages.model import Receive, Scope, Send
from stillfresh.pages.places import Place, SiteFull, SitePlaces
from stillfresh.pages.routes import INTERIM
from stillfresh.pages.sharing import POOL_FULL
from stillfresh.pages.site_addresses import (
    SiteAddress,
    SiteAddresses,
    leaves_base,
)
from stillfresh.pages.site_connections import (
    ConnectTimeout,
    NoConnection,
    SiteConnection,
    SiteTls,
    Tell,
)
from stillfresh.pages.site_messages import (
    WITHOUT_BODY,
    CannotBePassed,
    SiteBroken,
    SiteHead,
    SiteRequest,
)
from stillfresh.pages.spooling import Spool, SpoolRoom
from stillfresh.pages.tunnels import TUNNEL, joined

with needs("web", "stillfresh.pages.upstream"):
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
"""Bytes of an upload that are read before a connection to the site is taken, and of a response
that is sent as it comes."""
MIN_UPLOAD_RATE: Final = 500
"""Bytes a second that an upload must bring."""
MAX_SPILL: Final = 2**30
"""Bytes of temporary files, for responses that are read slowly."""
UPLOAD_WINDOW: Final = 10.0
"""Seconds of waiting for the client over which its rate is measured."""
WATCHED_AFTER: Final = 0.05
"""Seconds of an exchange before its client's leaving is noticed."""
HEALTH_EVERY: Final = 5.0
"""Seconds between two checks of an address."""
MOST_ADDRESSES: Final = 100
BASE_PATH: Final = re.compile(rb"(?:/[A-Za-z0-9._~%!$&'()*+,;=:@-]+)*")
HEALTH_PATH: Final = re.compile(r"/[!-~]*", re.ASCII)

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
        self._watches_soon: asyncio.TimerHandle | None = None
        self._watching: asyncio.Future[None] | None = None
        self._connection: SiteConnection | None = None
        self.is_gone = False

    async def begin(self) -> None:
        came = bytearray()
        while not self._is_whole and len(came) < SMALL:
            came += await self._part()
        self._begun = bytes(came)

    def may_repeat(self, method: str) -> bool:
        """True if the site may see this request twice."""
        return method in {"GET", "HEAD"} and not self._has_body

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
        """From now on, ignore what the client sends, except that it leaves.

        Most exchanges are over before that begins, so they need no task for it.
        """
        if self._watches_soon is None:
            loop = asyncio.get_running_loop()
            self._watches_soon = loop.call_later(WATCHED_AFTER, self.watch_now)

    def watch_now(self) -> None:
        """For a response that may be long: what a client that left does not read piles up."""
        if self._watches_soon is not None:
            self._watches_soon.cancel()
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
        if self._watches_soon is not None:
            self._watches_soon.cancel()
        if self._watching is not None:
            self._watching.cancel()


def checked_upstream(url: object) -> httpx2.URL:
    """`http://host[:port]`, with a path below which the site has its pages, or without one."""
    like = "write http://host:port, https://host or https://host/path"
    checked = checked_url(url, "upstream", like=like)
    path = checked.raw_path.removesuffix(b"/")
    if not BASE_PATH.fullmatch(path) or leaves_base(path):
        raise ConfigError(f"upstream: {like}, not {shown_address(url)}")
    return checked.copy_with(raw_path=path)


def checked_upstreams(urls: str | Iterable[str]) -> tuple[httpx2.URL, ...]:
    """One address of a site, or several, each once."""
    texts = [urls] if isinstance(urls, str) else list(urls)
    if not 1 <= len(texts) <= MOST_ADDRESSES:
        raise ConfigError(f"upstream: write 1 to {MOST_ADDRESSES} addresses, not {len(texts)}")
    addresses = tuple(checked_upstream(text) for text in texts)
    for position, address in enumerate(addresses):
        if address in addresses[:position]:
            raise ConfigError(f"upstream: {address} is there twice")
    return addresses


def checked_health_path(path: object, name: str = "health_path") -> str:
    """Return the path. Raises ConfigError."""
    if not isinstance(path, str) or not HEALTH_PATH.fullmatch(path):
        raise ConfigError(f"{name}: must be a path such as '/health', not {shown(path)}")
    return path


def checked_ca(file: str, name: str = "site_ca") -> ssl.SSLContext:
    """Return a context that trusts the certificates of this file, and no others."""
    try:
        return ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        raise ConfigError(f"{name}: {shown(file)} has no certificates in PEM format") from None
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{name}: {shown(file)}: {why}") from exc


class SiteAnswer(NamedTuple):
    """The head of an answer, and where the rest of it comes from."""

    address: SiteAddress
    connection: SiteConnection
    head: SiteHead


class Upstream:
    """`url`: the address of the site, or several that take turns.

    `keep_host`: the site receives the requested Host; otherwise its own name.

    `connections`: how many visitors may use at once, and how many loads. `pool_wait`: seconds that
    a request waits for one of them. `min_upload_rate`: bytes a second; 0: any. `max_spill`: bytes
    of temporary files, for responses that visitors read more slowly than they come.

    `ca`: a file of certificates that the site is trusted by, in place of the system's.
    `health_path`: asked for at each address every `health_every` seconds, with `health_host` as
    Host; an address that fails is left out.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        clock: Clock,
        timeout: float = 30.0,
        keep_host: bool = False,
        max_streams: int = MAX_STREAMS,
        connections: int = CONNECTIONS,
        pool_wait: float = POOL_WAIT,
        min_upload_rate: int = MIN_UPLOAD_RATE,
        max_spill: int = MAX_SPILL,
        ca: str | None = None,
        health_path: str | None = None,
        health_every: float = HEALTH_EVERY,
        health_host: str | None = None,
    ) -> None:
        tls = SiteTls(None if ca is None else checked_ca(ca))
        self.addresses = SiteAddresses(checked_upstreams(url), timeout, tls)
        self._clock = clock
        self._keep_host = keep_host
        self._timeout = timeout
        self._health_path = None if health_path is None else checked_health_path(health_path)
        self._health_every = health_every
        self._health_host = None if health_host is None else health_host.encode("ascii")
        self._pool_wait = pool_wait
        self._min_upload_rate = min_upload_rate
        self.places = SitePlaces(connections, max_streams)
        self.spool_room = SpoolRoom(max_spill)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] in {"http", TUNNEL}:
            await self._pass(scope, receive, send)
        else:  # of a server that makes messages of it; `stillfresh serve` passes it on
            await send({"type": f"{scope['type']}.close", "code": 1011})

    async def _live(self, receive: Receive, send: Send) -> None:
        checking: asyncio.Task[None] | None = None
        try:
            while (message := await receive())["type"] != "lifespan.shutdown":
                if checking is None and self._health_path is not None:
                    checking = asyncio.create_task(
                        self.addresses.check_all(
                            self._health_path, self._health_every, self._health_host
                        )
                    )
                await send({"type": f"{message['type']}.complete"})
        finally:
            if checking is not None:
                checking.cancel()
                await asyncio.wait([checking])
            self.addresses.close()
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
        except CannotBePassed:
            await refuse(send, 400, b"This cannot be passed on.\n")
        except TimeoutError:
            await refuse(send, 504, b"The site did not answer in time.\n")
        except SiteBroken as exc:
            await refuse(send, 502, b"The site cannot be reached.\n", fault=exc.fault)
        finally:
            visitor.end()

    async def _exchange(self, scope: Scope, visitor: Visitor, send: Send) -> None:
        """A response that turns out to be private takes a visitor's place."""
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
            site_answer = await self._answer(scope, visitor)
            _, connection, answer = site_answer
            if answer.is_interim:
                await self._switch(connection, answer, visitor, scope[TUNNEL])
                return
            is_endless = is_event_stream(answer.headers)
            then = places.streams if is_endless or is_tunnel else places.visitors
            if load is not None:
                load.leaves = partial(place.move, then)
            elif is_endless and not await place.move(then):
                connection.close()
                raise SiteFull
            last_part = await self._stream(site_answer, scope, visitor, send, place)
        finally:
            place.leave()
        await send({"type": "http.response.body", "body": last_part})

    async def _switch(
        self,
        connection: SiteConnection,
        answer: SiteHead,
        visitor: Visitor,
        client: Any,  # noqa: ANN401 (the server's: see `TUNNEL`)
    ) -> None:
        """From here on, bytes pass both ways unchanged."""
        visitor.end()
        client.open(answer.status_code, (*end_to_end(answer.headers), *SWITCH))
        await joined(client, connection)

    async def _answer(self, scope: Scope, visitor: Visitor) -> SiteAnswer:
        """The answer of the first address that gives one.

        Without a connection nothing was sent, so any request goes on to the next address. If the
        connection breaks afterwards, only a safe request does, and only once: it may be what the
        site broke by. A site that takes too long is not asked again elsewhere.
        """
        has_another_try = visitor.may_repeat(scope["method"])
        addresses = self.addresses.in_turn(monotonic())
        for address in addresses:
            is_last = address is addresses[-1]
            request = self._request(scope, address)
            try:
                connection, answer = await self._ask(address, request, visitor, scope.get(INTERIM))
            except (NoConnection, ConnectTimeout) as exc:
                address.health.note_no_connection(monotonic())
                self._note(address, exc, scope)
                if is_last:
                    raise
            except SiteBroken as exc:
                self._note(address, exc, scope)
                if is_last or not has_another_try:
                    raise
                has_another_try = False
            else:
                address.is_reached = True
                address.health.note_answer()
                return SiteAnswer(address, connection, answer)
        raise AssertionError("the last address returns or raises")

    async def _ask(
        self, address: SiteAddress, request: SiteRequest, visitor: Visitor, tell: Tell | None
    ) -> tuple[SiteConnection, SiteHead]:
        """If a kept connection turns out to be closed, a safe request is sent once more."""
        is_safe = visitor.may_repeat(request.method)
        pool = address.pool
        for is_last in (False, True):
            connection = await pool.take(is_new=is_last)
            visitor.attach(connection)
            try:
                return connection, await connection.ask(request, visitor.upload(), tell)
            except BaseException as exc:
                visitor.attach(None)
                pool.give(connection)
                if visitor.is_gone:
                    raise Left from exc
                if not isinstance(exc, SiteBroken) or is_last or connection.is_new or not is_safe:
                    raise
        raise AssertionError("the second try returns or raises")

    def _note(self, address: SiteAddress, error: Exception, scope: Scope) -> None:
        """Log once, not for each request."""
        if address.is_reached:
            what = f"{scope['method']} {shown_path(scope)}"
            logger.warning("%s: cannot be reached: %s (%s)", address.text, error, what)
        address.is_reached = False

    def _request(self, scope: Scope, address: SiteAddress) -> SiteRequest:
        raw: Raw = tuple(scope["headers"])
        visited = visited_host(raw)
        host = visited if self._keep_host else b""
        passed_on = [(name, value) for name, value in end_to_end(raw) if name not in OURS]
        own = [(b"via", _via(raw)), (b"x-forwarded-proto", scope["scheme"].encode("ascii"))]
        if visited:
            own.append((b"x-forwarded-host", visited))
        if scope["type"] == TUNNEL:
            own += SWITCH
        fields = ((b"host", host or address.host), *passed_on, *_framing(scope), *own)
        return SiteRequest(scope["method"], address.target(target_of(scope)), fields)

    async def _stream(
        self, site_answer: SiteAnswer, scope: Scope, visitor: Visitor, send: Send, place: Place
    ) -> bytes:
        """Send all of a response but the part that is returned, which is sent as its end.

        The connection is free as soon as the response has come, however slow the visitor is.
        """
        address, connection, answer = site_answer
        raw = answer.headers
        # RFC 9112 §6.3: chunked wins, and what else comes on such a connection is not trusted.
        is_framed_twice = {b"content-length", b"transfer-encoding"} <= {name for name, _ in raw}
        # RFC 9110 §8.6: no length may stand in a 204. Servers take that of a 304 for a body's.
        is_bodiless = answer.status_code in WITHOUT_BODY
        dropped = {b"via", b"content-length"} if is_framed_twice or is_bodiless else {b"via"}
        host = visited_host(tuple(scope["headers"]))
        headers = [
            address.as_visited(field, host) for field in end_to_end(raw) if field[0] not in dropped
        ]
        if not values(raw, b"date"):
            headers.append((b"date", http_date_text(self._clock())))
        headers.append((b"via", _via(raw)))
        reading: asyncio.Future[None] | None = None
        spool: Spool | None = None
        last_part = b""
        try:
            visitor.watch()  # what is left of its upload, the site did not want
            start = {"type": "http.response.start", "status": answer.status_code}
            await send({**start, "headers": headers})
            is_endless = is_event_stream(raw)
            if is_endless or _is_short(raw):
                limit = None if is_endless else self._timeout
                while part := await connection.next_part(limit):
                    if connection.has_whole_answer:
                        last_part = part
                        break
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                if is_framed_twice:
                    connection.close()
            else:
                visitor.watch_now()
                spool = Spool(self.spool_room)
                reading = asyncio.ensure_future(
                    self._read_into(spool, site_answer, visitor, place, is_last=is_framed_twice)
                )
                while part := await spool.next():
                    if visitor.is_gone:
                        raise Left
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except (SiteBroken, TimeoutError) as exc:
            if visitor.is_gone:
                raise Left from exc
            why = exc if isinstance(exc, SiteBroken) else f"no byte came for {self._timeout:g} s"
            raise ConnectionError(f"{address.text}: broke off its answer: {why}") from exc
        finally:
            visitor.end()
            if reading is None:
                address.pool.give(connection)
            else:
                reading.cancel()  # it gives the connection back
                await asyncio.wait([reading])
            if spool is not None:
                spool.close()
        return last_part

    async def _read_into(
        self,
        spool: Spool,
        site_answer: SiteAnswer,
        visitor: Visitor,
        place: Place,
        *,
        is_last: bool,
    ) -> None:
        """Read a response as fast as the site sends it; `is_last`: of this connection."""
        address, connection, _ = site_answer
        error: Exception | None = None
        try:
            while part := await connection.next_part(self._timeout):
                await spool.add(part)
            if is_last:
                connection.close()
        except (SiteBroken, TimeoutError) as exc:
            error = exc
        finally:
            visitor.attach(None)
            address.pool.give(connection)
            place.leave()
        spool.end(error)


def visited_host(headers: Raw) -> bytes:
    """The Host that the visitor asked, which is in the key of what is asked for."""
    return b"".join(values(headers, b"host")[:1])


def _is_short(raw: Raw) -> bool:
    """True if the response fits into the buffers of its connections."""
    lengths = values(raw, b"content-length")
    return (
        len(lengths) == 1
        and lengths[0].isdigit()
        and len(lengths[0]) <= len(str(SMALL))
        and (int(lengths[0]) <= SMALL)
    )


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
