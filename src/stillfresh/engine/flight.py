"""A load in flight: its states, what moves it on, and which callers hear of its end (E3-E6).

Pure: what happened goes in, what is to be done comes out. All that a load goes through is in
`NEXT`, all that its end means is in `ENDINGS`; docs/engine.md draws both from here. `load.py` does
the work. Nothing else may live here: no clock, no store, no asyncio.
"""

from collections.abc import Collection, Hashable
from enum import IntEnum, StrEnum
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import Struct

from stillfresh.stores.contract import Copy, Failure, Record

K = TypeVar("K", bound=Hashable)
W = TypeVar("W", bound=Hashable)
"""A caller that waits."""

MAX_ROUNDS: Final = 2
"""Loads in a row that lost their lease and are followed by another with nobody waiting."""


class LoadState(StrEnum):
    """Where a load stands."""

    QUEUED = "queued"
    ASKING = "asking"
    """The store is asked for the lease."""
    HELD = "held"
    """Another process has the lease."""
    LOOKING = "looking"
    """The store is asked what that process has done."""
    LOADING = "loading"
    """The loader runs: with a lease, or without one because the store is away (S5)."""
    PUBLISHING = "publishing"
    """The copy is on its way to the store."""
    ENDED = "ended"


class LoadEvent(StrEnum):
    """What happens to a load."""

    BEGIN = "its turn comes"
    GRANT = "the lease is granted, or the store is away"
    DENY = "another process has the lease"
    LOOK = "the pause is over"
    WAIT = "that process is still loading"
    SEND = "the loader has answered"
    LEAVE = "nobody waits any more"
    END = "its end is known"


QUEUED, ASKING, HELD, LOOKING, LOADING, PUBLISHING, ENDED = LoadState

NEXT: Final[dict[LoadState, dict[LoadEvent, LoadState]]] = {
    QUEUED: {LoadEvent.BEGIN: ASKING, LoadEvent.LEAVE: ENDED},
    ASKING: {LoadEvent.GRANT: LOADING, LoadEvent.DENY: HELD, LoadEvent.END: ENDED},
    HELD: {LoadEvent.LOOK: LOOKING, LoadEvent.LEAVE: ENDED, LoadEvent.END: ENDED},
    LOOKING: {LoadEvent.WAIT: HELD, LoadEvent.END: ENDED},
    LOADING: {LoadEvent.SEND: PUBLISHING, LoadEvent.END: ENDED},
    PUBLISHING: {LoadEvent.END: ENDED},
    ENDED: {},
}
"""From state and event to state. An event that is not listed cannot happen. Closing the cache ends
every load, whatever its state."""


class Joined(IntEnum):
    """When a caller came, as the load sees it. An invalidation may lie between two of them (E6)."""

    BEFORE = 0
    """Before it began: nothing that this load learns was known to be wrong."""
    DURING = 1
    AFTER = 2
    """Its copy was on the way to the store: such a caller may know more than it."""


BEFORE, DURING, AFTER = Joined
JOINED: Final = dict.fromkeys(LoadState, DURING) | {QUEUED: BEFORE, PUBLISHING: AFTER}


class End(StrEnum):
    """How the load of one key ended."""

    LOADED = "loaded"
    SUPERSEDED = "loaded, and the lease was lost"
    FAILED = "failed"
    FOUND = "another process has published"
    FOUND_STALE = "another process has published, and it is stale by now"
    COOLING = "another process has failed"
    GIVEN_UP = "another process has given up"


class Again(IntEnum):
    """Whether another load of the key follows; it does whenever callers are left."""

    IF_WAITED = 0
    AS_WANTED = 1
    """If this one was begun with nobody waiting, so is the next."""
    LIMITED = 2
    """`MAX_ROUNDS` times: a loader that is slower than its lease would be called for ever."""
    ALWAYS = 3


class EndRule(NamedTuple):
    """What an end means."""

    told: int
    """The callers that hear of it are those that joined earlier than this (a `Joined`, or 3)."""
    again: Again = Again.IF_WAITED
    is_overtaken: bool = False
    """The value was known to be wrong before it came: STALE to those callers, and not kept."""


LOADED, SUPERSEDED, FAILED, FOUND, FOUND_STALE, COOLING, GIVEN_UP = End
IF_WAITED, AS_WANTED, LIMITED, ALWAYS = Again
ALL: Final = len(Joined)
_IN_TIME: Final = EndRule(AFTER)
_NOBODY: Final = EndRule(BEFORE, AS_WANTED)

