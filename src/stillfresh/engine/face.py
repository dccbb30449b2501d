"""Face: what the public objects of a resource have in common.

A face answers hits from memory without its core: one lookup, one clock reading, one addition. While
a block of `bypassed()` or `recording()` is open, it finds no entry, so each read goes to the core.
So do reads inside a block of `at_least()`, and a loader's reads of what memory may keep too long.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from stillfresh.engine.at_least import demanded
from stillfresh.errors import shown

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.entry import Entry

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
N = TypeVar("N", bound=Hashable)

OPENS_AFTER: Final = 16
"""Reads in quiet. To open a face, and to close it for the next load, takes as long as so many looks
at the context."""


class EntriesOutsideBlocks(Generic[N, K, V]):
    """The entries of memory by some name, but none for code in `at_least()` or in a loader."""

    def __init__(self, face: "Face[K, V]", entries: "dict[N, Entry[K, V]]") -> None:
        self._face = face
        self._owner = face.core.owner
        self._loaders = face.core.owner.running_loaders
        self._entries = entries
        self._quiet = 0
        """Reads while no loader ran and no block was open."""

    def __getitem__(self, name: N) -> "Entry[K, V]":
        if demanded() is not None:
            raise KeyError(name)
        if not self._loaders.are_some and not self._owner.watched_blocks:
            self._quiet += 1
            if self._quiet >= OPENS_AFTER:
                self._face.stand_back()
        return self._entries[name]

    def get(self, name: N) -> "Entry[K, V] | None":
        if demanded() is not None:
            return None
        if not self._loaders.are_some and not self._owner.watched_blocks:
            self._quiet += 1
            if self._quiet >= OPENS_AFTER:
                self._face.stand_back()
        return self._entries.get(name)


class Face(Generic[K, V]):
    """The public object of a resource. It answers hits from memory without its core."""

    what = "resource"
    """What it is, for its repr."""

    def __init__(self, core: "Core[K, V]") -> None:
        self.core = core
        self._clock = core.memory.now
        self._reads = core.memory.counts.on_loop
        core.faces.append(self)
        self.stand_back()

    def stand_back(self) -> None:
        """Leave every read to the core while a block is open that only the core knows.

        Blocks of `at_least()` concern only the reads inside them, and loaders, of whatever cache,
        only what they read: the others go on using memory.
        """
        owner = self.core.owner
        loaders = owner.running_loaders
        with loaders.lock:
            entries: dict[K, Entry[K, V]] = {} if owner.blocks else self.core.memory.entries
            self.entries = entries
            self.entry_by_key: dict[K, Entry[K, V]] | EntriesOutsideBlocks[K, K, V]
            """What reads take entries from. Set once: other threads may read now."""
            if self.is_watched:
                self.entry_by_key = EntriesOutsideBlocks(self, entries)
            else:
                self.entry_by_key = entries
                if self.core.memory_may_lag:
                    loaders.note_open(self)

    @property
    def is_watched(self) -> bool:
        """True if each read must look at its context before memory answers it."""
        owner = self.core.owner
        if owner.watched_blocks:
            return True
        return owner.running_loaders.are_some and self.core.memory_may_lag

    def __repr__(self) -> str:
        name = getattr(self, "__qualname__", None)
        named = "" if name is None else f" {self.__module__}.{name}"
        spec = self.core.spec
        fresh_for = spec.terms.policy.fresh_for
        return f"<{self.what}{named}: kind {spec.kind!r}, fresh for {fresh_for:g} s>"

    def __reduce__(self) -> Any:  # noqa: ANN401 (as in `object`)
        """Pickle the import path: another process has a cache of its own."""
        return getattr(self, "__qualname__", None) or super().__reduce__()

    @property
    def is_shared(self) -> bool:
        """True if all callers get the same object, False if each gets its own."""
        return self.core.spec.share

    def pass_on_to(self, other: "Face[K, V]") -> None:
        """The resource was declared again: from now on this object is another name of `other`."""
        self.__class__ = other.__class__
        vars(self).clear()
        vars(self).update(vars(other))
        self.core.faces.append(self)
        self.stand_back()

    def _one_key(self, *keys: object) -> TypeError:
        """Say how to write a call with several keys."""
        name = getattr(self, "__name__", self.core.spec.kind)
        many = f"{name}.get_many({shown([*keys])})"
        return TypeError(f"{name}: takes one key, not {len(keys)}; write {many}")
