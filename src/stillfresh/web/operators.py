"""Recognise an operator, and limit guesses at the token by address (G6, G12).

The address is the connection's peer. `X-Forwarded-For` is not read: anybody can write it, so a
guesser would have a new address for each guess.
"""

import math
from collections.abc import Sized
from ipaddress import IPv6Address, ip_address, ip_network
from time import monotonic
from typing import Final

from starlette.types import Scope

from stillfresh.clock import Clock
from stillfresh.ttl_cache import TtlCache
from stillfresh.web.guard import is_operator
from stillfresh.web.replies import Problem

MOST_GUESSES: Final = 10
"""Wrong tokens of one address in `COUNTED_FOR` seconds."""
COUNTED_FOR: Final = 60.0
MOST_ADDRESSES: Final = 10_000
"""Addresses whose guesses are counted; beyond, the oldest are forgotten."""
IPV6_SHARED: Final = 64
"""Leading bits of an IPv6 address that one customer has."""


class Guesses:
    """The wrong tokens of one address, by their hashes."""

    __slots__ = ("began_at", "wrong")

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.wrong: set[int] = set()


class Operators(Sized):
    """Compares tokens, and refuses an address that has sent too many wrong ones."""

    def __init__(self, token: str | None, *, clock: Clock = monotonic) -> None:
        self._token = token
        self._clock = clock
        self._guesses: TtlCache[str, Guesses] = TtlCache(
            COUNTED_FOR, max_entries=MOST_ADDRESSES, clock=clock
        )

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
        address = address_of(scope)
        guesses = self._guesses.get(address)
        if guesses is not None and len(guesses.wrong) >= MOST_GUESSES:
            raise self._refused(guesses)
        if is_operator(scope, self._token, given):
            return True
        if guesses is None:
            guesses = Guesses(self._clock())
            self._guesses.insert(address, guesses)
        guesses.wrong.add(hash(given))
        return False

    def __len__(self) -> int:
        """Addresses whose guesses are counted now."""
        return len(self._guesses)

    def _refused(self, guesses: Guesses) -> Problem:
        left = max(1, math.ceil(guesses.began_at + COUNTED_FOR - self._clock()))
        said = f"too many wrong tokens from this address; try again in {left} s"
        return Problem(429, "too_many_guesses", "Too many guesses", said, retry_after=f"{left}")


def address_of(scope: Scope) -> str:
    """The peer; of IPv6 its network. Peers without an address are counted together."""
    peer = str((scope.get("client") or ("",))[0])
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), IPV6_SHARED), strict=False))
