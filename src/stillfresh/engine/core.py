"""All of a resource but its public face: opened, watched, changed, looked into (E6, E8, E24).

The read path is in `read.py`, the loads are in `load.py`.
"""

from collections.abc import (
    AsyncGenerator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import TypeVar

from stillfresh.engine.explain import explain
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.load import Loads
from stillfresh.engine.loader import Runtime
from stillfresh.engine.memory import Memory
from stillfresh.engine.model import Explanation, Origin, Outcome
from stillfresh.engine.queue import Waiter
from stillfresh.engine.read import Reads, StoreStep
from stillfresh.engine.rules import NOTHING, Serve, refresh_times, verdict_of, watched_until
from stillfresh.engine.spec import Spec
from stillfresh.engine.stats import ResourceStats
from stillfresh.engine.watcher import Watcher
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Core(Reads[K, V]):
    """One resource; `key` makes a key of its id."""

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

    def open(self, runtime: Runtime) -> None:
        self.begin_anew(runtime)
        self.loads = Loads(self.spec, self.memory, self.watcher, self.queue, runtime)

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

    async def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """For watchers: what is not fresh is loaded, by us or another; cooldowns hold."""
        runtime, texts = await self.ready(), self.texts(keys)
        records = await self._watched_records(runtime, texts)
        waiter: Waiter[K, V] = Waiter(each=True)
        now = runtime.clock()
        times = refresh_times(texts, records, now, self.spec.terms, self.watcher.absent)
        stale = [key for key, at in times.items() if at <= now]
        for key in stale:
            self._join(key, texts[key], records.get(texts[key], NOTHING), waiter)
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
        runtime, texts = await self.ready(), self.texts(keys)
        records = await self._watched_records(runtime, texts)
        return refresh_times(texts, records, runtime.clock(), self.spec.terms, self.watcher.absent)

    async def _watched_records(self, runtime: Runtime, texts: Mapping[K, str]) -> dict[str, Record]:
        """What can be read; watches hear of fresh copies that another process published (C14)."""
        since, unread = runtime.clock(), set[K]()
        records = self.memory.readable(texts, await self._records(runtime, texts, unread))
        now = runtime.clock()
        for key, id_ in texts.items() if not unread else ():
            copy = records.get(id_, NOTHING).copy
            if copy is None or not self.watcher.is_news(key, copy.fetched_at):
                continue
            plan = Serve(copy, verdict_of(copy, now))
            if plan.verdict is Verdict.FRESH and (
                answer := self.memory.serve(key, plan, now, Origin.ANOTHER, since)
            ):
                self.watcher.landed(key, answer, watched_until(copy, self.spec.terms), now)
        return records

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> None:
        """E6: nothing enters memory from a step that began before this ended."""
        runtime, texts = await self.ready(), self.texts(keys)
        with self.overtaking(keys):
            await runtime.store.invalidate(self.spec.kind, list(texts.values()), soft=soft)

    async def delete(self, keys: Sequence[K]) -> None:
        runtime, texts = await self.ready(), self.texts(keys)
        with self.overtaking(keys):
            await runtime.store.delete(self.spec.kind, list(texts.values()))
        self.memory.counts.mended(texts.values())

    @contextmanager
    def overtaking(self, keys: Sequence[K]) -> Iterator[StoreStep[K]]:
        """Before the store's step and after it; the step notes which keys others overtake."""
        self.overtake(keys)
        try:
            with self.step(keys) as step:
                yield step
        finally:
            self.overtake(keys)

    def overtake(self, keys: Iterable[K]) -> None:
        """E6: what is under way for these keys came too early to be kept."""
        keys = set(keys)
        self.watcher.look_again(keys)
        for key in keys:
            self.memory.drop(key)
            if (flight := self.queue.flights.get(key)) is not None:
                flight.overtake()
        for step in self._steps:
            step.dirty |= step.keys & keys

    def tagged(self, tag: str) -> set[K]:
        """E8: what is under way or in memory and has this tag, or cannot say."""
        if self.spec.tags is None:
            return set()
        steps = (key for step in self._steps for key in step.keys)
        tags_of, wanted = self.spec.possible_tags, {tag, None}
        under_way = {*self.queue.flights, *steps}
        found = {key for key in under_way if not wanted.isdisjoint(tags_of(key))}
        return found | self.memory.tagged(tag)

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
        return self.memory.counts.stats(
            self.memory.now(),
            entries=len(self.memory.entries),
            loading=len(self.queue.flights),
            queued=self.queue.not_begun(),
            watched=len(self.watcher.watches),
            max_batch=self.spec.max_batch,
        )
