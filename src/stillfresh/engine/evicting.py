"""Which entries leave memory when it is full, and how it is emptied.

CLOCK: entries stand in a line. An entry that was read since its last turn goes to the end; the
first other one is dropped. Long work is done in slices.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from stillfresh.bounded import SLICE, Room, TagIndex, sliced
from stillfresh.clock import Clock
from stillfresh.engine.counts import Counts
from stillfresh.engine.rules_objective import Objective

if TYPE_CHECKING:
    from stillfresh.engine.memory import MemoryEntry

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Evicting(ABC, Generic[K, V]):
    """The entries of one resource, in line, and the room that they take."""

    now: Clock

    def __init__(self, most: int | None, objective: Objective | None) -> None:
        """`most`: the most bytes."""
        self.entries: OrderedDict[K, MemoryEntry[K, V]] = OrderedDict()
        self.room = Room(most, self._free)
        self.counts = Counts(objective)
        self._tagged: TagIndex[K] = TagIndex()
        self.cleared: Callable[[], object] = bool
        """Called when `entries` is another dict."""
        self._left: list[tuple[OrderedDict[K, MemoryEntry[K, V]], TagIndex[K]]] = []

    @abstractmethod
    def drop(self, key: K) -> None:
        """Remove the entry: nothing is served from it any more."""

    @abstractmethod
    def fold(self, entry: "MemoryEntry[K, V]") -> None:
        """Hand the entry's hits over to the counts, and mark it as read if there were any."""

    @abstractmethod
    def _end(self, entry: "MemoryEntry[K, V]") -> None:
        """Drop the reference to the value."""

    def tagged(self, tag: str) -> list[K]:
        """The entries that have this tag, or may have it."""
        return self._tagged.keys(tag) + self._tagged.keys(None)

    def clear(self) -> None:
        """Serve nothing from these entries any more; `freed` releases them in small steps."""
        self._left.append((self.entries, self._tagged))
        self.entries = OrderedDict()
        self._tagged = TagIndex()
        self.room.held = 0
        self.cleared()

    def keys(self) -> list[K]:
        """All of them, in no order: in order the walk is 20 times slower."""
        return list(dict.keys(self.entries))

    def freed(self) -> Iterator[None]:
        """Release one entry at each step, and count its hits."""
        for left, tagged in self._left:
            while left:
                self._end(left.popitem()[1])
                yield
            yield from tagged.freed()
        self._left.clear()

    def fold_now(self) -> None:
        """Count the hits of all entries in one go, where nothing can be awaited."""
        began = self.now()
        for entry in self._hit(dict.values(self.entries)):
            self.fold(entry)
        self.counts.folded_at = began

    async def fold_all(self) -> None:
        began = self.now()
        async for entries in sliced(list(dict.values(self.entries))):
            for entry in self._hit(entries):
                self.fold(entry)
        self.counts.folded_at = began

    @staticmethod
    def _hit(entries: "Iterable[MemoryEntry[K, V]]") -> "list[MemoryEntry[K, V]]":
        """Most were not read since they were last looked at."""
        return [entry for entry in entries if entry.hits]

    def keeps(self, key: K) -> bool:
        """A private store asks before it drops a copy. If it was not read, memory drops it."""
        if (entry := self.entries.get(key)) is None:
            return False
        was_read = self._was_read(entry)
        if not was_read:
            self.drop(key)
        return was_read

    def _was_read(self, entry: "MemoryEntry[K, V]") -> bool:
        """True if the entry was read since the last call; it then moves to the end of the line."""
        self.fold(entry)
        was_read = entry.marked
        entry.marked = False
        if was_read:
            self.entries.move_to_end(entry.key)
        return was_read

    def _drop_next(self, *, is_any: bool) -> bool:
        """Drop the first entry in line, unless it was read. True if it was dropped."""
        entry = next(iter(self.entries.values()))
        if self._was_read(entry) and not is_any:
            return False
        self.counts.evicted_bytes += entry.size
        self.drop(entry.key)
        return True

    def _drop_one(self) -> None:
        """Drop the first unread entry of a slice, or else any."""
        left = SLICE
        while not self._drop_next(is_any=not left):
            left -= 1

    def _free(self) -> bool:
        for left in range(SLICE, -1, -1):
            if not self.entries or self.room.is_enough:
                break
            self._drop_next(is_any=not left)
        return bool(self.entries)
