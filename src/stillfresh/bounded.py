"""What keeps memory and the turns of the event loop bounded.

A dict with a limit, room for a number of bytes, a line of many objects, an index from tags to keys,
a rate of messages, and long work in slices.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Generic, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")

SLICE: Final = 1_000
"""Items in one turn of the loop, at 1 to 10 µs each."""
CHUNK: Final = 256
"""Objects in one tuple of a `Line`."""
BESIDE: Final = 500
"""Bytes that a key, its times and its place take besides the value, about."""


class BoundedDict(dict[K, V]):
    """At most `most` keys: `note` makes its key the newest, and drops the oldest beyond the limit.

    With `size`, also at most `most_bytes` of values; change such a dict only by `note`.
    """

    __slots__ = ("_bytes", "_most", "_most_bytes", "_size")

    def __init__(
        self, most: int, most_bytes: int = 0, size: Callable[[V], int] = lambda _: 0
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._size = size
        self._bytes = 0

    def note(self, key: K, value: V) -> None:
        if key in self:
            self._bytes -= self._size(self.pop(key))
        self[key] = value
        self._bytes += self._size(value)
        while len(self) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._size(self.pop(next(iter(self))))


class Room:
    """The bytes `held`. Above `most`, the owner drops entries until 90 % of it is held.

    The owner adds and subtracts, and calls `shrink` when there is too much. `free` drops some: at
    most a slice, in one turn of the loop, and nothing once there `is_enough`. It returns False if
    nothing may be dropped.
    """

    def __init__(self, most: int | None, free: Callable[[], bool]) -> None:
        self.held = 0
        self.limit(most)
        self._free = free
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop on which slices follow each other."""

    def limit(self, most: int | None) -> None:
        self.most = float("inf") if most is None else float(most)
        self.largest = 0.9 * self.most
        """A larger value is never kept: everything else would be dropped for it."""

    @property
    def is_enough(self) -> bool:
        return self.held <= self.largest

    def shrink(self) -> None:
        """Drop a slice now, and the rest on the running loop, unless that goes on already.

        Callers may fill it faster than the loop has turns.
        """
        loop = asyncio.get_running_loop()
        if self._free() and not self.is_enough and self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._slice)

    def _slice(self) -> None:
        loop = self._loop
        if loop is not None and not self.is_enough and self._free():
            loop.call_soon(self._slice)
        else:
            self._loop = None


class Line(Generic[V]):
    """Objects in a row: they join at the end, and leave at the front.

    For very many objects that the garbage collector does not track. It would walk through a deque
    of them at each full collection. A tuple of them it looks at once, and no longer tracks.
    """

    def __init__(self) -> None:
        self._front: list[V] = []  # the first of them comes last
        self._middle: deque[tuple[V, ...]] = deque()  # each of `CHUNK`
        self._back: list[V] = []

    def __len__(self) -> int:
        return len(self._front) + CHUNK * len(self._middle) + len(self._back)

    def append(self, value: V) -> None:
        back = self._back
        back.append(value)
        if len(back) == CHUNK:
            self._middle.append(tuple(back))
            self._back = []

    def popleft(self) -> V:
        """Take the first one out. IndexError if there is none."""
        if not self._front:
            if self._middle:
                self._front = list(self._middle.popleft())
            else:
                self._front = self._back
                self._back = []
            self._front.reverse()
        return self._front.pop()


class TagIndex(Generic[K]):
    """Which keys have a tag, in the order in which they came.

    The owner of a key stores its tags, and removes the key with the same tags. Most tags have one
    key, which needs no dict of its own: that would take more memory than the rest of an entry.
    """

    def __init__(self) -> None:
        self._keys: dict[str | None, K | dict[K, None]] = {}

    def keys(self, tag: str | None) -> list[K]:
        keys = self._keys.get(tag, {})
        return list(keys) if isinstance(keys, dict) else [keys]

    def add(self, key: K, tags: Iterable[str | None]) -> None:
        for tag in tags:
            keys = self._keys.setdefault(tag, key)
            if isinstance(keys, dict):
                keys[key] = None
            elif keys != key:
                self._keys[tag] = {keys: None, key: None}

    def remove(self, key: K, tags: Iterable[str | None]) -> None:
        for tag in tags:
            keys = self._keys.get(tag, {})
            if isinstance(keys, dict):
                keys.pop(key, None)
            if keys in ({}, key):  # a key may be 0
                self._keys.pop(tag, None)

    def freed(self) -> Iterator[None]:
        """Free one key at each step; for an index that is no longer used."""
        while self._keys:
            _, keys = self._keys.popitem()
            while isinstance(keys, dict) and keys:
                keys.popitem()
                yield
            yield


class MessageRate:
    """How many messages a client may still send: `rate` a second, up to `burst` at once."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def spend(self, now: float, cost: int = 1) -> bool:
        """False if it is too much."""
        passed = max(0.0, now - self._at)
        self._left = min(self._burst, self._left + passed * self._rate) - cost
        self._at = now
        return self._left >= 0


class sliced(Generic[V]):  # noqa: N801 (called like `enumerate`)
    """`async for batch in sliced(items)`: the loop has a turn between two slices.

    No generator: a loop that ends allows no new one.
    """

    def __init__(self, items: Iterable[V], size: int = SLICE) -> None:
        self._left = iter(items)
        self._size = size
        self._is_full = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[V]:
        if self._is_full:
            await asyncio.sleep(0)
        batch = list(islice(self._left, self._size))
        self._is_full = len(batch) == self._size
        if not batch:
            raise StopAsyncIteration
        return batch
