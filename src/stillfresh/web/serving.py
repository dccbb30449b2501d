"""`stillfresh serve`: a gateway of settings, on uvicorn with uvloop and httptools (G1, I12).

Needs `stillfresh[web]`.
"""

import asyncio
import errno
import logging
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import httpx2
import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillfresh.errors import ConfigError, StillfreshError, without_password
from stillfresh.http.client import new_client
from stillfresh.http.fields import http_date_text
from stillfresh.server.protocol import new_protocol
from stillfresh.server.sockets import SocketProtocol
from stillfresh.web.app import Gateway
from stillfresh.web.config import Settings
from stillfresh.web.replies import Problem, problem_reply
from stillfresh.web.sources import Authority, kind_for, page_cache_of, site_of

PORT: Final = re.compile(r"(^[^:]*|\]):\d*$")
GRACE: Final = 10
"""Seconds that requests under way are given when the server is told to end."""
KEPT: Final = 20
"""Idle connections to upstream APIs."""
LONGEST_WAIT: Final = 30.0
"""Seconds for one step of an exchange; each kind bounds the whole of its own."""
LOGGED: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Where no logging was set up."""
LONGEST_FRAME: Final = 1_048_576
"""Bytes; a longer message is not even put together."""


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT; what cannot work is told before anything is served."""
    logging.basicConfig(format=LOGGED)
    listener = bound(settings.server.host, settings.server.port)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, listener, say))


def gateway_of(settings: Settings, client: httpx2.AsyncClient) -> Gateway:
    """The gateway that these settings describe; its kinds ask through this client."""
    server, pages = settings.server, settings.pages
    page_cache = page_cache_of(pages, settings.store) if pages is not None else None
    url = server.authenticate_url
    return Gateway(
        settings.store.url,
        kinds=[kind_for(kind, client, settings.store.memory_for) for kind in settings.kinds],
        pages=site_of(pages, page_cache) if pages is not None and page_cache is not None else None,
        page_cache=page_cache,
        authenticate=Authority(client, url) if url is not None else None,
        origins=server.origins,
        hosts=names_of(settings),
        token=server.token,
        max_connections=server.max_connections,
    )


def names_of(settings: Settings) -> tuple[str, ...]:
    """What the gateway is called; ports say nothing."""
    server, pages = settings.server, settings.pages
    own = (server.host, *server.hosts, *(pages.site_hosts if pages is not None else ()))
    return tuple(PORT.sub(r"\1", name) for name in own)


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How a gateway is run: without compression of messages, which costs memory by the viewer."""
    return uvicorn.Config(
        finished(app),
        http=new_protocol(),
        ws=SocketProtocol,
        ws_max_size=LONGEST_FRAME,
        ws_per_message_deflate=False,
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE,
    )


def finished(app: ASGIApp) -> ASGIApp:
    """Every answer has a Date (a page the one it was made at), and every request an answer.

    What is still under way when the server's time is over is cancelled by uvicorn: told as 503.
    """

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        is_begun = False

        async def tell(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                message["headers"] = with_date(message.get("headers", ()))
                is_begun = True
            await send(message)

        try:
            await app(scope, receive, tell)
        except asyncio.CancelledError:
            if scope["type"] == "lifespan":
                raise
            if scope["type"] == "http" and not is_begun:  # else it is cut, as the client sees
                ending = Problem(503, "ending", "The server ends", retry_after="5")
                await problem_reply(ending)(scope, receive, tell)

    return answered


def with_date(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """RFC 9110 §6.6.1."""
    found = list(headers)
    if any(name == b"date" for name, _ in found):
        return found
    return [*found, (b"date", http_date_text(time.time()))]


class Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()


async def _run(settings: Settings, listener: socket.socket, say: Callable[[str], None]) -> None:
    where = address(settings.server.host, listener.getsockname()[1])

    def listening() -> None:
        for line in _said(settings, where):
            say(line)

    async with new_client(LONGEST_WAIT, kept=KEPT) as client:
        app = gateway_of(settings, client)
        opening = asyncio.ensure_future(_open(app))
        for number in (signal.SIGTERM, signal.SIGINT):
            # While it starts; then uvicorn obeys them, and raises them once more for nobody.
            asyncio.get_running_loop().add_signal_handler(number, opening.cancel)
        try:
            await asyncio.wait([opening])
            if not opening.cancelled():
                opening.result()
                await Server(server_config(app), listening).serve(sockets=[listener])
        finally:
            await app.close()


async def _open(app: Gateway) -> None:
    """Open the store first, so that its error is reported once."""
    await app.cache.open()
    await app.open()


def _said(settings: Settings, where: str) -> Iterator[str]:
    """What stands where; never a password."""
    store = without_password(settings.store.url)
    if settings.pages is not None:
        yield f"{where} in front of {settings.pages.upstream}, pages in {store}"
        if not settings.pages.routes:
            yield "pages are kept if the site says so (Cache-Control); --route '/*=1m' keeps others"
    if settings.kinds:
        yield f"{where}/v1/ keeps {', '.join(it.name for it in settings.kinds)} in {store}"
    yield f"{where}/_stillfresh/ shows what it does"


def address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        return "another program listens there; choose another one with --port, or 0 for any"
    return str(exc)


def bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, ValueError) as exc:
        listener.close()
        failed = StillfreshError if isinstance(exc, OSError) else ConfigError
        raise failed(f"cannot listen on {host}:{port}: {_why(exc)}") from exc
    return listener
