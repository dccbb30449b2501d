"""The callers that wait, key by key, and the flights that have not begun (E3, E4, E6).

Bookkeeping on one event loop: single-flight, batches, and no waiting in a circle.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

from stillfresh.engine.flight import (
    BEFORE,
    LOADING,
    NEXT,
    OVER,
    PUBLISHING,
    QUEUED,
    Batch,
    Flight,
    LoadEvent,
)
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Private
from stillfresh.engine.rules import FOR_EVER, NOTHING
from stillfresh.engine.spec import Spec
from stillfresh.engine.stats import Counts
from stillfresh.errors import LoadFailed
from stillfresh.stores.contract import Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_BEHIND: Final = 10_000
"""Refreshes that may queue with nobody waiting; a key beyond that is asked for by its next read."""
CURRENT: ContextVar[Batch | None] = ContextVar("stillfresh_batch", default=None)
"""The batch in whose loader this code runs."""


class Waiter(Generic[K, V]):
    """One caller, waiting for one or many keys."""

    __slots__ = ("fallbacks", "future", "load", "max_age", "missing", "outcomes", "private")

    def __init__(
        self,
        future: "asyncio.Future[None]",
        load: OwnLoad | None = None,
        max_age: float = FOR_EVER,
    ) -> None:
        self.future = future
        self.max_age = max_age
        """E18: an older copy does not do for this caller."""
        self.load = load
        """A loader of its own, for the flights that it begins."""
        self.private: Private[Any] | None = None
        """That loader's value for this caller alone."""
        self.missing = 0
        self.outcomes: dict[K, Outcome[V]] = {}
        self.fallbacks: dict[K, Callable[[LoadFailed], Answer[V]]] = {}
        """What is left to serve this caller if the load fails (E2)."""

    def settle(self, key: K, outcome: Outcome[V]) -> None:
        if self.fallbacks and isinstance(outcome, LoadFailed) and key in self.fallbacks:
            outcome = self.fallbacks[key](outcome)
        self.outcomes[key] = outcome
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(None)


class OneByOne(Waiter[K, V]):
    """A caller that is woken by each key that ends, not only by the last."""

    __slots__ = ()

    def settle(self, key: K, outcome: Outcome[V]) -> None:
        super().settle(key, outcome)
        if not self.future.done():
            self.future.set_result(None)

    def ended(self) -> dict[K, Outcome[V]]:
        """Those that have ended since this was asked last; then it waits for the others."""
        outcomes, self.outcomes = self.outcomes, {}
        self.future = self.future.get_loop().create_future()
        return outcomes


def waits_for(flight: Flight[K, Waiter[K, V]], batch: Batch) -> bool:
    """E3: would `flight` come to its end only after `batch` does?"""
    seen: set[int] = set()
    stack: list[Flight[Any, Any]] = [flight]
    while stack:
        one = stack.pop()
        while one.successor is not None:
            one = one.successor
        if one.batch is batch:
            return True
        if id(one.batch) not in seen:
            seen.add(id(one.batch))
            stack.extend(one.batch.waiting_for)
    return False


