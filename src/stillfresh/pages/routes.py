"""Which page is meant: routes, a request's key, how people name pages.

Pure: an ASGI scope in, a `Visit` out, or the reason why the request passes as if there were no
cache. By its key, a render gets what is in the key, in the same form, and nothing else.
RFC 9110 §4.2.3 and RFC 3986 §6.2 for equal URLs.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, unquote_plus, urljoin, urlsplit

from stillfresh.checks import checked_flag
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, shown
from stillfresh.http import (
    CREDENTIALS,
    CookieNames,
    Reason,
    Wish,
    carried_in,
    checked_cookies,
    checked_credentials,
    selected,
    wish_of,
)
from stillfresh.http.fields import Raw, end_to_end, strings, values, with_field
from stillfresh.http.own_writes import token_in, with_token
from stillfresh.pages.clients import (
    Forward,
    canonical_host,
    checked_forward,
    is_allowed,
    reads_along,
)
from stillfresh.pages.facetheory import address_in_key
from stillfresh.pages.model import Scope

__all__ = ["CREDENTIALS", "Forward", "Route", "Routes", "checked_credentials"]

MOST_URL: Final = 8_192
"""Bytes of path and query; longer ones pass uncached."""
MOST_PATH: Final = 65_536
"""Bytes of a path that a program names; a longer one is an error."""
MOST_KEY: Final = 16_384
"""Characters; a request that would need a longer key passes uncached."""
PLAIN: Final = "/%!$&'()*+,;=:@~-._"
VISIBLE: Final = "".join(map(chr, range(0x21, 0x7F)))
"""The characters of a URL: visible ASCII."""
NOT_FROM_BROWSERS: Final = str.maketrans({'"': "%22", "'": "%27", "<": "%3C", ">": "%3E"})
"""Characters that other clients send in a query as they are, and browsers encoded."""
ONLY_COOKIES: Final = frozenset({b"cookie"})
PLAIN_PATH: Final = re.compile(rb"/|(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*+)++/?")
"""Paths that have one form only. Segments that begin with a dot are looked at more closely."""
ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})|(%)")
UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
NEVER_ENCODED: Final = frozenset(b"\\\x7f") | frozenset(range(0x20))
SLASH: Final = ord("/")
ENCODED_SLASH: Final = re.compile(r"%2[Ff]")
SLASHES: Final = re.compile("/{2,}")
STAYS_ENCODED: Final = re.compile(r"%2[Ff]|%3F|%25(?=(?:25)*(?:2[Ff]|3[Ff]))")
"""An encoded slash or question mark, which decoded would be another path or begin a query.

Also a percent sign that would make one of them of the characters after it.
"""
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Also lone surrogates, which some servers make of bytes that are not UTF-8."""
GROUPS: Final = b"cache-group-invalidation"
ORIGIN: Final = re.compile(r"https?://[^/?#\s]*", re.IGNORECASE)
CONDITIONAL: Final = frozenset({b"if-match", b"if-unmodified-since"})
"""RFC 9110 §13.1: only the site can judge these."""
EDGE: Final = "stillfresh.edge"
"""Key in a scope: our edge has removed fields that this client may not set."""
INTERIM: Final = "stillfresh.interim"
"""Key in a scope of a server that can send interim responses: takes status and fields."""


