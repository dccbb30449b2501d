"""The read path of one resource: from a key to an answer (E2-E6, E26).

Reads the clock once for an operation and does what `rules.py` decides. Callers use keys of any
type; `text` is the name of a key in the store.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from stillfresh.engine import rules
from stillfresh.engine.blocks import Face, is_past, loaded
from stillfresh.engine.keys import Spec
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.load import Loads
from stillfresh.engine.loader import is_cancelled, looked_at
from stillfresh.engine.memory import Memory, MemoryEntry
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Read
from stillfresh.engine.queue import Queue, Waiter
from stillfresh.engine.rules import FOR_EVER, NOTHING, Load, Plan, Serve
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.spans import apart
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import MAX_SKEW, Verdict
from stillfresh.stores.contract import AWAY, Copy, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
ReadNow: TypeAlias = Callable[..., dict[str, Record]]


class StoreStep(Struct, Generic[K], eq=False):
    """A running step of the store, and which of its keys were invalidated meanwhile (E6)."""

    keys: frozenset[K]
    dirty: set[K] = set()


class Question:
    """The ids that one turn of the loop asks a store for, and what all its callers know (E4)."""

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


class Reads(Generic[K, V]):
    """Answers reads from memory, the store or a load."""

    def __init__(
        self, spec: Spec[K, V], owner: Lifecycle, memory: Memory[K, V], text: Callable[[K], str]
    ) -> None:
        self.spec, self.owner, self.memory, self.text = spec, owner, memory, text
        self.queue: Queue[K, V]
        self.loads: Loads[K, V]  # while the cache is open
        self.faces: list[Face[K, V]] = []
        self._steps: set[StoreStep[K]] = set()
        self.begin_anew()

    def begin_anew(self, runtime: Runtime | None = None) -> None:
        """Forget running steps: they belong to a life of the cache that has ended."""
        self._runtime = runtime
        self.queue = Queue(self.spec, self.memory.counts)
        self._question: Question | None = None

    async def ready(self) -> Runtime:
        """E13: a cache belongs to the loop that opened it."""
        runtime = self._runtime
        if runtime is None or runtime.loop is not asyncio.get_running_loop():
            runtime = await self.owner.runtime()
            self._check_open(runtime)
        return runtime

    def _check_open(self, runtime: Runtime) -> None:
        """Raise if the cache was closed meanwhile: what this call has read is outdated."""
        if self._runtime is not runtime:
            raise NotOpen(f"{self.spec.kind}: the cache is closed; open it again")

    def texts(self, keys: Iterable[K]) -> dict[K, str]:
        """The names of the keys in the store. ConfigError if one is not a valid key."""
        return {key: self.text(key) for key in keys}

    async def read(self, key: K, load: OwnLoad, *, anew: bool = False) -> Read[V]:
        """E2 with a loader for this read (`max_batch` is 1); joins a running load."""
        waiter: Waiter[K, V] = Waiter(load)
        outcomes = await (self.reload([key], waiter) if anew else self.answers([key], waiter))
        return outcomes[key] if waiter.private is None else waiter.private

    async def answers(
        self, keys: Sequence[K], waiter: Waiter[K, V] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """E2 for each key; keys that need a load are loaded together."""
        if is_past(self.owner):
            return await loaded(self, keys, waiter or Waiter())
        runtime = await self.ready()
        now, waiter = runtime.clock(), waiter or Waiter(max_age=max_age)
        if texts := self._unheld(keys, now, waiter.outcomes, max_age):
            records = await self._records(runtime, texts, waiter.unread)
            for key, id_ in texts.items() if records else ():
                if (record := records.get(id_)) is not None:
                    self._answer(key, id_, record, now, waiter, unverified=key in waiter.unread)
                else:
                    self._join(key, id_, NOTHING, waiter)
            if not records:
                self._drop_deleted(texts)
                self.queue.join_missing(texts, waiter)
            await self.loads.wait(waiter, texts)
            self.memory.count([waiter.outcomes[key] for key in texts], runtime.clock())
        return {key: waiter.outcomes[key] for key in keys}

    def _answer(  # noqa: PLR0917 (called for each key that is read)
        self, key: K, id_: str, record: Record, now: float, waiter: Waiter[K, V], unverified: bool
    ) -> None:
        plan, said = self._planned(key, record, now, waiter.max_age, unverified=unverified)
        if said is not None:
            waiter.outcomes[key] = said
            if isinstance(plan, Serve) and plan.refresh:
                self.queue.want(key, id_, record, waiter)
                self.loads.flush_soon()
            return
        if isinstance(plan, Load) and plan.fallback is not None:
            self.loads.give_fallback(key, plan.fallback, [waiter], unverified=unverified)
        self._join(key, id_, record, waiter)

    def _planned(
        self, key: K, record: Record, now: float, max_age: float, *, unverified: bool
    ) -> tuple[Plan, Outcome[V] | None]:
        """The plan for a key, and its answer if that needs no load."""
        plan = rules.plan_read(record, now, self.spec.lease_for, max_age)
        if isinstance(plan, Serve) and (
            answer := self.memory.serve(key, plan, now, unverified=unverified)
        ):
            return plan, answer
        failure = rules.cooling(record.failure, now)
        return plan, None if failure is None else self.memory.cooling(key, failure, now)

    def _join(
        self, key: K, id_: str, record: Record, waiter: Waiter[K, V], *, forced: bool = False
    ) -> None:
        if record.copy is None:
            self._drop_deleted([key])
        self.queue.join(key, id_, record, waiter, forced=forced)

    def _drop_deleted(self, keys: Iterable[K]) -> None:
        """Drop keys from memory whose copy was deleted from the store."""
        for key in keys if (entries := self.memory.entries) else ():
            if key in entries and key not in self.queue.flights:
                self.memory.drop(key)

    def _unheld(
        self, keys: Iterable[K], now: float, held: dict[K, Outcome[V]], max_age: float
    ) -> dict[K, str]:
        """Put the answers of memory into `held`; return the names of the other keys."""
        if self.owner.recording_to is not None:
            self.owner.recording_to.note(self, keys, "read")
        texts, oldest = dict[K, str](), now - max_age
        entries, text, is_trusted = self.memory.entries, self.text, self.memory.is_trusted
        for key in keys:
            entry = entries.get(key)
            if (
                entry is not None
                and (now < entry.until or is_trusted(entry, now))
                and entry.copy.fetched_at >= oldest
            ):
                entry.hits += 1
                held[key] = entry.answer
            else:
                texts[key] = text(key)
        return texts

    def glance(self, key: K, *, on_loop: bool = True) -> Answer[V] | None:
        """The answer in memory, if it is still right."""
        entry, now = self.memory.entries.get(key), self.memory.now()
        return None if entry is None else self.verified(key, entry, now, on_loop=on_loop)

    def verified(
        self, key: K, entry: MemoryEntry[K, V], now: float, *, on_loop: bool = True
    ) -> Answer[V] | None:
        """E9, E14: the entry's answer, if its row has not changed; the row is read inline.

        S10: or if the store would announce a change, and has announced none. In a thread (not
        `on_loop`) the entry may change meanwhile: then it is not used (E20).
        """
        runtime = self._runtime
        if runtime is None or self.owner.blocks:
            return None
        if on_loop and runtime.loop is not asyncio.get_running_loop():
            return None
        answer, copy = entry.answer, entry.copy
        if runtime.read_now is None:
            is_right = on_loop and self.memory.is_trusted(entry, now)
        else:
            is_right = copy is not None and copy.fetched_at - MAX_SKEW <= now < entry.stands
            is_right = is_right and self._is_unchanged(runtime.read_now, self.text(key), copy)
            if is_right and on_loop and self.spec.memory_for:  # E9: the time counts from now
                entry.until = min(entry.stands, now + self.spec.memory_for)
        if not is_right or entry.answer is not answer:
            return None
        entry.hits += 1
        return answer

    def _is_unchanged(self, read_now: ReadNow, id_: str, copy: Copy) -> bool:
        try:
            record = read_now(self.spec.kind, (id_,), {id_: copy.generation}).get(id_, NOTHING)
        except (StoreError, NotOpen):
            return False
        found = record.copy if record.failure is None else None
        return found is not None and found.mark == copy.mark and found.generation == copy.generation

    async def known(
        self, keys: Iterable[K], unread: set[K] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """The answers that need no load; other keys are left out."""
        if is_past(self.owner):
            return {}
        runtime = await self.ready()
        now, found = runtime.clock(), dict[K, Outcome[V]]()
        texts = self._unheld(keys, now, found, max_age)
        unread = set() if unread is None else unread
        records = await self._records(runtime, texts, unread) if texts else {}
        for key, id_ in texts.items():
            record, unverified = records.get(id_, NOTHING), key in unread
            _, said = self._planned(key, record, now, max_age, unverified=unverified)
            if said is not None:
                found[key] = said
        self.memory.count([found[key] for key in texts if key in found], now)
        return found

    async def look(self, key: K) -> Answer[V] | None:
        """The stored copy, however old; None if it is GONE. Loads nothing."""
        if is_past(self.owner):
            return None
        runtime, id_, unread = await self.ready(), self.text(key), set[K]()
        now = runtime.clock()
        copy = (await self._records(runtime, {key: id_}, unread)).get(id_, NOTHING).copy
        if copy is None or (verdict := rules.verdict_of(copy, now)) is Verdict.GONE:
            return None
        return self.memory.serve(key, Serve(copy, verdict), now, unverified=bool(unread))

    def fresh_for(self, key: K) -> float:
        """In seconds, by the copy in memory, or else by the resource."""
        entry = self.memory.entries.get(key)
        return (self.spec.terms if entry is None else entry.copy).policy.fresh_for

    def is_full(self, key: K) -> bool:
        """True if the limit of simultaneous loads is reached, and this key is not among them."""
        flights = self.queue.flights
        return len(flights) >= self.spec.concurrency and key not in flights

    async def reload(
        self, keys: Sequence[K], waiter: Waiter[K, V] | None = None
    ) -> dict[K, Outcome[V]]:
        """Load now, at any age and during a cooldown; a running load counts."""
        waiter = waiter or Waiter()
        if is_past(self.owner):
            return await loaded(self, keys, waiter)
        runtime, texts = await self.ready(), self.texts(keys)
        records = await self._records(runtime, texts, waiter.unread)
        for key, id_ in texts.items():
            self._join(key, id_, records.get(id_, NOTHING), waiter, forced=True)
        await self.loads.wait(waiter, texts)
        return waiter.outcomes

    async def _records(
        self, runtime: Runtime, texts: Mapping[K, str], unread: set[K] | None = None
    ) -> dict[str, Record]:
        """The stored copies, without values that memory has.

        While the store is unavailable, memory answers; keys that could not be read go to `unread`.
        """
        entries = self.memory.entries
        held = {id_: entries[key].copy for key, id_ in texts.items() if key in entries}
        known = {id_: copy.generation for id_, copy in held.items()}
        try:
            if runtime.read_now is not None:
                return runtime.store.read_now(self.spec.kind, list(texts.values()), known)
            records = await self._asked(runtime, texts, known, held)
            lost = {key: id_ for key, id_ in texts.items() if records.get(id_) is AWAY}
        except StoreError:
            self._check_open(runtime)
            lost, records = {**texts}, {}
        if lost:
            self.memory.counts.store_errors += 1
            if unread is not None:
                unread.update(lost)
            records |= {id_: Record(held[id_]) for id_ in lost.values() if id_ in held}
        return records

    async def _asked(
        self, runtime: Runtime, texts: Mapping[K, str], known: dict[str, str], held: dict[str, Copy]
    ) -> dict[str, Record]:
        """Ask with all other reads of this turn of the loop. A cancelled caller cancels no other.

        E6: a key that was invalidated while it was read counts as missing, in memory as well.
        """
        if (question := self._question) is None:
            question = self._question = Question()
            question.task = runtime.spawn(self._ask(runtime, question), apart(runtime.hooks))
            question.task.add_done_callback(looked_at)
        question.add(texts.values(), known)
        entries = self.memory.entries
        pinned = {it.key: (it.copy, it.answer, it.size) for it in map(entries.get, texts) if it}
        with self.step(texts) as step:
            try:
                records = await asyncio.shield(question.task)
            except asyncio.CancelledError:
                if question.task.cancelled() and not is_cancelled():
                    raise NotOpen(f"{self.spec.kind}: the cache is closed; open it again") from None
                raise
            finally:
                for key in step.dirty:
                    held.pop(texts[key], None)
        self._check_open(runtime)
        for key in pinned.keys() - entries.keys() - step.dirty:
            copy, answer, size = pinned[key]  # dropped from memory while the store was asked
            self.memory.put(key, copy, answer, size=size)
        clean = (id_ for key, id_ in texts.items() if key not in step.dirty)
        return {id_: records[id_] for id_ in clean if id_ in records}

    async def _ask(self, runtime: Runtime, question: Question) -> dict[str, Record]:
        """Start when the turn is over. E9, I7: with `memory_for`, a cheaper read is allowed."""
        if self._question is question:
            self._question = None
        kind, ids, lag = self.spec.kind, list(question.ids), self.spec.memory_for
        return await runtime.store.read(kind, ids, question.known, lag)

    @contextmanager
    def step(self, keys: Iterable[K]) -> Iterator[StoreStep[K]]:
        """A step that notes which of its keys are invalidated meanwhile."""
        step = StoreStep(frozenset(keys))
        self._steps.add(step)
        try:
            yield step
        finally:
            self._steps.discard(step)
