"""Kept HTTP/1.1 connections to a site: one request at a time on each.

RFC 9112 §9.2: bytes without a request are not an answer. A connection is never used again if it has
more bytes than its answer, receives some while idle, or identifies a client to the site.

§9.5: a site may answer before it has the whole body of a request, and read no more of it. While a
body is sent, `_look_for_answer` looks at what comes, and `_limit_sending` ends the sending by its
timeout. Needs `stillfresh[web]`.
"""

import asyncio
import math
import os
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias, cast

from stillfresh.errors import needs
from stillfresh.http.fields import Raw, end_to_end
from stillfresh.pages.site_messages import (
    SWITCHED,
    AnswerReader,
    RequestWriter,
    SiteBroken,
    SiteHead,
    SiteRequest,
)
from stillfresh.pages.tunnels import LINGER, Inbox

with needs("web", "stillfresh.pages.upstream"):
    import httpx2

READ_AT_ONCE: Final = 32_768
"""Bytes."""
BY_CONNECTION: Final = re.compile(rb"\s*(?:ntlm|nego)", re.IGNORECASE)
"""RFC 4559 §6: these schemes identify a client for everything on a connection."""
LENGTH: Final = b"content-length"
REST: Final = 5.0
"""Seconds that an idle connection is kept for the next request."""
REDIRECTS: Final = 300
"""The lowest status by which a site says that it does not use the request."""
PATIENCE: Final = 1.0
"""Seconds in which a site that has answered takes nothing more of the body."""
Tell: TypeAlias = Callable[[int, Raw], None]
"""Takes the status and fields of an interim response (RFC 9110 §15.2)."""


class NoConnection(SiteBroken):
    """There is no connection, so nothing of the request was sent."""


class ConnectTimeout(TimeoutError):
    """No connection in time, so nothing of the request was sent."""


def broken_by(exc: Exception) -> NoConnection:
    """Say in our own words why there is no connection."""
    match exc:
        case ssl.SSLCertVerificationError():
            broken = NoConnection(f"its certificate is not trusted: {exc.verify_message}")
            broken.fault = b"tls_certificate_error"
        case ssl.SSLError():
            broken = NoConnection(f"it does not speak TLS as expected ({exc.reason or exc})")
            broken.fault = b"tls_protocol_error"
        case ConnectionRefusedError():
            broken = NoConnection("it refuses connections")
        case socket.gaierror() | UnicodeError():
            broken = NoConnection("its name is not known")
        case OSError(strerror=str() as text):
            broken = NoConnection(f"the connection failed ({text})")
        case _:
            broken = NoConnection(f"the connection failed ({exc})")
    return broken


