"""Which keys fail at the moment, for who looks at the whole of it (E12, G6).

Bounded, and touched only when a load ends. The store alone decides about cooldowns (E7).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stillfresh.engine.rules import LONGEST_COOLDOWN
from stillfresh.stores.contract import Failure

MOST: Final = 1_000
"""Keys that are remembered as failing; beyond that the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What can be said of all of them together."""

    count: int
    retry_at: float | None
    error: str | None


class Failing:
    """Ids whose last load failed, the latest at the end."""

    def __init__(self) -> None:
        self._failures: dict[str, Failure] = {}

    def failed(self, id_: str, failure: Failure) -> None:
        self._failures.pop(id_, None)
        self._failures[id_] = failure
        if len(self._failures) > MOST:
            del self._failures[next(iter(self._failures))]

    def ended(self, ids: Iterable[str]) -> None:
        """They were loaded, or deleted: what was said before is no news."""
        if self._failures:
            for id_ in ids:
                self._failures.pop(id_, None)

    def seen(self, now: float) -> Seen:
        """One that nobody asked for again, long after it might have been, is forgotten."""
        for id_, failure in list(self._failures.items()):
            if failure.retry_at + LONGEST_COOLDOWN < now:
                del self._failures[id_]
        failures = list(self._failures.values())
        pauses = [failure.retry_at for failure in failures if failure.retry_at > now]
        error = failures[-1].error if failures else None
        return Seen(len(failures), min(pauses, default=None), error)