ENDINGS: Final[dict[tuple[End, bool], EndRule]] = {
    (LOADED, False): _IN_TIME,
    (LOADED, True): EndRule(DURING, ALWAYS, is_overtaken=True),
    (SUPERSEDED, False): EndRule(DURING, LIMITED, is_overtaken=True),
    (SUPERSEDED, True): EndRule(DURING, ALWAYS, is_overtaken=True),
    (FAILED, False): _IN_TIME,
    (FAILED, True): EndRule(DURING),
    (FOUND, False): EndRule(DURING),
    (FOUND, True): _NOBODY,
    (FOUND_STALE, False): EndRule(DURING, ALWAYS),
    (FOUND_STALE, True): _NOBODY,
    (COOLING, False): EndRule(ALL),
    (COOLING, True): EndRule(ALL),
    (GIVEN_UP, False): _NOBODY,
    (GIVEN_UP, True): _NOBODY,
}
"""By how a load ended, and whether the key was invalidated since it began."""


class Ended(Struct, Generic[W]):
    """What is to be done at the end of a flight."""

    told: Collection[W]
    """The callers that hear of it."""
    left: Collection[W]
    """Those that wait for the next load."""
    again: bool
    is_overtaken: bool


class Batch:
    """The flights that go through the states together: one lease request, one loader call."""

    __slots__ = ("flights", "overtaken", "state", "waiting_for")

    def __init__(
        self, flights: "list[Flight[Any, Any]]", state: LoadState = LoadState.QUEUED
    ) -> None:
        self.flights = flights
        self.state = state
        self.overtaken: set[Hashable] = set()
        """E6: the keys that were invalidated since it began."""
        self.waiting_for: list[Flight[Any, Any]] = []
        """What its loader waits for in turn."""
        for flight in flights:
            flight.batch = self

    def step(self, event: LoadEvent) -> None:
        """To the next state. A look at the store is new to all callers that wait for it."""
        self.state = NEXT[self.state][event]
        if self.state is LOOKING:
            self.overtaken.clear()
            for flight in self.flights:
                flight.waiters = dict.fromkeys(flight.waiters, BEFORE)
                flight.last = BEFORE

    def split(self, flights: "list[Flight[Any, Any]]", event: LoadEvent) -> "Batch":
        """These go another way; what was said of their keys goes with them."""
        other = Batch(flights, NEXT[self.state][event])
        other.overtaken = set(self.overtaken)
        self.flights = [flight for flight in self.flights if flight.batch is self]
        return other


IN_QUEUE: Final = Batch([])
OVER: Final = Batch([], ENDED)


class Flight(Struct, Generic[K, W], eq=False):
    """One key on its way from "somebody needs it" to an answer, and its waiting callers."""

    key: K
    id: str
    waiters: dict[W, Joined] = {}
    last: Joined = BEFORE
    """When the last of them came."""
    seen: str | None = None
    """The generation of the copy that is to be replaced."""
    failure: Failure | None = None
    wanted: bool = False
    """It is loaded even if nobody waits: a refresh behind a stale answer."""
    forced: bool = False
    """A caller wants a new copy, however good the old one is, and whatever failed (E7)."""
    outgrown: bool = False
    """E18: the copy that was seen is too old for a caller."""
    urgent: bool = False
    """A loader waits for it, and may hold the only place."""
    rounds: int = 0
    successor: "Flight[K, W] | None" = None
    batch: Batch = IN_QUEUE
    by: W | None = None
    """The caller whose loader it runs; it may have left, or have been served an older copy."""

    def saw(self, record: Record) -> None:
        """What the next lease is asked for with."""
        self.seen = record.copy.generation if record.copy is not None else None
        self.failure = record.failure

    @property
    def failures(self) -> int | None:
        """E7: no lease for a caller that missed a failure; `refresh()` asks for it anyway."""
        if self.forced:
            return None
        return 0 if self.failure is None else self.failure.count

    @property
    def is_bound(self) -> bool:
        """E7: by a cooldown; not if it was invalidated since it began, nor for a new copy."""
        return self.key not in self.batch.overtaken and not self.forced

    def takes(self, copy: Copy, seen: str | None) -> bool:
        """Another's copy answers, unless it was invalidated since, or a newer one is wanted."""
        is_new_enough = copy.generation != seen or not (self.forced or self.outgrown)
        return self.key not in self.batch.overtaken and is_new_enough

    def join(self, waiter: W) -> None:
        self.last = self.waiters[waiter] = JOINED[self.batch.state]

    def overtake(self) -> None:
        """E6: the key is invalidated. A load that has not begun will not be told of the past."""
        if self.batch.state is not QUEUED:
            self.batch.overtaken.add(self.key)

    def end(self, how: End) -> Ended[W]:
        """Over: which callers are told, which wait on, and whether another load follows."""
        told_to, again, is_overtaken = ENDINGS[how, self.key in self.batch.overtaken]
        waiters, self.batch = self.waiters, OVER
        if again is IF_WAITED:
            self.wanted = False
        elif again is not AS_WANTED:
            self.wanted = again is ALWAYS or self.rounds < MAX_ROUNDS
        if self.last < told_to:
            return Ended(waiters, (), self.wanted, is_overtaken)
        told = [waiter for waiter, joined in waiters.items() if joined < told_to]
        left = [waiter for waiter, joined in waiters.items() if joined >= told_to]
        return Ended(told, left, self.wanted or bool(left), is_overtaken)
