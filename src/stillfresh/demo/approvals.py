"""Requests that wait for the visitor, and are gone when their time is up (G8; seed 002).

A `TtlCache`: expired means absent, so nothing can be approved too late; `remove` hands a request to
exactly one caller, so nothing is approved twice.
"""

import random
import secrets
import time
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.demo.words import ASKS
from stillfresh.durations import Duration, seconds
from stillfresh.ttl_cache import TtlCache

AT_ONCE: Final = 3


@dataclass(frozen=True, slots=True)
class Ask:
    who: str
    what: str
    asked_at: float


class Approvals:
    """Of one visitor. A new request comes while somebody looks, a third of a lifetime apart."""

    def __init__(self, ttl: Duration, dice: random.Random, clock: Clock = time.monotonic) -> None:
        self._ttl = seconds(ttl)
        self._clock = clock
        self._last = float("-inf")
        self._asks = cycle(dice.sample(ASKS, len(ASKS)))
        self.expired = 0
        self.decided = 0
        self._pending = TtlCache[str, Ask](
            ttl, max_entries=AT_ONCE, clock=clock, on_evict=self._missed
        )

    def shown(self) -> dict[str, Any]:
        """What is pending, the oldest first, and how long each has left."""
        self._pending.cleanup_expired()
        now = self._clock()
        if now - self._last >= self._ttl / 3 and len(self._pending) < AT_ONCE:
            self._last = now
            self._pending.insert(secrets.token_hex(8), Ask(*next(self._asks), now))
        pending = [
            {
                "id": key,
                "who": ask.who,
                "what": ask.what,
                "left": round(max(0.0, self._ttl - (now - ask.asked_at)), 2),
            }
            for key, ask in self._pending.items()
        ]
        return {
            "pending": pending,
            "ttl": self._ttl,
            "expired": self.expired,
            "decided": self.decided,
        }

    def decide(self, key: str) -> bool:
        """False: it is too late, or somebody was quicker."""
        is_ours = self._pending.remove(key) is not None
        self.decided += is_ours
        return is_ours

    def _missed(self, _key: str, _ask: Ask, _reason: str) -> None:
        self.expired += 1
