"""An index from tag to keys, so that an invalidation visits the tagged keys alone (E8, E28)."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


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
