"""What a resource asks the store for when it reads.

A store on this machine is read inline, in the caller's turn. A store over a network is asked once
in a turn of the loop: all reads of the turn go into one `Question`, which is sent when the turn is
over. If this process changes a key meanwhile, the store's answer about it is not used, because it
may be older than the change.

While the store is unavailable, memory answers; those keys are named as `unread`.
"""

import asyncio
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from stillfresh.engine.changes import StoreStep
from stillfresh.engine.rules import NOTHING
from stillfresh.engine.runtime import ReadNow, Runtime
from stillfresh.engine.spans import apart
from stillfresh.errors import NotOpen, StoreError
from stillfresh.stores.contract import AWAY, Copy, Record
from stillfresh.tasks import is_cancelled, looked_at

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Question:
    """The ids that one turn of the loop asks a store for, and what all its callers know."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        self.known: dict[str, str] = {}
        self.task: asyncio.Task[dict[str, Record]]

    def add(self, ids: Iterable[str], known: Mapping[str, str]) -> None:
        for id_ in ids:
            generation = known.get(id_)
            if id_ not in self.ids:
                self.ids[id_] = None
                if generation is not None:
                    self.known[id_] = generation
            elif self.known.get(id_) != generation:
                self.known.pop(id_, None)


class StoreReads(Generic[K, V]):
    """Asks the store of one resource for copies."""

    def __init__(self, core: "Core[K, V]") -> None:
        self._core = core
        self._spec = core.spec
        self._memory = core.memory
        self._question: Question | None = None

    def begin_anew(self) -> None:
        """Forget the question of a life of the cache that has ended."""
        self._question = None

    async def records(
        self, runtime: Runtime, texts: Mapping[K, str], unread: set[K] | None = None
    ) -> dict[str, Record]:
        """The stored copies, without values that memory has.

        While the store is unavailable, memory answers; keys that could not be read go to `unread`.
        Their cooldowns are then those that this process knows of.
        """
        entries = self._memory.entries
        copies = {id_: entries[key].copy for key, id_ in texts.items() if key in entries}
        known = {id_: copy.generation for id_, copy in copies.items()}
        try:
            if runtime.can.inline is not None:
                return runtime.can.inline.read_now(self._spec.kind, list(texts.values()), known)
            records = await self._ask_in_this_turn(runtime, texts, known, copies)
            lost = {key: id_ for key, id_ in texts.items() if records.get(id_) is AWAY}
        except StoreError:
            self._core.check_open(runtime)
            lost = {**texts}
            records = {}
        if lost:
            self._memory.counts.store_errors += 1
            if unread is not None:
                unread.update(lost)
            failing = self._memory.counts.failing
            for id_ in lost.values():
                records.pop(id_, None)
                if id_ in copies or id_ in failing:
                    records[id_] = Record(copies.get(id_), failure=failing.get(id_))
        return records

    async def _ask_in_this_turn(
        self,
        runtime: Runtime,
        texts: Mapping[K, str],
        known: dict[str, str],
        copies: dict[str, Copy],
    ) -> dict[str, Record]:
        """Ask with all other reads of this turn of the loop. A cancelled caller cancels no other.

        A key that was changed while it was read counts as missing, and leaves `copies`.
        """
        question = self._question
        if question is None:
            question = Question()
            self._question = question
            question.task = runtime.spawn(self._ask(runtime, question), apart(runtime.hooks))
            question.task.add_done_callback(looked_at)
        question.add(texts.values(), known)
        entries = self._memory.entries
        pinned = {
            entry.key: (entry.copy, entry.answer, entry.size)
            for entry in map(entries.get, texts)
            if entry
        }
        step: StoreStep[K] | None = None
        try:
            with self._core.changes.step(texts) as step:
                records = await asyncio.shield(question.task)
        except asyncio.CancelledError:
            if question.task.cancelled() and not is_cancelled():
                raise NotOpen(f"{self._spec.kind}: the cache is closed; open it again") from None
            raise
        finally:
            for key in step.changed if step is not None else ():
                copies.pop(texts[key], None)
        self._core.check_open(runtime)
        for key in pinned.keys() - entries.keys() - step.changed:
            copy, answer, size = pinned[key]  # dropped from memory while the store was asked
            self._memory.insert(key, copy, answer, size=size)
        unchanged = (id_ for key, id_ in texts.items() if key not in step.changed)
        return {id_: records[id_] for id_ in unchanged if id_ in records}

    async def _ask(self, runtime: Runtime, question: Question) -> dict[str, Record]:
        """Start when the turn is over. With `memory_for`, a cheaper read is allowed."""
        if self._question is question:
            self._question = None
        ids = list(question.ids)
        kind = self._spec.kind
        return await runtime.store.read(kind, ids, question.known, self._spec.memory_for)

    def is_unchanged(self, read_now: ReadNow, id_: str, copy: Copy) -> bool:
        """True if an inline read of the store finds this very copy, and no failure."""
        try:
            record = read_now(self._spec.kind, (id_,), {id_: copy.generation}).get(id_, NOTHING)
        except (StoreError, NotOpen):
            return False
        stored = record.copy
        if stored is None or record.failure is not None:
            return False
        return stored.mark == copy.mark and stored.generation == copy.generation
