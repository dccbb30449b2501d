"""The loads of one resource and the callers that wait for them, by key (E3, E4, E6).

Pure bookkeeping by the tables of `flight.py`: one load for a key, batches, which callers get a
result, no waiting in a circle. `load.py` does the work. No clock, store or asyncio may live here.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar, copy_context
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.engine.counts import Counts
from stillfresh.engine.flight import (
    AFTER,
    BEFORE,
    ENDED,
    ENDINGS,
    JOINED,
    LOADING,
    LOOKING,
    MAX_ROUNDS,
    NEXT,
    PUBLISHING,
    QUEUED,
    Again,
    End,
    Ended,
    Joined,
    LoadEvent,
    LoadState,
)
from stillfresh.engine.keys import Spec
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Private, RefreshEnd, Span
from stillfresh.engine.rules import FOR_EVER, NOTHING
from stillfresh.errors import BadValue, LoadFailed
from stillfresh.stores.contract import Copy, Failure, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
W = TypeVar("W", bound=Hashable)

MAX_BEHIND: Final = 10_000  # background refreshes that may queue


class Batch:
    """Flights that go through the states together: one lease request, one loader call."""

    __slots__ = ("flights", "overtaken", "span", "state", "tags", "takes_place", "waiting_for")

    def __init__(self, flights: "list[Flight[Any, Any]]", state: LoadState = QUEUED) -> None:
        self.flights = flights
        self.state = state
        self.span: Span | None = None  # G15: for hooks
        self.takes_place = False  # True if it takes one of the `concurrency` places
        self.overtaken: set[Hashable] = set()  # E6: keys that were invalidated since it began
        self.tags: set[str] = set()  # I26: invalidated; whose they are is known at the end
        self.waiting_for: dict[object, list[Flight[Any, Any]]] = {}  # its loader's calls, for loads
        for flight in flights:
            flight.batch = self

    def step(self, event: LoadEvent) -> None:
        """Go to the next state. A look at the store counts as new for all waiting callers."""
        self.state = NEXT[self.state][event]
        if self.state is LOOKING:
            self.overtaken.clear()
            for flight in self.flights:
                flight.waiters = dict.fromkeys(flight.waiters, BEFORE)
                flight.last = BEFORE

    def split(self, flights: "list[Flight[Any, Any]]", event: LoadEvent) -> "Batch":
        """Move these keys, with their marks, to a batch of their own."""
        other = Batch(flights, NEXT[self.state][event])
        other.overtaken = set(self.overtaken)
        self.flights = [flight for flight in self.flights if flight.batch is self]
        return other


IN_QUEUE: Final = Batch([])
OVER: Final = Batch([], ENDED)
CURRENT: ContextVar[Batch | None] = ContextVar("stillfresh_batch", default=None)
"""The batch in whose loader this code runs."""
CALLER: ContextVar[Any] = ContextVar("stillfresh_caller", default=None)  # E20: a `ThreadCall`


class Flight(Struct, Generic[K, W], eq=False):
    """The load of one key, and its waiting callers."""

    key: K
    id: str
    waiters: dict[W, Joined] = {}
    """The callers, and when each and the last of them came."""
    last: Joined = BEFORE
    seen: str | None = None  # the generation of the copy to replace
    failure: Failure | None = None
    wanted: bool = False
    """True for a background refresh: it runs even if no caller waits."""
    forced: bool = False
    """A caller of `refresh` wants a new copy, even during a cooldown (E7)."""
    outgrown: bool = False  # E18: the copy is too old for a caller's `max_age`
    urgent: bool = False  # a loader waits for it, and may hold the only place
    is_blind: bool = False  # S5: it loads without a lease
    leased: bool = False  # E29: load only with a lease, since memory has a value that is not stored
    rounds: int = 0
    successor: "Flight[K, W] | None" = None
    batch: Batch = IN_QUEUE
    by: W | None = None
    """The caller that began it, with its own loader if it has one. It may have left."""

    def saw(self, record: Record) -> None:
        """Note the copy and the failure that the next lease request names."""
        self.seen = record.copy.generation if record.copy is not None else None
        self.failure = record.failure

    @property
    def failures(self) -> int | None:
        """E7: a caller that missed a failure gets no lease; `refresh()` does."""
        if self.forced:
            return None
        return 0 if self.failure is None else self.failure.count

    @property
    def is_bound(self) -> bool:
        """E7: True if a cooldown applies; not after an invalidation, and not for `refresh()`."""
        return self.key not in self.batch.overtaken and not self.forced

    def takes(self, copy: Copy, seen: str | None) -> bool:
        """True if another process's copy is good enough: not invalidated since, and new enough."""
        is_new_enough = copy.generation != seen or not (self.forced or self.outgrown)
        return self.key not in self.batch.overtaken and is_new_enough

    def join(self, waiter: W, *, knows: bool = True) -> None:
        """E6: nothing voids a load without a lease; what a caller `knows` may be newer."""
        joined = AFTER if self.is_blind and knows else JOINED[self.batch.state]
        self.waiters[waiter], self.last = joined, max(self.last, joined)

    def go_blind(self) -> None:
        """S5: the store gave no answer to the request for a lease, so load without one.

        The loader is called only now. So all callers that wait have asked before the load began
        (E29), and what was invalidated until now cannot be missed by it.
        """
        self.is_blind = True
        self.waiters = dict.fromkeys(self.waiters, BEFORE)
        self.last = BEFORE
        self.batch.overtaken.discard(self.key)

    def overtake(self) -> None:
        """E6: the key was invalidated. A load that has not begun need not know."""
        if self.batch.state is not QUEUED:
            self.batch.overtaken.add(self.key)

    def end(self, how: End) -> Ended[W]:
        """End: which callers get the result, which wait on, and whether another load follows."""
        told_to, again, is_overtaken = ENDINGS[how, self.key in self.batch.overtaken]
        waiters, self.batch = self.waiters, OVER
        if again is Again.IF_WAITED:
            self.wanted = False
        elif again is not Again.AS_WANTED:
            self.wanted = again is Again.ALWAYS or self.rounds < MAX_ROUNDS
        if self.last < told_to:
            return Ended(waiters, (), self.wanted, is_overtaken)
        told = [waiter for waiter, joined in waiters.items() if joined < told_to]
        left = [waiter for waiter, joined in waiters.items() if joined >= told_to]
        return Ended(told, left, self.wanted or bool(left), is_overtaken)

    def waits_for(self, batch: Batch) -> bool:
        """E3: True if this flight can end only after `batch` does."""
        seen: set[int] = set()
        stack: list[Flight[Any, Any]] = [self]
        while stack:
            if (one := stack.pop()).batch is batch:
                return True
            if id(one.batch) not in seen:
                seen.add(id(one.batch))
                for waiter, flights in one.batch.waiting_for.items():
                    stack += [flight.for_waiter(waiter) for flight in flights]
        return False

    def for_waiter(self, waiter: Any) -> "Flight[K, W]":  # noqa: ANN401 (or a thread's job)
        """The load that it waits for now, or whose result it was told."""
        flight = self
        while flight.successor is not None and waiter in flight.successor.waiters:
            flight = flight.successor
        return flight


