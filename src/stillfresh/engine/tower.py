"""Who waits for which flight, and how each flight ends (E2, E3, E5, E6).

Every flight that ends settles all who wait for it, here and nowhere else.
"""

import asyncio
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from stillfresh.engine.answers import Answers
from stillfresh.engine.flights import CURRENT, Flight, Outcome, Queue, Waiter, waits_for
from stillfresh.engine.front import NEVER
from stillfresh.engine.landing import Landing
from stillfresh.engine.model import Answer, Origin
from stillfresh.engine.rules import Fail, Load, Serve, at_arrival, cooling, plan_arrived, plan_read
from stillfresh.engine.spec import Spec
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Copy, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_ROUNDS: Final = 2
LOADED: Final = Origin.LOADED
STALE: Final = Verdict.STALE


class Tower(Generic[K, V]):
    """The flights of one resource, from the first who asks to the last who is told."""

    def __init__(
        self, spec: Spec[K, V], shelf: Answers[K, V], queue: Queue[K, V], watched: Container[K]
    ) -> None:
        self.queue = queue
        self._watched = watched
        self._kind = spec.kind
        self._lease_for = spec.lease_for
        self._shelf = shelf
        self._start: Callable[[], None] | None = None
        self._landed: Callable[[K, Answer[V], Copy], None] | None = None
        self._failed: Callable[[list[K]], None] | None = None
        self._flushing = False

    def open(
        self,
        start: Callable[[], None],
        landed: Callable[[K, Answer[V], Copy], None],
        failed: Callable[[list[K]], None],
    ) -> None:
        """`start` begins as many batches as there are places for; `landed` hears of new copies,
        `failed` of watched keys whose load failed."""
        self._start = start
        self._landed = landed
        self._failed = failed

    def close(self) -> None:
        """Nobody waits for ever."""
        self._start = None
        closed = LoadFailed(f"{self._kind}: the cache was closed")
        for flight in self.queue.clear():
            _settle(flight, flight.waiters, closed)

    def is_loading(self, key: K) -> bool:
        """By this process; not if another one holds the lease."""
        flight = self.queue.flights.get(key)
        return flight is not None and flight.batch is not None

    def join(
        self, key: K, id_: str, record: Record, waiter: Waiter[K, V], *, forced: bool = False
    ) -> None:
        if (running := self.queue.flights.get(key)) is not None:
            self._shelf.meter.coalesced += 1
            batch = CURRENT.get()
            if batch is not None and waits_for(running, batch):
                waiter.outcomes[key] = LoadFailed(
                    f"{self._kind} {key!r}: its loader waits, in a circle, for itself"
                )
                return
        flight = self.flight(key, id_, record, waiter)
        flight.forced |= forced
        flight.join(waiter)

    def flight(
        self, key: K, id_: str, record: Record, by: Waiter[K, V] | None = None
    ) -> Flight[K, V]:
        """The one there is, or a new one that builds on what the record says."""
        front = self._shelf.front
        if record.copy is None and key in front.entries and key not in self.queue.flights:
            front.drop(key)  # deleted, by whatever process
        if not self._flushing:
            self._flush_soon()
        return self.queue.add(
            key, id_, record, by if by is not None and by.load is not None else None
        )

    def give_fallback(
        self, key: K, copy: Copy, waiters: list[Waiter[K, V]], *, unverified: bool = False
    ) -> None:
        """E2: EXPIRED is served if the load fails."""
        if (old := self._shelf.fallback(key, copy, unverified=unverified)) is not None:
            for waiter in waiters:
                waiter.fallbacks[key] = old

    async def wait(self, waiter: Waiter[K, V], keys: Iterable[K]) -> None:
        if not waiter.missing:
            return
        flights: list[Flight[Any, Any]] = []
        waiting_for: list[Flight[Any, Any]] = []
        if (batch := CURRENT.get()) is not None:
            flights += [self.queue.flights[key] for key in keys if key not in waiter.outcomes]
            waiting_for = batch.waiting_for
            waiting_for += flights
        try:
            await waiter.future
        except asyncio.CancelledError:
            for key in keys:
                if (flight := self.queue.flights.get(key)) is not None:
                    flight.leave(waiter)
            raise
        finally:
            for flight in flights:
                waiting_for.remove(flight)

    def look(
        self, flight: Flight[K, V], record: Record, since: float, *, waited: bool = False
    ) -> None:
        """E5: another has published, failed or gone: answer from that, or ask again.

        `waited`: a copy that was not seen before came while the callers waited (E16).
        """
        self.queue.end(flight)
        seen = flight.seen
        flight.saw(record)
        now, lease_for = self._shelf.now(), self._lease_for
        plan = plan_read(record, now, lease_for)
        if waited:
            plan = plan_arrived(record, seen, now, lease_for)
        early, late = flight.early, [*flight.late, *flight.after]
        match plan:
            case Serve() if self._is_answer(flight, plan.copy, seen) and (
                answer := self._shelf.serve(flight.key, plan, now, Origin.ANOTHER, since)
            ):
                _settle(flight, early, answer)
                self._tell_landed(flight.key, answer, plan.copy)
                flight.wanted = plan.refresh
                if late or flight.wanted:  # who came since then may know better
                    self._again(flight, late)
            case Fail(failure):
                self._settle_failed(
                    flight, [*early, *late], self._shelf.cooling(flight.key, failure, now)
                )
            case Serve() if _is_bound(flight) and (pause := cooling(record.failure, now)):
                # Its copy cannot be read.
                _settle(flight, [*early, *late], self._shelf.cooling(flight.key, pause, now))
            case plan:
                if isinstance(plan, Load) and plan.fallback is not None:
                    self.give_fallback(flight.key, plan.fallback, [*early, *late])
                self._again(flight, [*early, *late])

    def land(
        self,
        flights: Iterable[Flight[K, V]],
        landings: Mapping[str, Landing[V]],
        *,
        stored: Container[str] = (),
        superseded: Container[str] = (),
        since: float | None = None,
    ) -> None:
        """Each has ended as its landing says; all at one time."""
        if self._start is None:
            return
        now = self._shelf.now()
        for flight in flights:
            id_ = flight.id
            if flight.by is not None:
                flight.by.private = landings[id_].private
            kept = since if id_ in stored else None
            self._land(flight, landings[id_], now, kept, superseded=id_ in superseded)

    def _land(
        self,
        flight: Flight[K, V],
        landing: Landing[V],
        now: float,
        since: float | None,
        *,
        superseded: bool,
    ) -> None:
        """E6: an overtaken value goes, as STALE, to those who asked before the load began."""
        self.queue.end(flight)
        overtaken = superseded or flight.overtaken
        told, others = flight.early, flight.late
        if others and not overtaken:
            told, others = [*told, *others], []
        if landing.error is not None:
            self._tell_failure(flight, told, landing.error)
        elif (copy := landing.copy) is not None:
            shelf, key, value = self._shelf, flight.key, landing.value
            outlook = shelf.outlook(copy, now)
            verdict = STALE if overtaken else at_arrival(outlook.verdict)
            self._tell_value(key, told, copy, value, verdict)
            if not overtaken:
                if since is None:
                    shelf.keep_unstored(key, copy, value, outlook)
                else:
                    shelf.keep(key, copy, value, outlook, since)
                if key in self._watched:
                    self._tell_landed(key, shelf.made(copy, value, verdict, LOADED), copy)
        # Overtaken by an invalidation, one more load follows; who only lost the lease, by running
        # past it, may do so for ever, and gives up unless somebody waits.
        flight.wanted = landing.error is None and (
            flight.overtaken or (superseded and flight.rounds < MAX_ROUNDS)
        )
        if flight.wanted or others or flight.after:
            self._again(flight, [*others, *flight.after])

    def _tell_value(
        self, key: K, told: list[Waiter[K, V]], copy: Copy, value: V | None, verdict: Verdict
    ) -> None:
        """The first who asked had it loaded; the others share it."""
        origin = LOADED
        for waiter in told:
            waiter.settle(key, self._shelf.made(copy, value, verdict, origin))
            origin = Origin.ANOTHER

    def _tell_landed(self, key: K, answer: Answer[V], copy: Copy) -> None:
        if self._landed is not None:
            self._landed(key, answer, copy)

    def _tell_failure(
        self, flight: Flight[K, V], told: list[Waiter[K, V]], error: LoadFailed
    ) -> None:
        if (entry := self._shelf.front.entries.get(flight.key)) is not None:
            entry.until = NEVER
        self._settle_failed(flight, told, error)

    def _settle_failed(
        self, flight: Flight[K, V], told: list[Waiter[K, V]], error: LoadFailed
    ) -> None:
        _settle(flight, told, error)
        if self._failed is not None and flight.key in self._watched:
            self._failed([flight.key])

    def _is_answer(self, flight: Flight[K, V], copy: Copy, seen: str | None) -> bool:
        """Not if it was invalidated meanwhile, nor, to who wants a new one, if it is the old one.

        What memory took since then, from a put, is not what was overtaken (E17).
        """
        entry = self._shelf.front.entries.get(flight.key)
        is_put = entry is not None and entry.copy.generation == copy.generation
        is_old = flight.forced and copy.generation == seen
        return (is_put or not flight.overtaken) and not is_old

    def _again(self, flight: Flight[K, V], waiters: list[Waiter[K, V]]) -> None:
        self.queue.again(flight, waiters, wanted=flight.wanted)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """E4: what is asked for in one turn of the loop goes together."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._start is not None:
            self._start()


def _settle(flight: Flight[K, V], waiters: Iterable[Waiter[K, V]], outcome: Outcome[V]) -> None:
    for waiter in waiters:
        waiter.settle(flight.key, outcome)


def _is_bound(flight: Flight[K, V]) -> bool:
    """E7: by a cooldown; not if it was invalidated meanwhile, nor who wants a new copy anyway."""
    return not flight.overtaken and not flight.forced
