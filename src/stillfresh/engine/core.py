"""The read path of one resource: from a key to an answer (E2-E6).

Reads the clock once for an operation and does what `rules.py` decided. A key is whatever the
resource's callers use; `text` is its name in the store.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from stillfresh.engine.answers import Answers
from stillfresh.engine.explain import explain
from stillfresh.engine.flights import OneByOne, Outcome, OwnLoad, Queue, Read, Waiter
from stillfresh.engine.loader import Loader
from stillfresh.engine.metrics import Holding, ResourceStats
from stillfresh.engine.model import Answer, Explanation
from stillfresh.engine.reads import Step
from stillfresh.engine.records import Records
from stillfresh.engine.rules import (
    FOR_EVER,
    NOTHING,
    Fail,
    Load,
    Serve,
    cooling,
    plan_read,
    refresh_times,
    verdict_of,
    watched_until,
)
from stillfresh.engine.spec import Owner, Runtime, Spec
from stillfresh.engine.tower import Tower
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import MAX_SKEW, Verdict
from stillfresh.stores.contract import Copy, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Core(Generic[K, V]):
    """Everything about a resource but its public face."""

    def __init__(
        self,
        spec: Spec[K, V],
        owner: Owner,
        answers: Answers[K, V],
        *,
        text: Callable[[K], str],
        key: Callable[[str], K],
    ) -> None:
        self.spec = spec
        self.shelf = answers
        self.text = text
        self.key = key
        self._owner = owner
        self.watcher: Watcher[K, V] = Watcher(self, spec.max_batch)
        self._tower = self._new_tower()
        self._steps: set[Step[K]] = set()
        self.puts: dict[K, asyncio.Future[None]] = {}
        """E17: the last put of each key that has not ended."""
        self._runtime: Runtime | None = None
        self._records: Records[K, V]

    def _new_tower(self) -> Tower[K, V]:
        queue: Queue[K, V] = Queue(self.spec.max_batch, self.spec.concurrency)
        return Tower(self.spec, self.shelf, queue, self.watcher.watches)

    def open(self, runtime: Runtime) -> None:
        self._runtime, self.puts = runtime, {}
        self._records = Records(self.spec, runtime, self.shelf, self._steps, self._check_open)
        tower = self._tower = self._new_tower()
        queue, meter = tower.queue, self.shelf.meter
        loader = Loader(
            self.spec, runtime, queue=queue, meter=meter, land=tower.land, look=tower.look
        )
        tower.open(loader.flush, self.on_landed, self.watcher.look_again)

    def close(self) -> None:
        """Nothing is served from memory any more, and nobody waits for ever."""
        self._runtime = None
        self.shelf.front.clear()
        self._tower.close()
        self.watcher.close()

    def leave(self) -> None:
        """E21: its loop was closed, or a fork left it to the parent: nobody can be told."""
        self._runtime = None
        self.shelf.front.clear()
        self.watcher.begin_anew()
        self._tower = self._new_tower()

    async def read(self, key: K, load: OwnLoad, *, anew: bool = False) -> Read[V]:
        """E2 by a loader for this read (`max_batch` is 1); a load under way is waited for."""
        waiter: Waiter[K, V] = Waiter((await self.ready()).loop.create_future(), load)
        outcomes = await (self.reload([key], waiter) if anew else self.answers([key], waiter))
        return outcomes[key] if waiter.private is None else waiter.private

    async def answers(
        self, keys: Sequence[K], waiter: Waiter[K, V] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """E2, for each key; those that need a load are loaded together."""
        runtime = await self.ready()
        now = runtime.clock()
        waiter = waiter or Waiter(runtime.loop.create_future(), max_age=max_age)
        if texts := self._unheld(keys, now, waiter.outcomes, max_age):
            unread: set[K] = set()
            records = await self._records.of(texts, unread)
            for key, id_ in texts.items():
                if (record := records.get(id_)) is not None:
                    self._answer(key, id_, record, now, waiter, unverified=key in unread)
                else:
                    self._tower.join(key, id_, NOTHING, waiter)
            await self._tower.wait(waiter, texts)
            self.shelf.count([waiter.outcomes[key] for key in texts], runtime.clock())
        return {key: waiter.outcomes[key] for key in keys}

    def _unheld(
        self, keys: Iterable[K], now: float, held: dict[K, Outcome[V]], max_age: float
    ) -> dict[K, str]:
        """Notes in `held` what memory can answer; the names of the others."""
        texts, oldest = dict[K, str](), now - max_age
        entries, text = self.shelf.front.entries, self.text
        for key in keys:
            entry = entries.get(key)
            if entry is not None and now < entry.until and entry.copy.fetched_at >= oldest:
                entry.hits += 1
                held[key] = entry.answer
            else:
                texts[key] = text(key)
        return texts

    def glance(self, key: K) -> Answer[V] | None:
        """E9, E14: the row is read on the spot; if it has not changed, nor has the answer."""
        entry, runtime = self.shelf.front.entries.get(key), self._runtime
        if entry is None or runtime is None or runtime.read_now is None:
            return None
        copy, id_, now = entry.copy, self.text(key), runtime.clock()
        is_right = copy.fetched_at - MAX_SKEW <= now < entry.stands
        if not is_right or runtime.loop is not asyncio.get_running_loop():
            return None
        try:
            record = runtime.read_now(self.spec.kind, (id_,), {id_: copy.generation}).get(id_)
        except StoreError:
            return None
        if record is None or record.copy is None or record.failure is not None:
            return None
        if record.copy.generation != copy.generation or record.copy.mark != copy.mark:
            return None
        entry.hits += 1
        return entry.answer

    async def known(
        self, keys: Iterable[K], unread: set[K] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """What can be said of each without a load; a key that needs one is left out."""
        runtime = await self.ready()
        now, found = runtime.clock(), dict[K, Outcome[V]]()
        texts = self._unheld(keys, now, found, max_age)
        unread = set() if unread is None else unread
        records = await self._records.of(texts, unread) if texts else {}
        for key, id_ in texts.items():
            match plan_read(records.get(id_, NOTHING), now, max_age=max_age):
                case Serve() as plan if answer := self.shelf.serve(
                    key, plan, now, unverified=key in unread
                ):
                    found[key] = answer
                case Fail(failure):
                    found[key] = self.shelf.cooling(key, failure, now)
        self.shelf.count([found[key] for key in texts if key in found], now)
        return found

    async def look(self, key: K) -> Answer[V] | None:
        """What there is, however old, unless it is GONE; nothing is loaded."""
        runtime, id_ = await self.ready(), self.text(key)
        unread: set[K] = set()
        copy = (await self._records.of({key: id_}, unread)).get(id_, NOTHING).copy
        now = runtime.clock()
        if copy is None or (verdict := verdict_of(copy, now)) is Verdict.GONE:
            return None
        return self.shelf.serve(key, Serve(copy, verdict), now, unverified=bool(unread))

    async def reload(
        self, keys: Sequence[K], waiter: Waiter[K, V] | None = None
    ) -> dict[K, Outcome[V]]:
        """Now, whatever the age and the cooldown; a load under way counts."""
        runtime = await self.ready()
        texts = {key: self.text(key) for key in keys}
        records = await self._records.of(texts)
        waiter = waiter or Waiter(runtime.loop.create_future())
        for key, id_ in texts.items():
            self._tower.join(key, id_, records.get(id_, NOTHING), waiter, forced=True)
        await self._tower.wait(waiter, texts)
        return waiter.outcomes

    async def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """For who watches: what is not fresh is loaded, by us or another; cooldowns hold."""
        runtime = await self.ready()
        texts = {key: self.text(key) for key in keys}
        records = self.shelf.readable(texts, await self._records.of(texts))
        waiter: OneByOne[K, V] = OneByOne(runtime.loop.create_future())
        now = runtime.clock()
        times = refresh_times(texts, records, now, self.spec.terms, self.watcher.absent)
        stale = [key for key, at in times.items() if at <= now]
        for key in stale:
            self._tower.join(key, texts[key], records.get(texts[key], NOTHING), waiter)
        if fresh := [key for key, at in times.items() if at > now]:
            yield dict.fromkeys(fresh)
        while waiter.missing or waiter.outcomes:
            await self._tower.wait(waiter, stale)
            ended = waiter.ended()
            stale = [key for key in stale if key not in ended]
            yield {**ended}

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """For who watches: when each is to be refreshed."""
        runtime = await self.ready()
        texts = {key: self.text(key) for key in keys}
        records = self.shelf.readable(texts, await self._records.of(texts))
        return refresh_times(texts, records, runtime.clock(), self.spec.terms, self.watcher.absent)

    def check(self, keys: Iterable[K]) -> None:
        for key in keys:
            self.text(key)

    def check_not_closed(self) -> None:
        self._owner.check_not_closed()

    def on_landed(self, key: K, answer: Answer[V], copy: Copy) -> None:
        """Tell watchers of a new copy."""
        self.watcher.landed(key, answer, watched_until(copy, self.spec.terms), self.shelf.now())

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> None:
        """E6: nothing enters memory from a step that began before this ended."""
        runtime, texts = await self.ready(), [self.text(key) for key in keys]
        with self.overtaking(keys):
            await runtime.store.invalidate(self.spec.kind, texts, soft=soft)

    async def delete(self, keys: Sequence[K]) -> None:
        runtime, texts = await self.ready(), [self.text(key) for key in keys]
        with self.overtaking(keys):
            await runtime.store.delete(self.spec.kind, texts)
        self.shelf.meter.failing.ended(texts)

    @contextmanager
    def overtaking(self, keys: Sequence[K]) -> Iterator[Step[K]]:
        """Before the store's step and after it; the step notes which keys others overtake."""
        self.overtake(keys)
        step = Step(keys)
        self._steps.add(step)
        try:
            yield step
        finally:
            self._steps.discard(step)
            self.overtake(keys)

    def overtake(self, keys: Iterable[K]) -> None:
        """E6: what is under way for these keys came too early to be kept."""
        keys = list(keys)
        self.watcher.look_again(keys)
        for key in keys:
            self.shelf.front.drop(key)
            if (flight := self._tower.queue.flights.get(key)) is not None and flight.began:
                flight.overtaken = True
            for step in self._steps:
                if key in step.keys:
                    step.dirty.add(key)

    def overtake_tagged(self, tag: str) -> None:
        """E8: what is under way or in memory and has this tag, or cannot say."""
        if self.spec.tags is not None:
            steps = (key for step in self._steps for key in step.keys)
            tags_of, wanted = self.spec.possible_tags, {tag, None}
            under_way = {*self._tower.queue.flights, *steps}
            tagged = {key for key in under_way if not wanted.isdisjoint(tags_of(key))}
            self.overtake(tagged | self.shelf.front.tagged(tag))

    async def explain(self, key: K) -> Explanation:
        runtime, id_ = await self.ready(), self.text(key)
        records = await runtime.store.read(self.spec.kind, [id_])
        return explain(
            self.spec.kind,
            key,
            records.get(id_, NOTHING),
            runtime.clock(),
            loading_here=self._tower.is_loading(key),
            in_memory=key in self.shelf.front.entries,
            lease_for=self.spec.lease_for,
        )

    def is_full(self, key: K) -> bool:
        """As many loads are under way as may be, none of them this one's."""
        flights = self._tower.queue.flights
        return len(flights) >= self.spec.concurrency and key not in flights

    def stats(self) -> ResourceStats:
        front, queue = self.shelf.front, self._tower.queue
        front.fold_all()
        watched, loading = len(self.watcher.watches), len(queue.flights)
        held = Holding(len(front.entries), loading, queue.waiting(), watched, self.spec.max_batch)
        return self.shelf.meter.stats(self.shelf.now(), held)

    async def ready(self) -> Runtime:
        """E13: a cache belongs to the loop that opened it."""
        runtime = self._runtime
        if runtime is None or runtime.loop is not asyncio.get_running_loop():
            runtime = await self._owner.runtime()
            self._check_open(runtime)
        return runtime

    def is_open(self, runtime: Runtime) -> bool:
        return self._runtime is runtime

    def _check_open(self, runtime: Runtime) -> None:
        """Closed while we waited: what we have in hand belongs to a life that has ended."""
        if not self.is_open(runtime):
            raise NotOpen(f"{self.spec.kind}: the cache is closed")

    def _answer(
        self,
        key: K,
        id_: str,
        record: Record,
        now: float,
        waiter: Waiter[K, V],
        *,
        unverified: bool,
    ) -> None:
        match plan_read(record, now, self.spec.lease_for, waiter.max_age):
            case Serve() as plan if served := self.shelf.serve(
                key, plan, now, unverified=unverified
            ):
                if plan.refresh and self._tower.queue.has_room_behind():
                    self._tower.flight(key, id_, record, waiter).wanted = True
                waiter.outcomes[key] = served
            case Serve() if failure := cooling(record.failure, now):
                waiter.outcomes[key] = self.shelf.cooling(key, failure, now)
            case Serve():
                self._tower.join(key, id_, record, waiter)
            case Load(fallback):
                if fallback is not None:
                    self._tower.give_fallback(key, fallback, [waiter], unverified=unverified)
                self._tower.join(key, id_, record, waiter, forced=waiter.max_age < FOR_EVER)
            case Fail(failure):
                waiter.outcomes[key] = self.shelf.cooling(key, failure, now)