class Queue(Generic[K, V]):
    """The flights of one resource, and those of them that have not begun."""

    def __init__(self, spec: Spec[K, V], counts: Counts) -> None:
        self.flights: dict[K, Flight[K, Waiter[K, V]]] = {}
        self.puts: dict[K, asyncio.Future[None]] = {}
        """E17: the last put of each key that has not ended."""
        self._spec = spec
        self._counts = counts
        self._pending: deque[Flight[K, Waiter[K, V]]] = deque()
        self._urgent: deque[Flight[K, Waiter[K, V]]] = deque()
        self._running = 0

    def join(
        self, key: K, id_: str, record: Record, waiter: Waiter[K, V], *, forced: bool = False
    ) -> None:
        """Wait for the load of this key: the one under way, or a new one."""
        if (running := self.flights.get(key)) is not None:
            self._counts.coalesced += 1
            batch = CURRENT.get()
            if batch is not None and waits_for(running, batch):
                waiter.outcomes[key] = LoadFailed(
                    f"{self._spec.kind} {key!r}: its loader waits, in a circle, for itself"
                )
                return
        flight = self.add(key, id_, record, waiter)
        flight.forced |= forced
        flight.outgrown |= waiter.max_age < FOR_EVER
        flight.join(waiter)
        waiter.missing += 1

    def join_missing(self, texts: Mapping[K, str], waiter: Waiter[K, V]) -> None:
        """The same for keys that the store knows nothing of; most are new, and they are many."""
        is_plain = waiter.load is None and CURRENT.get() is None
        if not is_plain or not self.flights.keys().isdisjoint(texts):
            for key, id_ in texts.items():
                self.join(key, id_, NOTHING, waiter)
            return
        new = {key: Flight(key, id_, {waiter: BEFORE}) for key, id_ in texts.items()}
        self.flights.update(new)
        self._pending.extend(new.values())
        waiter.missing += len(new)

    def add(
        self, key: K, id_: str, record: Record, by: Waiter[K, V] | None
    ) -> Flight[K, Waiter[K, V]]:
        """The flight of this key: the one there is, or a new one at the end of the queue."""
        if (flight := self.flights.get(key)) is None:
            flight = self.flights[key] = Flight(key, id_)
            flight.by = by if by is not None and by.load is not None else None
            self._pending.append(flight)
        if record is not NOTHING and flight.batch.state is QUEUED:
            flight.saw(record)
        if CURRENT.get() is not None:
            self._hurry(flight)
        return flight

    def _hurry(self, flight: Flight[K, Waiter[K, V]]) -> None:
        """A loader waits for it, and may hold the only place (E4)."""
        if not flight.urgent:
            flight.urgent = True
            if flight.batch.state is QUEUED:
                self._urgent.append(flight)

    async def wait(self, waiter: Waiter[K, V], keys: Iterable[K]) -> None:
        """Until all have ended. A caller that stops waiting takes nobody along (E3)."""
        flights: list[Flight[Any, Any]] = []
        waiting_for: list[Flight[Any, Any]] = []
        if (batch := CURRENT.get()) is not None:
            flights += [self.flights[key] for key in keys if key not in waiter.outcomes]
            waiting_for = batch.waiting_for
            waiting_for += flights
        try:
            await waiter.future
        except asyncio.CancelledError:
            self.leave(waiter, keys)
            raise
        finally:
            for flight in flights:
                waiting_for.remove(flight)

    def leave(self, waiter: Waiter[K, V], keys: Iterable[K]) -> None:
        """E3: a load that has not begun is dropped if nobody else waits for it."""
        for key in keys:
            if (flight := self.flights.get(key)) is not None:
                flight.waiters.pop(waiter, None)

    async def pause(self, batch: Batch, sleep: Awaitable[object]) -> None:
        """E5: or until a put of this process, which may hold the lease, has ended."""
        puts = [self.puts[flight.key] for flight in batch.flights if flight.key in self.puts]
        if not puts:
            await sleep
            return
        pause: asyncio.Future[Any] = asyncio.ensure_future(sleep)
        try:
            await asyncio.wait([pause, *puts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    def waiting(self) -> int:
        """How many have not begun."""
        return sum(flight.batch.state is QUEUED for flight in self.flights.values())

    def is_loading(self, key: K) -> bool:
        """By this process; not if another one holds the lease."""
        flight = self.flights.get(key)
        return flight is not None and flight.batch.state in {LOADING, PUBLISHING}

    def has_room_behind(self) -> bool:
        return len(self._pending) < MAX_BEHIND

    def take(self) -> tuple[Batch, bool] | None:
        """The next batch, and whether it takes a place; a load inside a load takes none (E4)."""
        if taken := self._begin(self._urgent):
            return taken, False
        if self._running < self._spec.concurrency and (taken := self._begin(self._pending)):
            self._running += 1
            return taken, True
        return None

    def give_back(self) -> None:
        """A place is free again."""
        self._running -= 1

    def follow(self, flight: Flight[K, Waiter[K, V]], left: Iterable[Waiter[K, V]]) -> None:
        """The next flight of the key, for the callers that are left (E5, E6)."""
        first = next(iter(left), flight.by)
        by = first if first is not None and first.load is not None else flight.by
        trailing = flight.successor = self.add(flight.key, flight.id, NOTHING, by)
        trailing.seen, trailing.failure = flight.seen, flight.failure
        trailing.wanted = trailing.wanted or flight.wanted
        trailing.forced = trailing.forced or flight.forced
        trailing.outgrown = trailing.outgrown or flight.outgrown
        trailing.waiters.update(dict.fromkeys(left, BEFORE))
        trailing.rounds = flight.rounds + 1
        if flight.urgent:
            self._hurry(trailing)

    def drop_unwaited(self, batch: Batch) -> None:
        """Another process loads these, and nobody here waits for them any more."""
        for flight in batch.flights:
            if not flight.waiters:
                self._drop(flight)
        batch.flights = [flight for flight in batch.flights if flight.waiters]

    def clear(self) -> list[Flight[K, Waiter[K, V]]]:
        """Nothing is pending any more; the flights there were."""
        ended = list(self.flights.values())
        for flight in ended:
            flight.batch = OVER
        self.flights.clear()
        self._pending.clear()
        self._urgent.clear()
        return ended

    def _drop(self, flight: Flight[K, Waiter[K, V]]) -> None:
        flight.batch = OVER
        if self.flights.get(flight.key) is flight:
            del self.flights[flight.key]

    def _begin(self, queue: deque[Flight[K, Waiter[K, V]]]) -> Batch | None:
        taken: list[Flight[K, Waiter[K, V]]] = []
        while queue and len(taken) < self._spec.max_batch:
            flight = queue.popleft()
            if flight.batch.state is not QUEUED:
                continue  # it was urgent, and stood in both queues
            if flight.wanted or flight.waiters:
                taken.append(flight)
            else:  # E3: its last waiter left
                self._drop(flight)
        return Batch(taken, NEXT[QUEUED][LoadEvent.BEGIN]) if taken else None
