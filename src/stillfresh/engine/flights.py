"""Who waits for which load: single-flight, batches, and no waiting in a circle (E3, E4, E6).

A flight is one key on its way from "somebody needs it" to an answer. Here is the bookkeeping, on
one event loop and without an `await`; `loader.py` does the work.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar, cast

from msgspec import Struct

from stillfresh.clock import Clock
from stillfresh.engine.model import Answer, Origin, Private
from stillfresh.engine.rules import FOR_EVER, NOTHING
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Failure, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_BEHIND: Final = 10_000
"""Refreshes that may queue with nobody waiting; a key beyond that is asked for by its next read."""

Outcome = Answer[V] | LoadFailed
Read = Answer[V] | Private[Any] | LoadFailed
"""What a caller with a loader of its own is told: stored, private, or failed."""
OwnLoad = Callable[[], Awaitable[object]]
"""A loader that a caller brings for one key: its value, a `Loaded`, or a `Private`."""


def answered(outcome: Outcome[V], clock: Clock) -> Answer[V]:
    """A failure as an answer that says why there is none."""
    if not isinstance(outcome, LoadFailed):
        return outcome
    return Answer(
        cast("V", None),
        found=False,
        verdict=Verdict.GONE,
        fetched_at=clock(),
        origin=Origin.LOADED,
        clock=clock,
        error=outcome,
    )


def all_answered(outcomes: Mapping[K, Outcome[V]], clock: Clock) -> dict[K, Answer[V]]:
    return {
        key: outcome if isinstance(outcome, Answer) else answered(outcome, clock)
        for key, outcome in outcomes.items()
    }


def left_of(known: Outcome[V] | None, failure: LoadFailed, clock: Clock) -> Answer[V]:
    """What is left to show after a failure, and the failure with it."""
    if known is None or isinstance(known, LoadFailed):
        return answered(known or failure, clock)
    if known.error is not None:
        return known
    return Answer(
        known.value,
        found=known.found,
        verdict=known.verdict,
        fetched_at=known.fetched_at,
        origin=known.origin,
        clock=clock,
        error=failure,
        unverified=known.unverified,
    )


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


class Batch:
    """One call of a loader, and the flights that it waits for in turn."""

    __slots__ = ("waiting_for",)

    def __init__(self) -> None:
        self.waiting_for: list[Flight[Any, Any]] = []


CURRENT: ContextVar[Batch | None] = ContextVar("stillfresh_batch", default=None)
"""The batch in whose loader this code runs."""


class Flight(Struct, Generic[K, V], eq=False):
    """One key's load. Who asked before it began is apart from who came later (E6)."""

    key: K
    id: str
    seen: str | None = None
    failure: Failure | None = None
    early: list[Waiter[K, V]] = []
    late: list[Waiter[K, V]] = []
    after: list[Waiter[K, V]] = []
    began: bool = False
    overtaken: bool = False
    forced: bool = False
    """Somebody wants a new copy, however good the old one is."""
    urgent: bool = False
    """A loader waits for it, and may hold the only place."""
    wanted: bool = False
    sent: bool = False
    """Its copy is on the way to the store: who comes now may know more than it."""
    rounds: int = 0
    successor: "Flight[K, V] | None" = None
    batch: Batch | None = None
    by: Waiter[K, V] | None = None
    """The caller whose loader it runs; it may have left, or have been served an older copy."""

    def saw(self, record: Record) -> None:
        """What the next lease is asked for with."""
        self.seen = record.copy.generation if record.copy is not None else None
        self.failure = record.failure

    @property
    def failures(self) -> int | None:
        """E7: the lease is not for one who has missed a failure; `refresh()` asks for it anyway."""
        if self.forced:
            return None
        return 0 if self.failure is None else self.failure.count

    def join(self, waiter: Waiter[K, V]) -> None:
        """Early, late, or after the fact: each may be told only what was not known to be wrong."""
        waiter.missing += 1
        (self.after if self.sent else self.late if self.began else self.early).append(waiter)

    def include_late(self) -> None:
        """The step that begins now is new to all who wait."""
        self.early += self.late
        self.late = []
        self.overtaken = False

    @property
    def waiters(self) -> list[Waiter[K, V]]:
        """All of them."""
        return [*self.early, *self.late, *self.after]

    def leave(self, waiter: Waiter[K, V]) -> None:
        for waiters in (self.early, self.late, self.after):
            if waiter in waiters:
                waiters.remove(waiter)


