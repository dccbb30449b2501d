"""The addresses of one site: which of them is asked next, and what is sent to its base path.

Requests take turns over the addresses. An address that cannot be reached is left out for a while,
and one that fails its checks until it passes one. If that is so of all of them, all are asked: a
wrong check must not take a site away. `AddressHealth` is pure; the time is an argument. Needs
`stillfresh[web]`.
"""

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from itertools import count
from typing import Final
from urllib.parse import unquote_to_bytes

from stillfresh.clock import monotonic
from stillfresh.errors import needs
from stillfresh.pages.site_connections import Pool, SiteTls
from stillfresh.pages.site_messages import CannotBePassed, SiteBroken, SiteRequest

with needs("web", "stillfresh.pages.site_addresses"):
    import httpx2

LEFT_OUT_FOR: Final = 10.0
"""Seconds for which an address is left out after a connection to it failed."""
CHECKS_TO_FAIL: Final = 2
"""Checks in a row that an address fails before it is left out."""
CHECK_WITHIN: Final = 5.0
"""Seconds for the answer to a check."""
CONNECT_WITHIN: Final = 3.0
"""Seconds for a connection, if there is another address to ask."""
SEPARATORS: Final = re.compile(rb"[/\\]")
OWN_LINK: Final = re.compile(rb"(?s)((?:https?://([^/?#]+))?)(/(?!/).*|/)")
"""A link with its scheme and host, or without them; and its path."""
COOKIE_PATH: Final = re.compile(rb"(?i)(;[ \t]*path[ \t]*=[ \t]*)([^;]*)")
WELL: Final = range(200, 400)
"""Statuses of an answer to a check that let an address be asked."""

logger = logging.getLogger(__name__)


def leaves_base(target: bytes) -> bool:
    """True if a server could read this path as one outside of the base path.

    A site decodes escapes, some more than once. Some read a backslash as a slash, and some ignore
    what comes after a semicolon.
    """
    path = target.partition(b"?")[0]
    while b"%" in path and (decoded := unquote_to_bytes(path)) != path:
        path = decoded
    segments = SEPARATORS.split(path)
    return any(segment.partition(b";")[0] in {b".", b".."} for segment in segments)


class AddressHealth:
    """Whether an address is asked, from its connections and its checks."""

    def __init__(self) -> None:
        self._left_out_until = -math.inf
        self._failed_checks = 0

    def is_asked(self, now: float) -> bool:
        return self._failed_checks < CHECKS_TO_FAIL and now >= self._left_out_until

    def note_no_connection(self, now: float) -> None:
        self._left_out_until = now + LEFT_OUT_FOR

    def note_answer(self) -> None:
        """A visitor's request was answered."""
        self._left_out_until = -math.inf

    def note_check(self, *, is_well: bool) -> None:
        if is_well:
            self._failed_checks = 0
            self._left_out_until = -math.inf
        else:
            self._failed_checks += 1


class SiteAddress:
    """One address of the site, and the connections to it."""

    def __init__(self, base: httpx2.URL, pool: Pool) -> None:
        self.text = str(base)
        self.host = base.netloc
        self.pool = pool
        self.health = AddressHealth()
        self.is_reached = True
        """False after a failure that the log has named, until it is reached."""
        self._path = base.raw_path.removesuffix(b"/")
        self._origin = f"{base.scheme}://".encode() + base.netloc

    def target(self, target: bytes) -> bytes:
        """What this address is asked for. Raises CannotBePassed for a path beside its own."""
        if not self._path or target == b"*":
            return target
        if not target.startswith(b"/") or leaves_base(target):
            raise CannotBePassed("this path would leave the site's base path")
        return self._path + target

    def as_visited(self, field: tuple[bytes, bytes], host: bytes) -> tuple[bytes, bytes]:
        """A field of the answer, with links and cookies for the paths that visitors know.

        Visitors know neither this address nor its base path. `host`: the one that they asked.
        """
        name, value = field
        if name in {b"location", b"content-location"}:
            return name, self._link(value, host)
        if name == b"set-cookie" and self._path:
            return name, COOKIE_PATH.sub(self._cookie_path, value)
        return field

    def _link(self, link: bytes, host: bytes) -> bytes:
        if link.startswith(self._origin + b"/"):
            path = link.removeprefix(self._origin)
            return _as_path(self._below(path) or path)
        parts = OWN_LINK.fullmatch(link) if self._path else None
        if parts is None or (parts[2] or host).lower() != host.lower():
            return link
        below = self._below(parts[3])
        if below is None:
            return link
        return parts[1] + below if parts[1] else _as_path(below)

    def _below(self, path: bytes) -> bytes | None:
        """The path below the base path; None if it is not there."""
        if not path.startswith(self._path):
            return None
        below = path[len(self._path) :]
        if not below or below[:1] in {b"?", b"#"}:
            return b"/" + below
        return below if below.startswith(b"/") else None

    def _cookie_path(self, match: "re.Match[bytes]") -> bytes:
        path = match[2].rstrip(b" \t")
        return match[1] + (self._below(path) or path)


