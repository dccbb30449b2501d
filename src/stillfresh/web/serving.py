"""`stillfresh serve`: a gateway of settings, on uvicorn with uvloop and httptools (G1, I12).

Needs `stillfresh[web]`.
"""

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import httpx2
import uvloop

from stillfresh.errors import without_password
from stillfresh.http.client import new_client
from stillfresh.server import Board, Server, Worker, Workers, address, bound, server_config
from stillfresh.web.app import Gateway
from stillfresh.web.config import Settings
from stillfresh.web.sources import Authority, kind_for, page_cache_of, site_of

PORT: Final = re.compile(r"(^[^:]*|\]):\d*$")
KEPT: Final = 20
"""Idle connections to upstream APIs."""
LONGEST_WAIT: Final = 30.0
"""Seconds for one step of an exchange; each kind bounds the whole of its own."""
PLACE: Final = 65_536
PLACE_BY_KIND: Final = 8_192
"""Bytes for the numbers of one worker, and of each kind."""
LOGGED: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Where no logging was set up."""


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT; what cannot work is told before anything is served."""
    logging.basicConfig(format=LOGGED)
    server = settings.server
    with bound(server.host, server.port) as listener:
        where = address(server.host, listener.getsockname()[1])

        def listening() -> None:
            for line in _said(settings, where):
                say(line)

        if server.workers == 1:
            _work(_run(settings, listener, listening))
            return
        size = PLACE + sum(PLACE_BY_KIND + 2 * len(kind.name) for kind in settings.kinds)
        board = Board(server.workers, size)
        Workers(
            listener,
            board,
            lambda worker: _work(_run(settings, listener, worker.ready, worker)),
            listening,
        ).run()


def _work(running: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(running)


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


async def _run(
    settings: Settings,
    listener: socket.socket,
    listening: Callable[[], None],
    worker: Worker | None = None,
) -> None:
    async with new_client(LONGEST_WAIT, kept=KEPT) as client:
        app = gateway_of(settings, client)
        server = Server(server_config(app, app.is_site), listening)
        opening = asyncio.ensure_future(_open(app))

        def end() -> None:
            opening.cancel()
            server.should_exit = True

        if worker is not None:
            app.dashboard.numbers.share(worker)
            worker.end_with_parent(end)
        for number in (signal.SIGTERM, signal.SIGINT):
            # While it starts; then uvicorn obeys them, and raises them once more for nobody.
            asyncio.get_running_loop().add_signal_handler(number, end)
        try:
            await asyncio.wait([opening])
            if not opening.cancelled():
                opening.result()
                await server.serve(sockets=[listener])
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