class Waiter(Generic[K, V]):
    """One caller that waits for one or many keys."""

    def __init__(
        self, load: OwnLoad | None = None, max_age: float = FOR_EVER, *, each: bool = False
    ) -> None:
        self.load = load  # its own loader, for flights that it begins
        self.context = copy_context()  # G15: for hooks
        self.caller, self.max_age = CALLER.get(), max_age  # E18: it accepts no older copy
        self.each, self.unread = each, set[K]()  # keys that the store could not be asked for
        self.unstored: set[K] = set()  # keys whose value in memory the store does not have
        self.wake: Callable[[], object] = bool  # when the last key has ended; if `each`, each one
        self.private: Private[Any] | None = None  # its own loader's value, for it alone
        self.missing, self.batch = 0, CURRENT.get()  # of the loader that calls, or None
        self.outcomes: dict[K, Outcome[V]] = {}
        self.not_stored: dict[K, RefreshEnd] = {}
        """Keys that were loaded and whose copy the store does not have, and why."""
        self.fallbacks: dict[K, Callable[[LoadFailed], Answer[V]]] = {}  # E2: if the load fails

    def end(self) -> None:
        """The call has ended: a loader that made it waits for nothing any more."""
        if self.batch is not None:
            self.batch.waiting_for.pop(self, None)

    def settle(self, key: K, outcome: Outcome[V]) -> None:
        if self.fallbacks and isinstance(outcome, LoadFailed) and key in self.fallbacks:
            # E19: the old copy does not hide a value of a wrong type, except in its cooldown.
            is_new_mistake = isinstance(outcome, BadValue) and outcome.retry_at is None
            outcome = outcome if is_new_mistake else self.fallbacks[key](outcome)
        self.outcomes[key] = outcome
        self.missing -= 1
        if self.missing == 0 or self.each:
            self.wake()


