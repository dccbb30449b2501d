"""A shell that tells of trouble in its own words keeps the log from telling it again (G8, G10)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly(level: int) -> Iterator[None]:
    """Nothing below this level is logged meanwhile; afterwards all is as it was."""
    logger = logging.getLogger("stillfresh")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
