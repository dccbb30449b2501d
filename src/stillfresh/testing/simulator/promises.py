"""What must hold at every step of a simulation, and how it is told when it does not (T2)."""

from enum import StrEnum


class Promise(StrEnum):
    """The invariants of T2, and that nothing fails inside."""

    FRESH = "nobody is served as fresh what was invalidated before they asked"
    HOLDER = "a key has one lease holder"
    LOAD = "a lease is good for one load of its key"
    LOST = "what was published without the lease never shows"
    COUNTS = "subscriptions and counts match what the viewers hold"
    ASKED = "what is watched and stale is asked for in time"
    BOUND = "nothing grows without bound"
    ALIVE = "nothing deadlocks"
    WHOLE = "nothing fails inside"


class Broken(Exception):
    """A promise that did not hold, and what was seen instead."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"broken: {promise}\n  {what}")
        self.promise = promise
        self.what = what
