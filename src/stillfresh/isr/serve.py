"""`stillfresh serve`: the page cache as a reverse proxy (I12-I16).

On uvicorn, with uvloop and httptools. Needs `stillfresh[web]`.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import uvicorn
import uvloop

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, shown
from stillfresh.isr.asgi import MAX_BODY, IsrMiddleware
from stillfresh.isr.edge import Edge
from stillfresh.isr.pages import PageCache
from stillfresh.isr.rendering import App
from stillfresh.isr.rules_edge import checked_networks, is_host
from stillfresh.isr.rules_routes import Route
from stillfresh.isr.upstream import Upstream, checked_upstream

__all__ = ["Settings", "app_for", "serve"]

GRACE: Final = 10
"""Seconds that requests under way are given when the server is told to end."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    upstream: str
    store: str = "memory://"
    host: str = "127.0.0.1"
    port: int = 8080
    site_hosts: Collection[str] = ()
    routes: Mapping[str, Duration] = field(default_factory=dict)
    query: Collection[str] = ()
    memory_for: Duration = 0
    tenant: str | None = None
    max_body: int = MAX_BODY
    timeout: float = 30.0
    trusted_proxies: Collection[str] = ()

    def __post_init__(self) -> None:
        seconds(self.timeout, name="--timeout", positive=True)
        seconds(self.memory_for, name="--memory-for")
        for path, duration in self.routes.items():
            seconds(duration, name=f"--route {path}", positive=True)
        for host in self.site_hosts:
            if not is_host(host.removeprefix("*.").encode("latin-1", "replace")):
                raise ConfigError(f"--site-host {shown(host)}: write example.com or *.example.com")
        if not all(self.query):
            raise ConfigError("--query: a parameter's name, not ''")


def app_for(settings: Settings, pages: PageCache) -> App:
    """Routes of their own duration; everything else as it says itself."""
    query = tuple(settings.query) or None
    routes = {path: Route(fresh, query) for path, fresh in settings.routes.items()}
    keep_host = bool(settings.site_hosts)
    upstream = Upstream(
        settings.upstream, clock=pages.clock, timeout=settings.timeout, keep_host=keep_host
    )
    isr = IsrMiddleware(
        upstream,
        pages,
        {"*": Route(None, query), **routes},
        hosts=settings.site_hosts or None,
        max_body=settings.max_body,
    )
    host = None if keep_host else checked_upstream(settings.upstream).netloc
    return Edge(isr, host=host, trusted=checked_networks(settings.trusted_proxies))


class Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT; what cannot work is told before anything is served."""
    pages = PageCache(
        settings.store,
        memory_for=settings.memory_for,
        tenant=settings.tenant,
        render_timeout=settings.timeout,
    )
    app = app_for(settings, pages)
    listener = _bound(settings.host, settings.port)

    where = f"http://{settings.host}:{listener.getsockname()[1]}"

    def listening() -> None:
        say(f"{where} in front of {settings.upstream}, pages in {settings.store}")

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ending = Ending()
        before = {it: signal.signal(it, ending) for it in (signal.SIGTERM, signal.SIGINT)}
        try:
            if runner.run(_opened(pages, ending)):
                runner.run(_serve(app, pages, listener, listening))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Ending:
    """A signal ends what is starting; later uvicorn obeys it, and raises it once more for none."""

    def __init__(self) -> None:
        self.starting: asyncio.Future[None] | None = None

    def __call__(self, *_: object) -> None:
        if self.starting is not None:
            self.starting.get_loop().call_soon_threadsafe(self.starting.cancel)


async def _opened(pages: PageCache, ending: Ending) -> bool:
    """False: told to end before that."""
    ending.starting = asyncio.ensure_future(pages.open())
    await asyncio.wait([ending.starting])
    opening, ending.starting = ending.starting, None
    if opening.cancelled():
        return False
    opening.result()
    return True


async def _serve(
    app: App, pages: PageCache, listener: socket.socket, listening: Callable[[], None]
) -> None:
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE,
    )
    async with pages:
        await Server(config, listening).serve(sockets=[listener])


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as exc:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc}") from exc
    return listener
