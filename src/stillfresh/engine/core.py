"""All of a resource but its public face: opened, watched, changed, looked into (E6, E8, E17, E24).

The read path is in `read.py`, the loads are in `load.py`. A put is a load without a loader, in two
steps of the store: take the lease over, then publish with its token. So the law covers it, and a
late or repeated message of it undoes nothing (S8, decision 0110).
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.engine import rules
from stillfresh.engine.explain import Explanation, ResourceStats, explain
from stillfresh.engine.keys import Spec
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.load import Loads
from stillfresh.engine.loader import Runtime, looked_at
from stillfresh.engine.memory import Memory
from stillfresh.engine.model import Origin, Outcome
from stillfresh.engine.queue import Waiter
from stillfresh.engine.read import Reads, StoreStep
from stillfresh.engine.rules import NOTHING, Serve
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import ConfigError, StoreError, error_text
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Newer, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


SLICE: Final = 100
"""Keys that are put together in one step of the store."""
ATTEMPTS: Final = 10
"""Other publications that may come between a put's sight of the copy and its lease."""


class Known(Struct, Generic[K, V], frozen=True):
    """A caller's value for one key, ready to be published."""

    key: K
    id: str
    copy: Copy
    """Its generation is that of the lease, once there is one."""
    value: V
    tags: tuple[str, ...]


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
        self.loads = Loads(self, runtime)

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
        for key, record in records.items() if not unread else ():
            copy = record.copy
            if copy is None or not self.watcher.is_news(key, copy.fetched_at):
                continue
            plan = Serve(copy, rules.verdict_of(copy, now))
            if plan.verdict is Verdict.FRESH and (
                answer := self.memory.serve(key, plan, now, Origin.ANOTHER, since)
            ):
                self.watcher.landed(key, answer, rules.watched_until(copy, terms), now)
        return records, rules.refresh_times(records, now, terms, self.watcher.absent), now

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

    async def put(
        self, values: Iterable[tuple[K, object]], check: Callable[[], None] = lambda: None
    ) -> None:
        """Publish what the caller knows; ConfigError, and nothing, if one value cannot be stored.

        `check` is called while the leases are held; nothing is published if it raises.
        """
        runtime, spec = await self.ready(), self.spec
        sent, ready = rules.stamped(runtime.clock()), list[Known[K, V]]()
        for key, given in values:
            id_ = self.text(key)
            try:
                copy, value = rules.kept(given, spec.terms, spec.codec, ("", sent), runtime.dice)
            except Exception as exc:  # the caller's mistake, and no failed load
                said = f"{spec.kind} {key!r}: the value cannot be stored: {error_text(exc)}"
                raise ConfigError(said) from exc
            ready.append(Known(key, id_, copy, value, spec.tags_of(key)))
            if not len(ready) % SLICE:
                await asyncio.sleep(0)
        for start in range(0, len(ready), SLICE):
            step = runtime.step(self._put(runtime, ready[start : start + SLICE], check))
            step.add_done_callback(looked_at)
            await asyncio.shield(step)

    async def _put(
        self, runtime: Runtime, values: Sequence[Known[K, V]], check: Callable[[], None]
    ) -> None:
        """E6: memory takes a value only if nothing overtook the put meanwhile."""
        keys, entries, counts = [it.key for it in values], self.memory.entries, self.memory.counts
        try:
            async with _in_turn(self.loads.puts, keys):
                since = runtime.clock()
                held = [it for it in values if it.key in entries]
                seen = {it.id: entries[it.key].copy.generation for it in held}
                with self.overtaking(keys) as step:
                    stored = await self._published(runtime, values, seen, check)
        except StoreError:
            counts.store_errors += 1
            raise
        counts.puts += len(stored)
        counts.superseded += len(values) - len(stored)
        counts.mended(stored)
        for it in values if self._runtime is runtime else ():
            if it.id in stored and it.key not in step.dirty:
                outlook = self.memory.outlook(copy := stored[it.id], self.memory.now())
                self.memory.keep(it.key, copy, it.value, outlook, since)
                self.loads.tell_watches(it.key, copy, it.value, outlook)

    async def _published(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        seen: dict[str, str],
        check: Callable[[], None],
    ) -> dict[str, Copy]:
        """The copies that stand now, by id; those that are left out were overtaken.

        `seen`: the generations that memory has. StoreError if the store did not confirm a step.
        """
        leases: dict[str, Lease] = {}
        try:
            await self._take_over(runtime, values, seen, leases)
            copies = {
                it.id: (lease := leases[it.id], replace(it.copy, generation=lease.token))
                for it in values
            }
            check()
            superseded = await runtime.store.publish(self.spec.kind, copies)
        except BaseException:  # others need not wait for the end of leases that it leaves
            with suppress(StoreError):
                await runtime.store.release(self.spec.kind, list(leases.values()))
            raise
        if superseded:
            await self._outdate(runtime, superseded, seen)
        return {id_: copy for id_, (_, copy) in copies.items() if id_ not in superseded}

    async def _take_over(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        seen: dict[str, str],
        leases: dict[str, Lease],
    ) -> None:
        """Asks again with the copy there is, where that is not the one seen; notes it in `seen`."""
        kind, lease_for = self.spec.kind, self.spec.lease_for
        asks = {it.id: Ask(it.id, seen.get(it.id), it.tags, take_over=True) for it in values}
        for _ in range(ATTEMPTS):
            grants = await runtime.store.acquire(kind, list(asks.values()), lease_for)
            for id_, grant in grants.items():
                match grant:
                    case Lease():
                        leases[id_] = grant
                        del asks[id_]
                    case Newer(Record(copy=Copy(generation=generation))):
                        seen[id_] = generation
                        asks[id_] = replace(asks[id_], seen=generation)
            if not asks:
                return
        raise StoreError(f"{kind}: {len(asks)} keys were published by others all the time")

    async def _outdate(self, runtime: Runtime, ids: set[str], seen: Mapping[str, str]) -> None:
        """Invalidate what was there before, unless something newer overtook the put.

        Then the lease had run out. To take it again would not be safe: it cannot be told from a
        lease that was voided.
        """
        records = await runtime.store.read(self.spec.kind, sorted(ids))
        copies = {id_: it.copy for id_, it in records.items() if it.copy is not None}
        unmarked = [id_ for id_, copy in copies.items() if copy.mark is Mark.NONE]
        if old := [id_ for id_ in unmarked if copies[id_].generation == seen.get(id_)]:
            await runtime.store.invalidate(self.spec.kind, old)

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


@asynccontextmanager
async def _in_turn(last: dict[K, "asyncio.Future[None]"], keys: Sequence[K]) -> AsyncIterator[None]:
    """One put of a key at a time, in the order of the calls: the last value stays."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    before = {last[key] for key in keys if key in last}
    last.update(dict.fromkeys(keys, done))
    try:
        if before:
            await asyncio.wait(before)
        yield
    finally:
        done.set_result(None)
        for key in keys:
            if last.get(key) is done:
                del last[key]
