"""What a client may claim, what the site is sent, and for whom its answer is (I12, I13, I24).

Pure. *As asked*: the site sees the visitor's own request, less what clients may not claim. The
response is shared only if nothing in that request made it the visitor's own. *Key only*: the site
sees the page's key (`rules_keys`), so that nothing of the visitor can be in the response.
RFC 9110 §7.2 (Host) and §7.6.2 (Max-Forwards), RFC 9112 §3.2, RFC 7239 §8 (Forwarded).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, Literal, TypeAlias

from stillfresh.errors import ConfigError, shown
from stillfresh.http.fields import BAD, NAME, Raw, end_to_end, members, names_in, values
from stillfresh.http.freshness import PageTerms, controls
from stillfresh.isr.model import Reason
from stillfresh.isr.rules_keys import HOST, HOST_LENGTH, normalised, variant
from stillfresh.isr.rules_storage import Judgement, Shared, Unshared, allows_authorized, judged

Networks: TypeAlias = tuple[IPv4Network | IPv6Network, ...]
ANOTHER_PAGE: Final = names_in(
    b"x-host x-http-host-override x-http-method x-http-method-override x-method-override "
    b"x-original-host x-original-method x-original-uri x-original-url x-rewrite-url"
)
"""Fields that ask for another page than the one in the key: no shared load carries them."""
MADE_UP: Final = ANOTHER_PAGE | names_in(
    b"cf-connecting-ip client-ip fastly-client-ip forwarded front-end-https proxy "
    b"true-client-ip x-client-ip x-cluster-client-ip x-forwarded x-proxyuser-ip x-real-ip"
)
"""By which a client would say who it is, where it is, or that it asked for something else."""
PREFIX: Final = b"x-forwarded-"
LAST_DOT: Final = re.compile(rb"(?<=[^.])\.(?=\Z|:[0-9]*\Z)")
SECRET: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization"})


def checked_networks(texts: Iterable[str]) -> Networks:
    """`10.0.0.0/8`, `::1`: whose word counts."""
    return tuple(_network(text) for text in texts)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as exc:
        raise ConfigError(
            f"{shown(text)}: write an address or a network, as 10.0.0.0/8 ({exc})"
        ) from None


def is_trusted(peer: str | None, trusted: Networks) -> bool:
    if peer is None or not trusted:
        return False
    try:
        address = ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in trusted)


def believed(headers: Raw, *, is_trusted: bool) -> Raw:
    """Without what only a proxy may say, and its look-alikes: a site may read `_` as `-`."""
    return tuple(it for it in headers if not _is_made_up(it[0], is_trusted=is_trusted))


def _is_made_up(name: bytes, *, is_trusted: bool) -> bool:
    plain = name.replace(b"_", b"-")
    if plain != b"host" and not plain.startswith(PREFIX) and plain not in MADE_UP:
        return False
    return plain != name or (plain != b"host" and not is_trusted)


def forwarded(headers: Raw, name: bytes) -> bytes | None:
    """What the nearest proxy said: it writes at the end."""
    said = members(values(headers, PREFIX + name))
    return said[-1] if said else None


def host_fault(headers: Raw, version: str) -> bytes | None:
    """RFC 9112 §3.2: one Host, well-formed; only HTTP/1.0 may leave it out."""
    hosts = values(headers, b"host")
    if not hosts:
        return None if version == "1.0" else b"The request names no Host.\n"
    if len(hosts) > 1:
        return b"The request names several Hosts.\n"
    return None if is_host(hosts[0]) or not hosts[0] else b"This is not a Host.\n"


def is_host(value: bytes) -> bool:
    text = plain_host(value).decode("latin-1").lower()
    return len(text) <= HOST_LENGTH and HOST.fullmatch(text) is not None


def plain_host(value: bytes) -> bytes:
    """Without the dot that ends a whole name: `example.com.:80` is `example.com:80`."""
    return LAST_DOT.sub(b"", value, count=1)


def coding_fault(headers: Raw) -> bytes | None:
    """RFC 9112 §6.1: of the transfer codings only `chunked` is known here."""
    known = [it.lower() for it in members(values(headers, b"transfer-encoding"))]
    return None if known in ([], [b"chunked"]) else b"This transfer coding is not known here.\n"


def own_fields(headers: Raw) -> Raw:
    """RFC 9110 §7.6.1: without what the client says to us alone; how its body comes stays."""
    framing = tuple(it for it in headers if it[0] == b"transfer-encoding")
    return (*end_to_end(headers), *framing)


def forwards_left(headers: Raw) -> int | None:
    """RFC 9110 §7.6.2; None: not limited, or not to be read."""
    found = values(headers, b"max-forwards")
    is_number = len(found) == 1 and found[0].isdigit() and len(found[0]) < 10
    return int(found[0]) if is_number else None


def with_forwards(headers: Raw, left: int) -> Raw:
    return tuple((name, b"%d" % left if name == b"max-forwards" else it) for name, it in headers)


def reflected(target: bytes, headers: Raw) -> bytes:
    """RFC 9110 §9.3.8: a TRACE as it came, without what is secret."""
    lines = [b"TRACE " + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in headers if name not in SECRET]
    return b"\r\n".join([*lines, b"", b""])


Forward: TypeAlias = Literal["request", "key"]
CREDENTIALS: Final = ("X-Api-Key", "Api-Key", "X-Auth-Token", "X-Access-Token")
"""Besides `Authorization` and `Cookie`: request fields by which services know their clients."""
ALWAYS: Final = frozenset({b"authorization", b"cookie"})
MOST_FIELDS: Final = 8_192
"""Bytes of header fields; sites refuse more, and their refusal must not become the page."""
ASKED_ANEW: Final = names_in(
    b"accept-encoding content-length expect host if-modified-since if-none-match if-range range"
)
"""Fields that a cache sends in its own words: it wants the whole page, which has one host."""


def checked_forward(value: object, name: str = "forward") -> Forward | None:
    match value:
        case None | "request" | "key":
            return value
        case _:
            raise ConfigError(f"{name}: must be 'request' or 'key', not {shown(value)}")


def checked_credentials(names: Iterable[str]) -> frozenset[bytes]:
    """The names of header fields, in lower case."""
    if isinstance(names, str):
        raise ConfigError(f"credentials: must be a list such as ['X-Api-Key'], not {shown(names)}")
    found = frozenset(name.lower().encode("latin-1", "replace") for name in names)
    if bad := next((name for name in found if not NAME.fullmatch(name)), None):
        raise ConfigError(
            f"credentials: {shown(bad.decode())} is not the name of a header field; "
            "write one such as X-Api-Key"
        )
    return found


def carried_in(headers: Raw, credentials: frozenset[bytes]) -> frozenset[bytes]:
    """The fields of this request that say who its sender is."""
    return frozenset(name for name, _ in headers if name in ALWAYS or name in credentials)


def unfit_to_fill(headers: Raw) -> Reason | None:
    """Why this request must not fill the cache; None: it may."""
    if any(name == b"transfer-encoding" for name, _ in headers) or any(
        it != b"0" for it in values(headers, b"content-length")
    ):
        return Reason.BODY
    size = sum(len(name) + len(value) for name, value in headers)
    if size > MOST_FIELDS or any(BAD.search(value) for _, value in headers):
        return Reason.HEADERS
    return Reason.RANGE if values(headers, b"range") else None


def as_asked(headers: Raw, host: str, *, is_vouched: bool) -> Raw:
    """The visitor's header fields as the site gets them.

    `is_vouched`: our own edge has already taken out what this client may not claim.
    """
    claimed = believed(end_to_end(headers), is_trusted=is_vouched)
    kept = without(claimed, ASKED_ANEW | ANOTHER_PAGE)
    coding: Raw = ()
    if values(headers, b"accept-encoding"):
        offered = normalised("accept-encoding", headers) or "identity"
        coding = ((b"accept-encoding", offered.encode("latin-1")),)
    return ((b"host", host.encode("ascii")), *kept, *coding)


def without(headers: Raw, names: Collection[bytes]) -> Raw:
    return tuple(it for it in headers if it[0] not in names)


def is_for(answer: Raw, carried: frozenset[bytes]) -> Reason | None:
    """Why the response to a request that carried these may not be shared; None: it may.

    RFC 9111 §3.5 for `Authorization`. `must-revalidate` says nothing about cookies, and personal
    pages often carry it: for those, only `public` and `s-maxage` count.
    """
    if b"cookie" in carried and not controls(answer).keys() & {"public", "s-maxage"}:
        return Reason.COOKIE
    if carried - {b"cookie"} and not allows_authorized(answer):
        return Reason.AUTHORIZATION
    return None


def judged_for(
    request: Raw,
    credentials: frozenset[bytes],
    status: int,
    answer: Raw,
    *,
    fetched_at: float,
    own: PageTerms | None,
) -> Judgement:
    """May the response to this visitor's own request be shared?"""
    judgement = judged(status, answer, fetched_at, own)
    if isinstance(judgement, Unshared):
        return judgement
    carried = carried_in(request, credentials)
    if (reason := is_for(answer, carried)) is not None:
        return Unshared(reason)
    judgement = _by_origin(judgement, request, answer)
    chosen = selected(judgement.vary, request, carried)
    if chosen is None or chosen != selected(judgement.vary, end_to_end(request), carried):
        return Unshared(Reason.VARY)  # in the second case `Connection` hid a field from the site
    names = {*credentials, *(name.encode("latin-1", "replace") for name in judgement.vary)}
    return Unshared(Reason.HEADERS) if _look_like(request, names) else judgement


def _look_like(request: Raw, names: Collection[bytes]) -> bool:
    """Whether a field, written with `_`, could be read as one of these names."""
    return any(b"_" in name and name.replace(b"_", b"-") in names for name, _ in request)


def _by_origin(judgement: Shared, request: Raw, answer: Raw) -> Shared:
    """A response that allows one origin depends on it, whether its `Vary` says so or not."""
    allowed = values(answer, b"access-control-allow-origin")
    is_open = not allowed or allowed == [b"*"] or not values(request, b"origin")
    if is_open or "origin" in judgement.vary:
        return judgement
    return replace(judgement, vary=tuple(sorted({*judgement.vary, "origin"})))


def selected(
    vary: Iterable[str], request: Raw, carried: frozenset[bytes]
) -> Mapping[str, str] | None:
    """RFC 9111 §4.1: the variant that a request selects; None: it is the visitor's own.

    Credentials never become part of a key.
    """
    names = tuple(vary)
    if any(name.encode("latin-1", "replace") in carried for name in names):
        return None
    return variant(names, request)
