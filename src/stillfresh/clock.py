"""A clock is a callable that returns seconds, given as `clock=` to everything that needs one.

In memory use `monotonic`, which never jumps; for times that are stored or shared use `wall`.
Tests use `stillfresh.testing.ManualClock`.
"""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown

__all__ = ["Clock", "checked_clock", "monotonic", "wall"]

Clock: TypeAlias = Callable[[], float]
"""A callable that returns seconds, such as `time.time`."""

monotonic: Final[Clock] = time.monotonic
"""Seconds that never jump. For times that stay in this process."""
wall: Final[Clock] = time.time
"""Seconds since 1970. For times that are stored or shared."""


def checked_clock(clock: Clock) -> Clock:
    """Return the clock. Raise ConfigError if it is not a callable that returns seconds."""
    if not callable(clock) or not isinstance(clock(), float | int):
        raise ConfigError(f"clock: must be a callable that returns seconds, not {shown(clock)}")
    return clock
