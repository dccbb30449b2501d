"""The fence: did this process change a key after a piece of work began?

A load, a read of the store and a put take time. Meanwhile this process may invalidate the key, or
put another value. The result of the work is then too old: it must not go to memory, and not to
callers that asked after the change.

Every change takes the next number of one clock, and marks its keys or its tag with it. Every piece
of work notes the number at which it began. When it ends, it asks whether its key, or one of the
key's tags, has a greater mark. That is the only answer to "was it changed meanwhile?".

There are two marks for a key. An invalidation or a deletion *voids* it: nothing that began earlier
may be stored or kept. A put *changes* it: earlier loads and reads are too old, but not earlier
puts, because the store decides which of two puts is the last one.

Marks are needed only while something is under way. They are forgotten when nothing is; and where
something always is, the oldest are given up by marking every key. A fence may call a result too old
that is not. That costs a load, and never serves an old value.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Generic, Self, TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)

MOST_MARKS: Final = 10_000


class Marks(Generic[K]):
    """The number with which each key was last marked; a bounded number of keys."""

    __slots__ = ("_every", "_marks", "last")

    def __init__(self) -> None:
        self._marks: dict[K, int] = {}
        self._every = 0  # the mark of every key that is not in `_marks`
        self.last = 0  # the greatest mark: one comparison answers for most keys

    def mark(self, key: K, number: int) -> None:
        if len(self._marks) >= MOST_MARKS:
            self.mark_all(number)
        self._marks[key] = number
        self.last = number

    def mark_all(self, number: int) -> None:
        self._marks.clear()
        self._every = number
        self.last = number

    def forget(self) -> None:
        """Forget the marks of single keys: nothing is under way that began before them."""
        self._marks.clear()

    def number(self, key: K) -> int:
        return self._marks.get(key, self._every)

    def is_marked(self, key: K, began: int) -> bool:
        """True if the key was marked after this number."""
        return self.last > began and self._marks.get(key, self._every) > began


class FenceClock:
    """The numbers of one cache, and the marks of its tags.

    Each change takes a number, and so do the beginning of a load and the sending of its copies:
    callers, loads and changes are all ordered by it.

    A tag may stand for keys of several resources, so its marks are the cache's.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self.now = 0
        self.last_change = 0
        """The number of the last change of anything: most work began after it, and need not ask."""
        self._is_busy = is_busy
        self._tags: Marks[str] = Marks()

    def advance(self) -> int:
        """Take the next number. Whatever comes from now on comes after what has a smaller one."""
        self.now += 1
        return self.now

    def next_change(self) -> int:
        """Take the number of a change."""
        self.now += 1
        self.last_change = self.now
        return self.now

    def void_tag(self, tag: str) -> None:
        """The tag was invalidated: whatever began before may not keep a value that has it."""
        number = self.next_change()
        if not self._is_busy():
            self._tags.forget()
            return
        self._tags.mark(tag, number)

    def has_voids(self, began: int) -> bool:
        """True if any tag was voided after this number."""
        return self._tags.last > began

    def has_void(self, tags: Iterable[str | None], began: int) -> bool:
        """True if one of the tags was voided after this number. None stands for an unknown tag."""
        if not self.has_voids(began):
            return False
        return any(tag is None or self._tags.is_marked(tag, began) for tag in tags)


class Fence(Generic[K]):
    """The marks of one resource's keys."""

    def __init__(
        self,
        clock: FenceClock,
        tags_of: Callable[[K], Sequence[str | None]],
        is_loading: Callable[[], bool],
    ) -> None:
        """`tags_of`: the tags that a key may have. `is_loading`: True while a load is under way."""
        self.clock = clock
        self._tags_of = tags_of
        self._is_loading = is_loading
        self._starts = 0  # blocks of `starting` that are open
        self._changes: Marks[K] = Marks()
        self._voids: Marks[K] = Marks()

    @property
    def is_busy(self) -> bool:
        """True if something is under way that may ask about a change."""
        return self._starts > 0 or self._is_loading()

    def void(self, keys: Iterable[K]) -> None:
        """The keys were invalidated or deleted."""
        number = self._next_number()
        if number:
            for key in keys:
                self._changes.mark(key, number)
                self._voids.mark(key, number)

    def change(self, keys: Iterable[K]) -> None:
        """Other values of the keys were put."""
        number = self._next_number()
        if number:
            for key in keys:
                self._changes.mark(key, number)

    def void_all(self) -> None:
        """Every key was invalidated, or the cache closes: nothing that is under way counts."""
        number = self.clock.next_change()
        self._changes.mark_all(number)
        self._voids.mark_all(number)

    def is_changed(self, key: K, began: int, tags: Iterable[str] = ()) -> bool:
        """True if the key was changed after this number. `tags`: those that only a load knows."""
        if self.clock.last_change <= began:
            return False
        if self._changes.is_marked(key, began):
            return True
        if not self.clock.has_voids(began):
            return False
        return self.clock.has_void((*tags, *self._tags_of(key)), began)

    def changed_keys(self, keys: Iterable[K], began: int) -> set[K]:
        """Those of the keys that were changed after this number."""
        if self.clock.last_change <= began:  # as mostly
            return set()
        return {key for key in keys if self.is_changed(key, began)}

    def is_put(self, key: K, began: int) -> bool:
        """True if the key was changed after this number, at last by a put."""
        number = self._changes.number(key)
        return number > began and not self.is_void(key, number - 1, self._tags_of(key))

    def is_void(self, key: K, began: int, tags: Iterable[str | None]) -> bool:
        """True if a value with these tags may not be put any more."""
        if self._voids.last <= began and not self.clock.has_voids(began):  # as mostly
            return False
        return self._voids.is_marked(key, began) or self.clock.has_void(tags, began)

    def starting(self) -> "Start[K]":
        """A put inside this block learns from the `Start` what was voided since."""
        return Start(self, self.clock.now)

    def begins(self) -> None:
        """A block of `starting` is entered."""
        self._starts += 1

    def ends(self) -> None:
        """It is left."""
        self._starts -= 1

    def _next_number(self) -> int:
        """The number of a change; 0 if nothing is under way, so that it need not be noted."""
        number = self.clock.next_change()
        if self.is_busy:
            return number
        self._changes.forget()
        self._voids.forget()
        return 0


class Start(Struct, Generic[K], frozen=True):
    """When a piece of work began.

    It asks the fence that it began with. A cache that is opened again has another one.
    """

    fence: Fence[K]
    number: int

    def __enter__(self) -> Self:
        self.fence.begins()
        return self

    def __exit__(self, *_: object) -> None:
        self.fence.ends()

    def is_void(self, key: K, tags: Iterable[str]) -> bool:
        """True if a value with these tags may not be put any more."""
        return self.fence.is_void(key, self.number, tags)
