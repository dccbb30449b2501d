"""Stored values that cannot be decoded: each reason is logged once, and never per value."""

import logging
from typing import Final

from stillfresh.errors import UnreadableValue

MOST_REASONS: Final = 8
"""The most lines that one resource logs; a codec of the caller's may have any number of texts."""
MISFIT: Final = (
    "does not fit the declared type ({}), so it is loaded again. If the type has changed, write "
    "version='2'; if another function uses this name on the same store, rename one of them"
)

logger = logging.getLogger(__name__)


class UnreadableLog:
    """Logs why values of one resource could not be read."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def report(self, kind: str, error: Exception) -> None:
        """A stored value of this resource could not be decoded, and is a miss."""
        if isinstance(error, UnreadableValue):
            reason = str(error)
            text = f"cannot be read, so it is loaded again: {reason}"
        else:  # one reason, whatever was raised: the line says what to do about all of them
            reason = MISFIT
            text = MISFIT.format(type(error).__name__)
        if reason in self._reasons or len(self._reasons) >= MOST_REASONS:
            return
        self._reasons.add(reason)
        logger.warning("%s: a stored value %s", kind, text)
