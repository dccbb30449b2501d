"""The read path of one resource: from a key to an answer.

Reads the clock once for an operation and does what `rules.py` decides. Callers use keys of any
type; `text` is the name of a key in the store.
"""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from stillfresh.bounded import SLICE
from stillfresh.engine import rules
from stillfresh.engine.blocks import Face, is_past, loaded
from stillfresh.engine.fence import Fence
from stillfresh.engine.keys import Spec, are_plain
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.loads import Loads
from stillfresh.engine.memory import Memory, MemoryEntry
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Read
from stillfresh.engine.rules import NOTHING, MustLoad, Plan, Serve
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.store_reads import StoreReads
from stillfresh.engine.work import Waiter
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import MAX_SKEW
from stillfresh.stores.contract import AWAY, Copy, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


ReadNow: TypeAlias = Callable[..., dict[str, Record]]


class Reads(StoreReads[K, V]):
    """Answers reads from memory, the store or a load."""

    def __init__(
        self,
        spec: Spec[K, V],
        owner: Lifecycle,
        memory: Memory[K, V],
        *,
        text: Callable[[K], str],
        key: Callable[[str], K],
    ) -> None:
        super().__init__(spec, memory)
        self.owner, self.text, self.key = owner, text, key
        self.loads: Loads[K, V]
        self.faces: list[Face[K, V]] = []
        self.fence = self._new_fence()
        self.begin_anew()

    def begin_anew(self, runtime: Runtime | None = None) -> None:
        """Forget running steps: they belong to a life of the cache that has ended."""
        self._runtime = runtime
        self._question = None
        self._steps.clear()
        self.fence.void_all()  # a put that still runs would not learn what is invalidated now
        self.fence = self._new_fence()
        self.loads = Loads(self, runtime)  # type: ignore[arg-type]

    def _new_fence(self) -> Fence[K]:
        return Fence(
            self.owner.fence_clock, self.spec.possible_tags, lambda: bool(self.loads.under_way)
        )

    async def ready(self) -> Runtime:
        """A cache belongs to the loop that opened it."""
        runtime = self._runtime
        if runtime is None or runtime.loop is not asyncio.get_running_loop():
            runtime = await self.owner.runtime()
            self._check_open(runtime)
        return runtime

    def check(self, keys: Collection[K]) -> None:
        """Raise ConfigError if one is not a valid key."""
        if not are_plain(keys, self.key):
            self.texts(keys)

    def texts(self, keys: Collection[K]) -> dict[K, str]:
        """The names of the keys in the store. ConfigError if one is not a valid key."""
        if are_plain(keys, self.key):
            return dict(zip(keys, map(str, keys), strict=True))
        return {key: self.text(key) for key in keys}

    async def read(self, key: K, load: OwnLoad, *, anew: bool = False) -> Read[V]:
        """Read with a loader for this read (`max_batch` is 1); joins a running load."""
        waiter: Waiter[K, V] = Waiter(load)
        outcomes = await self.answers([key], waiter, anew=anew)
        return outcomes[key] if waiter.private is None else waiter.private

    async def answers(
        self, keys: Sequence[K], waiter: Waiter[K, V] | None = None, *, anew: bool = False
    ) -> dict[K, Outcome[V]]:
        """The outcome of each key, in no order: read in slices, loaded in full batches.

        `anew`: load all, at any age and during a cooldown; a running load counts.
        """
        waiter = waiter or Waiter()
        if self.owner.blocks and is_past(self.owner):
            return await loaded(self, keys, waiter)  # type: ignore[arg-type]
        runtime, slices = await self.ready(), _slices(keys)
        held, missing, records = dict[K, Outcome[V]](), dict[K, str](), dict[str, Record]()
        outcomes, most = waiter.outcomes, self.spec.max_batch
        try:
            for some in slices:
                if some is not slices[0]:
                    await asyncio.sleep(0)
                    self._check_open(runtime)
                texts, found = await self._look_up(runtime, some, waiter, None if anew else held)
                missing = missing | texts if missing else texts
                records |= found
                if len(missing) >= most:  # the rest waits for the next slices
                    rest = [missing.popitem() for _ in range(len(missing) % most)]
                    self._join(missing, records, waiter, forced=anew)
                    missing = dict(reversed(rest))
            self._join(missing, records, waiter, forced=anew)
            await self.loads.wait(waiter)
        except BaseException:
            self.loads.leave(waiter, keys)
            raise
        finally:
            waiter.end()
        for counted in _slices([] if anew else list(outcomes.values())):
            self.memory.count(counted, runtime.clock())
            if len(outcomes) > SLICE:
                await asyncio.sleep(0)
        return held | outcomes if held and outcomes else held or outcomes

    async def _look_up(
        self,
        runtime: Runtime,
        keys: Collection[K],
        waiter: Waiter[K, V],
        held: dict[K, Outcome[V]] | None,
    ) -> tuple[dict[K, str], dict[str, Record]]:
        """Serve what is in memory (`held`) or the store; if that is None, serve nothing.

        Returns the keys to load, and what is stored of them. A key that was served may be among
        them: it is loaded in the background.
        """
        now = runtime.clock()
        texts = self.texts(keys) if held is None else self._unheld(keys, now, held, waiter.max_age)
        records = await self._records(runtime, texts, waiter.unread) if texts else {}
        if not records or held is None:
            return texts, records
        left: dict[K, str] = {}
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            unverified = key in waiter.unread
            has_newer = self.memory.has_newer(key, record.copy)
            if has_newer:
                record = Record(self.memory.entries[key].copy, record.held_until, record.failure)
                unverified = True
            plan, said = self._planned(key, record, now, waiter.max_age, unverified=unverified)
            if said is not None:
                waiter.outcomes[key] = said
            elif isinstance(plan, MustLoad) and plan.fallback is not None:
                self.loads.give_fallback(key, plan.fallback, [waiter], unverified=unverified)
            if said is None or (isinstance(plan, Serve) and plan.refresh):
                left[key] = id_
            elif has_newer:  # perhaps it can be stored by now; if not, it need not be loaded again
                left[key] = id_
                waiter.unstored.add(key)
        return left, {id_: records[id_] for id_ in left.values() if id_ in records}

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
        return plan, None if failure is None else self.memory.failure_error(key, failure, now)

    def _join(
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
        self.loads.flush_soon()
        if not records and not forced:
            self._drop_deleted(texts)
            self.loads.join_missing(texts, waiter)
            return
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.copy is None:
                self._drop_deleted([key])
            if key in waiter.outcomes:
                self.loads.want(key, id_, record, waiter, leased=key in waiter.unstored)
            else:
                self.loads.join(key, id_, record, waiter, forced=forced)

    def _drop_deleted(self, keys: Iterable[K]) -> None:
        """Drop keys from memory whose copy was deleted from the store."""
        for key in keys if (entries := self.memory.entries) else ():
            if key in entries and key not in self.loads.under_way:
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
        """The entry's answer, if its row has not changed; the row is read inline.

        Or if the store would announce a change, and has announced none. In a thread (not
        `on_loop`) the entry may change meanwhile: then it is not used.
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
            if is_right and on_loop and self.spec.memory_for:  # the time counts from now
                entry.vouched = now + self.spec.memory_for
                entry.until = min(entry.stands, entry.vouched)
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

    def peek(self, key: K) -> Answer[V] | None:
        """What memory holds, without waiting; a row that can be read inline is looked at."""

        def confirms(copy: Copy) -> bool:
            runtime = self._runtime
            if runtime is None or runtime.read_now is None or self.owner.blocks:
                return False
            return self._is_unchanged(runtime.read_now, self.text(key), copy)

        return self.memory.peek(key, confirms)

    def is_full(self, key: K) -> bool:
        """True if the limit of simultaneous loads is reached, and this key is not among them."""
        under_way = self.loads.under_way
        return len(under_way) >= self.spec.concurrency and key not in under_way

    async def _records(
        self, runtime: Runtime, texts: Mapping[K, str], unread: set[K] | None = None
    ) -> dict[str, Record]:
        """The stored copies, without values that memory has.

        While the store is unavailable, memory answers; keys that could not be read go to `unread`.
        Their cooldowns are then those that this process knows of.
        """
        entries = self.memory.entries
        held = {id_: entries[key].copy for key, id_ in texts.items() if key in entries}
        known = {id_: copy.generation for id_, copy in held.items()}
        try:
            if runtime.can.inline is not None:
                return runtime.can.inline.read_now(self.spec.kind, list(texts.values()), known)
            records = await self._asked(runtime, texts, known, held)
            lost = {key: id_ for key, id_ in texts.items() if records.get(id_) is AWAY}
        except StoreError:
            self._check_open(runtime)
            lost, records = {**texts}, {}
        if lost:
            self.memory.counts.store_errors += 1
            if unread is not None:
                unread.update(lost)
            failing = self.memory.counts.failing
            for id_ in lost.values():
                records.pop(id_, None)
                if id_ in held or id_ in failing:
                    records[id_] = Record(held.get(id_), failure=failing.get(id_))
        return records


def _slices(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[at : at + SLICE] for at in range(0, len(items), SLICE)]
