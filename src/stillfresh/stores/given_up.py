"""Requests for leases that this process has given up, and that may still take a lease.

A request can arrive after its sender has given up, or has sent it again. It then takes the lease,
and nobody loads: all readers would wait until the lease ends. Its token begins with what the sender
drew for it, the *asker*; so the sender's process recognises the lease when it next meets it, and
takes it at once.
"""

import time
from collections.abc import Iterable
from typing import Final

from stillfresh.bounded import BoundedDict

MOST_REMEMBERED: Final = 10_000
REMEMBERED_LONGER: Final = 60.0
"""Seconds beyond the time of the lease: a request may be on its way for so long."""


class GivenUpRequests:
    """The askers of requests that this process no longer waits for."""

    def __init__(self, asker_size: int) -> None:
        """`asker_size`: so many characters of a token are the asker."""
        self._asker_size = asker_size
        self._given_up: BoundedDict[str, float] = BoundedDict(MOST_REMEMBERED)
        """Until when each is remembered, by the monotonic clock."""
        self._sent_again: BoundedDict[str, float] = BoundedDict(MOST_REMEMBERED)
        """The same for requests that were sent twice: this process may hold their lease."""
        self._last_until = 0.0

    def __bool__(self) -> bool:
        """False if no lease can be one that was left behind."""
        return bool(self._given_up) and time.monotonic() < self._last_until

    def give_up(self, askers: Iterable[str], lease_for: float) -> None:
        """Their sender is gone, or got no answer."""
        until = time.monotonic() + lease_for + REMEMBERED_LONGER
        for asker in askers:
            self._remember(asker, until)

    def _remember(self, asker: str, until: float) -> None:
        self._given_up.note(asker, until)
        self._last_until = max(self._last_until, until)

    def note_sent_again(self, askers: Iterable[str], lease_for: float) -> None:
        """The first request of each may arrive after the lease of the second has ended."""
        until = time.monotonic() + lease_for + REMEMBERED_LONGER
        for asker in askers:
            self._sent_again.note(asker, until)

    def note_end(self, token: str) -> None:
        """This process has ended its lease, or has been denied one."""
        asker = token[: self._asker_size]
        until = self._sent_again.pop(asker, None)
        if until is not None:
            self._remember(asker, until)

    def is_left_behind(self, token: str) -> bool:
        """True for the token of a lease under which nobody loads."""
        asker = token[: self._asker_size]
        until = self._given_up.get(asker)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        del self._given_up[asker]
        return False

    def take(self, asker: str, lease_for: float) -> None:
        """The lease is held by this process from now on; its first request may come once more."""
        self._given_up.pop(asker, None)
        self.note_sent_again([asker], lease_for)