@dataclass(frozen=True, slots=True)
class Route:
    """How the pages of a path are cached."""

    revalidate: Duration | None = None
    """How long a page is fresh. None: as long as its response says."""
    query: Sequence[str] | None = ()
    """Query parameters that are part of the key; others are dropped. None: all of them count."""
    vary: Sequence[str] = ()
    """Request fields that the app receives, and that are part of the key.

    With a field of `credentials`, as `Authorization`, each of its values has pages of its own: the
    app gets the visitor's request, and the key has a digest of the value.
    """
    tags: Sequence[str] = ()
    """Tags of every page of the route, for `revalidate_tag` and `purge_tag`."""
    forward: Forward | None = None
    """`"request"`: the app gets the visitor's request; `"key"`: only the parts of the key."""
    ignore_cookies: Sequence[str] | None = None
    """Cookies that the app does not receive with a GET or HEAD. None: those of the middleware."""
    never: bool = False
    """True: its pages pass uncached."""

    def __post_init__(self) -> None:
        checked_forward(self.forward)
        checked_flag("never", self.never)
        if self.revalidate is not None:
            seconds(self.revalidate, name="revalidate", positive=True)
        if self.ignore_cookies is not None:
            checked_cookies(self.ignore_cookies)
        for name in ("query", "vary", "tags"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: a list of names, not {shown(getattr(self, name))}")


NEVER: Final = "never"
"""In the place of a route's duration: its pages pass uncached."""
RoutesLike: TypeAlias = Mapping[str, Duration | Literal["never"] | Route | None]


class Routes:
    """Routes by exact path, or else by the longest matching `/prefix/*`."""

    def __init__(self, routes: RoutesLike) -> None:
        self._exact: dict[str, Route] = {}
        self._below: dict[str, Route] = {}
        for pattern, value in routes.items():
            if not isinstance(pattern, str) or not pattern.startswith(("/", "*")):
                raise ConfigError(f"route {shown(pattern)}: must begin with /, as '/blog/*'")
            prefix, star, behind_star = pattern.partition("*")
            if behind_star:
                raise ConfigError(f"route {shown(pattern)}: * may stand only at the end")
            route = route_of(pattern, value)
            if star:
                self._below[prefix or "/"] = route
            else:
                self._exact[prefix or "/"] = route
        self._prefixes = sorted(self._below, key=len, reverse=True)

    def of(self, path: str) -> Route | None:
        if (route := self._exact.get(path)) is not None:
            return route
        for prefix in self._prefixes:
            if path.startswith(prefix):
                return self._below[prefix]
        return None

    def items(self) -> Iterator[tuple[str, Route]]:
        """Each pattern with its route."""
        yield from self._exact.items()
        yield from ((f"{prefix}*", route) for prefix, route in self._below.items())


def route_of(pattern: str, value: object) -> Route:
    """The route that a duration, `"never"` or None stands for. Raises ConfigError."""
    if isinstance(value, Route):
        return value
    if value == NEVER:
        return Route(never=True)
    if value is not None:
        seconds(value, name=f"route {shown(pattern)}", positive=True)  # type: ignore[arg-type]
    return Route(value)  # type: ignore[arg-type]  # checked in the line above


def check_token_routes(routes: Routes, credentials: Collection[bytes]) -> None:
    """Raise ConfigError for a route whose key has a credential that the app would not receive."""
    for pattern, route in routes.items():
        names = [name for name in route.vary if _is_credential(name, credentials)]
        if names and route.forward == "key":
            raise ConfigError(
                f"route {shown(pattern)}: vary has {names[0]}, which reaches the app only with the "
                'visitor\'s own request; remove forward = "key"'
            )


def _is_credential(name: str, credentials: Collection[bytes]) -> bool:
    """Not `Cookie`: it has too many values that say nothing about the visitor."""
    field = name.lower().encode("latin-1", "replace")
    return field == b"authorization" or field in credentials


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page that may be shared."""

    url: str
    path: str
    app_path: str
    """The path for the app; it differs if an outer layer has rewritten it."""
    raw_path: str
    query: str
    host: str
    scheme: str
    headers: Raw
    route: Route
    id: str = ""
    root_path: str = ""
    """Where the app is mounted. It is part of the key, because an outer layer sets it."""
    declared: Mapping[str, str] = field(default_factory=dict)
    wish: Wish = field(default_factory=Wish)
    is_head: bool = False
    carried: frozenset[bytes] = frozenset()
    """Fields that identify the client: a render without them may get another answer."""
    is_as_asked: bool = False
    """True if the app is asked with this request itself."""
    is_vouched: bool = False
    """True if our edge has removed fields that this client may not set."""
    is_part: bool = False
    """True if it asks for one range of a page that is not stored whole."""
    is_filling: bool = False
    """True if it asks for one range, and the page is loaded whole to answer it."""
    keyed: frozenset[bytes] = frozenset()
    """Credentials that are part of the key by their digest: its page is for their sender only."""
    reads_along: bool = False
    token: str = ""
    """The changes that the visitor has seen: it accepts no older page. It is in no key."""

    def part(self) -> "Visit":
        """The same visit for the stored parts of the page, under their own key."""
        return replace(self, id=f"{self.id}\n:part", is_part=True)

    def filling(self) -> "Visit":
        """The same visit, which loads the whole page although it asks for a range."""
        return replace(self, is_filling=True)

    @property
    def is_authorized(self) -> bool:
        return not self.carried <= ONLY_COOKIES

    @property
    def is_open(self) -> bool:
        """True if only its responses say whether it can be shared."""
        return self.is_as_asked or self.route.revalidate is None

    def unencoded(self) -> "Visit":
        """The same visit for the uncompressed page."""
        return replace(self, headers=with_field(self.headers, b"accept-encoding", b"identity"))


class Site:
    """Routes and hosts; without hosts, each well-formed host has its own pages."""

    def __init__(
        self,
        routes: RoutesLike | None,
        hosts: Collection[str] | None,
        forward: Forward | None = None,
        credentials: Iterable[str] = CREDENTIALS,
        *,
        normalise_query: bool = False,
        ignore_cookies: Iterable[str] = (),
    ) -> None:
        self._forward = checked_forward(forward)
        self._sorts_query = checked_flag("normalise_query", normalise_query)
        self.credentials = checked_credentials(credentials)
        if isinstance(hosts, str) or (hosts is not None and not all(hosts)):
            raise ConfigError(f"hosts: a list such as ['example.com'], not {shown(hosts)}")
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._routes = Routes({"*": Route(query=None)} if routes is None else routes)
        check_token_routes(self._routes, self.credentials)
        self._ignored_cookies = CookieNames.of(ignore_cookies)
        # By identity: routes are compared by their fields, which may be lists.
        self._ignored_by_route = {
            id(route): CookieNames.of(route.ignore_cookies)
            for _, route in self._routes.items()
            if route.ignore_cookies is not None
        }
        self._ignores_cookies = bool(self._ignored_cookies) or any(self._ignored_by_route.values())

    def is_named(self, host: str) -> bool:
        """True for a host that `hosts` names in full: it always has a place."""
        return self._hosts is not None and host in self._hosts

    def without_ignored_cookies(self, scope: Scope) -> Scope:
        """The same GET or HEAD without the cookies that its route ignores."""
        if not self._ignores_cookies or scope["method"] not in {"GET", "HEAD"}:
            return scope
        headers = tuple(scope["headers"])
        if not values(headers, b"cookie"):
            return scope
        path = canonical_path(raw_path_of(scope))
        route = None if path is None else self._routes.of(readable_path(path))
        names = self._ignored_by_route.get(id(route), self._ignored_cookies)
        token = token_in(headers)
        if token:  # a pattern may match its cookie, too
            headers = with_token(headers, token)
        return {**scope, "headers": names.removed_from(headers)}

    def place(self, scope: Scope) -> Visit | Reason:
        """The URL of a request, without an id; or the reason why it is not for the cache."""
        raw = raw_path_of(scope)
        path = canonical_path(raw)
        if path is None:
            return Reason.PATH
        readable = readable_path(path)
        route = self._routes.of(readable)
        if route is None or route.never:
            return Reason.ROUTE
        if ENCODED_SLASH.search(path) and self._would_be_elsewhere(unquote(path), route):
            return Reason.PATH
        headers: Raw = tuple([(name.lower(), value) for name, value in scope["headers"]])
        scheme = scope.get("scheme", "http")
        host = canonical_host(headers, scheme)
        if host is None or (self._hosts is not None and not is_allowed(host, self._hosts)):
            return Reason.HOST
        query = query_of(scope.get("query_string", b""), route.query, is_sorted=self._sorts_query)
        if query is None:
            return Reason.PATH
        url = with_query(f"{scheme}://{host}{path}", query)
        is_rewritten = scope["path"] != unquote(raw.decode("latin-1"))
        app_path = scope["path"] if is_rewritten else unquote(path)
        return Visit(url, readable, app_path, path, query, host, scheme, headers, route)

    def _would_be_elsewhere(self, decoded: str, route: Route) -> bool:
        """True if a site that decodes the slash, and perhaps merges slashes, has another route."""
        readings = (decoded, SLASHES.sub("/", decoded))
        return any(self._routes.of(reading) is not route for reading in readings)

    def changed(self, scope: Scope, place: Visit, answer: Raw) -> list[str]:
        """RFC 9111 §4.4: the URLs that a change concerns, of its own origin only."""
        names = [place.url]
        groups = strings([value for name, value in answer if name.lower() == GROUPS])
        names += [group_tag(place.url, group) for group in groups]
        for name, value in answer:
            if name.lower() in {b"location", b"content-location"}:
                with suppress(ValueError):
                    url = urlsplit(urljoin(place.url, value.decode("latin-1")))
                    host = canonical_host(((b"host", url.netloc.encode("latin-1")),), url.scheme)
                    target = {
                        "raw_path": url.path.encode("latin-1"),
                        "path": unquote(url.path),
                        "query_string": url.query.encode("latin-1"),
                    }
                    other = self.place({**scope, **target})
                    is_same_origin = (url.scheme, host) == (place.scheme, place.host)
                    if is_same_origin and isinstance(other, Visit):
                        names.append(other.url)
        return names

    def visit(self, scope: Scope) -> Visit | Reason:
        """The visit, or the reason why the app must answer."""
        if isinstance(place := self.place(scope), Reason):
            return place
        headers = place.headers
        route = place.route
        keyed = frozenset(
            name.lower().encode("latin-1", "replace")
            for name in route.vary
            if _is_credential(name, self.credentials)
        )
        others = (name.lower() for name in route.vary if name.lower().encode() not in keyed)
        declared = selected(others, headers)
        root = scope.get("root_path", "")
        if any(name in CONDITIONAL for name, _ in headers):
            return Reason.CONDITION
        if declared is None:
            return Reason.VARY
        digests = digests_of(keyed, headers)
        if digests and digests != digests_of(keyed, end_to_end(headers)):
            return Reason.HEADERS  # `Connection` hides a credential from the app
        if CONTROL.search(place.app_path + root):
            return Reason.PATH
        is_rewritten = place.app_path != unquote(place.raw_path)
        outer = {":path": place.app_path} if is_rewritten else {}
        if root:
            outer[":root"] = root
        id_ = key_of_variant(place.url, {**declared, **digests, **outer})
        if len(id_) > MOST_KEY:
            return Reason.HEADERS
        by_duration: Forward = "request" if route.revalidate is None else "key"
        return replace(
            place,
            id=id_,
            root_path=root,
            declared=declared,
            wish=wish_of(headers),
            is_head=scope["method"] == "HEAD",
            carried=carried_in(headers, self.credentials) - keyed,
            keyed=keyed,
            is_as_asked=bool(keyed) or (route.forward or self._forward or by_duration) == "request",
            is_vouched=EDGE in scope,
            reads_along=reads_along(scope),
        )


def key_of_variant(url: str, values: Mapping[str, str]) -> str:
    """A key with lines: no URL or field value has a line break, so variants never collide."""
    return "\n".join([url, *(f"{name}: {values[name]}" for name in sorted(values))])


def digests_of(names: Iterable[bytes], headers: Raw) -> dict[str, str]:
    """A digest of each of these fields that the request has: a key never shows a credential."""
    digests: dict[str, str] = {}
    for name in names:
        lines = values(headers, name)
        if lines:
            digests[name.decode("latin-1")] = hashlib.sha256(b"\n".join(lines)).hexdigest()
    return digests


def raw_path_of(scope: Scope) -> bytes:
    """The path as it was sent, or as it would be, without the query."""
    whole = scope.get("raw_path") or quote(scope["path"], "/%", errors="surrogatepass").encode()
    return bytes(whole).partition(b"?")[0]


def canonical_path(raw: bytes) -> str | None:
    """RFC 3986 §6.2.2; None where a server behind might read another path than this one.

    Such are dot segments, also behind an encoded slash, empty segments, backslashes, and controls
    in disguise. An encoded slash stays as it was sent.
    """
    if not raw.startswith(b"/") or len(raw) > MOST_URL or b"\\" in raw:
        return None
    if PLAIN_PATH.fullmatch(raw):
        return raw.decode("ascii")
    if any(byte <= 0x20 or byte == 0x7F for byte in raw):
        return None
    if any(escape[2] or int(escape[1], 16) in NEVER_ENCODED for escape in ESCAPE.finditer(raw)):
        return None
    text = quote(ESCAPE.sub(_plain, raw), safe=PLAIN)
    if "" in text.split("/")[1:-1]:
        return None
    if not {".", ".."}.isdisjoint(ENCODED_SLASH.sub("/", text).split("/")):
        return None
    return text


def _plain(escape: "re.Match[bytes]") -> bytes:
    """Unescape plain characters, write other escapes in upper case, leave an encoded slash."""
    byte = int(escape[1], 16)
    if byte == SLASH:
        return escape[0]
    return bytes([byte]) if byte in UNRESERVED else b"%%%02X" % byte


def readable_path(path: str) -> str:
    """The path for routes, tags and people: decoded, but for encoded slashes and question marks.

    No two canonical paths of UTF-8 have the same readable one.
    """
    if "%" not in path:
        return path
    text = ""
    end = 0
    for match in STAYS_ENCODED.finditer(path):
        text += unquote(path[end : match.start()]) + match[0]
        end = match.end()
    return text + unquote(path[end:])


def query_of(
    raw: bytes, declared: Collection[str] | None, *, is_sorted: bool = False
) -> str | None:
    """The query in key and request, byte for byte. None if no URL can have it.

    `declared`: only these parameters, in the order in which they came; None: all of them.
    `is_sorted`: by name, equal names in their order, without empty parts.
    """
    if not raw:
        return ""
    if len(raw) > MOST_URL or any(byte <= 0x20 or byte >= 0x7F for byte in raw):
        return None
    query = raw.decode("ascii")
    if declared is not None:
        parts = query.split("&")
        query = "&".join(part for part in parts if part and parameter_name(part) in declared)
    return sorted_query(query) if is_sorted else query


def parameter_name(part: str) -> str:
    """The decoded name of one parameter of a query, as `name=value` or `name`."""
    return unquote_plus(part.partition("=")[0], errors="surrogateescape")


def parameter_names(query: bytes) -> set[str]:
    """The decoded names of the parameters of a query."""
    return {parameter_name(part) for part in query.decode("latin-1").split("&")}


def sorted_query(query: str) -> str:
    """By decoded name, equal names in their order; empty parts mean nothing."""
    return "&".join(sorted(filter(None, query.split("&")), key=parameter_name))


def with_query(address: str, query: str) -> str:
    """Without a question mark if the query is empty: servers do not tell these two apart."""
    return f"{address}?{query}" if query else address


def percent_encoded(text: str | bytes) -> str:
    """As browsers send it: only what no URL can have is encoded."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return quote(data, safe=VISIBLE)


def plain_path(path: str) -> str:
    """A path, perhaps with a query, as visits have it; an impossible one is returned unchanged."""
    before, _, query = path.partition("?")
    canonical = _canonical_text(before)
    if canonical is None:
        return path
    return with_query(readable_path(canonical), percent_encoded(query))


def _canonical_text(path: str) -> str | None:
    return canonical_path(quote(path, safe=PLAIN, errors="surrogatepass").encode("ascii"))


def canonical_url(url: str) -> str:
    """A whole URL as visits have it; an impossible one is returned unchanged."""
    origin = ORIGIN.match(url)
    if origin is None:
        return url
    scheme, _, host = origin[0].partition("://")
    before, _, query_text = url[origin.end() :].partition("?")
    scheme = scheme.lower()
    named = canonical_host(((b"host", host.encode("latin-1", "replace")),), scheme)
    path = _canonical_text(before or "/")
    query = query_of(percent_encoded(query_text).encode("ascii"), None)
    if named is None or path is None or query is None:
        return url
    return with_query(f"{scheme}://{named}{path}", query)


def _is_url(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def checked_path(path: str) -> str:
    """Any text is a key, unless it could name another tenant's page or a variant."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"path: must be text such as /pricing, not {shown(path)}")
    if path.startswith("TENANT#") or (_is_url(path) and "\n" in path):
        raise ConfigError(
            f"path: {shown(path)} could name another page: it must not begin with TENANT#, "
            "and a URL has no line break"
        )
    if len(path.encode("utf-8", "surrogatepass")) > MOST_PATH:
        raise ConfigError(f"path: must have at most {MOST_PATH:,} bytes, not {shown(path)}")
    return path


def reached(key: str) -> tuple[list[str], list[str]]:
    """The tags of every variant of the page, and the ids under which it may be stored.

    Other services write no tags: their pages are reached by the id alone. A query is meant as it is
    written, as a browser would send it, and sorted: so a cache with `normalise_query` has it, and
    so did earlier versions.
    """
    is_url = _is_url(checked_path(key))
    kind = "key" if is_url else "path"
    name = canonical_url(key) if is_url else plain_path(key)
    names = {name: None}
    before, _, query = name.partition("?")
    for sent in (query, query.translate(NOT_FROM_BROWSERS)):
        if sent:
            names[with_query(before, sent)] = None
        in_order = sorted_query(sent)
        if in_order:  # a query of nothing but empty parts is not the path without a query
            names[with_query(before, in_order)] = None
    tags = [f"{kind}:{name}" for name in names]
    return tags, list(dict.fromkeys([key, *names]))


class PageName(NamedTuple):
    """A path and its query in a form in which names and the cache keys of any program compare.

    The path is without a final slash: FaceTheory's keys do not say whether a visitor sent one. The
    query is decoded, and sorted by name: FaceTheory sorts and encodes it in its own way.
    """

    path: str
    query: tuple[tuple[str, str], ...]

    def means(self, page: "PageName") -> bool:
        """True if an operator who writes this name means `page`: a path means all its queries."""
        return self.path == page.path and (not self.query or self.query == page.query)


def page_name(address: str) -> PageName:
    """The name of a page, made of its path and its query."""
    path, _, query = plain_path(address).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    return PageName(path.rstrip("/") or "/", tuple(sorted(pairs, key=lambda pair: pair[0])))


def name_in_key(key: str) -> PageName | None:
    """The name of the page with this cache key: a path, a URL, or FaceTheory's default form.

    None for other keys.
    """
    first_line = key.partition("\n")[0]  # further lines are of a variant
    address = first_line.partition("#")[0]
    if address.startswith("/"):
        return page_name(address)
    if _is_url(address):
        return page_name(ORIGIN.sub("", address, count=1))
    default = address_in_key(first_line)
    return None if default is None else page_name(default)


def own_tags(tags: str | Iterable[str]) -> list[str]:
    """The user's tags of a page; a single one may be given as text."""
    try:
        listed = [tags] if isinstance(tags, str) else list(tags)
    except TypeError:
        raise ConfigError(f"tags: a list of words such as 'blog', not {shown(tags)}") from None
    return [own_tag(tag) for tag in listed]


def own_tag(tag: str) -> str:
    """The user's tag, kept apart from our own: `path:…` and `key:…`."""
    if not isinstance(tag, str) or not tag:
        raise ConfigError(f"tag: a word such as 'blog', not {shown(tag)}")
    return f"tag:{tag}"


def group_tag(url: str, name: str) -> str:
    """RFC 9875 §2: a group of the URL's origin; the origin is empty for a page without one."""
    origin = ORIGIN.match(url)
    return f"group:{origin[0] if origin else ''} {name}"
