"""What one process notes of names from outside, and of how many (I13, I14).

Pure but for what it counts; the time is an argument.
"""

from enum import Enum
from typing import Final, TypeAlias

from stillfresh.bounded import BoundedDict

UNUSED_FOR: Final = 600.0
"""Seconds after which a name that nobody asked for makes room, and half of its visits are over."""
CLEARLY: Final = 2.0
"""So many visits more than another's are no chance."""
Seen: TypeAlias = tuple[float, float]
"""When last, and how often: visits, of which half are forgotten in `UNUSED_FOR`."""


class BoundedNames:
    """At most so many names; a known name stays while it is asked for.

    When all places are taken, a new name gets the place of the one not seen for longest: once that
    was a while ago, or once the new one is clearly asked for more often. So made-up names that are
    asked for once or twice push nobody out, and names that are repeated just to hold their places
    keep out nobody who has visitors. A name is kept as its hash, which is short.
    """

    __slots__ = ("_most", "_seen", "_waiting")

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, Seen] = {}
        self._waiting: BoundedDict[int, Seen] = BoundedDict(most)
        """Names without a place that were asked for last; as many again."""

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
        self._waiting.note(mark, (now, visits))
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


class NamesOf:
    """Names for each of so many paths, or pages; the one asked for longest ago is forgotten."""

    def __init__(self, each: int, *, most: int) -> None:
        self._each = each
        self._names: BoundedDict[str, BoundedNames] = BoundedDict(most)

    def has(self, of: str, name: str, now: float) -> bool:
        names = self._names.get(of) or BoundedNames(self._each)
        self._names.note(of, names)
        return names.has(name, now)


STANDS_FOR: Final = 30.0
"""Seconds."""


class Word(Enum):
    """What is known of a page."""

    NONE = "nothing"
    PRIVATE = "its render was not to be shared"
    STATED = "an answer stated freshness, and no privacy"


class Heard:
    """The last word on so many pages."""

    def __init__(self, most: int) -> None:
        self._private: BoundedDict[str, float] = BoundedDict(most)
        self._stated: BoundedDict[str, None] = BoundedDict(most)

    def of(self, id_: str) -> Word:
        if id_ in self._private:
            return Word.PRIVATE
        return Word.STATED if id_ in self._stated else Word.NONE

    def rendered(self, id_: str, now: float, *, is_shared: bool) -> None:
        """What a render of it came to."""
        self._stated.pop(id_, None)
        self._private.pop(id_, None)
        if not is_shared:
            self._private.note(id_, now)

    def stated(self, id_: str, now: float, *, is_personal: bool) -> None:
        """An answer to one visitor says that it may be shared; `is_personal`: it knew who asks."""
        since = now - self._private.get(id_, float("-inf"))
        if not is_personal or since >= STANDS_FOR:
            self._private.pop(id_, None)
            self._stated.note(id_, None)
