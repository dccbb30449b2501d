"""Who looks at the demo: sessions by a cookie, bounded, forgotten after an hour unused (G8).

Sessions are a `TtlCache` themselves. What an old one held open is closed by the next `sweep`.
"""

import random
import re
import secrets
from collections.abc import Callable
from typing import Final

from stillfresh.demo.approvals import Approvals
from stillfresh.demo.playing import Playing
from stillfresh.durations import Duration
from stillfresh.ttl_cache import TtlCache

__all__ = ["MOST_VISITORS", "Visitor", "Visitors"]

MOST_VISITORS: Final = 64
KEPT_FOR: Final = "1h"
TOKEN: Final = re.compile(r"[\w-]{32}", re.ASCII)
"""As we make them."""


class Visitor:
    """`token` is the secret that the cookie holds; `id` is what others may see."""

    def __init__(self, id_: str, token: str, playing: Playing, approvals: Approvals) -> None:
        self.id = id_
        self.token = token
        self.playing = playing
        self.approvals = approvals


class Visitors:
    """By token; a new one beyond the limit ends the oldest."""

    def __init__(
        self, playing_of: Callable[[str], Playing], approvals_for: Duration, dice: random.Random
    ) -> None:
        self._playing_of = playing_of
        self._approvals_for = approvals_for
        self._dice = dice
        self._left: list[Visitor] = []
        self._sessions = TtlCache[str, Visitor](
            KEPT_FOR, max_entries=MOST_VISITORS, on_evict=self._leave
        )

    def find(self, token: str | None) -> Visitor | None:
        """Seen again: kept for another hour. One that was forgotten begins anew: its page is open,
        and goes on after a restart.
        """
        if token is None or not TOKEN.fullmatch(token):
            return None
        visitor = self._sessions.get(token)
        if visitor is None:
            return self.welcome(token)
        self._sessions.insert(token, visitor)
        return visitor

    def welcome(self, token: str | None = None) -> Visitor:
        id_, token = secrets.token_hex(8), token or secrets.token_urlsafe(24)
        approvals = Approvals(self._approvals_for, self._dice)
        visitor = Visitor(id_, token, self._playing_of(id_), approvals)
        self._sessions.insert(token, visitor)
        return visitor

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

    def _leave(self, _token: str, visitor: Visitor, _reason: str) -> None:
        self._left.append(visitor)