class Queue(Generic[K, V]):
    """The flights of one resource, including those that have not begun."""

    def __init__(self, spec: Spec[K, V], counts: Counts) -> None:
        self.flights: dict[K, Flight[K, Waiter[K, V]]] = {}
        self._spec = spec
        self._counts = counts
        self._pending: deque[Flight[K, Waiter[K, V]]] = deque()
        self._urgent: deque[Flight[K, Waiter[K, V]]] = deque()
        self.running, self._is_closed = 0, False

    def join(
        self, key: K, id_: str, record: Record, waiter: Waiter[K, V], *, forced: bool = False
    ) -> None:
        """Wait for the load of this key: the running one, or a new one."""
        if (running := self.flights.get(key)) is not None:
            self._counts.coalesced += 1
            if waiter.batch is not None and running.waits_for(waiter.batch):
                waiter.outcomes[key] = LoadFailed(
                    f"{self._spec.kind} {key!r}: its loader waits, in a circle, for itself"
                )
                return
        flight = self._add(key, id_, record, waiter)
        if waiter.batch is not None:  # E3: that load can end only after this one
            waiter.batch.waiting_for.setdefault(waiter, []).append(flight)
        flight.forced |= forced
        flight.outgrown |= waiter.max_age < FOR_EVER
        flight.join(waiter, knows=key not in waiter.unread)
        waiter.missing += 1

    def join_missing(self, texts: Mapping[K, str], waiter: Waiter[K, V]) -> None:
        """The same for many keys that the store does not have."""
        if waiter.load or CURRENT.get() or not self.flights.keys().isdisjoint(texts):
            for key, id_ in texts.items():
                self.join(key, id_, NOTHING, waiter)
            return
        new = {key: Flight(key, id_, {waiter: BEFORE}) for key, id_ in texts.items()}
        self.flights.update(new)
        self._pending.extend(new.values())
        waiter.missing += len(new)

    def want(
        self, key: K, id_: str, record: Record, by: Waiter[K, V], *, leased: bool = False
    ) -> None:
        """Refresh in the background, if there is room. `leased`: only if a lease is granted."""
        if len(self._pending) < MAX_BEHIND:
            is_new = key not in self.flights
            flight = self._add(key, id_, record, by)
            flight.wanted = True
            flight.leased = leased and (is_new or flight.leased)

    def _add(self, key: K, id_: str, record: Record, by: Waiter[K, V]) -> Flight[K, Waiter[K, V]]:
        """The flight of this key: an existing one, or a new one at the end of the queue."""
        if (flight := self.flights.get(key)) is None:
            flight = self.flights[key] = Flight(key, id_, by=by)
            self._pending.append(flight)
        if record is not NOTHING and flight.batch.state is QUEUED:
            flight.saw(record)
        if CURRENT.get() is not None:
            self._hurry(flight)
        return flight

    def _hurry(self, flight: Flight[K, Waiter[K, V]]) -> None:
        """Move a load forward that a loader waits for: that loader may hold the only place (E4)."""
        if not flight.urgent:
            flight.urgent = True
            if flight.batch.state is QUEUED:
                self._urgent.append(flight)

    def leave(self, waiter: Waiter[K, V], keys: Iterable[K]) -> None:
        """The caller leaves. E3: if it was the last, a load that has not begun is dropped."""
        for key in keys:
            if (flight := self.flights.get(key)) is not None:
                flight.waiters.pop(waiter, None)

    def not_begun(self) -> int:
        return sum(flight.batch.state is QUEUED for flight in self.flights.values())

    def is_loading(self, key: K) -> bool:
        """True if this process loads it; False if another one holds the lease."""
        return key in self.flights and self.flights[key].batch.state in {LOADING, PUBLISHING}

    def take(self) -> Batch | None:
        """The next batch. A load inside a load takes no place (E4)."""
        if (batch := self._begin(self._urgent)) is not None:
            return batch
        if self.running < self._spec.concurrency and (batch := self._begin(self._pending)):
            batch.takes_place = True
            self.running += 1
        return batch

    def _begin(self, queue: deque[Flight[K, Waiter[K, V]]]) -> Batch | None:
        taken: list[Flight[K, Waiter[K, V]]] = []
        while queue and len(taken) < self._spec.max_batch and not self._is_closed:
            flight = queue.popleft()
            if flight.batch.state is not QUEUED:
                continue  # it was urgent, and in both queues
            if flight.wanted or flight.waiters:
                taken.append(flight)
            else:  # E3: its last caller left
                self._drop(flight)
        return Batch(taken, NEXT[QUEUED][LoadEvent.BEGIN]) if taken else None

    def end(self, flight: Flight[K, Waiter[K, V]], how: End) -> Ended[Waiter[K, V]]:
        """End a flight. A following load is queued first, so that callers may join it (E5, E6)."""
        ended = flight.end(how)
        self.flights.pop(flight.key, None)
        if ended.again:
            first = next(iter(ended.left), flight.by)
            trailing = self.flights[flight.key] = flight.successor = Flight(
                flight.key,
                flight.id,
                dict.fromkeys(ended.left, BEFORE),
                seen=flight.seen,
                failure=flight.failure,
                wanted=flight.wanted,
                forced=flight.forced,
                outgrown=flight.outgrown,
                rounds=flight.rounds + 1,
                by=first if first is not None and first.load is not None else flight.by,
            )
            self._pending.append(trailing)
            if flight.urgent:
                self._hurry(trailing)
        return ended

    def drop_unwaited(self, batch: Batch) -> None:
        """Drop keys that another process loads and for which no caller waits here."""
        for flight in batch.flights:
            if not flight.waiters:
                self._drop(flight)
        batch.flights = [flight for flight in batch.flights if flight.waiters]

    def drop_unleased(self, flight: Flight[K, Waiter[K, V]]) -> bool:
        """E29: drop a refresh that got no lease, if it is of no use without one."""
        if not flight.leased or flight.waiters:
            return False
        self._drop(flight)
        return True

    def _drop(self, flight: Flight[K, Waiter[K, V]]) -> None:
        if self.flights.get(flight.key) is flight:
            del self.flights[flight.key]

    def close(self) -> list[Flight[K, Waiter[K, V]]]:
        """Start nothing more; return the flights that there were."""
        self._is_closed = True
        ended = list(self.flights.values())
        for flight in ended:
            flight.batch = OVER
        self.flights.clear()
        return ended
