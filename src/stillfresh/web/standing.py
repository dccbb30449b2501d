"""Whose token a live session holds, and whether it still holds good (G12).

The application's hook is asked again at least every minute, and before each subscription to a
per-viewer kind. When to ask is decided in `rules_live.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

from stillfresh.clock import Clock
from stillfresh.errors import StillfreshError
from stillfresh.web.rules_live import Limits, has_lapsed, is_check_due

ViewerOf = Callable[[str], Awaitable[str | None]]
"""The viewer that a token belongs to; None for a token that belongs to nobody."""


class SignInFailed(StillfreshError):
    """Nobody can sign in with this token."""


class SignInUnavailable(SignInFailed):
    """Nobody could say whose the token is: the hook failed, or took too long."""


class Checked(StrEnum):
    """What a check found out."""

    GOOD = "good"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


class Standing:
    """One session's token, from the sign-in to the sign-out."""

    def __init__(self, viewer_of: ViewerOf, limits: Limits, clock: Clock) -> None:
        self._viewer_of = viewer_of
        self._limits = limits
        self._clock = clock
        self._token: str | None = None
        self._viewer_id: str | None = None
        self._asked_at = 0.0
        self._confirmed_at = 0.0
        self._spared_until = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    async def sign_in(self, token: str) -> str | None:
        """The token's viewer; None, and nothing changes, if it belongs to nobody."""
        asked_at = self._clock()
        viewer_id = await self._viewer_of(token)
        if viewer_id is not None:
            self._token, self._viewer_id = token, viewer_id
            self._asked_at = self._confirmed_at = asked_at
            self._spared_until = 0.0
        return viewer_id

    def sign_out(self) -> None:
        self._token = self._viewer_id = None

    def is_due(self, now: float) -> bool:
        """The token has to be checked, and no check is under way."""
        is_held = self._token is not None and self._idle.is_set()
        return is_held and is_check_due(self._asked_at, self._limits, now)

    def has_lapsed(self, now: float) -> bool:
        """Nobody has confirmed the token for too long."""
        return self._token is not None and has_lapsed(self._confirmed_at, self._limits, now)

    async def check(self) -> Checked:
        """Ask whose the token is now; one check at a time, each bounded by the hook's time limit.

        A check that begins while another one is under way waits for it, and then asks as well: the
        token may have been revoked after the first one began. After a check that failed, nobody is
        asked for as long as it took: a hook that hangs holds up what is for all half of the time.
        """
        while not self._idle.is_set():
            await self._idle.wait()
        if (token := self._token) is None:
            return Checked.GOOD
        if self._clock() < self._spared_until:
            return Checked.UNKNOWN
        self._idle.clear()
        self._asked_at = asked_at = self._clock()
        try:
            viewer_id = await self._viewer_of(token)
        except SignInFailed:
            now = self._clock()
            self._spared_until = now + (now - asked_at)
            return Checked.UNKNOWN
        finally:
            self._idle.set()
        if token != self._token:  # signed in anew, or out, while this one was asked about
            return Checked.GOOD
        if viewer_id != self._viewer_id:
            return Checked.REVOKED
        self._confirmed_at = asked_at
        return Checked.GOOD
