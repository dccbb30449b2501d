"""`stillfresh serve`: a gateway from settings, on uvicorn with uvloop and httptools.

With one worker, this process serves. With more, it is their parent: it binds the socket, reads the
settings again on SIGHUP, and forks the workers. Each of them does what a single process does
(`_work`). What all processes share is made before the fork (`Inherited`).

Needs `stillfresh[web]`.
"""

import asyncio
import gc
import logging
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import httpx2
import uvloop
from starlette.types import ASGIApp

from stillfresh.clock import monotonic
from stillfresh.engine.recordings import Recording
from stillfresh.errors import StillfreshError, without_password
from stillfresh.gateway.app import Gateway
from stillfresh.gateway.config import OutboxSettings, Settings
from stillfresh.gateway.guard import Guesses, checked_hosts
from stillfresh.gateway.page_names import PageNames
from stillfresh.gateway.reloading import Replaceable, read_again
from stillfresh.gateway.server import (
    AccessLog,
    Server,
    Worker,
    WorkerNumbers,
    Workers,
    address,
    begin_drain,
    bound,
    bound_path,
    forget_hits,
    is_on_loopback,
    raise_limit,
    server_config,
)
from stillfresh.gateway.sources import Authority, kind_for, page_cache_of, site_of, upstream_of
from stillfresh.http.client import new_client
from stillfresh.logs import Hidden, LineHandler, LineWriter, passwords_in
from stillfresh.pages import PageCache
from stillfresh.pages.edge import checked_networks, is_trusted

Follow: TypeAlias = Callable[[OutboxSettings, PageCache], AbstractAsyncContextManager[object]]
PORT: Final = re.compile(r"(^[^:]*|\]):\d*$")
KEPT: Final = 20
"""Idle connections to upstream APIs."""
LONGEST_WAIT: Final = 30.0
"""Seconds for one step of an exchange; each kind limits the whole."""
NUMBERS_SIZE: Final = 65_536
NUMBERS_SIZE_BY_KIND: Final = 16_384
"""Bytes for the numbers of one worker, and of each kind."""

logger = logging.getLogger(__name__)


