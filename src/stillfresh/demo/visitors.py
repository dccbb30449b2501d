"""The demo's visitors: sessions by a cookie, and requests that wait for approval (G8; seed 002).

Both are kept in a `TtlCache`. An expired request is absent, so nothing is approved too late;
`remove` hands it to one caller, so nothing is approved twice. Sessions end an hour after their
last use; `sweep` closes what they held open.
"""

import hashlib
import hmac
import random
import re
import secrets
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

from stillfresh.clock import Clock, monotonic
from stillfresh.demo.playing import Playing
from stillfresh.durations import Duration, seconds
from stillfresh.ttl_cache import TtlCache

MOST_VISITORS: Final = 64
KEPT_FOR: Final = "1h"
TOKEN: Final = re.compile(r"([\w-]{32})\.([\da-f]{32})", re.ASCII)
"""As we make them: a secret, and our signature."""
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


class Approval(NamedTuple):
    who: str
    what: str
    asked_at: float


class Approvals:
    """Of one visitor. A new request comes while somebody looks, a third of a lifetime apart."""

    def __init__(self, ttl: Duration, dice: random.Random, clock: Clock = monotonic) -> None:
        self._ttl = seconds(ttl)
        self._clock = clock
        self._last = float("-inf")
        self._asks = cycle(dice.sample(ASKS, len(ASKS)))
        self.expired = 0
        self.decided = 0
        self._pending = TtlCache[str, Approval](
            ttl, max_entries=AT_ONCE, clock=clock, on_evict=self._missed
        )

    def shown(self) -> dict[str, Any]:
        """What is pending, the oldest first, and how long each has left."""
        self._pending.cleanup_expired()
        now = self._clock()
        if now - self._last >= self._ttl / 3 and len(self._pending) < AT_ONCE:
            self._last = now
            self._pending.insert(secrets.token_hex(8), Approval(*next(self._asks), now))
        pending = [
            {"id": key, "who": it.who, "what": it.what, "left": self._left(it, now)}
            for key, it in self._pending.items()
        ]
        counts = {"expired": self.expired, "decided": self.decided}
        return {"pending": pending, "ttl": self._ttl, **counts}

    def _left(self, request: Approval, now: float) -> float:
        return round(max(0.0, self._ttl - (now - request.asked_at)), 2)

    def decide(self, key: str) -> bool:
        """False: it is too late, or somebody was quicker."""
        is_ours = self._pending.remove(key) is not None
        self.decided += is_ours
        return is_ours

    def _missed(self, _key: str, _request: Approval, _reason: str) -> None:
        self.expired += 1


class DemoVisitor:
    """`token` is the secret that the cookie holds; `id` is what others may see."""

    def __init__(self, id_: str, token: str, playing: Playing, approvals: Approvals) -> None:
        self.id = id_
        self.token = token
        self.playing = playing
        self.approvals = approvals


class Visitors:
    """By token; a new one beyond the limit ends the one that was longest away.

    `key` signs the tokens: one that we did not make is nobody's.
    """

    def __init__(
        self,
        playing_of: Callable[[str], Playing],
        approvals_for: Duration,
        dice: random.Random,
        key: bytes,
    ) -> None:
        self._key = key
        self._playing_of = playing_of
        self._approvals_for = approvals_for
        self._dice = dice
        self._left: list[DemoVisitor] = []
        self._sessions = TtlCache[str, DemoVisitor](
            KEPT_FOR, max_entries=MOST_VISITORS, on_evict=self._leave
        )

    def find(self, token: str | None) -> DemoVisitor | None:
        """Seen again: kept for another hour. One that was forgotten begins anew: its page is open,
        and goes on after a restart.
        """
        if token is None or not self._is_ours(token):
            return None
        visitor = self._sessions.get(token)
        if visitor is None:
            return self.welcome(token)
        self._sessions.insert(token, visitor)
        return visitor

    def welcome(self, token: str | None = None) -> DemoVisitor:
        id_, token = secrets.token_hex(8), token or self._new_token()
        approvals = Approvals(self._approvals_for, self._dice)
        visitor = DemoVisitor(id_, token, self._playing_of(id_), approvals)
        self._sessions.insert(token, visitor)
        return visitor

    def _new_token(self) -> str:
        secret = secrets.token_urlsafe(24)
        return f"{secret}.{self._signature(secret)}"

    def _is_ours(self, token: str) -> bool:
        found = TOKEN.fullmatch(token)
        return found is not None and hmac.compare_digest(found[2], self._signature(found[1]))

    def _signature(self, secret: str) -> str:
        return hmac.new(self._key, secret.encode(), hashlib.sha256).hexdigest()[:32]

    def authenticate(self, token: str) -> str | None:
        """For the gateway: whose connection it is."""
        visitor = self.find(token)
        return None if visitor is None else visitor.id

    async def sweep(self) -> None:
        self._sessions.cleanup_expired()
        while self._left:
            await self._left.pop().playing.close()

    async def close(self) -> None:
        self._left.extend(visitor for _, visitor in self._sessions.items())
        self._sessions.clear()
        await self.sweep()

    def _leave(self, _token: str, visitor: DemoVisitor, _reason: str) -> None:
        self._left.append(visitor)


def key_in(directory: Path) -> bytes:
    """The same after a restart on the same directory; for its owner's eyes alone."""
    file = directory / "visitors.key"
    if file.is_file() and len(key := file.read_bytes()) == KEY_LENGTH:
        return key
    file.touch(mode=0o600)
    file.write_bytes(key := secrets.token_bytes(KEY_LENGTH))
    return key
