"""How many names from outside are kept by: hosts, queries of a path, variants of a page (I13).

Pure but for what it counts; the time is an argument. Who is known stays known while he is asked
for. When all seats are taken, a new name gets the seat of the one not seen for longest, once that
was a while ago, or once it is itself clearly asked for more often. So names that are made up and
asked for once or twice push out nobody; and names that are repeated just to hold their seats keep
out nobody who has visitors.
"""

from typing import Final, TypeAlias

UNUSED_FOR: Final = 600.0
"""Seconds after which a name that nobody asked for makes room, and half of its visits are over."""
CLEARLY: Final = 2.0
"""So many visits more than another's are no chance."""

Seen: TypeAlias = tuple[float, float]
"""When last, and how often: visits, of which half are forgotten in `UNUSED_FOR`."""


class Seats:
    """Names, by when each was last seen, the oldest first; kept as their hash, which is short."""

    __slots__ = ("_most", "_seen", "_waiting")

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, Seen] = {}
        self._waiting: dict[int, Seen] = {}
        """Those without a seat who asked for one last; as many again."""

    def has(self, name: str, now: float) -> bool:
        """Whether this name is kept by, from now on."""
        mark = hash(name)
        if (known := self._seen.pop(mark, None)) is not None:
            self._seen[mark] = now, 1.0 + _visits(known, now)
            return True
        visits = 1.0 + _visits(self._waiting.pop(mark, (now, 0.0)), now)
        if len(self._seen) < self._most or self._freed(visits, now):
            self._seen[mark] = now, visits
            return True
        self._waiting[mark] = now, visits
        if len(self._waiting) > self._most:
            del self._waiting[next(iter(self._waiting))]
        return False

    def _freed(self, visits: float, now: float) -> bool:
        oldest = next(iter(self._seen), None)
        if oldest is None:
            return False
        last, often = self._seen[oldest]
        known = self._seen[oldest] = min(last, now), often
        if now - known[0] < UNUSED_FOR and visits <= _visits(known, now) + CLEARLY:
            return False
        del self._seen[oldest]
        return True


def _visits(seen: Seen, now: float) -> float:
    last, often = seen
    return float(often * 0.5 ** (max(0.0, now - last) / UNUSED_FOR))


class SeatsOf:
    """Seats for each of so many paths, or pages; the one asked for longest ago is forgotten."""

    __slots__ = ("_each", "_most", "_rooms")

    def __init__(self, each: int, *, most: int) -> None:
        self._each = each
        self._most = most
        self._rooms: dict[str, Seats] = {}

    def has(self, of: str, name: str, now: float) -> bool:
        room = self._rooms.pop(of, None) or Seats(self._each)
        if len(self._rooms) >= self._most:
            del self._rooms[next(iter(self._rooms))]
        self._rooms[of] = room
        return room.has(name, now)
