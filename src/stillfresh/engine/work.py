"""What is under way for one key, and the callers that wait for it.

A `Work` exists while the load of its key is queued or runs; `Loads` has all of them. A `Waiter` is
one caller, which may wait for many keys. No store and no event loop may live here.
"""

from collections.abc import Callable, Hashable
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct, field

from stillfresh.engine.load_states import (
    ALL,
    ALWAYS,
    AS_WANTED,
    EARLY,
    ENDINGS,
    IF_WAITED,
    IN_TIME,
    MAX_ROUNDS,
    QUEUED,
    End,
    Ended,
    LoadState,
)
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Private, RefreshEnd
from stillfresh.engine.rules import FOR_EVER
from stillfresh.errors import BadValue, LoadFailed, RaisedByLoader
from stillfresh.stores.contract import Copy, Failure, Record

if TYPE_CHECKING:
    from stillfresh.engine.at_least import AtLeast
    from stillfresh.engine.load import Load
    from stillfresh.engine.loads import Loads

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NOT_SENT: Final = 1 << 62  # greater than any number of the fence
LATE: Final = NOT_SENT + 1  # a caller that only the next load can answer
CURRENT: ContextVar["Load[Any, Any] | None"] = ContextVar("stillfresh_load", default=None)
"""The load in whose loader this code runs."""
CALLER: ContextVar[Any] = ContextVar("stillfresh_caller", default=None)
"""The `ThreadCall` of the thread that waits for this code."""


class Work(Struct, Generic[K, V], eq=False):
    """The load of one key, queued or running, and its waiting callers."""

    key: K
    id: str
    waiters: "dict[Waiter[K, V], int]" = {}
    """The callers, and when each of them asked, as a number of the fence."""
    last_asked: int = 0  # when the last of them asked
    began: int = 0
    """The fence's number when it began, or last asked the store what another process has done:
    changes up to it are in the result, and callers up to it get the result."""
    seen: str | None = None  # the generation of the copy to replace
    failure: Failure | None = None
    wanted: bool = False
    """True for a background refresh: it runs even if no caller waits."""
    forced: bool = False
    """A caller of `refresh` wants a new copy, even during a cooldown."""
    outgrown: bool = False  # the copy is too old for a caller's `max_age`
    at_least: bool = False  # a caller accepts no invalidated copy: it has a token, or is a loader
    has_token: bool = False  # a caller has a token, or is the loader of a load for one that has
    urgent: bool = False  # a loader waits for it, and may hold the only place
    is_blind: bool = False  # the store is unavailable, so it loads without a lease
    leased: bool = False  # load only with a lease, since memory has a value that is not stored
    rounds: int = 0
    load: "Load[K, V] | None" = None  # None: queued
    by: "Waiter[K, V] | None" = None
    """The caller that began it, with its own loader if it has one. It may have left."""

    @property
    def state(self) -> LoadState:
        return QUEUED if self.load is None else self.load.state

    def saw(self, record: Record) -> None:
        """Note the copy and the failure that the next lease request names."""
        self.seen = record.copy.generation if record.copy is not None else None
        self.failure = record.failure

    @property
    def failures_seen(self) -> int | None:
        """How many failures in a row the caller knows of; None if that does not matter.

        A caller that missed a failure gets no lease; `refresh()` does.
        """
        if self.forced:
            return None
        return 0 if self.failure is None else self.failure.count

    def is_new_enough(self, copy: Copy, seen: str | None) -> bool:
        """True if another process's copy is good enough for the callers."""
        return copy.generation != seen or not (self.forced or self.outgrown)

    def join(self, waiter: "Waiter[K, V]", asked_at: int, *, knows: bool = True) -> None:
        """`knows`: the caller has asked the store.

        No invalidation in another process voids a load without a lease. What such a caller has
        read may be newer, so it waits for the next load. So does a caller with a token: the load
        may have begun before the change. The next load finds what this one stores.
        """
        if waiter.at_least is not None:
            self.at_least = True
            self.has_token |= waiter.has_token
            if self.load is not None:
                asked_at = LATE
        if self.is_blind and knows:
            asked_at = LATE
        self.waiters[waiter] = asked_at
        self.last_asked = max(self.last_asked, asked_at)

    def end(self, how: End, *, is_changed: bool) -> "Ended[Waiter[K, V]]":
        """End: which callers get the result, which wait on, and whether another load follows."""
        receivers, again, is_overtaken = ENDINGS[how, is_changed]
        if receivers is IN_TIME:
            limit = NOT_SENT if self.load is None else self.load.sent
        elif receivers is EARLY:
            limit = self.began
        else:
            limit = LATE if receivers is ALL else -1
        waiters = self.waiters
        if again is IF_WAITED:
            self.wanted = False
        elif again is not AS_WANTED:
            self.wanted = again is ALWAYS or self.rounds < MAX_ROUNDS
        if self.last_asked <= limit:
            return Ended(waiters, (), self.wanted, is_overtaken)
        in_time = [waiter for waiter, asked_at in waiters.items() if asked_at <= limit]
        left = [waiter for waiter, asked_at in waiters.items() if asked_at > limit]
        return Ended(in_time, left, self.wanted or bool(left), is_overtaken)


