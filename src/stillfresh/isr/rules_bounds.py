"""How many names from outside are kept by: hosts, queries of a path, variants of a page (I13).

Pure but for what it counts; the time is an argument. Who is known stays known while he is asked
for. When all seats are taken, a new name gets the seat of the one not seen for longest, once that
was a while ago: whoever makes up names fills the store no faster than that, pushes out nobody who
is asked for, and keeps nobody out for ever.
"""

from typing import Final

__all__ = ["UNUSED_FOR", "Seats", "SeatsOf"]

UNUSED_FOR: Final = 600.0
"""Seconds after which a name that nobody asked for makes room."""


class Seats:
    """Names, by when each was last seen, the oldest first; kept as their hash, which is short."""

    __slots__ = ("_most", "_seen")

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, float] = {}

    def has(self, name: str, now: float) -> bool:
        """Whether this name is kept by, from now on."""
        seen, mark = self._seen, hash(name)
        if seen.pop(mark, None) is None and len(seen) >= self._most and not self._freed(now):
            return False
        seen[mark] = now
        return True

    def _freed(self, now: float) -> bool:
        oldest = next(iter(self._seen), None)
        if oldest is None:
            return False
        since = self._seen[oldest] = min(self._seen[oldest], now)
        if now - since < UNUSED_FOR:
            return False
        del self._seen[oldest]
        return True


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
