"""Decide whether a request is an operator's: by its token, or because it comes from this machine.

Without a token only loopback peers under a loopback name are operators: a page of another site that
points its own name at 127.0.0.1 comes with its own Host. A request that a proxy passed on is not
local either: its peer is this machine, its visitor is not.

Guesses at the token are limited by the address of the client: that of the connection, or if
a trusted proxy made the connection, the last one in `X-Forwarded-For` that is no proxy. What others
write there is not believed: a guesser would have a new address for each guess.
"""

import hmac
import math
import mmap
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from struct import Struct
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from stillfresh.clock import Clock, monotonic
from stillfresh.errors import ConfigError, shown
from stillfresh.gateway.live.messages import is_allowed_origin
from stillfresh.gateway.replies import Problem
from stillfresh.http.fields import members, values
from stillfresh.pages.edge import Networks, is_allowed, is_trusted, peer_of

SECRET: Final = re.compile(r"[\x21-\x7e]+")
"""The characters of a token: all that a header field can carry."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 (to be compared with)
HOST: Final = re.compile(r"(\[[\da-f:.]+\]|[^\s:@/?#\[\]]+)(:\d*)?", re.ASCII)
PASSED_ON: Final = re.compile(
    rb"forwarded|via|cdn-loop|cf-ray|x-(url-)?scheme|x-(invoke|matched)-path|x-(envoy|original)-.*"
    rb"|x-forwarded.*|.*-(client|connecting|real|remote)-?(ip|addr).*"
)
"""Fields that show that a proxy passed the request on, even if empty."""
OWN_SITES: Final = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of this page's own requests, and of an address typed in."""
NAME: Final = re.compile(r"(\*\.)?[\w.-]+|\[?[\da-fA-F:.]+(%\w+)?\]?")
MOST_GUESSES: Final = 10
"""Wrong tokens of one address in `COUNTED_FOR` seconds."""
COUNTED_FOR: Final = 60.0
MOST_ADDRESSES: Final = 8_192
"""Places for addresses whose guesses are counted."""
SHARED_BY: Final = 16
"""Places that an address may have. If all are taken, it takes over the one that began first. With
one each, two addresses could take turns, and guess without end."""
ADDRESS_SLOT: Final = Struct(f"qd{MOST_GUESSES}I")
"""The hash of an address, the time of its first wrong token, and the hashes of its wrong tokens."""
BEGINNING: Final = Struct("qdI")
PORT: Final = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d+)?")
"""An address in `X-Forwarded-For`; some proxies add a port."""
IPV6_SHARED: Final = 64
"""Leading bits of an IPv6 address that one customer has."""


def bearer(scope: Scope) -> str | None:
    kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None


def is_local(scope: Scope) -> bool:
    is_passed_on = any(PASSED_ON.fullmatch(name) for name, _ in scope["headers"])
    return _is_loopback(scope) and host_name(scope) in LOCAL_NAMES and not is_passed_on


def is_called_rightly(scope: Scope, hosts: Collection[str]) -> bool:
    """True unless a request from this machine uses a name that is neither local nor in `hosts`.

    The owner of any name can lead a browser here to 127.0.0.1. `*.name` allows all names below it.
    """
    name = host_name(scope)
    if not _is_loopback(scope) or name in LOCAL_NAMES:
        return True
    return name is not None and is_allowed(name, hosts)


def is_of_this_page(scope: Scope) -> bool:
    """Not asked by a page of another origin.

    Browsers say so in a field that no script can set; where they do not (plain HTTP), the origin
    is compared with the name that was asked for.
    """
    headers = Headers(scope=scope)
    if site := headers.get("sec-fetch-site"):
        return site in OWN_SITES
    return is_allowed_origin(headers.get("origin", ""), headers.get("host", ""), ())


def _is_loopback(scope: Scope) -> bool:
    peer = peer_of(scope) or ""
    return peer == "::1" or peer.removeprefix("::ffff:").startswith("127.")


def host_name(scope: Scope) -> str | None:
    """The name in one Host that is nothing but a name and a port."""
    hosts = values(scope["headers"], b"host")
    return _name_in(hosts[0]) if len(hosts) == 1 else None


@lru_cache(maxsize=64)  # every request for a page asks
def _name_in(host: bytes) -> str | None:
    match = HOST.fullmatch(host.decode("latin-1").lower())
    return match[1].strip("[]") if match is not None else None


