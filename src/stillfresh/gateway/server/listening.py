"""An app on a port: the socket, its address, and how uvicorn is set up for it.

Nothing here knows what a gateway is. Needs `stillfresh[web]`.
"""

import asyncio
import errno
import logging
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.gateway.server.access import AccessLog
from stillfresh.gateway.server.open_files import OpenFiles
from stillfresh.gateway.server.protocol import Protocol, new_protocol
from stillfresh.gateway.server.sockets import SocketProtocol
from stillfresh.http.fields import http_date_text
from stillfresh.pages.edge import shown_path

GRACE: Final = 10
"""Seconds for running requests when the server ends."""
MOST_SHOWN: Final = 5
"""Requests that the line of the log names which says that they were cut off."""
NOBODY: Final = ("unknown", 0)
"""RFC 7239 §6: a client that has no address."""
LONGEST_FRAME: Final = 1_048_576
"""Bytes; a longer message is not even put together."""
ENDING: Final = {
    "type": "urn:stillfresh:problem:ending",
    "title": "The server ends",
    "status": 503,
    "detail": "The server ends",
    "code": "ending",
}
"""RFC 9457, as all problems of the gateway are."""
FAILURES: Final = {
    "lifespan.startup.failed": "the server could not start",
    "lifespan.shutdown.failed": "the server could not end in order",
}
"""The messages with which an app says that it failed, in our own words."""

logger = logging.getLogger(__name__)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket for this host and port. Raises StillfreshError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol, asyncio lets Nagle's algorithm hold back the second part of an answer,
    # until the client acknowledges the first: often after 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, ValueError) as exc:
        listener.close()
        failed = StillfreshError if isinstance(exc, OSError) else ConfigError
        raise failed(f"cannot listen on {host}:{port}: {_why(exc)}") from exc
    return listener


@contextmanager
def bound_path(path: str) -> Iterator[socket.socket]:
    """Return a Unix socket that its group may use; replace one that nobody listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if stat.S_ISSOCK(Path(path).stat().st_mode) and not _has_listener(path):
                Path(path).unlink()
        except OSError:
            pass  # there is none
        try:
            listener.bind(path)
            Path(path).chmod(0o660)
        except (OSError, ValueError) as exc:
            raise StillfreshError(f"cannot listen on {path}: {_why(exc)}") from exc
        try:
            yield listener
        finally:
            Path(path).unlink(missing_ok=True)


def is_on_loopback(listener: socket.socket) -> bool:
    """True if only this machine can connect to the port of this socket.

    The bound address counts, not the host as it was written: a name such as the machine's own may
    stand for 127.0.1.1 in the hosts file. It was resolved when the socket was bound.
    """
    if listener.family == socket.AF_UNIX:
        return False
    ip = ip_address(listener.getsockname()[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == 0


def _why(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        return "another program listens there; choose another one with --port, or 0 for any"
    return str(exc)


def address(host: str, port: int) -> str:
    """Return `http://host:port`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Runs an ASGI app, and says when it listens. Its program handles signals."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening
        self._open_files = OpenFiles()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    async def _wait_tasks_to_complete(self) -> None:
        """If that takes too long, uvicorn cancels this, and then the requests."""
        try:
            await super()._wait_tasks_to_complete()
        except asyncio.CancelledError:
            requests = self._requests_under_way()
            if not requests:  # their clients have left, and nobody is cut off
                raise
            shown = ", ".join(requests[:MOST_SHOWN])
            logger.warning(
                "requests still under way when the server ended are cut off (%d): %s%s",
                len(requests),
                shown,
                ", …" if len(requests) > MOST_SHOWN else "",
            )
            raise

    def _requests_under_way(self) -> list[str]:
        lines: list[str] = []
        for connection in self.server_state.connections:
            if isinstance(connection, Protocol):
                lines += [line_of(scope) for scope in connection.under_way]
            elif isinstance(connection, SocketProtocol):
                lines.append(line_of(connection.scope))
        return lines

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: uvicorn's own duties, and a look at the open files."""
        for server in self.servers:
            for listener in server.sockets[:1]:
                self._open_files.look(listener.fileno())
        return await super().on_tick(counter)