class SiteConnection(asyncio.BufferedProtocol):
    """One exchange after the other; after each, it goes back to the pool.

    It reads into a buffer of its own: the event loop's is large, and with many slow visitors each
    step of a response holds as much as was read at once.
    """

    _transport: asyncio.Transport
    _inbox: Inbox

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._answer = AnswerReader("GET")
        self._is_sent = False
        """The request is complete."""
        self._sending: asyncio.Timeout | None = None
        """While a body is sent: its end."""
        self._early_head: SiteHead | None = None
        """The head of an answer that came before the request was sent."""
        self._fault: SiteBroken | None = None
        """Why what came before the request was sent is no answer."""
        self._tell: Tell | None = None
        self.is_new = True
        self._is_ones_own = False
        self._can_write = asyncio.Event()
        self._buffer = bytearray(READ_AT_ONCE)
        self._resting: asyncio.TimerHandle | None = None
        self._has_ended = False
        """The site said that it sends no more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inbox = Inbox(self._transport, most=READ_AT_ONCE)
        self._can_write.set()

    def get_buffer(self, sizehint: int) -> bytearray:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._resting is not None:
            self.close()
            return
        self._inbox.add(self._buffer[:nbytes])
        if self._sending is not None:
            self._look_for_answer()

    def eof_received(self) -> None:
        """RFC 9112 §9.8: TLS says where its bytes end.

        Otherwise anybody on the way could cut a body that lasts until the end of the connection.
        asyncio also calls this when TLS was cut off; uvloop then only calls `connection_lost`.
        """
        ssl_object = self._transport.get_extra_info("ssl_object")
        self._has_ended = ssl_object is None or _has_ended(ssl_object)
        self._inbox.end(None if self._has_ended else ConnectionResetError("TLS was cut off"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stir()
        if exc is not None:
            self._read_what_is_left()
        if exc is None and not self._has_ended:
            exc = ConnectionResetError("it was cut off")
        self._inbox.end(exc)
        self._can_write.set()
        self._limit_sending()

    def _read_what_is_left(self) -> None:
        """A site that refuses an upload may close at once, and then the next write fails.

        Its answer may have come before, and the event loop does not read it any more.
        """
        if self._transport.get_extra_info("ssl_object") is not None:
            return
        number = self._transport.get_extra_info("socket").fileno()
        with suppress(OSError):
            while data := os.read(number, READ_AT_ONCE):
                self._inbox.add(bytearray(data))

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._limit_sending()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._limit_sending()

    async def ask(
        self,
        request: SiteRequest,
        body: AsyncIterator[bytes] | None,
        tell: Tell | None = None,
    ) -> SiteHead:
        """The head of the answer. A site may answer, and close, before it has the whole body.

        An answer that says that the request is not used ends the sending at once. With a success,
        the body is sent to its end, as long as the site reads it. Raises CannotBePassed.
        """
        writer = RequestWriter(request)
        head = writer.head()  # if it cannot be written, the connection is as it was
        self._is_ones_own = any(
            name == b"authorization" and BY_CONNECTION.match(value)
            for name, value in request.headers
        )
        may_switch = any(name == b"upgrade" for name, _ in request.headers)
        self._answer = AnswerReader(request.method, may_switch=may_switch)
        self._is_sent = False
        self._early_head = None
        self._tell = tell
        self._fault = None
        if body is None:
            await self._send(head)
            await self._send(writer.end())
            self._is_sent = True
        else:
            await self._send_with_body(head, writer, body)
        if self._fault is not None:
            raise self._fault
        final_head = self._early_head or await self._head()
        self._tell = None  # it leads to the visitor's connection
        return final_head

    async def _send_with_body(
        self, head: bytes, writer: RequestWriter, body: AsyncIterator[bytes]
    ) -> None:
        """Send it to its end, or until the site reads no more of it."""
        try:
            async with asyncio.timeout(None) as self._sending:
                await self._send(head)
                async for part in body:
                    await self._send(writer.part(part))
                await self._send(writer.end())
            self._is_sent = True
        except SiteBroken:
            pass  # an answer may have come before
        except TimeoutError:
            if not self._reads_no_more:
                raise
        finally:
            self._sending = None

    def _look_for_answer(self) -> None:
        """Bytes have come while a body is sent."""
        if self._early_head is None and self._fault is None:
            self._answer.receive(self._inbox.take())
            try:
                self._early_head = self._final_head()
            except SiteBroken as exc:
                self._fault = exc
        self._limit_sending()

    @property
    def _reads_no_more(self) -> bool:
        """The site has answered, or is gone: only that ends the sending of a body."""
        return self._early_head is not None or self._fault is not None or self._inbox.is_over

    def _limit_sending(self) -> None:
        """The sending ends now, soon if nothing changes, or when the body ends."""
        if self._sending is None or self._sending.expired() or not self._reads_no_more:
            return
        now = asyncio.get_running_loop().time()
        head = self._early_head
        if head is None or head.status_code >= REDIRECTS or self._inbox.is_over:
            self._sending.reschedule(now)
        elif self._can_write.is_set():
            self._sending.reschedule(None)
        else:
            self._sending.reschedule(now + PATIENCE)

    async def _head(self) -> SiteHead:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout
        while (head := self._final_head(until)) is None:
            await self._receive(until)
        return head

    def _final_head(self, until: float = math.inf) -> SiteHead | None:
        """The head of the answer, if it has come; interim ones are passed on."""
        loop = asyncio.get_running_loop()
        while (head := self._answer.head()) is not None:
            if head.status_code == SWITCHED or not head.is_interim:
                return head
            if loop.time() >= until:  # a site that never pauses is never waited for
                raise TimeoutError
            if self._tell is not None and head.status_code > SWITCHED:
                fields = end_to_end(head.headers)
                # RFC 9110 §8.6: no length may stand in an interim response.
                length_left_out = tuple(field for field in fields if field[0] != LENGTH)
                self._tell(head.status_code, length_left_out)
        return None

    async def next_part(self, limit: float | None = None) -> bytes:
        """The next bytes of the body; empty at its end. `limit`: seconds to wait for them."""
        until: float | None = None
        while True:
            part = self._answer.part()
            if part is not None:
                return part
            if until is None and limit is not None:
                until = asyncio.get_running_loop().time() + limit
            await self._receive(until)

    @property
    def has_whole_answer(self) -> bool:
        """True once the last bytes were returned. With chunks it may become known only later."""
        return self._answer.is_complete

    async def _send(self, data: bytes) -> None:
        if not data:
            return
        self._write(data)
        if not self._can_write.is_set():
            async with asyncio.timeout(self._timeout):
                await self._can_write.wait()

    async def write(self, data: bytes) -> None:
        """For a tunnel."""
        self._write(data)
        await self._can_write.wait()

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise SiteBroken("it closed the connection")
        self._transport.write(data)

    async def _receive(self, until: float | None) -> None:
        data = await self._read(until)
        if data:
            self._answer.receive(data)
        else:
            self._answer.end()

    async def _read(self, until: float | None = None) -> bytes:
        try:
            return await self._inbox.read(until)
        except ConnectionError as exc:
            raise SiteBroken("the connection broke") from exc

    async def read(self) -> bytes:
        """For a tunnel: also bytes that came together with the head."""
        return self._answer.take_unread() or await self._read()

    def finish(self) -> None:
        """Close after the site has read what it was sent, if it does so soon."""
        self._stir()
        self._transport.close()
        self._resting = asyncio.get_running_loop().call_later(LINGER, self.close)

    @property
    def is_open(self) -> bool:
        return not self._inbox.is_over and not self._transport.is_closing()

    def rest(self) -> bool:
        """True if it may be used again: the exchange is complete, to the last byte."""
        is_over = self._is_sent and self._answer.is_complete and self._answer.may_stay
        is_quiet = not self._answer.unread and not self._inbox.came
        if self._is_ones_own or not (is_over and is_quiet and self.is_open):
            self.close()
            return False
        self.is_new = False
        self._resting = asyncio.get_running_loop().call_later(REST, self.close)
        return True

    def rise(self) -> bool:
        """True if it is still usable: no byte has arrived, not even in the kernel."""
        self._stir()
        if not self.is_open or self._inbox.came:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def _stir(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def close(self) -> None:
        self._stir()
        self._transport.abort()


def _has_ended(ssl_object: ssl.SSLObject) -> bool:
    """True if the site has closed TLS: then nothing is read. After a cut, more is waited for."""
    try:
        return not ssl_object.read(1)
    except ssl.SSLZeroReturnError:
        return True
    except ssl.SSLError:
        return False


class SiteTls:
    """How certificates of a site are checked; the system's own list is read once, in a thread."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context

    async def context(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = await asyncio.to_thread(httpx2.create_ssl_context)
        return self._context


class Pool:
    """Connections to one address; an idle one is used before a new one is made.

    `timeout`: seconds for each step of an exchange. `connect_within`: seconds for a connection.
    """

    def __init__(
        self, site: httpx2.URL, timeout: float, tls: SiteTls, connect_within: float
    ) -> None:
        self._is_tls = site.scheme == "https"
        self._host = site.raw_host.decode("ascii")
        self._port = site.port or (443 if self._is_tls else 80)
        self._tls = tls
        self._timeout = timeout
        self._connect_within = connect_within
        self._resting: deque[SiteConnection] = deque()
        self._is_closed = False

    async def take(self, *, is_new: bool = False) -> SiteConnection:
        """`is_new`: only a connection without an earlier request."""
        while self._resting and not is_new:
            connection = self._resting.pop()
            if connection.rise():
                return connection
            connection.close()
        tls = await self._tls.context() if self._is_tls else None
        loop = asyncio.get_running_loop()
        new_connection = partial(SiteConnection, self._timeout)
        try:
            async with asyncio.timeout(self._connect_within):
                _, connection = await loop.create_connection(
                    new_connection, self._host, self._port, ssl=tls
                )
        except TimeoutError as exc:
            raise ConnectTimeout(f"no connection within {self._connect_within:g} s") from exc
        except (OSError, UnicodeError) as exc:
            raise broken_by(exc) from exc
        return connection

    def give(self, connection: SiteConnection) -> None:
        """Give it back, however the exchange ended."""
        if self._is_closed:
            connection.close()
        elif connection.rest():
            self._resting.append(connection)

    def close(self) -> None:
        self._is_closed = True
        while self._resting:
            self._resting.pop().close()
