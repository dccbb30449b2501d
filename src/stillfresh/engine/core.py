"""All of a resource but its public face: opened, watched, invalidated, looked into (E6, E8, E24).

The read path is in `read.py`, the loads are in `load.py`, what callers store is in `put.py`.
"""

from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from stillfresh.bounded import sliced
from stillfresh.engine import rules
from stillfresh.engine.counts import ResourceStats
from stillfresh.engine.explain import Explanation, explain
from stillfresh.engine.keys import Spec
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.load import Loads
from stillfresh.engine.memory import Memory
from stillfresh.engine.model import Answer, Origin, Outcome
from stillfresh.engine.news import Notices
from stillfresh.engine.put import Puts
from stillfresh.engine.queue import IN_QUEUE, Waiter
from stillfresh.engine.rules import NOTHING, Serve
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Core(Puts[K, V]):
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
        super().__init__(spec, owner, memory, text)
        self.watcher: Watcher[K, V] = Watcher(self, memory.now)
        self.key = key
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
        """Nothing is served from memory any more, and nobody waits for ever."""
        self._runtime = None
        self.memory.clear()
        self.loads.close()
        self.watcher.close()

    def leave(self) -> None:
        """E21: its loop was closed, or a fork left it to the parent: nobody can be told."""
        self.memory.clear()
        for _ in self.memory.freed():
            pass
        self.watcher.begin_anew()
        self.begin_anew()

    def _show_memory(self) -> None:
        for face in self.faces:
            face.stand_back(back=self.owner.blocks > 0)

    async def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """For watchers: what is not fresh is loaded, by us or another; cooldowns hold."""
        records, times, now = await self._watched(keys)
        waiter: Waiter[K, V] = Waiter(each=True)
        stale = [key for key, at in times.items() if at <= now]
        for key in stale:
            self._join(key, self.text(key), records[key], waiter)
        self.loads.flush_soon()
        try:
            if fresh := [key for key, at in times.items() if at > now]:
                yield dict.fromkeys(fresh)
            while waiter.missing or waiter.outcomes:
                await self.loads.wait(waiter, stale)
                ended, waiter.outcomes = waiter.outcomes, {}
                stale = [key for key in stale if key not in ended]
                yield {**ended}
        finally:
            self.queue.leave(waiter, stale)

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """For watchers: when each is to be refreshed."""
        return (await self._watched(keys))[1]

    async def _watched(self, keys: Sequence[K]) -> tuple[dict[K, Record], dict[K, float], float]:
        """What can be read, and when each is to be refreshed, as of now.

        Watches hear of fresh copies that another process published (C14).
        """
        runtime, texts, unread = await self.ready(), self.texts(keys), set[K]()
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
        """E20: what can be said to a thread without a load; None: the loop has to be asked.

        Only the loop keeps memory up to date, where memory is of use to `hit` or `glance`.
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

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> None:
        """E6: nothing enters memory from a step that began before this ended."""
        runtime, texts = await self.ready(), self.texts(keys)
        async for some in sliced(texts):
            with self.overtaking(some):
                ids = [texts[key] for key in some]
                await runtime.store.invalidate(self.spec.kind, ids, soft=soft)
            self.owner.note(self, some, "soft" if soft else "invalidate")

    async def delete(self, keys: Sequence[K]) -> None:
        runtime, texts = await self.ready(), self.texts(keys)
        async for some in sliced(texts):
            ids = [texts[key] for key in some]
            with self.overtaking(some):
                await runtime.store.delete(self.spec.kind, ids)
            self.owner.note(self, some, "delete")
            self.memory.counts.mended(ids)

    async def clear(self) -> None:
        """Forget every entry of this resource."""
        runtime = await self.ready()
        async for page in runtime.store.walk(self.spec.kind):
            await self.delete([self.key(entry.id) for entry in page])

    def tagged(self, tag: str) -> list[K]:
        """E8: what is under way or in memory and has this tag, or cannot say.

        I26: what is under way and tells its tags later is noted.
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
        """I22: until no load is under way; False: one still is, so many seconds later."""
        return self._runtime is None or await self.loads.settled(within)

    def under_way(self) -> set[K]:
        return {*self.queue.flights, *(key for step in self._steps for key in step.keys)}

    async def explain(self, key: K) -> Explanation:
        runtime, id_ = await self.ready(), self.text(key)
        records = await runtime.store.read(self.spec.kind, [id_])
        return explain(
            self.spec.kind,
            key,
            records.get(id_, NOTHING),
            runtime.clock(),
            loading_here=self.queue.is_loading(key),
            in_memory=key in self.memory.entries,
            lease_for=self.spec.lease_for,
        )

    async def stats(self) -> ResourceStats:
        await self.memory.fold_all()
        return self.counted()

    def counted(self) -> ResourceStats:
        """What was folded so far."""
        return self.memory.counts.stats(
            self.memory.now(),
            entries=len(self.memory.entries),
            bytes=self.memory.room.held,
            loading=len(self.queue.flights),
            queued=self.queue.not_begun(),
            watched=len(self.watcher.watches),
            max_batch=self.spec.max_batch,
        )


async def overtake_all(keys: Iterable[tuple[Core[Any, Any], Any]]) -> None:
    """In slices; if this is cut off the rest at once, for all of them must be reached (E6)."""
    left = iter(keys)
    try:
        async for some in sliced(left):
            for core, key in some:
                core.overtake([key])
    finally:
        for core, key in left:
            core.overtake([key])
