"""Who may see and do what an operator may: by token, or from this machine itself (G6).

Without a token only loopback peers under a loopback name are operators: a page of another site that
points its own name at 127.0.0.1 comes with its own Host. A request that a proxy passed on is not
local either: its peer is this machine, its visitor is not.

Guesses at the token are limited by the address of the connection's peer (G12). `X-Forwarded-For` is
not read: anybody can write it, so a guesser would have a new address for each guess.
"""

import hmac
import math
import re
from collections.abc import Collection, Iterable, Sized
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from stillfresh.clock import Clock, monotonic
from stillfresh.errors import ConfigError, shown
from stillfresh.ttl_cache import TtlCache
from stillfresh.web.replies import Problem

SECRET: Final = re.compile(r"[\x21-\x7e]+")
"""What a token is made of: anything that a header field can carry whole."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HOST: Final = re.compile(r"(\[[\da-f:.]+\]|[^\s:@/?#\[\]]+)(:\d*)?", re.ASCII)
PASSED_ON: Final = re.compile(
    rb"forwarded|via|cdn-loop|cf-ray|x-original-host|x-envoy-external-address|x-forwarded.*"
    rb"|.*-(client|connecting|real|remote)-?(ip|addr).*"
)
"""Fields by which proxies say that they are one; an empty one says it as well."""
OWN_SITES: Final = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of this page's own requests, and of an address typed in."""
NAME: Final = re.compile(r"(\*\.)?[\w.-]+|\[?[\da-fA-F:.]+(%\w+)?\]?")
MOST_GUESSES: Final = 10
"""Wrong tokens of one address in `COUNTED_FOR` seconds."""
COUNTED_FOR: Final = 60.0
MOST_ADDRESSES: Final = 10_000
"""Addresses whose guesses are counted; beyond, the oldest are forgotten."""
IPV6_SHARED: Final = 64
"""Leading bits of an IPv6 address that one customer has."""


def bearer(scope: Scope) -> str | None:
    kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None


def is_operator(scope: Scope, token: str | None, given: str | None) -> bool:
    """`token` is the gateway's own, `given` what was sent; compared in constant time."""
    if token is None:
        return is_local(scope) and is_of_this_page(scope)
    return given is not None and hmac.compare_digest(token.encode(), given.encode())


def is_local(scope: Scope) -> bool:
    is_passed_on = any(PASSED_ON.fullmatch(name) for name, _ in scope["headers"])
    return _is_loopback(scope) and host_name(scope) in LOCAL_NAMES and not is_passed_on


def is_called_rightly(scope: Scope, hosts: Collection[str]) -> bool:
    """From this machine: by one of its names, or by one of `hosts` (`*.` stands for any below).

    A browser here is led to 127.0.0.1 by any name whose owner wishes it.
    """
    name = host_name(scope)
    if not _is_loopback(scope) or name in LOCAL_NAMES:
        return True
    return name is not None and any(
        name.endswith(it[1:]) if it.startswith("*.") else name == it.strip("[]")
        for it in map(str.lower, hosts)
    )


def is_of_this_page(scope: Scope) -> bool:
    """Not asked by a page of another origin.

    Browsers say so in a field that no script can set; where they do not (plain HTTP), the origin
    is compared with the name that was asked for.
    """
    headers = Headers(scope=scope)
    if site := headers.get("sec-fetch-site"):
        return site in OWN_SITES
    origin = headers.get("origin")
    return not origin or origin.partition("://")[2].lower() == headers.get("host", "").lower()


def _peer(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def _is_loopback(scope: Scope) -> bool:
    peer = _peer(scope)
    return peer == "::1" or peer.removeprefix("::ffff:").startswith("127.")


def host_name(scope: Scope) -> str | None:
    """Of one Host, and of one that is nothing but a name and a port."""
    told = Headers(scope=scope).getlist("host")
    found = HOST.fullmatch(told[0].lower()) if len(told) == 1 else None
    return found[1].strip("[]") if found is not None else None


class Operators(Sized):
    """Compares tokens, and refuses an address that has sent too many wrong ones."""

    def __init__(self, token: str | None, *, clock: Clock = monotonic) -> None:
        self._token = token
        self._clock = clock
        self._guesses: TtlCache[str, tuple[float, set[int]]] = TtlCache(
            COUNTED_FOR, max_entries=MOST_ADDRESSES, clock=clock
        )
        """By address: since when, and the hashes of its wrong tokens."""

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def admits(self, scope: Scope, given: str | None) -> bool:
        """True for an operator; raises a `Problem` (429) for an address that guesses too often.

        The right token is refused as well then: else a guesser could go on, and see which it is.
        The same wrong token, sent again, is not another guess.
        """
        if self._token is None or given is None:
            return is_operator(scope, self._token, given)
        address, now = address_of(scope), self._clock()
        began_at, wrong = self._guesses.get(address) or (now, set())
        if len(wrong) >= MOST_GUESSES:
            left = f"{max(1, math.ceil(began_at + COUNTED_FOR - now))}"
            said = f"too many wrong tokens from this address; try again in {left} s"
            raise Problem(429, "too_many_guesses", "Too many guesses", said, retry_after=left)
        if is_operator(scope, self._token, given):
            return True
        if not wrong:
            self._guesses.insert(address, (now, wrong))
        wrong.add(hash(given))
        return False

    def __len__(self) -> int:
        """Addresses whose guesses are counted now."""
        return len(self._guesses)


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def address_of(scope: Scope) -> str:
    """The peer; of IPv6 its network. Peers without an address are counted together."""
    peer = _peer(scope)
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), IPV6_SHARED), strict=False))


def checked_token(token: object, name: str = "token") -> str:
    """Never shown, not even where it is wrong."""
    if not isinstance(token, str) or not SECRET.fullmatch(token):
        raise ConfigError(f"{name}: must be printable ASCII text without spaces")
    return token


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """As a browser's Origin header has them: scheme, host, perhaps a port; nothing behind."""
    if isinstance(origins, str):
        raise ConfigError(f"origins: takes a list of origins; write [{origins!r}]")
    found = tuple(origins)
    for origin in found:
        if not isinstance(origin, str) or not _is_origin(origin):
            raise ConfigError(f"origins: write 'https://host' or with a port, not {shown(origin)}")
    return found


def checked_hosts(hosts: Iterable[str] | None) -> tuple[str, ...] | None:
    """Names without a port: example.com, or *.example.com for all below it."""
    if isinstance(hosts, str):
        raise ConfigError(f"hosts: takes a list of names; write [{hosts!r}]")
    found = None if hosts is None else tuple(hosts)
    for host in found or ():
        if not isinstance(host, str) or not NAME.fullmatch(host):
            raise ConfigError(f"hosts: write example.com or *.example.com, not {shown(host)}")
    return found


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_site = parts.scheme in {"http", "https"} and parts.hostname and parts.username is None
        return bool(is_site) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False