def waits_for(flight: Flight[K, V], batch: Batch) -> bool:
    """E3: would `flight` come to its end only after `batch` does?"""
    seen: set[int] = set()
    stack: list[Flight[Any, Any]] = [flight]
    while stack:
        one = stack.pop()
        while one.successor is not None:
            one = one.successor
        if one.batch is batch:
            return True
        if one.batch is not None and id(one.batch) not in seen:
            seen.add(id(one.batch))
            stack.extend(one.batch.waiting_for)
    return False


class Queue(Generic[K, V]):
    """The flights of one resource, and those of them that have not begun."""

    def __init__(self, max_batch: int, concurrency: int) -> None:
        self.flights: dict[K, Flight[K, V]] = {}
        self._max_batch = max_batch
        self._concurrency = concurrency
        self._pending: deque[Flight[K, V]] = deque()
        self._urgent: deque[Flight[K, V]] = deque()
        self._running = 0

    def add(
        self, key: K, id_: str, record: Record = NOTHING, by: Waiter[K, V] | None = None
    ) -> Flight[K, V]:
        """The flight of this key: the one there is, or a new one at the end of the queue."""
        if (flight := self.flights.get(key)) is None:
            flight = self.flights[key] = Flight(key, id_, by=by)
            self._pending.append(flight)
            if record is not NOTHING:
                flight.saw(record)
        if CURRENT.get() is not None:
            self._hurry(flight)
        return flight

    def _hurry(self, flight: Flight[K, V]) -> None:
        if not flight.urgent:
            flight.urgent = True
            if not flight.began:
                self._urgent.append(flight)

    def waiting(self) -> int:
        """How many have not begun."""
        return sum(not flight.began for flight in self.flights.values())

    def has_room_behind(self) -> bool:
        return len(self._pending) < MAX_BEHIND

    def take(self) -> tuple[list[Flight[K, V]], bool]:
        """The next batch, and whether it takes a place; a load inside a load takes none (E4)."""
        if taken := self._begin(self._urgent):
            return taken, False
        if self._running < self._concurrency and (taken := self._begin(self._pending)):
            self._running += 1
            return taken, True
        return [], False

    def give_back(self) -> None:
        """A place is free again."""
        self._running -= 1

    def end(self, flight: Flight[K, V]) -> None:
        if self.flights.get(flight.key) is flight:
            del self.flights[flight.key]

    def clear(self) -> list[Flight[K, V]]:
        """Nothing is pending any more; the flights there were."""
        ended = list(self.flights.values())
        self.flights.clear()
        self._pending.clear()
        self._urgent.clear()
        return ended

    def again(self, flight: Flight[K, V], waiters: list[Waiter[K, V]], *, wanted: bool) -> None:
        """A new flight of the same key, for those who are still waiting (E5, E6)."""
        self.end(flight)
        by = waiters[0] if waiters and waiters[0].load is not None else flight.by
        trailing = flight.successor = self.add(flight.key, flight.id, by=by)
        trailing.seen, trailing.failure = flight.seen, flight.failure
        trailing.wanted = trailing.wanted or wanted
        trailing.early.extend(waiters)
        trailing.forced = trailing.forced or flight.forced
        trailing.rounds = flight.rounds + 1
        if flight.urgent:
            self._hurry(trailing)

    def _begin(self, queue: deque[Flight[K, V]]) -> list[Flight[K, V]]:
        taken: list[Flight[K, V]] = []
        while queue and len(taken) < self._max_batch:
            flight = queue.popleft()
            if flight.began:
                continue  # it was urgent, and stood in both queues
            flight.began = True
            if flight.wanted or flight.early:
                taken.append(flight)
            else:  # E3: its last waiter left
                self.end(flight)
        return taken
