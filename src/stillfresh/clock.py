"""What a clock is: a callable that returns seconds, given as `clock=` to all that need one.

In memory use `monotonic`, which never jumps; for times that are stored or shared use `wall`.
Tests use `stillfresh.testing.ManualClock`.
"""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

__all__ = ["Clock", "monotonic", "wall"]

Clock: TypeAlias = Callable[[], float]

monotonic: Final[Clock] = time.monotonic
wall: Final[Clock] = time.time