def server_config(
    app: ASGIApp,
    is_site: Callable[[str], bool] = lambda _: False,
    access: AccessLog | None = None,
    is_proxy: Callable[[str | None], bool] = lambda _: False,
) -> uvicorn.Config:
    """Return how a gateway is run: without compression of messages, which costs memory per viewer.

    `is_site`: True if a WebSocket for this path belongs to the site behind. `is_proxy`: True if the
    client with this address is a proxy whose claims about its own clients are believed.
    """
    return uvicorn.Config(
        finished(app) if access is None else access.around(finished(app)),
        http=new_protocol(is_site, access, is_proxy),
        ws=SocketProtocol,
        ws_max_size=LONGEST_FRAME,
        ws_per_message_deflate=False,
        interface="asgi3",  # "auto" takes only coroutine functions for it
        lifespan="on",
        log_config=None,
        log_level="critical",  # `finished` and the protocols log it in our own words
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE,
    )


def begin_drain(server: Server) -> None:
    """Close each connection after its next answer, so that clients go elsewhere."""
    protocol = server.config.http_protocol_class
    if issubclass(protocol, Protocol):
        protocol.begin_drain(server.server_state.connections)


def forget_hits(server: Server) -> None:
    """Its app was replaced: answers of the old one are not given again."""
    protocol = server.config.http_protocol_class
    if issubclass(protocol, Protocol):
        protocol.forget_hits(server.server_state.connections)


def finished(app: ASGIApp) -> ASGIApp:
    """Give every answer a Date (a page keeps its own), and every request an answer.

    Uvicorn cancels requests that still run when the server's time is over: they get a 503. Mistakes
    of the app are logged here, with the path: uvicorn's own lines are switched off.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(app, scope, receive, send)
        else:
            await ServedRequest(scope, receive, send).run(app)

    return answer


class ServedRequest:
    """A request and its answer, between uvicorn and the app."""

    __slots__ = ("_is_begun", "_is_left", "_receive", "_scope", "_send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_begun = False
        self._is_left = False
        """True if the app has heard that the client is gone. Then it need not answer."""

    async def run(self, app: ASGIApp) -> None:
        scope = self._scope
        if scope["type"] == "http" and scope.get("client") is None:
            scope["client"] = NOBODY  # over a Unix socket
        try:
            await app(scope, self._hear, self._tell)
        except asyncio.CancelledError:
            await self._tell_that_the_server_ends()
        except ClientDisconnected:
            raise  # a WebSocket whose client has left
        except Exception:
            logger.exception("%s: internal error", line_of(scope))
            raise  # uvicorn answers with 500, or cuts the answer that has begun
        if scope["type"] == "http" and not self._is_begun and not self._is_left:
            logger.error("%s: internal error: there is no answer", line_of(scope))

    async def _hear(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_left = True
        return message

    async def _tell(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"] = list(message.get("headers", ()))
            if not any(name == b"date" for name, _ in headers):  # RFC 9110 §6.6.1
                headers.append((b"date", http_date_text(time.time())))
            self._is_begun = True
        await self._send(message)

    async def _tell_that_the_server_ends(self) -> None:
        """An answer that has begun is cut off, and the client sees it."""
        if self._scope["type"] == "http" and not self._is_begun:
            headers = {"cache-control": "no-store", "retry-after": "5"}
            ending = JSONResponse(ENDING, 503, headers, "application/problem+json")
            await ending(self._scope, self._hear, self._tell)


async def _lifespan(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The start and the end of the app: a failure is logged once."""
    is_logged = False

    async def tell(message: Message) -> None:
        nonlocal is_logged
        if message["type"] in FAILURES:
            logger.error("%s: %s", FAILURES[message["type"]], message.get("message", ""))
            is_logged = True
        await send(message)

    try:
        await app(scope, receive, tell)
    except asyncio.CancelledError:
        pass  # the server has ended
    except Exception:
        if not is_logged:
            logger.exception("internal error at the start or the end of the server")
        raise


def line_of(scope: Any) -> str:  # noqa: ANN401 (uvicorn has types of its own)
    """A request in a line of the log; a WebSocket is asked for with GET."""
    return f"{scope.get('method', 'GET')} {shown_path(scope)}"
