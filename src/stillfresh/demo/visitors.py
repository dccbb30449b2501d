"""Who looks at the demo: sessions by a cookie, bounded, forgotten after an hour unused (G8).

Sessions are a `TtlCache` themselves. What an old one held open is closed by the next `sweep`.
"""

import hashlib
import hmac
import random
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stillfresh.demo.approvals import Approvals
from stillfresh.demo.playing import Playing
from stillfresh.durations import Duration
from stillfresh.ttl_cache import TtlCache

MOST_VISITORS: Final = 64
KEPT_FOR: Final = "1h"
TOKEN: Final = re.compile(r"([\w-]{32})\.([\da-f]{32})", re.ASCII)
"""As we make them: a secret, and our signature."""
KEY_LENGTH: Final = 32


class Visitor:
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
        self._left: list[Visitor] = []
        self._sessions = TtlCache[str, Visitor](
            KEPT_FOR, max_entries=MOST_VISITORS, on_evict=self._leave
        )

    def find(self, token: str | None) -> Visitor | None:
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

    def welcome(self, token: str | None = None) -> Visitor:
        id_, token = secrets.token_hex(8), token or self._new_token()
        approvals = Approvals(self._approvals_for, self._dice)
        visitor = Visitor(id_, token, self._playing_of(id_), approvals)
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

    def _leave(self, _token: str, visitor: Visitor, _reason: str) -> None:
        self._left.append(visitor)


def key_in(directory: Path) -> bytes:
    """The same after a restart on the same directory; for its owner's eyes alone."""
    file = directory / "visitors.key"
    if file.is_file() and len(key := file.read_bytes()) == KEY_LENGTH:
        return key
    file.touch(mode=0o600)
    file.write_bytes(key := secrets.token_bytes(KEY_LENGTH))
    return key
