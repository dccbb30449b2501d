"""Which claims of a client count, which reach the site, and how many are remembered.

Pure, except for the counts of `BoundedNames` and `Heard`; the time is an argument. *As asked*:
the site sees the visitor's own request, without fields that clients may not set. *Key only*:
it sees the page's key, so the response cannot contain anything about the visitor. RFC 9110 §7.2
(Host) and §7.6.2 (Max-Forwards), RFC 9112 §3.2, RFC 7239 §8 (Forwarded).
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, Literal, TypeAlias

from stillfresh.bounded import BoundedDict
from stillfresh.errors import ConfigError, shown
from stillfresh.http import Reason
from stillfresh.http.fields import BAD, Raw, end_to_end, members, names_in, normalised, values
from stillfresh.pages.model import Scope

Forward: TypeAlias = Literal["request", "key"]
"""The values of `forward`."""
Networks: TypeAlias = tuple[IPv4Network | IPv6Network, ...]
"""Networks whose clients are trusted."""
ANOTHER_PAGE: Final = names_in(
    b"x-envoy-original-path x-host x-http-host-override x-http-method x-http-method-override "
    b"x-invoke-path x-matched-path x-method-override x-middleware-subrequest x-nextjs-data "
    b"x-original-host x-original-method x-original-uri x-original-url x-rewrite-url"
)
"""Fields that ask for another page than the one in the key: no shared load carries them."""
MADE_UP: Final = ANOTHER_PAGE | names_in(
    b"cf-connecting-ip client-ip fastly-client-ip forwarded front-end-https proxy "
    b"true-client-ip x-client-ip x-cluster-client-ip x-forwarded x-proxyuser-ip x-real-ip "
    b"x-scheme x-url-scheme"
)
"""Fields by which a client could claim another address, scheme, host or page."""
PREFIX: Final = b"x-forwarded-"
HOST: Final = re.compile(r"(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
HOST_LENGTH: Final = 255
PORTS: Final = {"http": ":80", "https": ":443"}
LAST_DOT: Final = re.compile(rb"(?<=[^.])\.(?=\Z|:[0-9]*\Z)")
SECRET: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization"})
MOST_FIELDS: Final = 8_192
"""Bytes of header fields; sites refuse more, and their refusal must not become the page."""
ON_WHOLE: Final = names_in(b"if-modified-since if-none-match if-range range")
"""Fields whose answer is known only when the page is complete."""
ASKED_ANEW: Final = names_in(
    b"accept-encoding content-length expect host if-modified-since if-none-match if-range range"
)
"""Fields that the cache writes itself: it wants the whole page of one host."""


def checked_networks(texts: Iterable[str]) -> Networks:
    """Return the networks that texts such as `10.0.0.0/8` or `::1` name. Raises ConfigError."""
    return tuple(_network(text) for text in texts)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as exc:
        raise ConfigError(
            f"{shown(text)}: write an address or a network, as 10.0.0.0/8 ({exc})"
        ) from None


def is_trusted(peer: str | None, trusted: Networks) -> bool:
    """True if the client's address is in one of the networks."""
    if peer is None or not trusted:
        return False
    try:
        address = ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in trusted)


def believed(headers: Raw, *, is_trusted: bool) -> Raw:
    """Return the fields without those that only a trusted proxy may set.

    Such names with `_` in them are left out in any case: some servers read them as `-`.
    """
    return tuple([field for field in headers if not _is_made_up(field[0], is_trusted)])


@lru_cache(maxsize=128)
def _is_made_up(name: bytes, is_trusted: bool) -> bool:
    plain = name.replace(b"_", b"-")
    if plain != b"host" and not plain.startswith(PREFIX) and plain not in MADE_UP:
        return False
    return plain != name or (plain != b"host" and not is_trusted)


def forwarded(headers: Raw, name: bytes) -> bytes | None:
    """Return the last value of a forwarded field: the one that the nearest proxy wrote."""
    claims = members(values(headers, PREFIX + name))
    return claims[-1] if claims else None


def host_fault(headers: Raw, version: str) -> bytes | None:
    """RFC 9112 §3.2: one Host, well-formed; only HTTP/1.0 may leave it out."""
    hosts = values(headers, b"host")
    if not hosts:
        return None if version == "1.0" else b"The request names no Host.\n"
    if len(hosts) > 1:
        return b"The request names several Hosts.\n"
    return None if is_host(hosts[0]) or not hosts[0] else b"This is not a Host.\n"


@lru_cache(maxsize=64)
def is_host(value: bytes) -> bool:
    """True if this can be the host of a request."""
    text = plain_host(value).decode("latin-1").lower()
    return len(text) <= HOST_LENGTH and HOST.fullmatch(text) is not None


