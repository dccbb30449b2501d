"""The upstreams of a file: a site's pages, an API's kinds, and who signs in.

A kind is fetched one by one (`kind_fetch.py`), or in batches: POST `{"<ids_field>": […]}`. The
answer is a JSON list of views, or an object that has the list under `list_field`. A view's id is
built from its own fields. An id without a view does not exist.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from ipaddress import ip_address
from string import Formatter
from typing import Any, Final, TypeAlias

import httpx2
import msgspec
from starlette.types import ASGIApp

from stillfresh.errors import LoadFailed, shown
from stillfresh.gateway.config import KindSettings, PagesSettings, StoreSettings
from stillfresh.gateway.guard import is_address
from stillfresh.gateway.kind_fetch import GetFetch, GotCodec, decoded
from stillfresh.gateway.purging import PurgeRequests
from stillfresh.http.client import Endpoint, Refused
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.edge import Edge, checked_networks
from stillfresh.pages.routes import Route
from stillfresh.pages.upstream import Upstream, checked_upstreams
from stillfresh.systems.coordinator import Kind
from stillfresh.ttl_cache import TtlCache

IdOf: TypeAlias = Callable[[object], str]
KNOWN_FOR: Final = "1m"
"""For reads over HTTP: a revoked token is refused after this time at the latest."""
MOST_TOKENS: Final = 10_000
NEARBY: Final = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that only this machine or this network knows (RFC 6761, RFC 6762, RFC 8375)."""
UNKNOWN: Final = frozenset({401, 403, 404})
SPARE: Final = 5.0
"""Seconds that a render has beyond twice the site's timeout, to connect and to answer."""


def page_cache_of(settings: PagesSettings, store: StoreSettings) -> PageCache:
    """The page cache. A render outlasts the client's timeout, so a hung site is a 504 for all."""
    return PageCache(
        store.url,
        memory_for=store.memory_for,
        max_entries=settings.max_entries,
        max_bytes=settings.max_bytes,
        tenant=settings.tenant,
        stale_for=settings.stale_for,
        error_for=settings.error_for,
        absent_for=settings.absent_for,
        render_timeout=2 * (settings.timeout + settings.pool_wait) + SPARE,
        expose_tags=settings.expose_tags,
        objective=settings.objective,
    )


def upstream_of(settings: PagesSettings, pages: PageCache) -> Upstream:
    """The site, as an app that asks it over HTTP."""
    return Upstream(
        settings.upstream,
        clock=pages.clock,
        timeout=settings.timeout,
        keep_host=gets_visitors_host(settings),
        max_streams=settings.max_streams,
        connections=settings.site_connections,
        pool_wait=settings.pool_wait,
        min_upload_rate=settings.min_upload_rate,
        max_spill=settings.max_spill,
        ca=settings.site_ca,
        health_path=settings.health_path,
        health_every=settings.health_every,
        health_host=health_host(settings),
    )


def site_of(settings: PagesSettings, pages: PageCache, upstream: Upstream | None = None) -> ASGIApp:
    """The site behind the page cache: routes with durations; other pages by their own headers."""
    query = settings.query  # None: all parameters, and empty: none of them
    routes = {path: replace(route, query=query) for path, route in settings.routes.items()}
    upstream = upstream or upstream_of(settings, pages)
    isr = IsrMiddleware(
        upstream,
        pages,
        {"*": Route(None, query), **routes},
        hosts=settings.site_hosts or None,
        max_body=settings.max_body,
        forward=settings.forward,
        credentials=settings.credentials,
        heuristic=settings.heuristic,
        cdn_override=settings.cdn_override,
        normalise_query=settings.normalise_query,
        ignore_cookies=settings.ignore_cookies,
    )
    site = PurgeRequests(isr, pages, checked_networks(settings.purge_from))
    return Edge(site, host=None, trusted=checked_networks(settings.trusted_proxies))


def gets_visitors_host(settings: PagesSettings) -> bool:
    """True if the site receives the visitor's Host; otherwise it receives its own name.

    A site on this machine or in this network is usually reached through its proxy only, and links
    to itself by the name that visitors use. A site on the internet answers by its own name.
    """
    if settings.host is not None:
        return settings.host == "visitor"
    addresses = checked_upstreams(settings.upstream)
    return bool(settings.site_hosts) or all(is_nearby(address.host) for address in addresses)


def health_host(settings: PagesSettings) -> str | None:
    """The Host of a health check: one that visitors use, if the site receives theirs.

    None: the name in the address. Frameworks refuse a Host that they do not know.
    """
    names = [name for name in settings.site_hosts if not name.startswith("*.")]
    return names[0] if names and gets_visitors_host(settings) else None


