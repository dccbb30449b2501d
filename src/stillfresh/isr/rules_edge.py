"""What a reverse proxy believes of a request (I13), and which requests it answers itself (I12).

Pure. RFC 9110 §7.2 (Host) and §7.6.2 (Max-Forwards), RFC 9112 §3.2, RFC 7239 §8 (Forwarded).
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown
from stillfresh.isr.rules_fields import Raw, members, values
from stillfresh.isr.rules_headers import end_to_end
from stillfresh.isr.rules_keys import HOST, HOST_LENGTH

Networks: TypeAlias = tuple[IPv4Network | IPv6Network, ...]
ANOTHER_PAGE: Final = frozenset(
    {
        b"x-host",
        b"x-http-host-override",
        b"x-http-method",
        b"x-http-method-override",
        b"x-method-override",
        b"x-original-host",
        b"x-original-method",
        b"x-original-uri",
        b"x-original-url",
        b"x-rewrite-url",
    }
)
"""Fields that ask for another page than the one in the key: no shared load carries them."""
MADE_UP: Final = ANOTHER_PAGE | {
    b"cf-connecting-ip",
    b"client-ip",
    b"fastly-client-ip",
    b"forwarded",
    b"front-end-https",
    b"proxy",
    b"true-client-ip",
    b"x-client-ip",
    b"x-cluster-client-ip",
    b"x-forwarded",
    b"x-proxyuser-ip",
    b"x-real-ip",
}
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
