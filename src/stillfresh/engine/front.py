"""Memory in front of a store: a bounded number of decoded entries, no move on a hit (E9).

CLOCK: when it is full a hand goes round, passes over what was read since its last round, and
takes the first that was not. A hit already counts on the entry (E12), and that count is the mark.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

from stillfresh.engine.metrics import Meter
from stillfresh.engine.model import Answer
from stillfresh.stores.contract import Copy
from stillfresh.tags import TagIndex

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NEVER: Final = float("-inf")


class Entry(Generic[K, V]):
    """A decoded copy and the answer that can be given as it stands while `now < until`.

    No struct: a hit writes to it, and writing to a struct costs more.
    """

    __slots__ = (
        "answer",
        "bucket",
        "copy",
        "edition",
        "hits",
        "key",
        "marked",
        "stands",
        "tags",
        "until",
    )

    def __init__(self, key: K, copy: Copy, answer: Answer[V], until: float, stands: float) -> None:
        self.key = key
        self.copy = copy
        self.answer = answer
        self.until = until
        """Memory answers by itself until then."""
        self.stands = stands
        """The answer is right until then, if the store still has this copy."""
        self.bucket = self.hits = self.edition = 0
        """`edition`: another one whenever the answer was changed, or taken away."""
        self.marked = False
        self.tags: Sequence[str | None] = ()


class Front(Generic[K, V]):
    """The entries of one resource."""

    def __init__(
        self,
        max_entries: int,
        meter: Meter,
        tags_of: Callable[[K], Sequence[str | None]] | None = None,
    ) -> None:
        self.entries: dict[K, Entry[K, V]] = {}
        self._max_entries = max_entries
        self._meter = meter
        self._tags_of = tags_of
        self._tagged: TagIndex[K] = TagIndex()
        self._ring: list[Entry[K, V]] = []
        self._hand = 0

    def put(
        self,
        key: K,
        copy: Copy,
        answer: Answer[V],
        *,
        until: float = NEVER,
        stands: float = NEVER,
        bucket: int = 0,
    ) -> None:
        """Keep the copy and the answer; an entry that is there is changed, not replaced."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, copy, answer, until, stands)
            entry.bucket = bucket
            if self._tags_of is not None:
                entry.tags = self._tags_of(key)
                self._tagged.add(key, entry.tags)
            self._seat(entry)
            return
        self.fold(entry)
        entry.marked = True
        entry.copy, entry.answer, entry.bucket = copy, answer, bucket
        entry.until, entry.stands = until, stands
        entry.edition += 1

    def drop(self, key: K) -> None:
        """Nothing is served from this entry any more, by whoever still holds it."""
        if (entry := self.entries.pop(key, None)) is not None:
            self.fold(entry)
            self._tagged.remove(key, entry.tags)
            entry.until = NEVER
            entry.edition += 1
            del entry.answer, entry.copy  # the ring keeps the entry a while, not what it held

    def tagged(self, tag: str) -> set[K]:
        """E8: the entries that have this tag, or may have it."""
        return {*self._tagged.keys(tag), *self._tagged.keys(None)}

    def clear(self) -> None:
        for key in list(self.entries):
            self.drop(key)
        self._ring.clear()
        self._hand = 0

    def fold(self, entry: Entry[K, V]) -> None:
        """Hand the entry's hits over to the meter."""
        if entry.hits:
            answer = entry.answer
            self._meter.read(answer.origin, answer.verdict, entry.bucket, entry.hits)
            entry.hits = 0
            entry.marked = True

    def fold_all(self) -> None:
        for entry in self.entries.values():
            self.fold(entry)

    def _seat(self, entry: Entry[K, V]) -> None:
        """A place in the ring: a new one, or that of the first that was not read since."""
        if len(self._ring) < self._max_entries:
            self._ring.append(entry)
            return
        while True:
            self._hand = (self._hand + 1) % len(self._ring)
            other = self._ring[self._hand]
            if self.entries.get(other.key) is not other:
                break
            self.fold(other)
            if not other.marked:
                self.drop(other.key)
                break
            other.marked = False
        self._ring[self._hand] = entry
