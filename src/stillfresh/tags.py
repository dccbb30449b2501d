"""An index from tag to keys, so that an invalidation visits the tagged keys alone (E8, E28)."""

from collections.abc import Hashable, Iterable, Set
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TagIndex(Generic[K]):
    """Which keys have a tag. The owner of a key keeps its tags, and removes it with the same."""

    def __init__(self) -> None:
        self._keys: dict[str | None, set[K]] = {}

    def keys(self, tag: str | None) -> Set[K]:
        return self._keys.get(tag, set())

    def add(self, key: K, tags: Iterable[str | None]) -> None:
        for tag in tags:
            self._keys.setdefault(tag, set()).add(key)

    def remove(self, key: K, tags: Iterable[str | None]) -> None:
        for tag in tags:
            if keys := self._keys.get(tag):
                keys.discard(key)
                if not keys:
                    del self._keys[tag]

    def clear(self) -> None:
        self._keys.clear()
