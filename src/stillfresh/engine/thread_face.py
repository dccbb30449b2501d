"""What threads without an event loop use of the engine: the base of `SyncResource`.

`stillfresh.sync` is the same engine for such threads, and this module is its way in, besides the
public one; no other package may use it. A thread may answer a read by itself if memory or one
inline read of the store can. All other work is a coroutine function of the async `Resource`, which
`sync` runs on the loop thread.

Only the loop thread changes entries in memory. It ends `until` first and sets it last, so a thread
that finds `until` in the future, and the same answer before and after, has read a whole entry.
"""

from collections.abc import Hashable, Iterable
from typing import TypeVar

from stillfresh.engine.counts import CountsOfThread
from stillfresh.engine.face import Face
from stillfresh.engine.function import CachedFunction, bind
from stillfresh.engine.model import Answer
from stillfresh.engine.resource import Resource
from stillfresh.engine.threads import ThreadCall, in_caller

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

__all__ = ["CachedFunction", "ThreadCall", "ThreadFace", "bind", "in_caller"]


class ThreadFace(Face[K, V]):
    """A resource as threads read it without asking the loop thread."""

    def __init__(self, resource: Resource[K, V]) -> None:
        super().__init__(resource.core)
        self.thread_reads = CountsOfThread(resource.core.memory.counts)

    def hit(self, key: K) -> Answer[V] | None:
        """The answer of memory alone, or None; counted as a read."""
        try:
            entry = self.entry_of(key)
        except TypeError:  # it cannot be hashed: the call on the loop refuses it
            return None
        if entry is not None:
            answer = entry.answer
            now = self._clock()
            if now < entry.until and entry.answer is answer:
                self.thread_reads.counts.hit(entry, answer, now)
                return answer
        return None

    def confirmed(self, key: K) -> Answer[V] | None:
        """The answer of memory, if an inline read of the store confirms it; counted as a read."""
        now = self._clock()
        try:
            answer = self.core.reads.from_entry_in_thread(key, now)
        except TypeError:  # as in `hit`
            return None
        if answer is not None:
            self.thread_reads.counts.note(answer, now)
        return answer

    def at_hand(self, keys: Iterable[K]) -> tuple[dict[K, Answer[V]], list[K]]:
        """The answers that memory can give, alone or confirmed, and the other keys."""
        answers: dict[K, Answer[V]] = {}
        others: list[K] = []
        for key in keys:
            answer = self.hit(key) or self.confirmed(key)
            if answer is None:
                others.append(key)
            else:
                answers[key] = answer
        return answers, others

    def stored(self, keys: list[K]) -> dict[K, Answer[V]] | None:
        """The answers that one read of the store gives; None if the loop thread must be asked."""
        try:
            answers = self.core.reads.in_thread(keys)
        except TypeError:  # as in `hit`
            return None
        if answers is not None:
            self.thread_reads.counts.note_all(answers.values(), self._clock())
        return answers
