"""The exceptions behind the last failed loads of this process.

A store keeps the text of a failure, which every process can read. The exception itself is kept
here, so that callers get it as `__cause__` during the cooldown too. An exception holds its
traceback, and that holds the frames of the load with everything in them. So few exceptions are
kept, each until its key is loaded, put or deleted, and at most a minute longer than its cooldown.

Pure bookkeeping: no clock, store or asyncio may live here.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.errors import LoadFailed
from stillfresh.stores.contract import Failure

K = TypeVar("K", bound=Hashable)

MOST_EXCEPTIONS: Final = 100
"""For each resource. A call that failed for many keys counts once."""
MOST_KEYS: Final = 1_000
KEPT_AFTER: Final = 60.0
"""Seconds after the cooldown: longer than the retry takes, which may have the same cause."""
SAME_TIME: Final = 0.01
"""Seconds: stores may round the end of a cooldown to milliseconds."""


class SeenFailure(Struct, frozen=True):
    """A failure as the store has it, and the error that this process made of it."""

    failure: Failure
    error: LoadFailed


class Causes(Generic[K]):
    """By key, the error of the last load that failed here. The oldest go first."""

    def __init__(self) -> None:
        self.seen: dict[K, SeenFailure] = {}
        """The oldest first."""
        self._uses: Counter[int] = Counter()  # keys of each exception, by the exception's id()

    def note(self, key: K, failure: Failure, error: LoadFailed) -> None:
        """The load of this key has failed."""
        self.forget(key)
        self.seen[key] = SeenFailure(failure, error)
        self._uses[id(error.__cause__)] += 1
        while len(self._uses) > MOST_EXCEPTIONS or len(self.seen) > MOST_KEYS:
            self.forget(next(iter(self.seen)))

    def error_of(self, key: K, failure: Failure) -> LoadFailed | None:
        """The error of this failure; None if another process saw it, or if it is forgotten."""
        seen = self.seen.get(key)
        if seen is None or seen.failure.count != failure.count:
            return None
        is_same = abs(seen.failure.retry_at - failure.retry_at) < SAME_TIME
        return seen.error if is_same else None

    def forget(self, key: K) -> None:
        """The key was loaded, put or deleted, or its error is not needed any more."""
        seen = self.seen.pop(key, None)
        if seen is None:
            return
        exception = id(seen.error.__cause__)
        self._uses[exception] -= 1
        if not self._uses[exception]:
            del self._uses[exception]

    def forget_old(self, now: float) -> None:
        """Forget errors whose cooldown has been over for some time."""
        old = [key for key, seen in self.seen.items() if seen.failure.retry_at + KEPT_AFTER <= now]
        for key in old:
            self.forget(key)

    def clear(self) -> None:
        """Forget all; what memory holds goes at the same time."""
        self.seen.clear()
        self._uses.clear()
