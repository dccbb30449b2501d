"""The newest stamp that this process has heard from a PostgreSQL server: the fence of its puts.

A put, an invalidation and a deletion carry the newest stamp that their sender has heard, and the
life of the server in which it was given out. The server does nothing to an entry that has changed
since. A stamp that is too low is safe, and costs one more round trip. One that is too high would
not be: so the server refuses a stamp of another life, or one that it has not given out.
"""

import time

from stillfresh.stores.postgres.schema import GOOD_FOR


class LastHeard:
    """The newest stamp, its life, and the server's time."""

    def __init__(self) -> None:
        self.life: int | None = None
        self.stamp = 0
        self._server_is_ahead: float | None = None
        """Seconds between the server's clock and the monotonic clock of this process."""

    def hear(self, life: int | None, stamp: int, now: float) -> None:
        """Take what the server says of itself, also if the stamp is lower than the last one."""
        self.life = life
        self.stamp = stamp
        self._server_is_ahead = now - time.monotonic()

    def hear_stamp(self, stamp: int) -> None:
        """Take the stamp of an entry or a change, if it is newer."""
        self.stamp = max(self.stamp, stamp)

    def good_until(self) -> float:
        """Until when the server may insert what is put now; the past if its time is not known.

        The answer took a while to arrive, so the server's clock is not behind what is added here.
        """
        if self._server_is_ahead is None:
            return 0.0
        return self._server_is_ahead + time.monotonic() + GOOD_FOR
