"""The circuit breaker of a store: after a failure, one step tries the server after each pause.

Pure: `now` is an argument. While a server is unavailable, one step at a time waits for it, and all
others fail at once. The first step that succeeds ends that.
"""

from typing import Final

from stillfresh.backoff import pause_after

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
TRIED_AGAIN: Final = f"stillfresh tries it again within {LONGEST_PAUSE:g} s"
"""The end of an error of a store that is unavailable."""


class Breaker:
    """Closed while the server works; after a failure it lets one step through after each pause."""

    def __init__(self) -> None:
        self.is_open = False
        self._failures = 0
        self._pause = self._opened_at = self._next_at = 0.0

    def allows(self, now: float) -> bool:
        """True if a step may ask the server. After that no other may until the pause is over."""
        if self.is_open and now < self._next_at:
            return False
        self._next_at = now + self._pause
        return True

    def is_overtaken(self, began: float) -> bool:
        """True if a step that began then would only repeat a failure that is known by now."""
        return self.is_open and began < self._opened_at

    def failed(self, began: float, now: float) -> None:
        """Steps that began together count once."""
        if self.is_overtaken(began):
            return
        self.is_open = True
        self._failures += 1
        self._pause = pause_after(self._failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        self._opened_at = now
        self._next_at = now + self._pause

    def succeeded(self) -> None:
        self.is_open = False
        self._failures = 0
