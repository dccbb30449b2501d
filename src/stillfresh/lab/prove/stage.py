"""A store under proof, and its faults, which begin, last for a while, and end."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

Fault: TypeAlias = Callable[[random.Random], AbstractContextManager[None]]


@dataclass
class Stage:
    """A store's address and the faults that are its own."""

    url: str
    """Of an HTTP cache: its socket."""
    faults: Mapping[str, Fault]
    count: int = 32
    pace: float = 0.004
    memory_for: float = 0.0
    """Changes by others may be missed for this time, and no longer."""
    fresh_for: float = 1.0
    peer: str = ""
    """Another cache, whose answers are judged instead."""
    site_port: int = 0
    """Where the site behind an HTTP cache listens."""
    moves_clock: bool = True
    may_forget: bool = False
    """True if copies may be gone after a restart, as from a Redis without persistence."""
    left: str = ""
    """A sentence about entries that could not be deleted at the end."""

    @property
    def stale_for(self) -> float:
        """Seconds in which an old copy is served while it is refreshed."""
        return 2 * self.fresh_for

    @property
    def keys(self) -> tuple[str, ...]:
        """The ids that all processes read, load and invalidate."""
        return tuple(f"sku-{number}" for number in range(self.count))


def lasting(begin: Callable[[], object], end: Callable[[], object], *hold: float) -> Fault:
    """A fault that begins, lasts for one of the times in `hold` (in seconds), and ends."""

    @contextmanager
    def fault(dice: random.Random) -> Iterator[None]:
        begin()
        try:
            time.sleep(dice.choice(hold))
            yield
        finally:
            end()

    return fault
