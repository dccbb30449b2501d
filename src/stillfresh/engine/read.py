"""The read path of one resource: from a key to an answer.

`Reads.answers` is the story. Each key is looked up in memory, then in the store; `rules.py` decides
whether that copy is served. Keys that need a load join one (`loads.py`), and the caller waits. The
clock is read once for each of these steps.

The other methods answer without a load: `known`, `stored`, `peek`, and what threads ask.
"""

import asyncio
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from stillfresh.bounded import SLICE, sliced
from stillfresh.engine import rules
from stillfresh.engine.blocks import read_past
from stillfresh.engine.entry import Entry
from stillfresh.engine.model import Answer, Origin, Outcome, OwnLoad, Read
from stillfresh.engine.rules import FOR_EVER, NOTHING, MustLoad, Plan, Serve
from stillfresh.engine.runtime import ReadNow, Runtime
from stillfresh.engine.work import Waiter
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import MAX_SKEW, Verdict
from stillfresh.stores.contract import Copy, Record

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class Reads(Generic[K, V]):
    """Answers reads of one resource from memory, the store or a load."""

    def __init__(self, core: "Core[K, V]") -> None:
        self._core = core
        self._spec = core.spec
        self._owner = core.owner
        self._memory = core.memory
        self._names = core.names

    async def read(self, key: K, load: OwnLoad, *, anew: bool = False) -> Read[V]:
        """Read with a loader for this read (`max_batch` is 1); joins a running load."""
        waiter: Waiter[K, V] = Waiter(load)
        outcomes = await self.answers([key], waiter, anew=anew)
        return outcomes[key] if waiter.private is None else waiter.private

    async def answer(self, key: K, max_age: float = FOR_EVER) -> Outcome[V]:
        """The outcome of one key: what `answers` does, with a short way for a cold one.

        If neither memory nor a store in this process has anything of the key, it is loaded. Other
        stores go the general way, which would read a row that is there a second time.
        """
        waiter: Waiter[K, V] = Waiter(max_age=max_age)
        core = self._core
        runtime = core.runtime
        if (
            runtime is None
            or runtime.can.process is None
            or runtime.can.inline is None
            or key in self._memory.entries
            or self._owner.blocks  # of `bypassed()` or `recording()`
            or runtime.loop is not asyncio.get_running_loop()
        ):
            return (await self.answers([key], waiter))[key]
        id_ = self._names.text(key)
        try:
            records = runtime.can.inline.read_now(self._spec.kind, (id_,))
        except StoreError:
            records = {id_: NOTHING}
        if records:
            return (await self.answers([key], waiter))[key]
        loads = core.loads
        try:
            loads.join_missing({key: id_}, waiter)
            loads.begin()
            await loads.wait(waiter)
        except BaseException:
            loads.leave(waiter, [key])
            raise
        finally:
            waiter.end()
        self._memory.counts.on_loop.note_all(waiter.outcomes.values(), runtime.clock())
        return waiter.outcomes[key]

    async def answers(
        self, keys: Sequence[K], waiter: Waiter[K, V] | None = None, *, anew: bool = False
    ) -> dict[K, Outcome[V]]:
        """The outcome of each key, in no order: read in slices, loaded in full batches.

        `anew`: load all, at any age and during a cooldown; a running load counts.
        """
        waiter = waiter or Waiter()
        if self._core.is_bypassed():
            return await read_past(self._core, keys, waiter)
        runtime = await self._core.ready()
        loads = self._core.loads
        max_batch = self._spec.max_batch
        slices = _slices(keys)
        from_memory: dict[K, Outcome[V]] = {}
        to_load: dict[K, str] = {}
        records: dict[str, Record] = {}
        outcomes = waiter.outcomes
        try:
            for group in slices:
                if group is not slices[0]:
                    await asyncio.sleep(0)
                    self._core.check_open(runtime)
                texts, read = await self._look_up(
                    runtime, group, waiter, None if anew else from_memory
                )
                to_load = to_load | texts if to_load else texts
                records |= read
                if len(to_load) >= max_batch:
                    # Only full batches begin now; what is left over joins the next slice's keys.
                    left_over = [to_load.popitem() for _ in range(len(to_load) % max_batch)]
                    self.join(to_load, records, waiter, forced=anew)
                    to_load = dict(reversed(left_over))
            self.join(to_load, records, waiter, forced=anew)
            await loads.wait(waiter)
        except BaseException:
            loads.leave(waiter, keys)
            raise
        finally:
            waiter.end()
        if not anew:
            await self._count(outcomes, runtime)
        if not from_memory:
            return outcomes
        return from_memory | outcomes if outcomes else from_memory

    async def _count(self, outcomes: Mapping[K, Outcome[V]], runtime: Runtime) -> None:
        """Count the reads that left memory, in slices."""
        for group in _slices(list(outcomes.values())):
            self._memory.counts.on_loop.note_all(group, runtime.clock())
            if len(outcomes) > SLICE:
                await asyncio.sleep(0)

    async def _look_up(
        self,
        runtime: Runtime,
        keys: Collection[K],
        waiter: Waiter[K, V],
        from_memory: dict[K, Outcome[V]] | None,
    ) -> tuple[dict[K, str], dict[str, Record]]:
        """Serve what memory has (into `from_memory`) or the store; if that is None, nothing.

        Returns the keys to load, and what is stored of them. A key that was served may be among
        them: it is loaded in the background.
        """
        now = runtime.clock()
        if from_memory is None:
            texts = self._names.texts(keys)
        else:
            texts = self._take_from_memory(keys, now, from_memory, waiter.max_age)
        records: dict[str, Record] = {}
        if texts:
            records = await self._core.store_reads.records(runtime, texts, waiter.unread)
        if not records or from_memory is None:
            return texts, records
        to_load: dict[K, str] = {}
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            unverified = key in waiter.unread
            has_newer = self._memory.has_newer(key, record.copy)
            if has_newer:
                copy = self._memory.entries[key].copy
                record = Record(copy, record.held_until, record.failure)
                unverified = True
            plan, outcome = self._plan(key, record, now, waiter.max_age, unverified=unverified)
            if outcome is not None:
                waiter.outcomes[key] = outcome
            elif isinstance(plan, MustLoad) and plan.fallback is not None:
                self._core.loads.give_fallback(key, plan.fallback, [waiter], unverified=unverified)
            if outcome is None or (isinstance(plan, Serve) and plan.refresh):
                to_load[key] = id_
            elif has_newer:  # perhaps it can be stored by now; if not, it need not be loaded again
                to_load[key] = id_
                waiter.unstored.add(key)
        return to_load, {id_: records[id_] for id_ in to_load.values() if id_ in records}

    def _plan(
        self, key: K, record: Record, now: float, max_age: float, *, unverified: bool
    ) -> tuple[Plan, Outcome[V] | None]:
        """The plan for a key, and its outcome if that needs no load."""
        plan = rules.plan_read(record, now, self._spec.lease_for, max_age)
        if isinstance(plan, Serve):
            answer = self._memory.serve(key, plan, now, unverified=unverified)
            if answer is not None:
                return plan, answer
        failure = rules.cooling(record.failure, now)
        if failure is None:
            return plan, None
        return plan, self._memory.failure_error(key, failure, now)

    def join(
        self,
        texts: Mapping[K, str],
        records: Mapping[str, Record],
        waiter: Waiter[K, V],
        *,
        forced: bool = False,
    ) -> None:
        """Wait for loads of these keys. A key that has an answer is refreshed behind it."""
        if not texts:
            return
        loads = self._core.loads
        if not records and not forced:
            self._drop_deleted(texts)
            loads.join_missing(texts, waiter)
            loads.begin()
            return
        is_waiting = False
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.copy is None:
                self._drop_deleted([key])
            if key in waiter.outcomes:
                loads.want(key, id_, record, waiter, leased=key in waiter.unstored)
            else:
                is_waiting = True
                loads.join(key, id_, record, waiter, forced=forced)
        if is_waiting:
            loads.begin()
        else:
            loads.flush_soon()  # a refresh in the background does not hold up its reader

    def _drop_deleted(self, keys: Iterable[K]) -> None:
        """Drop keys from memory whose copy was deleted from the store."""
        entries = self._memory.entries
        if not entries:
            return
        under_way = self._core.loads.under_way
        for key in keys:
            if key in entries and key not in under_way:
                self._memory.drop(key)

    def _take_from_memory(
        self, keys: Iterable[K], now: float, from_memory: dict[K, Outcome[V]], max_age: float
    ) -> dict[K, str]:
        """Put the answers of memory into `from_memory`; return the names of the other keys."""
        recording = self._core.recording
        if recording is not None:
            recording.note(self._core, keys, "read")
        memory = self._memory
        entry_of = memory.entries.get
        text = self._names.text
        oldest = now - max_age
        others: dict[K, str] = {}
        for key in keys:
            entry = entry_of(key)
            if entry is None or entry.copy.fetched_at < oldest:
                others[key] = text(key)
                continue
            answer = self._answer_alone(entry, now)
            if answer is None:
                others[key] = text(key)
            else:
                from_memory[key] = answer
        return others

    def _answer_alone(self, entry: Entry[K, V], now: float) -> Answer[V] | None:
        """The answer that memory gives without asking the store, counted as a read; or None."""
        memory = self._memory
        reads = memory.counts.on_loop
        if now < entry.until or memory.is_trusted(entry, now):
            reads.hit(entry, entry.answer, now)
            return entry.answer
        answer = memory.old_answer(entry, now)
        if answer is not None:
            entry.is_used = True
            reads.note(answer, now)
        return answer

    # Answers without a load.

    async def known(
        self, keys: Iterable[K], unread: set[K] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """The answers that need no load; other keys are left out."""
        if self._core.is_bypassed():
            return {}
        runtime = await self._core.ready()
        outcomes: dict[K, Outcome[V]] = {}
        unread = set() if unread is None else unread
        async for batch in sliced(keys):
            self._core.check_open(runtime)  # since the last slice
            now = runtime.clock()
            texts = self._take_from_memory(batch, now, outcomes, max_age)
            records: dict[str, Record] = {}
            if texts:
                records = await self._core.store_reads.records(runtime, texts, unread)
            for key, id_ in texts.items():
                record = records.get(id_, NOTHING)
                unverified = key in unread
                if self._memory.has_newer(key, record.copy):
                    record = Record(self._memory.entries[key].copy, failure=record.failure)
                    unverified = True
                _, outcome = self._plan(key, record, now, max_age, unverified=unverified)
                if outcome is not None:
                    outcomes[key] = outcome
            read = [outcomes[key] for key in texts if key in outcomes]
            self._memory.counts.on_loop.note_all(read, now)
        return outcomes

    async def stored(self, key: K) -> Answer[V] | None:
        """The stored copy, however old; None if it is GONE. Loads nothing."""
        if self._core.is_bypassed():
            return None
        runtime = await self._core.ready()
        id_ = self._names.text(key)
        unread: set[K] = set()
        now = runtime.clock()
        records = await self._core.store_reads.records(runtime, {key: id_}, unread)
        record = records.get(id_, NOTHING)
        copy = record.copy
        if copy is None:
            return None
        verdict = rules.verdict_of(copy, now)
        if verdict is Verdict.GONE:
            return None
        failure = None if verdict is Verdict.FRESH else record.failure
        plan = Serve(copy, verdict, failure=failure)
        return self._memory.serve(key, plan, now, unverified=bool(unread))

    def from_entry(self, key: K, entry: Entry[K, V], now: float) -> Answer[V] | None:
        """The answer that an entry gives without waiting, counted as a read; or None.

        Memory alone gives it, or an inline read of the store confirms it.
        """
        runtime = self._core.runtime
        if runtime is None or self._owner.blocks:
            return None
        if runtime.loop is not asyncio.get_running_loop():
            return None
        answer = self._answer_alone(entry, now)
        if answer is not None:
            return answer
        if not self.is_confirmed(key, entry, now):
            return None
        entry.is_used = True
        self._memory.counts.on_loop.note(entry.answer, now)
        return entry.answer

    def is_confirmed(self, key: K, entry: Entry[K, V], now: float) -> bool:
        """True if the entry's answer is FRESH, by an inline read or by the store's silence."""
        runtime = self._core.runtime
        if runtime is None:
            return False
        if runtime.read_now is None:
            return self._memory.is_trusted(entry, now)
        if not self._has_its_row(runtime.read_now, key, entry, now):
            return False
        if self._spec.memory_for:  # the time counts from now
            entry.vouched = now + self._spec.memory_for
            entry.until = min(entry.stands, entry.vouched)
        return True

    def from_entry_in_thread(self, key: K, now: float) -> Answer[V] | None:
        """What `from_entry` is for the loop's thread, for another one; not counted.

        The loop may change the entry meanwhile: then it is not used.
        """
        runtime = self._core.runtime
        entry = self._memory.entries.get(key)
        if runtime is None or entry is None or self._owner.blocks:
            return None
        answer = entry.answer
        old_answer = self._memory.old_answer(entry, now)
        if old_answer is not None:
            return old_answer if entry.answer is answer else None
        if runtime.read_now is None or not self._has_its_row(runtime.read_now, key, entry, now):
            return None
        if entry.answer is not answer:
            return None
        entry.is_used = True
        return answer

    def _has_its_row(self, read_now: ReadNow, key: K, entry: Entry[K, V], now: float) -> bool:
        """True if the entry is FRESH, and an inline read finds its copy in the store."""
        copy = entry.copy
        if copy is None or not copy.fetched_at - MAX_SKEW <= now < entry.stands:
            return False
        return self._core.store_reads.is_unchanged(read_now, self._names.text(key), copy)

    def peek(self, key: K) -> Answer[V] | None:
        """What memory holds, without waiting; a row that can be read inline is looked at."""
        if self._core.is_bypassed():
            return None

        def confirms(copy: Copy) -> bool:
            runtime = self._core.runtime
            if runtime is None or runtime.read_now is None or self._owner.blocks:
                return False
            id_ = self._names.text(key)
            return self._core.store_reads.is_unchanged(runtime.read_now, id_, copy)

        return self._memory.peek(key, confirms)

    def in_thread(self, keys: Sequence[K]) -> dict[K, Answer[V]] | None:
        """Answer a thread from the store without a load; None if the loop must be asked.

        Not counted. The loop must be asked where `hit` or `confirmed` use memory: only the loop
        keeps memory up to date.
        """
        runtime = None if self._owner.blocks or self._spec.memory_for else self._core.runtime
        if runtime is None or runtime.read_in_thread is None:
            return None
        if runtime.read_now is not None and not self._memory.entries.keys().isdisjoint(keys):
            return None
        texts = self._names.texts(keys)
        now = runtime.clock()
        answers: dict[K, Answer[V]] = {}
        try:
            records = runtime.read_in_thread(self._spec.kind, list(texts.values()))
        except (StoreError, NotOpen):
            return None
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.failure is not None:
                return None
            plan = rules.plan_read(record, now, self._spec.lease_for)
            if isinstance(plan, Serve):
                is_readable, value = self._memory.value_of(key, plan.copy)
                if is_readable:
                    answers[key] = self._memory.new_answer(
                        plan.copy, value, plan.verdict, Origin.STORE
                    )
        return answers


def _slices(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[at : at + SLICE] for at in range(0, len(items), SLICE)]