def plain_host(value: bytes) -> bytes:
    """The host without the final dot: `example.com.:80` is `example.com:80`."""
    return LAST_DOT.sub(b"", value, count=1)


def canonical_host(headers: Raw, scheme: str) -> str | None:
    """One Host, well-formed, in lower case, without a default port; else None."""
    hosts = values(headers, b"host")
    return _canonical(hosts[0], scheme) if len(hosts) == 1 else None


@lru_cache(maxsize=64)  # pages share the text. Python 3.12 never frees an interned one
def _canonical(value: bytes, scheme: str) -> str | None:
    host = value.decode("latin-1").lower().removesuffix(PORTS.get(scheme, ""))
    return host if len(host) <= HOST_LENGTH and HOST.fullmatch(host) else None


def is_allowed(host: str, allowed: Collection[str]) -> bool:
    """True for a listed name, or one below `*.name`; an entry without a port allows any port."""
    name = host.rpartition(":")[0] if re.search(r"(^[^:]*|\]):[0-9]+$", host) else host
    return any(
        entry in (host, name) or (entry.startswith("*.") and name.endswith(entry[1:]))
        for entry in allowed
    )


def forwards_left(headers: Raw) -> int | None:
    """Return `Max-Forwards` (RFC 9110 §7.6.2); None if there is none, or it cannot be read."""
    limits = values(headers, b"max-forwards")
    is_number = len(limits) == 1 and limits[0].isdigit() and len(limits[0]) < 10
    return int(limits[0]) if is_number else None


def peer_of(scope: Scope) -> str | None:
    """The address of the connection's other end."""
    return scope["client"][0] if scope.get("client") else None


def target_of(scope: Scope) -> bytes:
    """Path and query, byte for byte: the site decides what an escape means."""
    query: bytes = scope["query_string"]
    return (scope["raw_path"] or b"/") + (b"?" + query if query else b"")


def reflected(scope: Scope) -> bytes:
    """RFC 9110 §9.3.8: a TRACE as it came, without secrets."""
    lines = [b"TRACE " + target_of(scope) + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in scope["headers"] if name not in SECRET]
    return b"\r\n".join([*lines, b"", b""])


def checked_forward(value: object) -> Forward | None:
    """Return the value. Raises ConfigError if it is neither `"request"`, `"key"` nor None."""
    match value:
        case None | "request" | "key":
            return value
        case _:
            raise ConfigError(f"forward: must be 'request' or 'key', not {shown(value)}")


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if a request with these fields, in lower case, has a body (RFC 9112 §6.3)."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            return True
    return False


def unfit_to_fill(headers: Raw) -> Reason | None:
    """Why this request must not fill the cache; None if it may."""
    if has_body(headers):
        return Reason.BODY
    all_values = b"".join([value for _, value in headers])
    size = len(all_values) + sum([len(name) for name, _ in headers])
    if size > MOST_FIELDS or BAD.search(all_values):
        return Reason.HEADERS
    return Reason.RANGE if values(headers, b"range") else None


def reads_along(scope: Scope) -> bool:
    """True if the answer can begin early, and a break can be seen by the client."""
    is_plain = not any(name in ON_WHOLE for name, _ in scope["headers"])
    return is_plain and scope["method"] == "GET" and scope.get("http_version") != "1.0"


def as_asked(headers: Raw, host: str, *, is_vouched: bool) -> Raw:
    """The visitor's header fields as the site receives them.

    `is_vouched`: our edge has already removed fields that this client may not set.
    """
    claimed = believed(end_to_end(headers), is_trusted=is_vouched)
    passed_on = tuple(field for field in claimed if field[0] not in ASKED_ANEW | ANOTHER_PAGE)
    coding: Raw = ()
    if values(headers, b"accept-encoding"):
        offered = normalised("accept-encoding", headers) or "identity"
        coding = ((b"accept-encoding", offered.encode("latin-1")),)
    return ((b"host", host.encode("ascii")), *passed_on, *coding)


UNUSED_FOR: Final = 600.0
"""Seconds after which an unused name makes room, and after which a visit counts half."""
CLEARLY: Final = 2.0
"""A difference in visits that is not chance."""
STANDS_FOR: Final = 30.0
"""Seconds for which a personal answer does not outweigh the result of a render."""
Seen: TypeAlias = tuple[float, float]
"""When last, and how many visits; half of them are forgotten in `UNUSED_FOR`."""