def serve(
    settings: Settings,
    say: Callable[[str], None],
    read: Callable[[], Settings] | None = None,
    follow: Follow | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises for settings that cannot work, before it serves.

    `read`: reads the settings again, on SIGHUP. `follow`: makes the outbox's consumer.
    """
    server = settings.server
    log = ProcessLog(settings)
    raise_limit()
    binding = bound(server.host, server.port) if server.uds is None else bound_path(server.uds)
    with binding as listener:
        is_path = server.uds is not None
        port = 0 if is_path else listener.getsockname()[1]
        where = f"unix:{server.uds}" if is_path else address(server.host, port)

        recording = Recording(server.record, share=server.record_share) if server.record else None
        if recording is not None:
            recording.begin(monotonic())
        given = Inherited(listener, log, Guesses(), recording, read, follow)

        def listening() -> None:
            for line in addresses_of(settings, where):
                say(line)

        if server.workers == 1:
            _work(given, settings, listening)
            return
        current = settings

        def read_anew() -> bool:
            """In the parent: read the settings for later workers; True if there is no mistake."""
            nonlocal current
            new = None if read is None else read_again(read, current)
            if new is not None and _size(new) > _size(settings):
                logger.error("not reloaded: with --workers, this many kinds need a restart")
                return False
            current = new or current
            log.hide.add(secrets_of(current))
            return new is not None

        def work(worker: Worker) -> None:
            _work(given, current, worker.ready, worker)

        shared_numbers = WorkerNumbers(server.workers, _size(settings))
        Workers(
            listener, shared_numbers, work, listening, drain=server.drain, reload=read_anew
        ).run()


def _size(settings: Settings) -> int:
    """Bytes for the numbers of one worker."""
    return NUMBERS_SIZE + sum(NUMBERS_SIZE_BY_KIND + 2 * len(kind.name) for kind in settings.kinds)


class ProcessLog:
    """The log as `[log]` says: where lines go, and what is hidden.

    It sets logging up, unless that is done already; libraries log from warnings up.
    """

    def __init__(self, settings: Settings) -> None:
        log = settings.log
        self.hide = Hidden(secrets_of(settings))
        self.writer = LineWriter()
        handler = LineHandler(self.writer, self.hide, is_json=log.format == "json")
        handler.setLevel(log.level.upper())
        logging.basicConfig(handlers=[handler])
        logging.getLogger("stillfresh").setLevel(log.level.upper())
        access = AccessLog(self.writer, self.hide, is_json=log.access == "json")
        self.access = None if log.access == "off" else access


def secrets_of(settings: Settings) -> Iterator[str]:
    """The secrets in the settings."""
    server = settings.server
    outbox = settings.outbox
    yield server.token or ""
    urls = [settings.store.url, server.authenticate_url]
    urls += settings.pages.upstream if settings.pages is not None else ()
    urls += [outbox.database] if outbox is not None else []
    for kind in settings.kinds:
        urls += [kind.url, kind.batch_url]
        for value in kind.headers.values():
            yield value
            yield value.rpartition(" ")[2]
    for url in urls:
        yield from passwords_in(url or "")


@dataclass(frozen=True, slots=True)
class Inherited:
    """What every process of one `serve` has from the start, besides its settings."""

    listener: socket.socket
    log: ProcessLog
    guesses: Guesses
    recording: Recording | None
    read: Callable[[], Settings] | None
    follow: Follow | None


def _work(
    given: Inherited,
    settings: Settings,
    listening: Callable[[], None],
    worker: Worker | None = None,
) -> None:
    async def run() -> None:
        async with new_client(LONGEST_WAIT, idle_connections=KEPT) as client:
            await GatewayProcess(given, settings, client, listening, worker).run()

    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with given.log.writer.running(), loop as runner:
        try:
            runner.run(run())
        except (StillfreshError, OSError):  # the command reports it in one line
            raise
        except Exception:
            logger.exception("internal error of stillfresh")  # as Python would, but without secrets
            raise SystemExit(1) from None


def gateway_of(
    settings: Settings,
    client: httpx2.AsyncClient,
    follow: Follow | None = None,
    *,
    checks_page_names: bool,
) -> Gateway:
    """The gateway that these settings describe; its kinds use this client.

    `checks_page_names`: True if it listens on loopback, where a browser of this machine may be led
    by another name.
    """
    server = settings.server
    pages = settings.pages
    names = names_of(settings)
    page_cache = None
    upstream = None
    site: ASGIApp | None = None
    if pages is not None:
        page_cache = page_cache_of(pages, settings.store)
        upstream = upstream_of(pages, page_cache)
        site = site_of(pages, page_cache, upstream)
        if checks_page_names and not pages.site_hosts:
            site = PageNames(site, checked_hosts(names) or (), server.origins)
    url = server.authenticate_url
    app = Gateway(
        settings.store.url,
        kinds=[kind_for(kind, client, settings.store.memory_for) for kind in settings.kinds],
        pages=site,
        page_cache=page_cache,
        authenticate=Authority(client, url) if url is not None else None,
        origins=server.origins,
        hosts=names,
        token=server.token,
        max_connections=server.max_connections,
        own_prefix=pages.own_prefix if pages is not None else "",
    )
    if upstream is not None:
        app.dashboard.numbers.site = upstream
    if settings.outbox is not None and page_cache is not None and follow is not None:
        app.following = follow(settings.outbox, page_cache)
    return app


def names_of(settings: Settings) -> tuple[str, ...]:
    """The names of the gateway, without ports."""
    server = settings.server
    site_hosts = settings.pages.site_hosts if settings.pages is not None else ()
    own = (server.host, *server.hosts, *site_hosts)
    return tuple(PORT.sub(r"\1", name) for name in own)


class GatewayProcess:
    """A gateway on a socket, and its signals."""

    def __init__(
        self,
        given: Inherited,
        settings: Settings,
        client: httpx2.AsyncClient,
        listening: Callable[[], None],
        worker: Worker | None,
    ) -> None:
        self._given = given
        self._settings = settings
        self._client = client
        self._worker = worker
        self._app = Replaceable(self._new())
        app = self._app.app if given.read is None else self._app
        config = server_config(app, self._is_site, given.log.access, self._is_proxy)
        self._tell_listening = listening
        self._server = Server(config, self._has_started)
        self._opening: asyncio.Future[None] = asyncio.ensure_future(_open(self._app.app))
        self._reloads = set[asyncio.Future[None]]()
        self._is_reload_due = False
        """A SIGHUP came before the server had started."""

    def _new(self) -> Gateway:
        app = gateway_of(
            self._settings,
            self._client,
            self._given.follow,
            checks_page_names=is_on_loopback(self._given.listener),
        )
        app.recording = self._given.recording
        operators = app.dashboard.operators
        pages = self._settings.pages
        operators.guesses = self._given.guesses
        operators.trusted = checked_networks(pages.trusted_proxies) if pages is not None else ()
        if self._worker is not None:
            app.dashboard.numbers.share(self._worker)
        return app

    def _is_site(self, path: str) -> bool:
        return self._app.app.is_site(path)

    def _is_proxy(self, peer: str | None) -> bool:
        return is_trusted(peer, self._app.app.dashboard.operators.trusted)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        if self._worker is not None:
            self._worker.end_with_parent(self._end)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._handle_signal, number)
        try:
            await asyncio.wait([self._opening])
            if not self._opening.cancelled():
                self._opening.result()
                freeze_objects()
                await self._server.serve(sockets=[self._given.listener])
        finally:
            await asyncio.gather(*self._reloads, return_exceptions=True)
            await self._app.app.close()

    def _has_started(self) -> None:
        self._tell_listening()
        if self._is_reload_due:
            self._reload()

    def _end(self) -> None:
        self._opening.cancel()
        self._server.should_exit = True

    def _handle_signal(self, number: int) -> None:
        """SIGHUP reloads; SIGTERM drains first; a second signal ends it at once."""
        drain = self._settings.server.drain
        app = self._app.app
        server = self._server
        if number == signal.SIGHUP:
            self._reload()
        elif number == signal.SIGTERM and server.started and drain and not app.is_draining:
            app.is_draining = True
            begin_drain(server)
            asyncio.get_running_loop().call_later(drain, self._end)
        elif number == signal.SIGINT and server.should_exit:
            server.force_exit = True
        else:
            self._end()

    def _reload(self) -> None:
        read = self._given.read
        if read is None:
            logger.warning("not reloaded: there is no file of settings")
        elif not self._server.started:  # the settings may have been read before they were changed
            self._is_reload_due = True
        elif (new := read_again(read, self._settings)) is not None:
            self._settings = new
            self._given.log.hide.add(secrets_of(new))
            replaced = partial(forget_hits, self._server)
            task = asyncio.ensure_future(self._app.replace(self._new(), replaced))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)


def freeze_objects() -> None:
    """What is there at the start stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


async def _open(app: Gateway) -> None:
    """Open the store first, so that its error is reported once.

    `app.open()` starts the pages before the store, and they would log that they cannot open it. A
    store that is open already is not opened again.
    """
    await app.cache.open()
    await app.open()


def _from_here(settings: Settings, where: str) -> str:
    """The address as a browser on this machine writes it: "all addresses" is none."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host)  # noqa: S104 (compared)
    if here is None or settings.server.uds is not None:
        return where
    return address(here, int(where.rpartition(":")[2]))


def addresses_of(settings: Settings, where: str) -> Iterator[str]:
    """The addresses that it serves; never a password."""
    store = without_password(settings.store.url)
    prefix = "" if settings.pages is None else settings.pages.own_prefix
    if settings.pages is not None:
        yield f"{where} in front of {', '.join(settings.pages.upstream)}, pages in {store}"
        if not settings.pages.routes:
            yield "pages are kept if the site says so (Cache-Control); --route '/*=1m' keeps others"
    if settings.kinds:
        kinds = ", ".join(kind.name for kind in settings.kinds)
        yield f"{where}{prefix}/v1/ keeps {kinds} in {store}"
    if settings.server.record:
        yield f"reads are recorded in {settings.server.record}, for `stillfresh plan`"
    yield f"{_from_here(settings, where)}{prefix}/_stillfresh/ shows what it does"
