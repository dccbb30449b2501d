"""A store under proof, and its faults, which begin, last for a while, and end."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TypeAlias

Fault: TypeAlias = Callable[[random.Random], AbstractContextManager[None]]
FRESH_FOR: Final = 1.0


class Stage:
    """A store's address and the faults that are its own."""

    def __init__(
        self,
        url: str,
        faults: Mapping[str, Fault],
        *,
        keys: int = 32,
        pace: float = 0.004,
        memory_for: float = 0.0,
        fresh_for: float = FRESH_FOR,
        peer: str = "",
        moves_clock: bool = True,
    ) -> None:
        """`memory_for`: changes by others may be missed for this time, and no longer (S10)."""
        self.url = url
        self.keys = tuple(f"sku-{number}" for number in range(keys))
        self.faults = dict(faults)
        self.pace = pace
        self.memory_for = memory_for
        self.fresh_for = fresh_for
        self.peer = peer
        """Another library, whose answers are judged instead."""
        self.moves_clock = moves_clock
        self.left = ""
        """A sentence about entries that could not be deleted at the end."""


def lasting(begin: Callable[[], object], end: Callable[[], object], *hold: float) -> Fault:
    """Something begins, lasts for a while, and ends."""

    @contextmanager
    def fault(dice: random.Random) -> Iterator[None]:
        begin()
        try:
            time.sleep(dice.choice(hold))
            yield
        finally:
            end()

    return fault
