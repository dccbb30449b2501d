"""How long to wait after failures in a row: the pause doubles up to a longest one. Pure."""

from collections.abc import Callable
from typing import Final

MOST_DOUBLINGS: Final = 30
"""After that, any pause has reached its longest, and no float overflows."""


def pause_after(failures: int, *, first: float, longest: float) -> float:
    """Seconds after so many failures: `first` after one, then twice the last, up to `longest`."""
    return min(longest, first * 2.0 ** min(max(failures - 1, 0), MOST_DOUBLINGS))


def spread(pause: float, dice: Callable[[], float]) -> float:
    """Between half and all of it, so that callers that failed together do not return together."""
    return pause * (1 + dice()) / 2
