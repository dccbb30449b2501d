"""A memo: what a response was made of, so that another layer can serve it again while it is right.

It holds the entries, not the answers: an entry that is dropped lets go of its value, whoever still
has a memo of it.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from stillfresh.engine.entry import Entry
from stillfresh.engine.model import Answer
from stillfresh.freshness import Verdict

if TYPE_CHECKING:
    from stillfresh.engine.face import Face

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """The answers that something was made of, made by `Resource.memo`."""

    __slots__ = ("_entries", "_face", "_face_entries", "_is_confirmed", "_reads")

    def __init__(self, face: "Face[K, V]", entries: Sequence[tuple[K, Entry[K, V], int]]) -> None:
        """`entries`: each key, its entry, and the entry's edition."""
        self._face = face
        # Others after memory was cleared, and while a block of `bypassed()` is open.
        self._face_entries = face.entries
        self._entries = entries
        self._is_confirmed = face.core.reads.is_confirmed
        self._reads = face.core.memory.counts.on_loop

    def read(self, now: float) -> Answer[V] | None:
        """Return the last of the answers, if none has changed. Counts nothing: see `count`.

        None: something changed, or the store must be asked.
        """
        if self._face.entries is not self._face_entries:
            return None
        for key, entry, edition in self._entries:
            if entry.edition != edition:
                return None
            if now >= entry.until and not self._is_confirmed(key, entry, now):
                return None
        return entry.answer

    def count(self, now: float) -> None:
        """Count one read of each answer, after `read` at the same time."""
        reads = self._reads
        for _, entry, _ in self._entries:
            if now < entry.until:
                reads.hit(entry, entry.answer, now)
            else:
                entry.is_used = True
                reads.note(entry.key, entry.answer, now)


def memo_of(face: "Face[K, V]", keys: Iterable[K]) -> tuple[Memo[K, V], list[Answer[V]]] | None:
    """A memo and its answers; None if one may not be served again as it is."""
    entries: list[tuple[K, Entry[K, V], int]] = []
    answers: list[Answer[V]] = []
    for key in keys:
        entry = face.entry_by_key.get(key)
        if entry is None:
            return None
        answer = entry.answer
        if not answer.found or answer.verdict is not Verdict.FRESH:
            return None
        if entry.trouble.failure is not None:
            return None
        entries.append((entry.key, entry, entry.edition))
        answers.append(answer)
    return Memo(face, tuple(entries)), answers