class BoundedNames:
    """At most so many names; a known name stays while it is asked for.

    When all places are taken, a new name gets the place of the one not seen for longest: once that
    was a while ago, or once the new one is clearly asked for more often. So made-up names that are
    asked for once or twice replace none, and names that are repeated only to hold their places do
    not keep out a name with visitors. A name is kept as its hash, which is short.
    """

    __slots__ = ("_most", "_seen", "_waiting")

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, Seen] = {}
        self._waiting: BoundedDict[int, Seen] = BoundedDict(most)
        """Names without a place that were requested last; as many as there are places."""

    def __len__(self) -> int:
        return len(self._seen) + len(self._waiting)

    def has(self, name: str, now: float) -> bool:
        """True if this name has, or now gets, a place."""
        mark = hash(name)
        if (known := self._seen.pop(mark, None)) is not None:
            self._seen[mark] = now, 1.0 + _visits(known, now)
            return True
        visits = 1.0 + _visits(self._waiting.pop(mark, (now, 0.0)), now)
        if len(self._seen) < self._most or self._make_room(visits, now):
            self._seen[mark] = now, visits
            return True
        self._waiting.note(mark, (now, visits))
        return False

    def _make_room(self, visits: float, now: float) -> bool:
        oldest = next(iter(self._seen), None)
        if oldest is None:
            return False
        last, often = self._seen[oldest]
        known = (min(last, now), often)  # a clock that was set back must not keep it for ever
        self._seen[oldest] = known
        if now - known[0] < UNUSED_FOR and visits <= _visits(known, now) + CLEARLY:
            return False
        del self._seen[oldest]
        return True


def _visits(seen: Seen, now: float) -> float:
    last, often = seen
    return float(often * 0.5 ** (max(0.0, now - last) / UNUSED_FOR))


class NamesOf:
    """Names for each of some paths or pages; the least recently requested is dropped.

    That also happens when all of them together have too many names.
    """

    def __init__(self, each: int, *, most: int) -> None:
        self._each = each
        self._most = most
        self._names: dict[str, BoundedNames] = {}
        self._count = 0

    def has(self, of: str, name: str, now: float) -> bool:
        names = self._names.pop(of, None)
        if names is None:
            names = BoundedNames(self._each)
        before = len(names)
        is_kept = names.has(name, now)
        self._names[of] = names
        self._count += len(names) - before
        while len(self._names) > self._most or (
            self._count > MOST_NAMES_OF_ALL and len(self._names) > 1
        ):
            dropped = self._names.pop(next(iter(self._names)))
            self._count -= len(dropped)
        return is_kept


PageAddress: TypeAlias = tuple[str, str, str]
"""Host, path and query: the parts of a page's key that visitors choose."""
KNOWN_PATHS: Final = 256
"""Paths whose queries are counted."""
MOST_NAMES_OF_ALL: Final = 300_000
"""Names of all paths together, at about 200 bytes."""


class NamePlaces:
    """Limits the queries of a path and the variants of a page, which clients can make up.

    Without a limit, one client could fill the store.
    """

    def __init__(self, max_variants: int, max_queries: int, *, most: int) -> None:
        self._variants = NamesOf(max_variants, most=most)
        self._queries = NamesOf(max_queries, most=KNOWN_PATHS)

    def has(self, address: PageAddress, keys: Sequence[str], now: float) -> bool:
        """True if the names in a page's key still have places; its own key comes last."""
        is_kept = keys[0] == keys[-1] or self.has_variant(keys[0], keys[-1], now)
        return is_kept and self.has_query(*address, now)

    def has_variant(self, base: str, key: str, now: float) -> bool:
        return self._variants.has(base, key, now)

    def has_query(self, host: str, path: str, query: str, now: float) -> bool:
        return not query or self._queries.has(host + path, query, now)


class Heard:
    """Remembers which pages could not be shared, and since when; None: the page can be shared."""

    def __init__(self, most: int) -> None:
        self._words: BoundedDict[str, float | None] = BoundedDict(most)

    def is_private(self, id_: str) -> bool | None:
        """True if its render could not be shared; None if nothing is known."""
        return self._words[id_] is not None if id_ in self._words else None

    def rendered(self, id_: str, now: float, *, is_shared: bool) -> None:
        """Note the result of a render."""
        if is_shared:
            self._words.pop(id_, None)
        else:
            self._words.note(id_, now)

    def stated(self, id_: str, now: float, *, is_personal: bool) -> None:
        """An answer to one visitor says that it may be shared; `is_personal`: a visitor it knew."""
        since = self._words.get(id_)
        if since is None or not is_personal or now - since >= STANDS_FOR:
            self._words.note(id_, None)