def is_nearby(host: str) -> bool:
    """True for a loopback or private address, and for a name that no public site can have."""
    if is_address(host):
        return ip_address(host).is_private
    return "." not in host.rstrip(".") or host.rstrip(".").lower().endswith(NEARBY)


def kind_for(settings: KindSettings, client: httpx2.AsyncClient, memory_for: float) -> Kind:
    endpoint = Endpoint(
        client,
        settings.url or settings.batch_url or "",
        timeout=settings.timeout,
        max_bytes=settings.max_bytes,
        headers=settings.headers,
    )
    is_single = settings.url is not None
    return Kind(
        settings.name,
        fetch=GetFetch(settings, endpoint) if is_single else batch_fetch(settings, endpoint),
        codec=GotCodec() if is_single else None,
        fresh_for=settings.fresh_for,
        max_batch=1 if is_single else settings.max_batch,
        concurrency=settings.concurrency,
        per_viewer=settings.per_viewer,
        stale_for=settings.stale_for,
        error_for=settings.error_for,
        absent_for=settings.absent_for,
        memory_for=memory_for,
        objective=settings.objective,
        check=settings.check,
        true_within=settings.true_within,
        check_calls=settings.check_calls,
    )


def batch_fetch(
    settings: KindSettings, endpoint: Endpoint
) -> Callable[..., Awaitable[dict[str, Any]]]:
    id_of = id_maker(settings.id)

    async def fetch(ids: list[str], viewer_id: str | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {settings.ids_field: ids}
        if viewer_id is not None:
            body[settings.viewer_field] = viewer_id
        views = views_in(await endpoint.ask(body), settings.list_field)
        return views_by_id(ids, views, id_of)

    return fetch


def views_in(body: bytes, list_field: str | None) -> list[Any]:
    """The views of an answer. Raises LoadFailed if it has no list of them."""
    answer = decoded(body)
    views = answer if list_field is None else value_at(answer, list_field)
    if not isinstance(views, list):
        where = f" under {list_field}" if list_field is not None else ""
        raise LoadFailed(f"the answer has no list of views{where}, but {shown(views)}")
    return views


def value_at(view: object, path: str) -> object:
    """The value at that path; None if there is none."""
    for name in path.split("."):
        view = view.get(name) if isinstance(view, dict) else None
    return view


def id_maker(template: str) -> IdOf:
    """`"{details.author}:{details.id}"`: texts and whole numbers of the view, put together."""
    pieces = [(literal, field) for literal, field, _, _ in Formatter().parse(template)]

    def id_of(view: object) -> str:
        return "".join(
            literal + ("" if field is None else id_part(view, field)) for literal, field in pieces
        )

    return id_of


def id_part(view: object, path: str) -> str:
    """A view's field as a piece of its id. Raises LoadFailed for what cannot be one."""
    value = value_at(view, path)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise LoadFailed(f"a view's {path} must be text or a whole number, not {shown(value)}")
    return str(value)


def views_by_id(ids: Iterable[str], views: list[Any], id_of: IdOf) -> dict[str, Any]:
    """Each view by its id; `null` is no view.

    A view that has no id could be any of those that are missing: these have failed, and are not
    taken for absent.
    """
    views_found: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for view in views:
        try:
            if view is not None:
                views_found[id_of(view)] = view
        except LoadFailed as exc:
            missing = dict.fromkeys(ids, exc)
    return missing | views_found


class Viewer(msgspec.Struct):
    """The upstream's answer."""

    viewer_id: str


class Authority:
    """`[server] authenticate_url`: POST `{"token": "…"}`, answered by `{"viewer_id": "…"}`.

    401, 403 or 404 mean that the token is not known.
    """

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self._endpoint = Endpoint(client, url, max_bytes=65_536)
        self._known: TtlCache[str, str] = TtlCache(KNOWN_FOR, max_entries=MOST_TOKENS)

    async def __call__(self, token: str) -> str | None:
        viewer_id = await self._ask(token)
        if viewer_id is None:
            self._known.remove(token)
        else:
            self._known.insert(token, viewer_id)
        return viewer_id

    async def remembered(self, token: str) -> str | None:
        """The last answer, for a minute, because a read over HTTP sends its token each time."""
        viewer_id = self._known.get(token)
        return await self(token) if viewer_id is None else viewer_id

    async def _ask(self, token: str) -> str | None:
        try:
            body = await self._endpoint.ask({"token": token})
            return msgspec.json.decode(body, type=Viewer).viewer_id or None
        except Refused as exc:
            if exc.status in UNKNOWN:
                return None
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise LoadFailed(f"the answer of authenticate_url names no viewer: {exc}") from exc