def _as_path(path: bytes) -> bytes:
    """A path of this host, also if it has a second slash: alone, `//name` names another host."""
    return b"/." + path if SEPARATORS.match(path, 1) else path


class SiteAddresses:
    """All addresses of one site, which take turns."""

    def __init__(self, bases: Sequence[httpx2.URL], timeout: float, tls: SiteTls) -> None:
        within = timeout
        if len(bases) > 1:
            within = min(CONNECT_WITHIN, timeout / len(bases))
        self._timeout = timeout
        self.all = [SiteAddress(base, Pool(base, timeout, tls, within)) for base in bases]
        self._turns = count()

    def in_turn(self, now: float) -> list[SiteAddress]:
        """The order in which one request asks them; those that are left out come last."""
        if len(self.all) == 1:
            return self.all
        usable = [address for address in self.all if address.health.is_asked(now)]
        left_out = [address for address in self.all if not address.health.is_asked(now)]
        turn = next(self._turns)
        return [*_rotated(usable, turn), *_rotated(left_out, turn)]

    def states(self) -> dict[str, bool]:
        """Each address, and whether it is asked now."""
        now = monotonic()
        return {address.text: address.health.is_asked(now) for address in self.all}

    async def check_all(self, path: str, every: float, host: bytes | None) -> None:
        """Check all addresses again and again, until this is cancelled."""
        while True:
            await asyncio.gather(*(self._check(address, path, host) for address in self.all))
            await asyncio.sleep(every)

    async def _check(self, address: SiteAddress, path: str, host: bytes | None) -> None:
        before = address.health.is_asked(monotonic())
        fault = await self._fault(address, path, host)
        address.health.note_check(is_well=fault is None)
        is_asked = address.health.is_asked(monotonic())
        if before and not is_asked:
            logger.warning("%s: fails its check, and is left out: %s", address.text, fault)
        elif is_asked and not before:
            logger.warning("%s: passes its check, and is asked again", address.text)

    async def _fault(self, address: SiteAddress, path: str, host: bytes | None) -> str | None:
        """Why the address failed a check; None if it passed."""
        fields = (
            (b"host", host or address.host),
            (b"user-agent", b"stillfresh"),
            (b"connection", b"close"),
        )
        request = SiteRequest("GET", address.target(path.encode("ascii")), fields)
        within = min(CHECK_WITHIN, self._timeout)
        try:
            async with asyncio.timeout(within):
                connection = await address.pool.take(is_new=True)
                try:
                    answer = await connection.ask(request, None)
                finally:
                    connection.close()
        except TimeoutError:
            return f"no answer within {within:g} s"
        except SiteBroken as exc:
            return str(exc)
        return None if answer.status_code in WELL else f"it answers {answer.status_code} to {path}"

    def close(self) -> None:
        for address in self.all:
            address.pool.close()


def _rotated(addresses: list[SiteAddress], turn: int) -> list[SiteAddress]:
    """The same addresses, beginning with another one at each turn."""
    if not addresses:
        return addresses
    first = turn % len(addresses)
    return [*addresses[first:], *addresses[:first]]
