"""The promises of a simulation, and the error that says which one did not hold."""

from enum import StrEnum


class Promise(StrEnum):
    """What a simulation checks after each step."""

    FRESH = "nobody is served as fresh what was invalidated before they asked"
    HOLDER = "a key has one lease holder"
    LOAD = "a lease is good for one load of its key"
    LOST = "what was published without the lease never shows"
    ONCE = "an acknowledged update is applied exactly once"
    STORED = "an acknowledged put was stored once, and on its condition"
    LATE = "nothing that has ended acts after a later change"
    WRITTEN = "a write-through stores nothing older than a write that began after it"
    OWN = "no answer to a token is older than the change that it names"
    GREATEST = "a smaller version does not replace a greater one"
    COUNTS = "subscriptions and counts match what the viewers hold"
    ASKED = "what is watched and stale is asked for in time"
    BOUND = "nothing grows without bound"
    ALIVE = "nothing deadlocks"
    WHOLE = "nothing fails inside"


class BrokenPromise(Exception):
    """A promise that did not hold, and what was seen instead."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"broken: {promise}\n  {what}")
        self.promise = promise
        self.what = what
