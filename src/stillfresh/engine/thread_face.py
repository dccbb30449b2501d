"""What threads without an event loop use of the engine: the base of `SyncResource`.

`stillfresh.sync` is the same engine for such threads, and this module is its way in, besides the
public one; no other package may use it. A thread may answer a read by itself if memory or one read
of the store can. All other work is a coroutine function of the async `Resource`. `sync` runs it in
the calling thread, which takes the loop's turn, or on the loop thread (`turns.py`).

Only the thread that has the loop's turn changes entries in memory. It ends `until` first and sets
it last, so a thread that finds `until` in the future, and the same answer before and after, has
read a whole entry.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from stillfresh.engine.counts import CountsOfThread
from stillfresh.engine.face import Face
from stillfresh.engine.function import CachedFunction, bind
from stillfresh.engine.model import Answer, Origin
from stillfresh.engine.resource import Resource
from stillfresh.engine.rules import NOTHING, Serve, plan_read
from stillfresh.engine.threads import ThreadCall, in_caller
from stillfresh.engine.unshared import own_answer
from stillfresh.errors import NotOpen, StoreError

if TYPE_CHECKING:
    from stillfresh.turns import SharedLoop

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

__all__ = ["CachedFunction", "ThreadCall", "ThreadFace", "bind", "in_caller"]


class ThreadFace(Face[K, V]):
    """A resource as threads read it without asking the loop thread."""

    def __init__(self, resource: Resource[K, V]) -> None:
        super().__init__(resource.core)
        self.thread_reads = CountsOfThread(resource.core.memory.counts)

    def own(self, answer: Answer[V]) -> Answer[V]:
        """The answer with a value that only its caller has."""
        return own_answer(self.core.spec.codec, answer)

    def hit(self, key: K) -> Answer[V] | None:
        """The answer of memory alone, or None; counted as a read."""
        try:
            entry = self.entry_by_key[key]
        except (KeyError, TypeError):  # TypeError: the call on the loop refuses such a key
            return None
        clock = self._clock
        answer = entry.answer
        now = clock()
        if now < entry.until and entry.answer is answer:
            reads = self.thread_reads.counts
            if entry.is_used:
                for _ in reads.unsampled:  # as in `ReadCounts.hit`
                    return answer
            reads.hit(entry, answer, now)
            return answer
        return None

    def confirmed(self, key: K, *, waits: bool = False) -> Answer[V] | None:
        """The answer of memory, if a read of the store confirms it; counted as a read.

        The read is inline, or a round trip if this thread `waits` for it.
        """
        now = self._clock()
        try:
            answer = self._confirmed(key, now, waits=waits)
        except TypeError:  # as in `hit`
            return None
        if answer is not None:
            self.thread_reads.counts.note(key, answer, now)
        return answer

    def _confirmed(self, key: K, now: float, *, waits: bool) -> Answer[V] | None:
        """What `Reads.from_entry` is for the loop's thread.

        The thread that has the loop's turn may change the entry meanwhile: then it is not used.
        """
        core = self.core
        runtime = core.runtime
        entry = core.memory.entries.get(key)
        if runtime is None or entry is None or core.owner.leaves_memory():
            return None
        answer = entry.answer
        old_answer = core.memory.old_answer(entry, now)
        if old_answer is not None:
            return old_answer if entry.answer is answer else None
        read = runtime.read_now
        if read is None and waits and not core.spec.memory_for:  # else the read counts for memory
            read = runtime.read_in_thread
        if read is None or not core.reads.has_its_row(read, key, entry, now):
            return None
        if entry.answer is not answer:
            return None
        entry.is_used = True
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
        """The answers that one read of the store gives; None if the engine must be asked."""
        try:
            answers = self._stored(keys)
        except TypeError:  # as in `hit`
            return None
        if answers is not None:
            self.thread_reads.counts.note_all(answers.items(), self._clock())
        return answers

    def _stored(self, keys: list[K]) -> dict[K, Answer[V]] | None:
        """The same, not counted.

        None where `hit` or `confirmed` use memory: only the thread that has the loop's turn keeps
        memory up to date.
        """
        core = self.core
        memory = core.memory
        runtime = None if core.owner.leaves_memory() else core.runtime
        if runtime is None or runtime.read_in_thread is None:
            return None
        fills_memory = core.spec.memory_for > 0
        if fills_memory and not runtime.runs_in_threads:
            return None
        uses_memory = fills_memory or runtime.read_now is not None
        if uses_memory and not memory.entries.keys().isdisjoint(keys):
            return None
        texts = core.names.texts(keys)
        began = core.fence.clock.now
        asked = memory.asked_now()
        now = asked.at
        plans: dict[K, Serve] = {}
        try:
            records = runtime.read_in_thread(core.spec.kind, list(texts.values()))
        except (StoreError, NotOpen):
            return None
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.failure is not None:
                return None
            plan = plan_read(record, now, core.spec.lease_for)
            if isinstance(plan, Serve):
                plans[key] = plan
        if not fills_memory:
            return self._answers_of(plans)
        if not plans:
            return {}
        with cast("SharedLoop", runtime.loop).borrowed():
            if core.runtime is not runtime or core.fence.clock.last_change > began:
                return None  # the store may have answered before the change
            served = {key: memory.serve(key, plan, now, asked) for key, plan in plans.items()}
        return {key: answer for key, answer in served.items() if answer is not None}

    def _answers_of(self, plans: Mapping[K, Serve]) -> dict[K, Answer[V]]:
        """The answers of stored copies, which memory does not keep."""
        memory = self.core.memory
        answers: dict[K, Answer[V]] = {}
        for key, plan in plans.items():
            is_readable, value = memory.value_of(key, plan.copy)
            if is_readable:
                answers[key] = memory.new_answer(plan.copy, value, plan.verdict, Origin.STORE)
        return answers
