"""`[pages]`: a site behind a page cache, as the gateway's app for everything else (G1, I12).

Needs httpx, as all of this package.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from starlette.types import ASGIApp

from stillfresh.isr import IsrMiddleware, PageCache
from stillfresh.isr.edge import Edge, checked_networks
from stillfresh.isr.rules_routes import Route
from stillfresh.isr.upstream import Upstream, checked_upstream
from stillfresh.web.config import PagesSettings, StoreSettings

SPARE: Final = 5.0
"""Seconds that a render has above twice its site's time: to connect, and to answer."""


def page_cache_of(settings: PagesSettings, store: StoreSettings) -> PageCache:
    """Its own patience is longer than the upstream's: who hangs is a 504, told to all who wait."""
    return PageCache(
        store.url,
        memory_for=store.memory_for,
        tenant=settings.tenant,
        absent_for=settings.absent_for,
        render_timeout=2 * settings.timeout + SPARE,
    )


def site_of(settings: PagesSettings, pages: PageCache) -> ASGIApp:
    """Routes of their own duration; everything else as it says itself."""
    query = settings.query or None
    routes = {path: _route(it, query) for path, it in settings.routes.items()}
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
        forward=settings.forward,
        credentials=settings.credentials,
    )
    host = None if keep_host else checked_upstream(settings.upstream).netloc
    return Edge(isr, host=host, trusted=checked_networks(settings.trusted_proxies))


def _route(written: float | Route, query: Sequence[str] | None) -> Route:
    route = written if isinstance(written, Route) else Route(written)
    return replace(route, query=query)
