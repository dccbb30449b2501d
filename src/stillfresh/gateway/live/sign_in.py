"""The token of a live session, and whether it is still valid.

The application's hook is asked again at least every minute, and before each subscription to a
per-viewer kind.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from stillfresh.clock import Clock
from stillfresh.errors import StillfreshError, shown
from stillfresh.gateway.live.messages import Code

Authenticate: TypeAlias = Callable[[str], str | Awaitable[str | None] | None]
"""The application's hook: the viewer that a token belongs to, or None."""

SIGN_IN_TIMEOUT: Final = 5.0
CHECK_EVERY: Final = 45.0
"""Seconds between two checks of a token: with the hook's 5 s, and 5 s between two looks for tokens
to check, a revoked token is noticed within a minute."""
UNCONFIRMED_FOR: Final = 300.0
"""Seconds that viewers stay signed in while the hook fails."""

logger = logging.getLogger(__name__)


class SignInFailed(StillfreshError):
    """The token is not valid, or the hook failed or was slow."""

    def __init__(
        self, why: str, code: Code = "sign_in_unavailable", *, is_bad: bool = False
    ) -> None:
        super().__init__(why)
        self.code = code
        self.is_bad = is_bad
        """True if it is the viewer's mistake."""


async def ask_hook(authenticate: Authenticate, token: str) -> str | None:
    """The result of the application's hook, within a time limit."""
    async with asyncio.timeout(SIGN_IN_TIMEOUT):
        viewer_id = authenticate(token)
        return await viewer_id if inspect.isawaitable(viewer_id) else viewer_id


class Tokens:
    """The application's hook, within a time limit."""

    def __init__(self, authenticate: Authenticate | None, clock: Clock) -> None:
        self.clock = clock
        self._authenticate = authenticate
        self._is_failing = False

    async def sign_in(self, token: str) -> "SignIn":
        """The viewer's id. SignInFailed if the token is not valid, or the hook failed."""
        asked_at = self.clock()
        if (viewer_id := await self.viewer_of(token)) is None:
            raise SignInFailed("this token is not valid", "sign_in_failed", is_bad=True)
        return SignIn(self, token, viewer_id, asked_at)

    async def viewer_of(self, token: str) -> str | None:
        """Ask the hook; None for a token that is not valid."""
        if self._authenticate is None:
            raise SignInFailed("this server has no sign-in", "sign_in_failed")
        try:
            viewer_id = await ask_hook(self._authenticate, token)
            if viewer_id is not None and (not isinstance(viewer_id, str) or not viewer_id):
                _refuse(viewer_id)
        except Exception as exc:
            if not self._is_failing:  # log once, not for each viewer every minute
                logger.exception("authenticate failed")
            self._is_failing = True
            raise SignInFailed("signing in failed; try again later") from exc
        self._is_failing = False
        return viewer_id


class SignIn:
    """One viewer's token, from the sign-in to the sign-out."""

    def __init__(self, tokens: Tokens, token: str, viewer_id: str, asked_at: float) -> None:
        self.viewer_id = viewer_id
        self._tokens = tokens
        self._token = token
        self._asked_at = self._confirmed_at = asked_at
        self._spared_until = 0.0
        self._checking = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        """True if the token must be checked, and no check is running."""
        return not self._checking.locked() and now - self._asked_at >= CHECK_EVERY

    def has_lapsed(self, now: float) -> bool:
        """True if the token was not confirmed for too long."""
        return now - self._confirmed_at >= UNCONFIRMED_FOR

    async def check(self) -> bool:
        """Ask whose the token is now; SignInFailed if nobody could say.

        One check at a time: one that begins while another is under way waits for it, and then asks
        as well, since the token may have been revoked after the first one began. After a check that
        failed, nobody is asked for as long as it took: so a hook that hangs delays the viewer's
        public subscriptions at most half of the time.
        """
        async with self._checking:
            clock = self._tokens.clock
            asked_at = clock()
            if asked_at < self._spared_until:
                raise SignInFailed("signing in failed a moment ago; try again later")
            self._asked_at = asked_at
            try:
                is_good = await self._tokens.viewer_of(self._token) == self.viewer_id
            except SignInFailed:
                now = clock()
                self._spared_until = now + (now - asked_at)
                raise
            if is_good:
                self._confirmed_at = asked_at
            return is_good


def _refuse(viewer_id: object) -> None:
    raise TypeError(f"authenticate: must return a viewer's id or None, not {shown(viewer_id)}")
