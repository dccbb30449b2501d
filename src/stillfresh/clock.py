"""What a clock is: a callable that returns seconds, given as `clock=` to all that need one.

In memory use `monotonic`, which never jumps; for times that are stored or shared use `wall`.
Tests use `stillfresh.testing.ManualClock`.
"""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown

__all__ = ["Clock", "checked_clock", "monotonic", "wall"]

Clock: TypeAlias = Callable[[], float]

monotonic: Final[Clock] = time.monotonic
wall: Final[Clock] = time.time


def checked_clock(clock: Clock) -> Clock:
    """The clock itself; refused where it is none, as when its parentheses were forgotten."""
    if not callable(clock) or not isinstance(clock(), float | int):
        raise ConfigError(f"clock: must be a callable that returns seconds, not {shown(clock)}")
    return clock
