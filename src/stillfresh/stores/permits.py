"""Permits for threads: so many at a time, and none can be lost.

A signal's handler may raise between any two steps of the main thread: also when a permit was just
taken, before the `try` whose `finally` gives it back. So a permit that nobody holds any more comes
back by itself. Otherwise a program that is interrupted now and then, as by a soft time limit, would
one day have none left, and wait for ever.
"""

from queue import SimpleQueue
from typing import Final
from weakref import ref


class Permit:
    """Given back when nobody refers to it any more."""

    __slots__ = ("_free",)

    def __init__(self, free: "SimpleQueue[Permit]") -> None:
        self._free = ref(free)  # the queue holds permits, and a circle would never end

    def __del__(self) -> None:
        free = self._free()
        if free is not None:
            free.put(type(self)(free))


class Permits:
    """At most `most` at a time. As a semaphore, but for the loss, and written in C."""

    def __init__(self, most: int) -> None:
        self._free: Final[SimpleQueue[Permit]] = SimpleQueue()
        for _ in range(most):
            self._free.put(Permit(self._free))
        self.take: Final = self._free.get
        """Wait for one; raises Empty after `timeout` seconds, if that is given."""
        self.give_back: Final = self._free.put

    @property
    def free_count(self) -> int:
        """How many can be taken now."""
        return self._free.qsize()