class Guesses:
    """Wrong tokens by address, in memory that processes share if it is made before they fork.

    Nobody waits: of two guesses at the same moment in two processes one may not be counted.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MOST_ADDRESSES * ADDRESS_SLOT.size)

    def of(self, address: str, now: float) -> tuple[float, list[int]]:
        """Since when, and the hashes of the tokens; none after `COUNTED_FOR`."""
        owner, began_at, *tokens = ADDRESS_SLOT.unpack_from(self._memory, self._place(address, now))
        is_counted = owner == hash(address) and _is_counted(began_at, now)
        wrong = [token for token in tokens if token] if is_counted else []
        return (began_at if wrong else now), wrong

    def add(self, address: str, given: str, now: float) -> None:
        """The same token, sent again, is not another guess."""
        began_at, wrong = self.of(address, now)
        tokens = [*dict.fromkeys([*wrong, hash(given) & 0xFFFFFFFF or 1])][:MOST_GUESSES]
        tokens += [0] * (MOST_GUESSES - len(tokens))
        ADDRESS_SLOT.pack_into(
            self._memory, self._place(address, now), hash(address), began_at, *tokens
        )

    def _place(self, address: str, now: float) -> int:
        """Its own place; else a free one; else the one that began first."""

        def rank(at: int) -> tuple[bool, float]:
            owner, began_at, guessed = BEGINNING.unpack_from(self._memory, at)
            is_free = not guessed or not _is_counted(began_at, now)
            return owner != hash(address), -1.0 if is_free else began_at

        first = hash(address) % (MOST_ADDRESSES // SHARED_BY) * SHARED_BY
        places = (at * ADDRESS_SLOT.size for at in range(first, first + SHARED_BY))
        return min(places, key=rank)


def _is_counted(began_at: float, now: float) -> bool:
    return began_at <= now < began_at + COUNTED_FOR


class Operators:
    """Compares tokens, and refuses an address that has sent too many wrong ones."""

    def __init__(self, token: str | None, *, clock: Clock = monotonic) -> None:
        self._token = token
        self._clock = clock
        self.guesses = Guesses()
        self.trusted: Networks = ()
        """Proxies whose `X-Forwarded-For` is trusted."""

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def admits(self, scope: Scope, given: str | None) -> bool:
        """True for an operator; raises a `Problem` (429) for an address that guesses too often.

        The right token is then refused too: otherwise a guesser would see which one is right.
        """
        if self._token is None:
            return is_local(scope) and is_of_this_page(scope)
        if given is None:
            return False
        address = address_of(scope, self.trusted)
        now = self._clock()
        began_at, wrong = self.guesses.of(address, now)
        if len(wrong) >= MOST_GUESSES:
            left = f"{max(1, math.ceil(began_at + COUNTED_FOR - now))}"
            why = f"too many wrong tokens from this address; try again in {left} s"
            raise Problem(429, "too_many_guesses", "Too many wrong tokens", why, retry_after=left)
        if hmac.compare_digest(self._token.encode(), given.encode()):
            return True
        self.guesses.add(address, given, now)
        return False


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def address_of(scope: Scope, trusted: Networks = ()) -> str:
    """The client's address; for IPv6 its network. Peers without an address count together."""
    own = peer = peer_of(scope) or ""
    if is_trusted(peer, trusted):
        passed_on = members(values(scope["headers"], b"x-forwarded-for"))
        senders = (_without_port(sender.decode("latin-1")) for sender in reversed(passed_on))
        peer = next((sender for sender in senders if not is_trusted(sender, trusted)), peer)
    try:
        address = ip_address(peer)
    except ValueError:
        return own
    if not isinstance(address, IPv6Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), IPV6_SHARED), strict=False))


def _without_port(sender: str) -> str:
    match = PORT.fullmatch(sender)
    if match is None:
        return sender
    return match[1] or match[2] or ""


def checked_token(token: object, name: str = "token") -> str:
    """Check a token; it is never shown, even if it is wrong."""
    if not isinstance(token, str) or not SECRET.fullmatch(token):
        raise ConfigError(f"{name}: must be printable ASCII text without spaces")
    return token


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """As in a browser's Origin header: scheme, host, perhaps a port, nothing else."""
    if isinstance(origins, str):
        raise ConfigError(f"origins: takes a list of origins; write [{origins!r}]")
    checked = tuple(origins)
    for origin in checked:
        if not isinstance(origin, str) or not _is_origin(origin):
            raise ConfigError(f"origins: write 'https://host' or with a port, not {shown(origin)}")
    return checked


def checked_hosts(hosts: Iterable[str] | None) -> tuple[str, ...] | None:
    """Names without a port: example.com, or *.example.com for all below it. In one form."""
    if isinstance(hosts, str):
        raise ConfigError(f"hosts: takes a list of names; write [{hosts!r}]")
    if hosts is None:
        return None
    names = tuple(hosts)
    for host in names:
        if not isinstance(host, str) or not NAME.fullmatch(host):
            raise ConfigError(f"hosts: write example.com or *.example.com, not {shown(host)}")
    return tuple(host.lower().strip("[]") for host in names)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_site = parts.scheme in {"http", "https"} and parts.hostname and parts.username is None
        return bool(is_site) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False
