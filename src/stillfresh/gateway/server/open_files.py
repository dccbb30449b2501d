"""The limit of open files: raised at the start, and noted in the log when it is reached.

Every connection is an open file. When there is none left, the event loop drops new connections
without a word, so the server has to find out by itself.
"""

import errno
import logging
import os
import resource
from typing import Final

from stillfresh.clock import Clock, monotonic

CANDIDATES: Final = (1_048_576, 65_536, 10_240)
"""Limits to try if the system refuses its own maximum; macOS allows 10,240 where it says "any"."""
LOOKED_EVERY: Final = 1.0
LOGGED_EVERY: Final = 60.0
"""Seconds."""
USED_UP: Final = frozenset({errno.EMFILE, errno.ENFILE})

logger = logging.getLogger(__name__)


def raise_limit() -> int:
    """Allow this process as many open files as it may have; return how many."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == most:
        return limit
    is_endless = most == resource.RLIM_INFINITY
    lower = [number for number in CANDIDATES if number > limit and (is_endless or number < most)]
    for candidate in [most, *lower]:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (candidate, most))
        except (OSError, ValueError):
            continue
        return candidate
    return limit


class OpenFiles:
    """Finds out whether this process can open another file; `look` is called again and again."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._look_at = clock()
        self._log_at = self._look_at

    def look(self, fd: int) -> None:
        """Log it if no file can be opened now. `fd`: an open file, to be opened once more."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOKED_EVERY
        try:
            os.close(os.dup(fd))
        except OSError as exc:
            if exc.errno in USED_UP and now >= self._log_at:
                self._log_at = now + LOGGED_EVERY
                self._log()

    def _log(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        logger.error(
            "no more files can be opened (the limit is %d), so new connections are dropped; "
            "raise the limit of this process (ulimit -n, or LimitNOFILE= in systemd)",
            limit,
        )
