"""Which requests a cache is for, and the key of each (I12, I13).

Pure: an ASGI scope in, a `Visit` out, or None: the request passes as if there were no cache.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias
from urllib.parse import quote, unquote

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, shown
from stillfresh.http.fields import Raw
from stillfresh.http.freshness import Wish, wish_of
from stillfresh.isr.model import Reason
from stillfresh.isr.rules_forward import (
    CREDENTIALS,
    Forward,
    carried_in,
    checked_credentials,
    checked_forward,
)
from stillfresh.isr.rules_keys import (
    canonical_host,
    canonical_path,
    canonical_query,
    is_allowed,
    variant,
)

__all__ = ["CREDENTIALS", "Forward", "Route", "Routes", "checked_credentials", "checked_forward"]

CONDITIONAL: Final = frozenset({b"if-match", b"if-unmodified-since"})
"""RFC 9110 §13.1: for the origin to judge."""
EDGE: Final = "stillfresh.edge"
"""In a scope: our own edge has taken out what this client may not claim."""
MOST_KEY: Final = 16_384
"""Characters; a request that would need a longer key passes."""
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""And halves of characters, which some servers make of bytes that are no UTF-8."""
Scope: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """How the pages of a path are kept; without `revalidate`, as each response says itself."""

    revalidate: Duration | None = None
    query: Sequence[str] | None = ()
    """Parameters that make another page; the others are dropped. None: all of them."""
    vary: Sequence[str] = ()
    """Request headers that the app is always given, and that make another page."""
    tags: Sequence[str] = ()
    forward: Forward | None = None
    """I24: `"request"`, the app sees the visitor's request; `"key"`, only the page's key."""

    def __post_init__(self) -> None:
        checked_forward(self.forward)
        if self.revalidate is not None:
            seconds(self.revalidate, name="revalidate", positive=True)
        for name in ("query", "vary", "tags"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: a list of names, not {shown(getattr(self, name))}")


RoutesLike: TypeAlias = Mapping[str, Duration | Route | None]


class Routes:
    """By exact path, else by the longest `/prefix/*`."""

    def __init__(self, routes: RoutesLike) -> None:
        self._exact: dict[str, Route] = {}
        self._below: dict[str, Route] = {}
        for pattern, value in routes.items():
            route = value if isinstance(value, Route) else Route(value)
            prefix, star, rest = _checked(pattern).partition("*")
            if rest:
                raise ConfigError(f"route {shown(pattern)}: * stands at the end only")
            (self._below if star else self._exact)[prefix] = route
        self._prefixes = sorted(self._below, key=len, reverse=True)

    def of(self, path: str) -> Route | None:
        if (route := self._exact.get(path)) is not None:
            return route
        for prefix in self._prefixes:
            if path.startswith(prefix):
                return self._below[prefix]
        return None


def _checked(pattern: str) -> str:
    if not isinstance(pattern, str) or not pattern.startswith(("/", "*")):
        raise ConfigError(f"route {shown(pattern)}: a path, as '/pricing' or '/blog/*'")
    return pattern.replace("*", "/*", 1) if pattern.startswith("*") else pattern


@dataclass(frozen=True, slots=True)
class RequestedUrl:
    """The URL that a request is for, whatever else it says."""

    url: str
    path: str
    app_path: str
    """The same, unless an outer layer has rewritten it: what the app is asked for."""
    raw_path: str
    query: str
    host: str
    scheme: str
    headers: Raw
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit(RequestedUrl):
    """A request for a page that may be shared."""

    id: str
    root_path: str = ""
    """Where the app is mounted, or is told to be: in the key, since an outer layer says so."""
    declared: Mapping[str, str] = field(default_factory=dict)
    wish: Wish = field(default_factory=Wish)
    is_head: bool = False
    carried: frozenset[bytes] = frozenset()
    """Fields that identify the client: a render without them may get another answer."""
    is_as_asked: bool = False
    """I24: the app is asked with this very request."""
    is_vouched: bool = False
    """Our own edge has taken out what this client may not claim."""

    @property
    def is_personal(self) -> bool:
        return bool(self.carried)

    @property
    def is_authorized(self) -> bool:
        return bool(self.carried - {b"cookie"})


class Site:
    """Routes and hosts; without hosts, each well-formed one has pages of its own."""

    def __init__(
        self,
        routes: RoutesLike | None,
        hosts: Collection[str] | None,
        forward: Forward | None = None,
        credentials: Iterable[str] = CREDENTIALS,
    ) -> None:
        self._forward = checked_forward(forward)
        self.credentials = checked_credentials(credentials)
        if isinstance(hosts, str) or (hosts is not None and not all(hosts)):
            raise ConfigError(f"hosts: a list such as ['example.com'], not {shown(hosts)}")
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._routes = Routes({"*": Route(query=None)} if routes is None else routes)

    def is_named(self, host: str) -> bool:
        """Written out in `hosts`: there is always room for it."""
        return self._hosts is not None and host in self._hosts

    def place(self, scope: Scope) -> RequestedUrl | Reason:
        """A reason: not for the cache, or not to be trusted with a key."""
        whole = scope.get("raw_path") or quote(scope["path"], "/%", errors="surrogatepass").encode()
        raw = whole.partition(b"?")[0]
        path = canonical_path(raw)
        if path is None:
            return Reason.PATH
        if (route := self._routes.of(unquote(path))) is None:
            return Reason.ROUTE
        headers: Raw = tuple((name.lower(), value) for name, value in scope["headers"])
        scheme = scope.get("scheme", "http")
        host = canonical_host(headers, scheme)
        if host is None or (self._hosts is not None and not is_allowed(host, self._hosts)):
            return Reason.HOST
        query = canonical_query(scope.get("query_string", b""), route.query)
        if query is None:
            return Reason.PATH
        url = f"{scheme}://{host}{path}{'?' if query else ''}{query}"
        asked = unquote(path)
        given = asked if scope["path"] == unquote(raw.decode("latin-1")) else scope["path"]
        return RequestedUrl(url, asked, given, path, query, host, scheme, headers, route)

    def visit(self, scope: Scope) -> Visit | Reason:
        """A reason: for the app alone."""
        if isinstance(place := self.place(scope), Reason):
            return place
        headers = place.headers
        declared = variant((name.lower() for name in place.route.vary), headers)
        names = {name for name, _ in headers}
        root = scope.get("root_path", "")
        if names & CONDITIONAL:
            return Reason.CONDITION
        if declared is None:
            return Reason.VARY
        if CONTROL.search(place.app_path + root):
            return Reason.PATH
        outer = {} if place.app_path == place.path else {":path": place.app_path}
        if root:
            outer[":root"] = root
        if len(id_ := key_of_variant(place.url, {**declared, **outer})) > MOST_KEY:
            return Reason.HEADERS
        return Visit(
            **{it.name: getattr(place, it.name) for it in fields(RequestedUrl)},
            id=id_,
            root_path=root,
            declared=declared,
            wish=wish_of(headers),
            is_head=scope["method"] == "HEAD",
            carried=carried_in(headers, self.credentials),
            is_as_asked=self._way(place.route) == "request",
            is_vouched=EDGE in scope,
        )

    def _way(self, route: Route) -> Forward:
        """I24: as the route says, else the site; else by whether the route has a duration."""
        by_duration: Forward = "request" if route.revalidate is None else "key"
        return route.forward or self._forward or by_duration


def key_of_variant(url: str, values: Mapping[str, str]) -> str:
    """No URL holds a line break, and no header's value does: no two variants are alike."""
    return "\n".join([url, *(f"{name}: {values[name]}" for name in sorted(values))])
