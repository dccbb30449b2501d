"""A program that reports errors itself keeps the log from repeating them (G8, G10)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly(level: int) -> Iterator[None]:
    """Inside the block, stillfresh logs nothing below this level."""
    logger = logging.getLogger("stillfresh")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
