"""The demo's visitors: sessions by a cookie, and requests that wait for approval.

Both are kept in a `TtlCache`. An expired request is absent, so nothing is approved too late;
`remove` hands it to one caller, so nothing is approved twice. Sessions end an hour after their
last use; `sweep` closes what they held open.
"""

import hashlib
import hmac
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from stillfresh.clock import Clock, monotonic
from stillfresh.demo.playing import Playing
from stillfresh.ttl_cache import TtlCache

MOST_VISITORS: Final = 64
KEPT_FOR: Final = "1h"
KEY_LENGTH: Final = 32
AT_ONCE: Final = 3
"""Requests that wait at the same time."""

ASKS: Final = (
    ("The build robot", "wants to publish version 4.2"),
    ("The garden pump", "wants to water the roof for ten minutes"),
    ("The night porter", "wants to open the side door for a courier"),
    ("The travel agent bot", "wants to book seat 14 A"),
    ("The library desk", "wants to lend out the last copy"),
    ("The kitchen bot", "wants to order twelve eggs"),
    ("The archive", "wants to delete logs older than a year"),
)  # fmt: skip


class Approvals:
    """The requests of one visitor. While they are shown, a new one comes every third of the TTL."""

    def __init__(self, ttl: float, dice: random.Random, clock: Clock = monotonic) -> None:
        self._ttl = ttl
        self._clock = clock
        self._last = float("-inf")
        self._asks = cycle(dice.sample(ASKS, len(ASKS)))
        self._decided = 0
        self._pending = TtlCache[str, dict[str, Any]](ttl, max_entries=AT_ONCE, clock=clock)

    def show(self) -> dict[str, Any]:
        """The pending requests, the oldest first, with their remaining time.

        Showing them lets a new one come, if its time has come.
        """
        self._pending.cleanup_expired()
        now = self._clock()
        if now - self._last >= self._ttl / 3 and len(self._pending) < AT_ONCE:
            self._last = now
            key = secrets.token_hex(8)
            who, what = next(self._asks)
            self._pending.insert(
                key, {"id": key, "who": who, "what": what, "until": now + self._ttl}
            )
        pending = [
            {**request, "left": round(max(0.0, request["until"] - now), 2)}
            for _, request in self._pending.items()
        ]
        expired = self._pending.stats().expired
        return {"pending": pending, "ttl": self._ttl, "expired": expired, "decided": self._decided}

    def decide(self, key: str) -> bool:
        """False if it is too late, or it was decided already."""
        is_ours = self._pending.remove(key) is not None
        self._decided += is_ours
        return is_ours


@dataclass(frozen=True, slots=True, eq=False)
class DemoVisitor:
    """`token` is the secret that the cookie holds; `id` is what others may see."""

    id: str
    token: str
    playing: Playing
    approvals: Approvals


@dataclass
class Visitors:
    """The visitors, by token; beyond the limit, the one not seen for longest is dropped.

    `key` signs the tokens; a token that we did not sign is refused.
    """

    playing_of: Callable[[str], Playing]
    approvals_for: float
    dice: random.Random
    key: bytes

    def __post_init__(self) -> None:
        self._left: list[DemoVisitor] = []
        self._sessions = TtlCache[str, DemoVisitor](
            KEPT_FOR,
            max_entries=MOST_VISITORS,
            on_evict=lambda _token, visitor, _reason: self._left.append(visitor),
        )

    def find(self, token: str | None) -> DemoVisitor | None:
        """The visitor of a token, kept for another hour.

        A forgotten one starts again, so that an open page works after a restart.
        """
        if token is None or not self._is_ours(token):
            return None
        return self._visitor_of(token)

    def welcome(self) -> DemoVisitor:
        """A new visitor, with a token of its own."""
        return self._visitor_of(self._sign(secrets.token_urlsafe(24)))

    def _visitor_of(self, token: str) -> DemoVisitor:
        """The visitor of a token, known or new; its session lasts another hour."""
        visitor = self._sessions.get(token)
        if visitor is None:
            id_ = secrets.token_hex(8)
            approvals = Approvals(self.approvals_for, self.dice)
            visitor = DemoVisitor(id_, token, self.playing_of(id_), approvals)
        self._sessions.insert(token, visitor)
        return visitor

    def _sign(self, secret: str) -> str:
        signature = hmac.new(self.key, secret.encode(), hashlib.sha256).hexdigest()
        return f"{secret}.{signature}"

    def _is_ours(self, token: str) -> bool:
        return token.isascii() and hmac.compare_digest(token, self._sign(token.partition(".")[0]))

    def authenticate(self, token: str) -> str | None:
        """For the gateway: the visitor's id for a token."""
        visitor = self.find(token)
        return None if visitor is None else visitor.id

    async def sweep(self) -> None:
        """Close what visitors held open whose session has ended."""
        self._sessions.cleanup_expired()
        while self._left:
            await self._left.pop().playing.close()

    async def close(self) -> None:
        self._left.extend(visitor for _, visitor in self._sessions.items())
        self._sessions.clear()
        await self.sweep()


def key_in(directory: Path) -> bytes:
    """Return the key in this directory, made at the first start; only its owner can read it."""
    file = directory / "visitors.key"
    if file.is_file():
        key = file.read_bytes()
        if len(key) == KEY_LENGTH:
            return key
    file.touch(mode=0o600)
    key = secrets.token_bytes(KEY_LENGTH)
    file.write_bytes(key)
    return key
