"""The read path of one resource: from a key to an answer (E2-E6).

Reads the clock once for an operation and does what `rules.py` decided. A key is whatever the
resource's callers use; `text` is its name in the store.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from stillfresh.engine.answers import Answers
from stillfresh.engine.explain import explain
from stillfresh.engine.flights import CURRENT, Flight, Outcome, Queue, Waiter, waits_for
from stillfresh.engine.front import NEVER
from stillfresh.engine.loader import Landing, Loader, Runtime, Spec
from stillfresh.engine.metrics import ResourceStats, age_bucket
from stillfresh.engine.model import Explanation, Origin
from stillfresh.engine.rules import Fail, Load, Serve, plan_read, verdict_of
from stillfresh.errors import LoadFailed, StillfreshError, StoreError
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Copy, Record

__all__ = ["Core", "Owner"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NOTHING: Final = Record()


class Owner(Protocol):
    """The cache that a resource belongs to."""

    async def runtime(self) -> Runtime:
        """Opens the cache if it was never opened; NotOpen if it was closed."""


class Step(Generic[K]):
    """A read of the store under way, and which of its keys were invalidated meanwhile (E6)."""

    __slots__ = ("dirty", "keys")

    def __init__(self, keys: Iterable[K]) -> None:
        self.keys = frozenset(keys)
        self.dirty: set[K] = set()


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
        self._text = text
        self._key = key
        self._owner = owner
        self._queue: Queue[K, V] = Queue(spec.max_batch, spec.concurrency)
        self._steps: set[Step[K]] = set()
        self._runtime: Runtime | None = None
        self._loader: Loader[K, V] | None = None
        self._flushing = False

    def open(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queue = Queue(self.spec.max_batch, self.spec.concurrency)
        self._loader = Loader(
            self.spec,
            runtime,
            queue=self._queue,
            meter=self.shelf.meter,
            land=self._land,
            look=self._look,
        )

    def close(self) -> None:
        """Nothing is served from memory any more, and nobody waits for ever."""
        self.shelf.front.clear()
        self._runtime = self._loader = None
        closed = LoadFailed(f"{self.spec.kind}: the cache was closed")
        for flight in self._queue.clear():
            for waiter in (*flight.early, *flight.late):
                waiter.settle(flight.key, closed)

    async def answers(self, keys: Sequence[K]) -> dict[K, Outcome[V]]:
        """E2, for each key; those that need a load are loaded together."""
        runtime = await self._ready()
        now = runtime.clock()
        waiter: Waiter[K, V] = Waiter(runtime.loop.create_future())
        texts: dict[K, str] = {}
        for key in keys:
            if (answer := self.shelf.hit(key, now)) is not None:
                waiter.outcomes[key] = answer
            else:
                texts[key] = self._text(key)
        if texts:
            records = await self._records(runtime, texts)
            for key, id_ in texts.items():
                self._answer(key, id_, records.get(id_, NOTHING), now, waiter)
            await self._wait(waiter, texts)
        return waiter.outcomes

    async def reload(self, keys: Sequence[K]) -> dict[K, Outcome[V]]:
        """Now, whatever the age and the cooldown; a load under way counts."""
        runtime = await self._ready()
        texts = {key: self._text(key) for key in keys}
        records = await self._records(runtime, texts)
        waiter: Waiter[K, V] = Waiter(runtime.loop.create_future())
        for key, id_ in texts.items():
            self._join(key, id_, records.get(id_, NOTHING), waiter)
        await self._wait(waiter, texts)
        return waiter.outcomes

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> None:
        """E6: nothing enters memory from a step that began before this ended."""
        runtime = await self._ready()
        texts = [self._text(key) for key in keys]
        self.overtake(keys)
        try:
            await runtime.store.invalidate(self.spec.kind, texts, soft=soft)
        finally:
            self.overtake(keys)

    async def delete(self, keys: Sequence[K]) -> None:
        runtime = await self._ready()
        texts = [self._text(key) for key in keys]
        self.overtake(keys)
        try:
            await runtime.store.delete(self.spec.kind, texts)
        finally:
            self.overtake(keys)

    def overtake(self, keys: Iterable[K]) -> None:
        """E6: what is under way for these keys came too early to be kept."""
        for key in keys:
            self.shelf.front.drop(key)
            if (flight := self._queue.flights.get(key)) is not None and flight.began:
                flight.overtaken = True
            for step in self._steps:
                if key in step.keys:
                    step.dirty.add(key)

    def overtake_texts(self, ids: Iterable[str]) -> None:
        self.overtake([self._key(id_) for id_ in ids])

    def overtake_tagged(self, tag: str) -> None:
        """E8: what is under way and has this tag; what is at rest, the store knows."""
        if (tags := self.spec.tags) is not None:
            busy = {*self._queue.flights, *(key for step in self._steps for key in step.keys)}
            self.overtake([key for key in busy if tag in tags(key)])

    async def explain(self, key: K) -> Explanation:
        runtime = await self._ready()
        id_ = self._text(key)
        records = await runtime.store.read(self.spec.kind, [id_])
        return explain(
            self.spec.kind,
            key,
            records.get(id_, NOTHING),
            runtime.clock(),
            loading_here=key in self._queue.flights,
            in_memory=key in self.shelf.front.entries,
        )

    def stats(self) -> ResourceStats:
        front = self.shelf.front
        front.fold_all()
        return self.shelf.meter.stats(entries=len(front.entries), loading=len(self._queue.flights))

    async def _ready(self) -> Runtime:
        """E13: a cache belongs to the loop that opened it."""
        runtime = self._runtime or await self._owner.runtime()
        if runtime.loop is not asyncio.get_running_loop():
            raise StillfreshError(
                f"{self.spec.kind}: this cache was opened by another event loop; "
                f"use cache.from_thread(...) from other threads, or close it there first"
            )
        return runtime

    async def _records(self, runtime: Runtime, texts: Mapping[K, str]) -> dict[str, Record]:
        """What the store has (values that memory holds left out); or memory, if it is away (S5)."""
        entries = self.shelf.front.entries
        held = {id_: entries[key].copy for key, id_ in texts.items() if key in entries}
        known = {id_: copy.generation for id_, copy in held.items()}
        ids = list(texts.values())
        try:
            if runtime.read_now is not None:
                return runtime.read_now(self.spec.kind, ids, known)
            return await self._read(runtime, texts, ids, known)
        except StoreError:
            self.shelf.meter.store_errors += 1
            return {id_: Record(copy) for id_, copy in held.items()}

    async def _read(
        self, runtime: Runtime, texts: Mapping[K, str], ids: list[str], known: dict[str, str]
    ) -> dict[str, Record]:
        """E6: what was invalidated while it was read is taken for missing."""
        step = Step(texts)
        self._steps.add(step)
        try:
            records = await runtime.store.read(self.spec.kind, ids, known)
        finally:
            self._steps.discard(step)
        for key in step.dirty:
            records.pop(texts[key], None)
        return records

    def _answer(self, key: K, id_: str, record: Record, now: float, waiter: Waiter[K, V]) -> None:
        match plan_read(record, now):
            case Serve() as plan:
                served = self.shelf.serve(key, plan, now)
                if served is None:
                    self._join(key, id_, record, waiter)
                    return
                if plan.refresh and self._queue.has_room_behind():
                    self._flight(key, id_, record).wanted = True
                waiter.outcomes[key] = served
            case Load(fallback):
                if fallback is not None:
                    self._give_fallback(key, fallback, [waiter])
                self._join(key, id_, record, waiter)
            case Fail(failure):
                self.shelf.meter.reads[Verdict.GONE] += 1
                waiter.outcomes[key] = self.shelf.cooling(key, failure, now)

    def _give_fallback(self, key: K, copy: Copy, waiters: list[Waiter[K, V]]) -> None:
        """E2: EXPIRED is served if the load fails."""
        if (old := self.shelf.fallback(key, copy)) is not None:
            for waiter in waiters:
                waiter.fallbacks[key] = old

    def _join(self, key: K, id_: str, record: Record, waiter: Waiter[K, V]) -> None:
        if (running := self._queue.flights.get(key)) is not None:
            self.shelf.meter.coalesced += 1
            batch = CURRENT.get()
            if batch is not None and waits_for(running, batch):
                waiter.outcomes[key] = LoadFailed(
                    f"{self.spec.kind} {key!r}: its loader waits, in a circle, for itself"
                )
                return
        self._flight(key, id_, record).join(waiter, record)

    def _flight(self, key: K, id_: str, record: Record) -> Flight[K, V]:
        is_new = key not in self._queue.flights
        flight = self._queue.add(key, id_)
        if is_new:
            flight.saw(record)
        self._flush_soon()
        return flight

    def _flush_soon(self) -> None:
        """E4: what is asked for in one turn of the loop goes together."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._loader is not None:
            self._loader.flush()

    async def _wait(self, waiter: Waiter[K, V], keys: Iterable[K]) -> None:
        if not waiter.missing:
            return
        flights: list[Flight[Any, Any]] = [
            self._queue.flights[key] for key in keys if key not in waiter.outcomes
        ]
        waiting_for = batch.waiting_for if (batch := CURRENT.get()) is not None else []
        waiting_for.extend(flights)
        try:
            await waiter.future
        except asyncio.CancelledError:
            for key in keys:
                if (flight := self._queue.flights.get(key)) is not None:
                    flight.leave(waiter)
            raise
        finally:
            for flight in flights:
                waiting_for.remove(flight)

    def _look(self, flight: Flight[K, V], record: Record) -> None:
        """E5: another has published, failed or gone: answer from that, or ask again."""
        self._queue.end(flight)
        flight.saw(record)
        now = self.shelf.now()
        early, late = flight.early, flight.late
        match plan_read(record, now):
            case Serve() as plan if not flight.overtaken and (
                answer := self.shelf.serve(flight.key, plan, now, Origin.ANOTHER)
            ):
                _settle(flight, early, answer)
                flight.wanted = plan.refresh
                if late or flight.wanted:  # who came since then may know better
                    self._again(flight, late)
            case Fail(failure):
                _settle(flight, [*early, *late], self.shelf.cooling(flight.key, failure, now))
            case plan:
                if isinstance(plan, Load) and plan.fallback is not None:
                    self._give_fallback(flight.key, plan.fallback, [*early, *late])
                self._again(flight, [*early, *late])

    def _again(self, flight: Flight[K, V], waiters: list[Waiter[K, V]]) -> None:
        self._queue.again(flight, waiters, wanted=flight.wanted)
        self._flush_soon()

    def _land(
        self, flight: Flight[K, V], landing: Landing[V], *, stored: bool, superseded: bool
    ) -> None:
        """E6: an overtaken value goes, as STALE, to those who asked before the load began."""
        if self._runtime is None:
            return
        self._queue.end(flight)
        overtaken = superseded or flight.overtaken
        told = flight.early if overtaken else [*flight.early, *flight.late]
        if landing.error is not None:
            self._tell_failure(flight, told, landing.error)
        elif (copy := landing.copy) is not None:
            now = self.shelf.now()
            verdict = Verdict.STALE if overtaken else verdict_of(copy, now)
            self.shelf.meter.read(verdict, age_bucket(age_of(copy.fetched_at, now)), len(told))
            origin = Origin.LOADED
            for waiter in told:
                waiter.settle(flight.key, self.shelf.made(copy, landing.value, verdict, origin))
                origin = Origin.ANOTHER
            if not overtaken:
                self.shelf.landed(flight.key, copy, landing.value, verdict, now, stored=stored)
        if overtaken:
            flight.wanted = landing.error is None
            if flight.wanted or flight.late:
                self._again(flight, flight.late)

    def _tell_failure(
        self, flight: Flight[K, V], told: list[Waiter[K, V]], error: LoadFailed
    ) -> None:
        if (entry := self.shelf.front.entries.get(flight.key)) is not None:
            entry.until = NEVER
        for waiter in told:
            left = Verdict.EXPIRED if flight.key in waiter.fallbacks else Verdict.GONE
            self.shelf.meter.reads[left] += 1
            waiter.settle(flight.key, error)


def _settle(flight: Flight[K, V], waiters: Iterable[Waiter[K, V]], outcome: Outcome[V]) -> None:
    for waiter in waiters:
        waiter.settle(flight.key, outcome)
