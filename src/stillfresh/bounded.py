"""What keeps memory and the turns of the event loop bounded (E8, E28).

A dict with a limit, an index that leads to the tagged keys alone, and long work in slices.
"""

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, Generic, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")

SLICE: Final = 1_000
"""Items of a microsecond or ten each."""


class BoundedDict(dict[K, V]):
    """At most `most` keys: `note` makes its key the newest, and drops the oldest one too many."""

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def note(self, key: K, value: V) -> None:
        self.pop(key, None)
        self[key] = value
        if len(self) > self._most:
            del self[next(iter(self))]


class TagIndex(Generic[K]):
    """Which keys have a tag, in the order in which they came.

    The owner of a key keeps the key's tags, and removes it with the same.
    """

    def __init__(self) -> None:
        self._keys: dict[str | None, dict[K, None]] = {}

    def keys(self, tag: str | None) -> list[K]:
        return list(self._keys.get(tag, ()))

    def add(self, key: K, tags: Iterable[str | None]) -> None:
        for tag in tags:
            self._keys.setdefault(tag, {})[key] = None

    def remove(self, key: K, tags: Iterable[str | None]) -> None:
        for tag in tags:
            if keys := self._keys.get(tag):
                keys.pop(key, None)
                if not keys:
                    del self._keys[tag]

    def freed(self) -> Iterator[None]:
        """Let go of one key at each step, when nobody asks any more."""
        while self._keys:
            _, keys = self._keys.popitem()
            while keys:
                keys.popitem()
                yield


class sliced(Generic[V]):  # noqa: N801 (called like `enumerate`)
    """`async for some in sliced(items)`: the loop has a turn between two slices.

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
        some = list(islice(self._left, self._size))
        self._is_full = len(some) == self._size
        if not some:
            raise StopAsyncIteration
        return some
