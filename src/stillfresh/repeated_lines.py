"""Lines of a log that may come by the hundred a second, for example while a site is down.

The first ones are written at once, so that a few different failures are all seen. After that, one
line every ten seconds is written, which says how many like it were left out.
"""

import logging
from typing import Final

AT_ONCE: Final = 20
EVERY: Final = 10.0
"""Seconds between two lines, if more than that come."""


class RepeatedLines:
    """Warnings of one sort. Used by one thread at a time."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._allowed = float(AT_ONCE)
        """Lines that may be written at once; it grows by one in each `EVERY` seconds."""
        self._counted_at = 0.0
        self._left_out = 0

    def warn(self, now: float, line: str) -> None:
        passed = max(0.0, now - self._counted_at)  # a clock that was set back gives nothing
        self._counted_at = now
        self._allowed = min(AT_ONCE, self._allowed + passed / EVERY)
        if self._allowed < 1:
            self._left_out += 1
            return
        self._allowed -= 1
        if self._left_out:
            line = f"{line}; {self._left_out:,} more like it were left out"
            self._left_out = 0
        self._logger.warning("%s", line)
