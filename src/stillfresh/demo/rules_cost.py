"""What polling would have cost (G8). Pure.

The same page, as fresh as it is here: every item on it is asked for each time its freshness ends,
by every tab that is open. Here only what is on a screen is, once for all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Polled:
    """Requests, one for each item; or with as many items in one as stillfresh puts in."""

    each: float = 0.0
    in_batches: float = 0.0

    def __add__(self, other: "Polled") -> "Polled":
        return Polled(self.each + other.each, self.in_batches + other.in_batches)


def polling(seconds: float, tabs: int, kinds: Iterable[tuple[int, float, int]]) -> Polled:
    """`kinds`: how many items, for how long each is fresh, how many go into one request."""
    total = Polled()
    for items, fresh_for, max_batch in kinds:
        rounds = tabs * seconds / fresh_for
        total += Polled(rounds * items, rounds * ceil(items / max_batch))
    return total
