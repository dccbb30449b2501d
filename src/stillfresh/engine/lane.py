"""Which of the watched ids are refreshed next.

Pure: events and the time go in, ids to look up or to fetch come out. Times are in any one unit. All
states of an id are in `NEXT`; docs/coordinator.md draws it from there. Nothing else may live here:
no clock, no store, no asyncio.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import filterfalse, islice
from typing import Final, Generic, NamedTuple, TypeVar

from stillfresh.backoff import pause_after
from stillfresh.freshness import is_over

K = TypeVar("K", bound=Hashable)

MAX_REMEMBERED: Final = 10_000
"""Cooldowns kept for ids that are no longer watched; beyond that the oldest are dropped."""


class LaneState(StrEnum):
    """The state of an id."""

    OUT = "out"
    DUE = "due"
    WAITING = "waiting"
    COOLING = "cooling"
    QUEUED = "queued"
    REFERRED = "referred"
    """Queued once although nobody subscribed to it: the original of a repost."""
    FLYING = "flying"
    LEAVING = "leaving"
    """In flight, and nobody looks at it any more."""


class Event(StrEnum):
    """What happens to an id."""

    SUBSCRIBE = "subscribed"
    UNSUBSCRIBE = "unsubscribed"
    TIME = "its time comes"
    FRESH = "looked up: fresh"
    STALE = "looked up: stale"
    COOL = "looked up: stale, cooling"
    TAKE = "taken into a batch"
    LAND = "the batch ends"
    REFER = "a repost names it"


OUT, DUE, WAITING, COOLING, QUEUED, REFERRED, FLYING, LEAVING = LaneState

_LOOKED_UP: Final = {Event.FRESH: WAITING, Event.STALE: QUEUED, Event.COOL: COOLING}

NEXT: Final[dict[LaneState, dict[Event, LaneState]]] = {
    OUT: {Event.SUBSCRIBE: DUE, Event.REFER: REFERRED},
    DUE: {Event.UNSUBSCRIBE: OUT, **_LOOKED_UP},
    WAITING: {Event.UNSUBSCRIBE: OUT, Event.TIME: DUE},
    COOLING: {Event.UNSUBSCRIBE: OUT, Event.TIME: DUE, Event.FRESH: WAITING},
    QUEUED: {Event.UNSUBSCRIBE: OUT, Event.FRESH: WAITING, Event.TAKE: FLYING},
    REFERRED: {Event.SUBSCRIBE: QUEUED, Event.UNSUBSCRIBE: OUT, Event.FRESH: OUT}
    | {Event.TAKE: LEAVING},
    FLYING: {Event.UNSUBSCRIBE: LEAVING, Event.LAND: DUE},
    LEAVING: {Event.SUBSCRIBE: FLYING, Event.LAND: OUT},
}
"""From state and event to state; an event that is not listed changes nothing."""


class Cooldown(NamedTuple):
    """How often in a row an id has failed, and until when it is not tried."""

    failures: int
    until: float
    at_most: int | None = None
    """Its whole batch failed, perhaps because of it: the most ids to try together next time."""
    trial: int = 0


class Lane(Generic[K]):
    """The subscriptions of one kind, and the next step for each."""

    def __init__(self, *, cooldown: float, longest_cooldown: float) -> None:
        self.cooldown = cooldown
        self._longest = longest_cooldown
        self._counts: dict[K, int] = {}
        self._states: dict[K, LaneState] = {}
        # Ordered: the first of a plain dict is found by walking over all that left before it.
        self._due: OrderedDict[K, None] = OrderedDict()
        self._queue: OrderedDict[K, None] = OrderedDict()
        self._flying: dict[K, None] = {}
        self._planned: dict[K, float] = {}
        self._plan: dict[float, dict[K, None]] = {}
        """The same, by time: ids that were refreshed together share one entry of the heap."""
        self._times: list[float] = []
        self._again: list[K] = []
        self._now = float("-inf")
        self._cooldowns: dict[K, Cooldown] = {}
        self._trial = 0
        """Counts suspects that succeeded; after each, the others' `at_most` no longer counts."""
        members: dict[LaneState, dict[K, None]] = {DUE: self._due}
        members |= dict.fromkeys((QUEUED, REFERRED), self._queue)
        members |= dict.fromkeys((FLYING, LEAVING), self._flying)
        self._ways = {
            old: {event: (new, members.get(old), members.get(new)) for event, new in ways.items()}
            for old, ways in NEXT.items()
        }
        """`NEXT`, with the collections that an id leaves and enters."""

    def subscribe(self, key: K, *, counted: bool) -> bool:
        """`counted`: one more subscription; else at least one. True if it must be looked up."""
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1 if counted else max(count, 1)
        return self._move(key, Event.SUBSCRIBE) is DUE and count == 0

    def unsubscribe(self, key: K) -> bool:
        """Works for any id, any number of times. True if nobody watches it any more."""
        count = self._counts.get(key, 0)
        if count > 1:
            self._counts[key] = count - 1
            return False
        self._counts.pop(key, None)
        self._move(key, Event.UNSUBSCRIBE)
        return True

    def reset(self) -> None:
        """Drop subscriptions and queues. Loads in flight end normally, and cooldowns stay."""
        for known in (self._counts, self._due, self._queue, self._planned, self._plan):
            known.clear()
        self._times.clear()
        self._again.clear()
        self._states = dict.fromkeys(self._flying, LEAVING)

    def recheck(self, keys: Iterable[K] | None = None) -> None:
        """Look these ids up (or all that wait) as if their time had come."""
        if keys is None:
            self._again = list(reversed(self._planned))
            return
        for key in keys:
            self._move(key, Event.TIME)

    def due(self, now: float, limit: int) -> list[K]:
        """The next ids to look up: those whose time has come.

        If the clock was set back, all are looked up.
        """
        if now < self._now:
            self._clear_suspects(now)
            self.recheck()
        self._now = now
        keys = list(islice(self._due, limit))
        while len(keys) < limit and (key := self._next(now)) is not None:
            if self._move(key, Event.TIME) is DUE:
                keys.append(key)
        return keys

    def next_time(self) -> float | None:
        """When the next id is due; None if nothing waits."""
        if self._due or self._again:
            return float("-inf")
        self._drop_empty_times()
        return self._times[0] if self._times else None

    def looked_up(self, key: K, stale_at: float, now: float) -> None:
        """Fresh until `stale_at`, or stale already: then queued, unless it cools down."""
        if stale_at > now:
            self._move(key, Event.FRESH, stale_at)
        elif (until := self.cooling_until(key, now)) is not None:
            self._move(key, Event.COOL, until)
        else:
            self._move(key, Event.STALE)

    def refer(self, key: K, now: float) -> None:
        """Fetch it once, subscribed or not, unless it cools down."""
        if self.cooling_until(key, now) is None:
            self._move(key, Event.REFER)

    def take(self, limit: int, beside: Sequence[K] = ()) -> list[K]:
        """The longest queued ids first; never one in flight.

        Ids whose whole batch failed are tried again in halves, down to one by one, and never
        together with other ids: one id that always fails starves no other. `beside`: ids that were
        taken before, for the same batch.
        """
        first = next(iter(beside or self._queue), None)
        if first is not None and self._is_suspect(first):
            taken = [] if beside else self._suspects(limit)
        else:
            taken = list(islice(filterfalse(self._is_suspect, self._queue), limit))
        for key in taken:
            self._move(key, Event.TAKE)
        return taken

    def refreshed(self, key: K, stale_at: float, now: float) -> bool:
        """The first success ends the cooldown. False if it is in flight, so not planned."""
        cooldown = self._cooldowns.pop(key, None)
        if cooldown is not None and cooldown.at_most is not None:
            self._trial += 1
        if is_here := key not in self._flying:
            self.looked_up(key, stale_at, now)
        return is_here

    def failed(
        self, key: K, now: float, pause: float = 0.0, *, together: int | None = None
    ) -> None:
        """Each id has its own cooldown, which doubles; `pause`: the least that was asked for.

        `together`: the size of its batch, if none of that batch succeeded.
        """
        before = self._cooldowns.pop(key, None)
        failures = before.failures + 1 if before is not None else 1
        doubled = pause_after(failures, first=self.cooldown, longest=self._most)
        until = now + max(doubled, min(pause, self._most))
        at_most = before.at_most if before is not None else None
        if together is not None:
            at_most = max(1, together // 2)
        self._cooldowns[key] = Cooldown(failures, until, at_most, self._trial)
        while len(self._cooldowns) > MAX_REMEMBERED + len(self._counts):
            del self._cooldowns[next(iter(self._cooldowns))]

    def land(self, keys: Iterable[K]) -> None:
        """The batch has ended; ids that are still subscribed are due until they are looked up."""
        for key in keys:
            self._move(key, Event.LAND)

    def state(self, key: K) -> LaneState:
        return self._states.get(key, OUT)

    def __contains__(self, key: K) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def subscribed(self) -> dict[K, int]:
        """Each id, and how often."""
        return dict(self._counts)

    @property
    def queued(self) -> list[K]:
        """The longest queued first."""
        return list(self._queue)

    @property
    def in_flight(self) -> list[K]:
        return list(self._flying)

    def cooling(self, now: float) -> dict[K, float]:
        """Until when each id is left alone."""
        ends = {key: self.cooling_until(key, now) for key in self._cooldowns}
        return {key: until for key, until in ends.items() if until is not None}

    def cooling_until(self, key: K, now: float) -> float | None:
        """A cooldown that ends too late is from before the clock was set back: it is ignored."""
        cooldown = self._cooldowns.get(key)
        if cooldown is None or is_over(cooldown.until, now):
            return None
        return cooldown.until if cooldown.until - now <= self._most else None

    def _clear_suspects(self, now: float) -> None:
        """After a clock was set back: ids whose cooldown ends too late are no suspects any more."""
        for key, cooldown in self._cooldowns.items():
            if cooldown.until - now > self._most:
                self._cooldowns[key] = cooldown._replace(at_most=None)

    def _is_suspect(self, key: K) -> bool:
        cooldown = self._cooldowns.get(key)
        return cooldown is not None and cooldown.at_most is not None

    def _suspects(self, limit: int) -> list[K]:
        """The longest queued suspects, in batches no larger than each may be in."""
        taken: list[K] = []
        for key in filter(self._is_suspect, self._queue):
            cooldown = self._cooldowns[key]
            if cooldown.trial == self._trial:
                limit = min(limit, cooldown.at_most or limit)
            if len(taken) >= limit:
                break
            taken.append(key)
        return taken

    @property
    def _most(self) -> float:
        return max(self._longest, self.cooldown)

    def _move(self, key: K, event: Event, at: float | None = None) -> LaneState:
        """Move an id to another collection; within the same one it keeps its place."""
        new = old = self._states.get(key, OUT)
        if (way := self._ways[old].get(event)) is not None:
            new, leaves, enters = way
            if leaves is not enters:
                if leaves is not None:
                    del leaves[key]
                if enters is not None:
                    enters[key] = None
            if new is OUT:
                del self._states[key]
            else:
                self._states[key] = new
            if old is WAITING or old is COOLING:
                self._unplan(key)
        if at is not None and (new is WAITING or new is COOLING):
            self._plan_at(key, at)
        return new

    def _plan_at(self, key: K, at: float) -> None:
        self._unplan(key)
        self._planned[key] = at
        if (together := self._plan.get(at)) is None:
            together = self._plan[at] = {}
            heappush(self._times, at)
            self._compact()
        together[key] = None

    def _unplan(self, key: K) -> None:
        at = self._planned.pop(key, None)
        if at is None or (together := self._plan.get(at)) is None:
            return
        together.pop(key, None)
        if not together:
            del self._plan[at]
            self._compact()

    def _compact(self) -> None:
        """Remove unused times from the heap before they are the majority."""
        if len(self._times) > 2 * len(self._plan) + 64:
            self._times = list(self._plan)
            heapify(self._times)

    def _next(self, now: float) -> K | None:
        """First ids to look up again, then ids whose time has come, in that order."""
        while True:
            while self._again:
                if (key := self._again.pop()) in self._planned:
                    return key
            self._drop_empty_times()
            if not self._times or self._times[0] > now:
                return None
            self._again.extend(reversed(self._plan.pop(heappop(self._times))))

    def _drop_empty_times(self) -> None:
        while self._times and self._times[0] not in self._plan:
            heappop(self._times)
