"""A resource behind its public object: opening, watching, invalidating, statistics (E6, E8, E24).

The read path is in `read.py`, loads are in `load.py`, put and update in `put.py` and `update.py`.
"""

from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from stillfresh.bounded import sliced
from stillfresh.engine import rules
from stillfresh.engine.blocks import is_past
from stillfresh.engine.counts import ResourceStats
from stillfresh.engine.explain import Explanation, explain
from stillfresh.engine.keys import Spec
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.load import Loads
from stillfresh.engine.memory import Memory
from stillfresh.engine.model import Answer, Origin, Outcome
from stillfresh.engine.news import Notices
from stillfresh.engine.queue import IN_QUEUE, Waiter
from stillfresh.engine.rules import FOR_EVER, NOTHING, Serve
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.update import Updates
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Core(Updates[K, V]):
    """One resource: reads, loads, puts and watches of its keys."""

    def __init__(
        self,
        spec: Spec[K, V],
        owner: Lifecycle,
        memory: Memory[K, V],
        *,
        text: Callable[[K], str],
        key: Callable[[str], K],
    ) -> None:
        super().__init__(spec, owner, memory, text=text, key=key)
        self.watcher: Watcher[K, V] = Watcher(self, memory.now)
        memory.cleared = self._show_memory

    def open(self, runtime: Runtime) -> None:
        self.memory.notices = Notices(runtime.news) if runtime.news is not None else None
        if runtime.news is not None and self.spec.memory_for:
            runtime.news.want()
        self.begin_anew(runtime)
        self.loads = Loads(self, runtime)
        if (memory := self.memory).is_private:  # E23
            memory.room.limit(self.spec.max_bytes or runtime.store.max_bytes)
            runtime.store.before_evicting(self.spec.kind, lambda id_: memory.keeps(self.key(id_)))

    def close(self) -> None:
        """Stop answering from memory, and let all waiting callers fail."""
        self._runtime = None
        self.memory.clear()
        self.loads.close()
        self.watcher.close()

    def leave(self) -> None:
        """E21: the event loop was closed, or is the parent process's: no caller waits here."""
        self.memory.clear()
        for _ in self.memory.freed():
            pass
        self.watcher.begin_anew()
        self.begin_anew()

    def _show_memory(self) -> None:
        for face in self.faces:
            face.stand_back(back=self.owner.blocks > 0)

    async def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """For watchers: load the keys that are not fresh, here or elsewhere. Cooldowns are kept."""
        waiter: Waiter[K, V] = Waiter(each=True)
        records, times, now = await self._watched(keys, waiter.unread)
        stale = [key for key, at in times.items() if at <= now]
        texts = self.texts(stale)
        self._join(texts, {id_: records[key] for key, id_ in texts.items()}, waiter)
        try:
            if fresh := [key for key, at in times.items() if at > now]:
                yield dict.fromkeys(fresh)
            while waiter.missing or waiter.outcomes:
                await self.loads.wait(waiter)
                ended, waiter.outcomes = waiter.outcomes, {}
                stale = [key for key in stale if key not in ended]
                yield {**ended}
        finally:
            waiter.end()
            self.queue.leave(waiter, stale)

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """For watchers: when to refresh each key."""
        return (await self._watched(keys, set()))[1]

    async def _watched(
        self, keys: Sequence[K], unread: set[K]
    ) -> tuple[dict[K, Record], dict[K, float], float]:
        """The copies that can be read now, and when to refresh each.

        Watches receive fresh copies that another process published (C14).
        """
        runtime, texts = await self.ready(), self.texts(keys)
        since, terms = runtime.clock(), self.spec.terms
        records = self.memory.readable(texts, await self._records(runtime, texts, unread))
        now = runtime.clock()
        for key, record in records.items():
            copy = record.copy
            if key in unread or copy is None or not self.watcher.is_news(key, copy):
                continue
            plan = Serve(copy, rules.verdict_of(copy, now))
            if plan.verdict is Verdict.FRESH and (
                answer := self.memory.serve(key, plan, now, Origin.ANOTHER, since)
            ):
                self.watcher.landed(key, answer, rules.watched_until(copy, terms), now)
        return records, rules.refresh_times(records, now, terms, self.watcher.absent), now

    def read_in_thread(self, keys: Sequence[K]) -> dict[K, Answer[V]] | None:
        """E20: answer a thread from the store without a load; None if the loop must be asked.

        It must be where `hit` or `glance` use memory: only the loop keeps memory up to date.
        """
        runtime = None if self.owner.blocks or self.spec.memory_for else self._runtime
        if runtime is None or runtime.read_in_thread is None:
            return None
        if runtime.read_now is not None and not self.memory.entries.keys().isdisjoint(keys):
            return None
        texts, now, found = self.texts(keys), runtime.clock(), dict[K, Answer[V]]()
        try:
            records = runtime.read_in_thread(self.spec.kind, list(texts.values()))
        except (StoreError, NotOpen):
            return None
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.failure is not None:
                return None
            plan = rules.plan_read(record, now, self.spec.lease_for)
            if isinstance(plan, Serve):
                is_readable, value = self.memory.value_of(key, plan.copy)
                if is_readable:
                    found[key] = self.memory.made(plan.copy, value, plan.verdict, Origin.STORE)
        self.memory.count(found.values(), now)
        return found

    async def known(
        self, keys: Iterable[K], unread: set[K] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """The answers that need no load; other keys are left out."""
        if self.owner.blocks and is_past(self.owner):
            return {}
        runtime, found = await self.ready(), dict[K, Outcome[V]]()
        unread = set() if unread is None else unread
        async for some in sliced(keys):
            if self._runtime is not runtime:  # since the last slice
                self._check_open(runtime)
            now = runtime.clock()
            texts = self._unheld(some, now, found, max_age)
            records = await self._records(runtime, texts, unread) if texts else {}
            for key, id_ in texts.items():
                record = records.get(id_, NOTHING)
                unverified = key in unread
                if self.memory.has_newer(key, record.copy):
                    record = Record(self.memory.entries[key].copy, failure=record.failure)
                    unverified = True
                _, said = self._planned(key, record, now, max_age, unverified=unverified)
                if said is not None:
                    found[key] = said
            self.memory.count([found[key] for key in texts if key in found], now)
        return found

    async def look(self, key: K) -> Answer[V] | None:
        """The stored copy, however old; None if it is GONE. Loads nothing."""
        if self.owner.blocks and is_past(self.owner):
            return None
        runtime, id_, unread = await self.ready(), self.text(key), set[K]()
        now = runtime.clock()
        record = (await self._records(runtime, {key: id_}, unread)).get(id_, NOTHING)
        copy = record.copy
        if copy is None or (verdict := rules.verdict_of(copy, now)) is Verdict.GONE:
            return None
        failure = None if verdict is Verdict.FRESH else record.failure
        plan = Serve(copy, verdict, failure=failure)
        return self.memory.serve(key, plan, now, unverified=bool(unread))

    def fresh_for(self, key: K) -> float:
        """In seconds, by the copy in memory, or else by the resource."""
        entry = self.memory.entries.get(key)
        return (self.spec.terms if entry is None else entry.copy).policy.fresh_for

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> None:
        """E6: no step that began before this ended puts its result into memory."""
        runtime = await self.ready()
        async for some in sliced(keys):
            ids = list(self.texts(some).values())
            with self.overtaking(some):
                await runtime.store.invalidate(self.spec.kind, ids, soft=soft)
            self.owner.note(self, some, "soft" if soft else "invalidate")

    async def delete(self, keys: Sequence[K]) -> None:
        runtime = await self.ready()
        async for some in sliced(keys):
            ids = list(self.texts(some).values())
            with self.overtaking(some):
                await runtime.store.delete(self.spec.kind, ids)
            self.owner.note(self, some, "delete")
            self.memory.counts.mended(ids)
            for key in some:
                self.memory.causes.forget(key)

    async def clear(self) -> None:
        """Forget every entry of this resource."""
        runtime = await self.ready()
        self.void_puts()
        await self.delete([*self.under_way(), *self.memory.keys()])  # a walk may miss them
        async for page in runtime.store.walk(self.spec.kind):
            await self.delete([self.key(entry.id) for entry in page])
        self.void_puts()

    def tagged(self, tag: str) -> list[K]:
        """E8: keys in memory or being loaded that have this tag, or may have it.

        I26: running loads note the tag, because theirs are known only when they end.
        """
        for flight in self.queue.flights.values():
            if flight.batch is not IN_QUEUE:
                flight.batch.tags.add(tag)
        if self.spec.tags is None:
            return self.memory.tagged(tag)
        tags_of, wanted = self.spec.possible_tags, {tag, None}
        found = [key for key in self.under_way() if not wanted.isdisjoint(tags_of(key))]
        return found + self.memory.tagged(tag)

    async def is_live(self, key: K) -> bool:
        """E6: a load is under way, and nothing has invalidated the key since it began."""
        runtime, flight = await self.ready(), self.queue.flights.get(key)
        lease = self.loads.leases.get(flight.id) if flight is not None else None
        if flight is None or lease is None or key in flight.batch.overtaken:
            return False
        try:
            return not await runtime.store.renew(self.spec.kind, [lease], self.spec.lease_for)
        except StoreError:
            return False

    async def settled(self, within: float) -> bool:
        """I22: wait until no load runs. False if one still runs after that many seconds."""
        return self._runtime is None or await self.loads.settled(within)

    def under_way(self) -> set[K]:
        return {*self.queue.flights, *(key for step in self._steps for key in step.keys)}

    async def explain(self, key: K) -> Explanation:
        runtime, id_ = await self.ready(), self.text(key)
        records = await runtime.store.read(self.spec.kind, [id_])
        return explain(
            self.spec.kind,
            key,
            self.memory.readable({key: id_}, records)[key],
            runtime.clock(),
            loading_here=self.queue.is_loading(key),
            in_memory=key in self.memory.entries,
            lease_for=self.spec.lease_for,
        )

    async def stats(self) -> ResourceStats:
        await self.memory.fold_all()
        return self.counted()

    def counted(self) -> ResourceStats:
        """The counts so far, without hits that are not folded yet."""
        return self.memory.counts.stats(
            self.memory.now(),
            entries=len(self.memory.entries),
            bytes=self.memory.room.held,
            loading=len(self.queue.flights),
            queued=self.queue.not_begun(),
            watched=len(self.watcher.watched),
            max_batch=self.spec.max_batch,
        )


async def overtake_all(keys: Iterable[tuple[Core[Any, Any], Any]]) -> None:
    """Mark all keys in slices.

    If this is cancelled, mark the rest at once: none may be missed (E6).
    """
    left = iter(keys)
    try:
        async for some in sliced(left):
            for core, key in some:
                core.overtake([key])
    finally:
        for core, key in left:
            core.overtake([key])
