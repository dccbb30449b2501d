"""The read path of one resource: from a key to an answer.

`Reads.answers` is the story. Each key is looked up in memory, then in the store; `rules.py` decides
whether that copy is served. Keys that need a load join one (`loads.py`), and the caller waits. The
clock is read once for each of these steps. The other methods of `Reads` answer without a load.

`StoreReads` asks the store. A store on this machine is read inline, in the caller's turn. A store
over a network is asked once in a turn of the loop: all reads of the turn go into one `Question`,
which is sent when the turn is over. If this process changes a key meanwhile, the store's answer
about it is not used, because it may be older than the change. While the store is unavailable,
memory answers; those keys are named as `unread`.
"""

import asyncio
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from stillfresh.bounded import SLICE, sliced
from stillfresh.engine import rules
from stillfresh.engine.at_least import AtLeast, demanded, joined
from stillfresh.engine.blocks import read_past
from stillfresh.engine.changes import StoreStep
from stillfresh.engine.entry import Entry
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Read
from stillfresh.engine.news import Asked
from stillfresh.engine.rules import FOR_EVER, NOTHING, MustLoad, Plan, Serve
from stillfresh.engine.runtime import ReadNow, Runtime
from stillfresh.engine.spans import apart
from stillfresh.engine.work import CURRENT, Waiter
from stillfresh.errors import LoadFailed, NotOpen, StoreError
from stillfresh.freshness import MAX_SKEW, Verdict
from stillfresh.stores.contract import AWAY, Copy, Record
from stillfresh.tasks import SharedResult, is_cancelled
from stillfresh.turns import THIS_THREAD

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

    async def answer(
        self,
        key: K,
        max_age: float = FOR_EVER,
        patience: float | None = None,
        at_least: AtLeast | None = None,
    ) -> Outcome[V]:
        """The outcome of one key: what `answers` does, with two short ways.

        One for a copy in memory that a store over a network has, too. The other for a cold key: if
        neither memory nor a store in this process has anything of it, it is loaded. Other stores go
        the general way, which would read a row that is there a second time.
        """
        runtime = self._core.runtime
        if (
            runtime is None
            or at_least is not None
            or self._owner.blocks > 0
            or self._owner.watched_blocks > 0
            or CURRENT.get() is not None
            or runtime.loop is not asyncio.get_running_loop()
        ):
            waiter: Waiter[K, V] = Waiter(max_age=max_age, at_least=at_least, patience=patience)
            return (await self.answers([key], waiter))[key]
        inline = runtime.can.inline
        is_known = key in self._memory.entries
        if is_known and inline is None and max_age == FOR_EVER and not self._spec.memory_for:
            return await self._ask_about_entry(runtime, key, patience)
        waiter = Waiter(max_age=max_age, patience=patience)
        if is_known or inline is None or runtime.can.process is None:
            return (await self.answers([key], waiter))[key]
        id_ = self._names.text(key)
        try:
            records = inline.read_now(self._spec.kind, (id_,))
        except StoreError:
            records = {id_: NOTHING}
        if records:
            return (await self.answers([key], waiter))[key]
        loads = self._core.loads
        try:
            loads.join_missing({key: id_}, waiter)
            loads.begin()
            if waiter.missing:
                await loads.wait(waiter, (key,))
        except BaseException:
            loads.leave(waiter, [key])
            raise
        finally:
            if waiter.outer is not None:
                waiter.end()
        outcome = waiter.outcomes[key]
        reads = self._memory.counts.on_loop
        if isinstance(outcome, LoadFailed):
            reads.note_failed(outcome)
        else:
            reads.note(key, outcome, runtime.clock())
        return outcome

    async def _ask_about_entry(
        self, runtime: Runtime, key: K, patience: float | None
    ) -> Outcome[V]:
        """The outcome of a key in memory. Mostly the store has the same copy, and it is FRESH.

        Then the entry's answer stands, and nothing else is to be done.
        """
        memory = self._memory
        asked = memory.asked_now()
        now = asked.at
        id_ = self._names.text(key)
        unread: set[K] = set()
        records = await self._core.store_reads.records(runtime, {key: id_}, unread)
        record = records.get(id_, NOTHING)
        entry = memory.entries.get(key)
        if (
            entry is not None
            and not unread
            and record.failure is None
            and memory.has(key, record.copy)
            and entry.copy.fetched_at - MAX_SKEW <= now < entry.stands
        ):
            entry.is_used = True
            memory.counts.on_loop.note(key, entry.answer, runtime.clock())
            return entry.answer
        waiter: Waiter[K, V] = Waiter(patience=patience)
        waiter.notes.unread |= unread
        return (await self.answers([key], waiter, stored=EarlierRead(asked, records)))[key]

    async def answers(
        self,
        keys: Sequence[K],
        waiter: Waiter[K, V] | None = None,
        *,
        anew: bool = False,
        stored: "EarlierRead | None" = None,
    ) -> dict[K, Outcome[V]]:
        """The outcome of each key, in no order: read in slices, loaded in full batches.

        `anew`: load all, at any age and during a cooldown; a running load counts. `stored`: what
        the store has of a single key, if it was asked just now.
        """
        waiter = waiter or Waiter()
        if self._owner.watched_blocks or waiter.outer is not None:
            waiter.at_least = joined(waiter.at_least, demanded())
        if self._core.is_bypassed():
            return await read_past(self._core, keys, waiter)
        runtime = await self._core.ready()
        if waiter.at_least is not None and waiter.at_least.positions:
            late = await self._owner.outboxes.wait_for(waiter.at_least.positions)
            if late is not None:
                return dict.fromkeys(keys, late)
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
                    runtime, group, waiter, None if anew else from_memory, stored
                )
                to_load = to_load | texts if to_load else texts
                records |= read
                if len(to_load) >= max_batch:
                    # Only full batches begin now; what is left over joins the next slice's keys.
                    left_over = [to_load.popitem() for _ in range(len(to_load) % max_batch)]
                    self.join(to_load, records, waiter, forced=anew)
                    to_load = dict(reversed(left_over))
            self.join(to_load, records, waiter, forced=anew)
            await loads.wait(waiter, keys)
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
        for group in _slices(list(outcomes.items())):
            self._memory.counts.on_loop.note_all(group, runtime.clock())
            if len(outcomes) > SLICE:
                await asyncio.sleep(0)

    async def _look_up(
        self,
        runtime: Runtime,
        keys: Collection[K],
        waiter: Waiter[K, V],
        from_memory: dict[K, Outcome[V]] | None,
        stored: "EarlierRead | None",
    ) -> tuple[dict[K, str], dict[str, Record]]:
        """Serve what memory has (into `from_memory`) or the store; if that is None, nothing.

        Returns the keys to load, and what is stored of them. A key that was served may be among
        them: it is loaded in the background.
        """
        asked = self._memory.asked_now() if stored is None else stored.asked
        now = asked.at
        if from_memory is None or stored is not None:
            texts = self._names.texts(keys)
        elif waiter.at_least is None:
            texts = self._take_from_memory(keys, now, from_memory, waiter.max_age)
        else:
            texts = self._take_own(keys, now, from_memory, waiter)
        records: dict[str, Record] = {}
        if stored is not None:
            records = stored.records
        elif texts:
            records = await self._core.store_reads.records(
                runtime, texts, waiter.notes.unread, waiter.at_least
            )
        if from_memory is None or not (records or self._memory.may_have_unstored):
            return texts, records
        to_load: dict[K, str] = {}
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            unverified = key in waiter.notes.unread
            has_newer = waiter.at_least is None and self._memory.has_newer(key, record.copy)
            if has_newer:
                copy = self._memory.entries[key].copy
                record = Record(copy, record.held_until, record.failure)
                unverified = True
            plan, outcome = self._plan(
                key,
                record,
                asked,
                waiter.max_age,
                unverified=unverified,
                at_least=waiter.at_least is not None,
            )
            if outcome is not None:
                waiter.outcomes[key] = outcome
            elif isinstance(plan, MustLoad) and plan.fallback is not None:
                self._core.loads.give_fallback(key, plan.fallback, [waiter], unverified=unverified)
            if outcome is None or (isinstance(plan, Serve) and plan.refresh):
                to_load[key] = id_
            elif has_newer and self._memory.may_be_stored_now(key):
                to_load[key] = id_
                waiter.notes.unstored.add(key)
        return to_load, {id_: records[id_] for id_ in to_load.values() if id_ in records}

    def _plan(
        self,
        key: K,
        record: Record,
        asked: Asked,
        max_age: float,
        *,
        unverified: bool,
        at_least: bool = False,
    ) -> tuple[Plan, Outcome[V] | None]:
        """The plan for a key, and its outcome if that needs no load."""
        now = asked.at
        plan = rules.plan_read(record, now, self._spec.lease_for, max_age, at_least=at_least)
        if isinstance(plan, Serve):
            answer = self._memory.serve(key, plan, now, asked, unverified=unverified)
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
        is_any_answered = self._memory.may_have_unstored and bool(waiter.outcomes)
        if not records and not forced and not is_any_answered:
            self._drop_deleted(texts, waiter)
            loads.join_missing(texts, waiter)
            loads.begin()
            return
        is_waiting = False
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if key in waiter.outcomes:
                loads.want(key, id_, record, waiter, leased=key in waiter.notes.unstored)
                continue
            if record.copy is None:
                self._drop_deleted([key], waiter)
            is_waiting = True
            loads.join(key, id_, record, waiter, forced=forced)
        if is_waiting:
            loads.begin()
        else:
            loads.flush_soon()  # a refresh in the background does not hold up its reader

    def _drop_deleted(self, keys: Iterable[K], waiter: Waiter[K, V]) -> None:
        """Drop keys from memory whose copy was deleted from the store.

        Not those that the store could not be asked for: nobody knows that they were.
        """
        entries = self._memory.entries
        if not entries:
            return
        under_way = self._core.loads.under_way
        unread = waiter.notes.unread
        for key in keys:
            if key in entries and key not in under_way and key not in unread:
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
        reads = memory.counts.on_loop
        text = self._names.text
        oldest = now - max_age
        others: dict[K, str] = {}
        for key in keys:
            entry = entry_of(key)
            if entry is None or entry.copy.fetched_at < oldest:
                others[key] = text(key)
                continue
            if now >= entry.until:
                answer = self._answer_alone(entry, now)
                if answer is None:
                    others[key] = text(key)
                else:
                    from_memory[key] = answer
                continue
            from_memory[key] = entry.answer
            if entry.is_used:
                for _ in reads.unsampled:  # as in `ReadCounts.hit`
                    break
                else:
                    reads.hit(entry, entry.answer, now)
            else:
                reads.hit(entry, entry.answer, now)
        return others

    def _take_own(
        self,
        keys: Collection[K],
        now: float,
        from_memory: dict[K, Outcome[V]],
        waiter: Waiter[K, V],
    ) -> dict[K, str]:
        """What `_take_from_memory` does, for a reader with a token.

        If this cache made all changes of the token, memory is no older: a change drops the entry.
        """
        at_least = waiter.at_least
        if at_least is None or not at_least.is_only_by(self._owner.maker):
            return self._names.texts(keys)
        oldest = now - waiter.max_age
        others: list[K] = []
        for key in keys:
            entry = self._memory.entries.get(key)
            if entry is None or now >= entry.until or entry.copy.fetched_at < oldest:
                others.append(key)
            else:
                self._memory.counts.on_loop.hit(entry, entry.answer, now)
                from_memory[key] = entry.answer
        return self._names.texts(others)

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
            reads.note(entry.key, answer, now)
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
        at_least = demanded()
        async for batch in sliced(keys):
            self._core.check_open(runtime)  # since the last slice
            asked = self._memory.asked_now()
            now = asked.at
            if at_least is not None:
                texts = self._names.texts(batch)
            else:
                texts = self._take_from_memory(batch, now, outcomes, max_age)
            records: dict[str, Record] = {}
            if texts:
                records = await self._core.store_reads.records(runtime, texts, unread, at_least)
            for key, id_ in texts.items():
                record = records.get(id_, NOTHING)
                unverified = key in unread
                if at_least is None and self._memory.has_newer(key, record.copy):
                    record = Record(self._memory.entries[key].copy, failure=record.failure)
                    unverified = True
                _, outcome = self._plan(
                    key,
                    record,
                    asked,
                    max_age,
                    unverified=unverified,
                    at_least=at_least is not None,
                )
                if outcome is not None:
                    outcomes[key] = outcome
            read = [(key, outcomes[key]) for key in texts if key in outcomes]
            self._memory.counts.on_loop.note_all(read, now)
        return outcomes

    async def stored(self, key: K) -> Answer[V] | None:
        """The stored copy, however old; None if it is GONE. Loads nothing."""
        if self._core.is_bypassed():
            return None
        runtime = await self._core.ready()
        id_ = self._names.text(key)
        unread: set[K] = set()
        asked = self._memory.asked_now()
        now = asked.at
        records = await self._core.store_reads.records(runtime, {key: id_}, unread, demanded())
        record = records.get(id_, NOTHING)
        copy = record.copy
        if copy is None:
            return None
        verdict = rules.verdict_of(copy, now)
        if verdict is Verdict.GONE:
            return None
        failure = None if verdict is Verdict.FRESH else record.failure
        plan = Serve(copy, verdict, failure=failure)
        return self._memory.serve(key, plan, now, asked, unverified=bool(unread))

    def from_entry(self, key: K, entry: Entry[K, V], now: float) -> Answer[V] | None:
        """The answer that an entry gives without waiting, counted as a read; or None.

        Memory alone gives it, or an inline read of the store confirms it.
        """
        runtime = self._core.runtime
        if runtime is None or self._owner.leaves_memory():
            return None
        if runtime.loop is not asyncio.get_running_loop():
            return None
        answer = self._answer_alone(entry, now)
        if answer is not None:
            return answer
        if not self.is_confirmed(key, entry, now):
            return None
        entry.is_used = True
        self._memory.counts.on_loop.note(key, entry.answer, now)
        return entry.answer

    def is_confirmed(self, key: K, entry: Entry[K, V], now: float) -> bool:
        """True if the entry's answer is FRESH, by an inline read or by the store's silence."""
        runtime = self._core.runtime
        if runtime is None:
            return False
        if runtime.read_now is None:
            return self._memory.is_trusted(entry, now)
        if not self.has_its_row(runtime.read_now, key, entry, now):
            return False
        if self._spec.memory_for:  # the time counts from now
            entry.vouched = now + self._spec.memory_for
            entry.until = min(entry.stands, entry.vouched)
        return True

    def has_its_row(self, read_now: ReadNow, key: K, entry: Entry[K, V], now: float) -> bool:
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

        at_least = demanded()
        may_lag = at_least is None or at_least.is_only_by(self._owner.maker)
        return self._memory.peek(key, confirms, may_lag=may_lag)