class WaiterNotes(Struct, Generic[K, V]):
    """What a caller learns of its keys on the way; most callers learn nothing."""

    unread: set[K] = set()
    """Keys that the store could not be asked for."""
    unstored: set[K] = set()
    """Keys whose value in memory the store does not have."""
    not_stored: dict[K, RefreshEnd] = {}
    """Keys that were loaded and whose copy the store does not have, and why."""
    fallbacks: dict[K, Callable[[LoadFailed], Answer[V]]] = {}
    """What is served if the load fails."""


class Waiter(Struct, Generic[K, V], eq=False):
    """One caller that waits for one or many keys."""

    load: OwnLoad | None = None  # its own loader, for loads that it begins
    max_age: float = FOR_EVER  # it accepts no older copy
    at_least: "AtLeast | None" = None  # it has seen these changes, and accepts nothing older
    each: bool = False
    patience: float | None = None  # seconds that it waits for loads; None: to their end
    wake: Callable[[], object] = bool  # when the last key has ended; if `each`, each one
    private: Private[Any] | None = None  # its own loader's value, for it alone
    missing: int = 0
    outcomes: dict[K, Outcome[V]] = {}
    own_notes: WaiterNotes[K, V] | None = None
    context: Context = field(default_factory=copy_context)  # for hooks
    caller: Any = field(default_factory=CALLER.get)
    outer: "Load[Any, Any] | None" = field(default_factory=CURRENT.get)
    """The load whose loader calls, or None."""

    @property
    def has_token(self) -> bool:
        """True if it has seen a change itself, or is the loader of a load for a caller that has."""
        return self.at_least is not None and not self.at_least.is_of_loader

    @property
    def notes(self) -> WaiterNotes[K, V]:
        if self.own_notes is None:
            self.own_notes = WaiterNotes()
        return self.own_notes

    def wait_for(self, loads: "Loads[K, V]", key: K) -> None:
        """The load whose loader calls can end only after the load of this key."""
        if self.outer is not None:
            self.outer.waiting_for.setdefault(self, []).append((loads, key))

    def end(self) -> None:
        """The call has ended: a loader that made it waits for nothing any more."""
        if self.outer is not None:
            self.outer.waiting_for.pop(self, None)

    def settle(self, key: K, outcome: Outcome[V]) -> None:
        if self.own_notes is not None and isinstance(outcome, LoadFailed):
            fallback = self.own_notes.fallbacks.get(key)
            # The old copy does not hide a value of a wrong type, except in its cooldown, nor an
            # exception that the caller wants to see.
            is_new_mistake = isinstance(outcome, BadValue) and outcome.retry_at is None
            is_raised = isinstance(outcome, RaisedByLoader)
            if fallback is not None and not is_new_mistake and not is_raised:
                outcome = fallback(outcome)
        self.outcomes[key] = outcome
        self.missing -= 1
        if self.missing == 0 or self.each:
            self.wake()