class EarlierRead(NamedTuple):
    """What the store has of a key, and when it was asked."""

    asked: Asked
    records: dict[str, Record]


class Question:
    """The ids that one turn of the loop asks a store for, and what all its callers know."""

    def __init__(self) -> None:
        self.answer: SharedResult[dict[str, Record]] = SharedResult()
        self.at_least = False
        """A caller has seen a change, so the answer may not lag."""
        self.ids: dict[str, None] = {}
        self.known: dict[str, str] = {}
        self.task: asyncio.Task[None]

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
        self,
        runtime: Runtime,
        texts: Mapping[K, str],
        unread: set[K] | None = None,
        at_least: AtLeast | None = None,
    ) -> dict[str, Record]:
        """The stored copies, without values that memory has.

        While the store is unavailable, memory answers; keys that could not be read go to `unread`.
        Their cooldowns are then those that this process knows of. `at_least`: the caller has seen a
        change, which memory and a lagging read may lack.
        """
        entries = self._memory.entries
        copies = {id_: entries[key].copy for key, id_ in texts.items() if key in entries}
        known = {id_: copy.generation for id_, copy in copies.items()}
        try:
            if runtime.can.inline is not None:
                return runtime.can.inline.read_now(self._spec.kind, list(texts.values()), known)
            records = await self._ask_in_this_turn(
                runtime, texts, known, copies, at_least=at_least is not None
            )
            lost = {key: id_ for key, id_ in texts.items() if records.get(id_) is AWAY}
        except StoreError:
            self._core.check_open(runtime)
            lost = {**texts}
            records = {}
        if lost:
            self._memory.counts.store_errors += 1
            if unread is not None:
                unread.update(lost)
            if at_least is not None and not at_least.is_of_loader:
                copies.clear()
            else:  # memory may have got some meanwhile
                copies |= {id_: entries[key].copy for key, id_ in lost.items() if key in entries}
            load = CURRENT.get()
            if load is not None and any(id_ in copies for id_ in lost.values()):
                load.has_unverified_parts = True
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
        *,
        at_least: bool,
    ) -> dict[str, Record]:
        """Ask with all other reads of this turn of the loop. A cancelled caller cancels no other.

        A thread that runs the engine itself asks at once: there are no others in its turn.
        A key that was changed while it was read counts as missing, and leaves `copies`.
        """
        question = Question() if THIS_THREAD.has_turn else self._question_of_this_turn(runtime)
        question.add(texts.values(), known)
        question.at_least |= at_least
        entries = self._memory.entries
        pinned = {
            entry.key: (entry.copy, entry.answer, entry.size)
            for entry in map(entries.get, texts)
            if entry
        }
        step: StoreStep[K] | None = None
        try:
            with self._core.changes.step(texts) as step:
                if THIS_THREAD.has_turn:
                    records = await self._ask(runtime, question)
                else:
                    records = await question.answer.wait()
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

    def _question_of_this_turn(self, runtime: Runtime) -> Question:
        """The question to which all reads of this turn add their ids."""
        question = self._question
        if question is None:
            question = Question()
            self._question = question
            asking = question.answer.of(self._ask(runtime, question))
            question.task = runtime.spawn(asking, apart(runtime.hooks))
            question.task.add_done_callback(question.answer.note_end)
        return question

    async def _ask(self, runtime: Runtime, question: Question) -> dict[str, Record]:
        """Start when the turn is over. With `memory_for`, a cheaper read is allowed."""
        if self._question is question:
            self._question = None
        ids = list(question.ids)
        kind = self._spec.kind
        lag = 0.0 if question.at_least else self._spec.memory_for
        return await runtime.store.read(kind, ids, question.known, lag)

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


def _slices(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[at : at + SLICE] for at in range(0, len(items), SLICE)]
