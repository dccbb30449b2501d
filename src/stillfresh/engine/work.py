"""What is under way for one key, and the callers that wait for it.

A `Work` exists while the load of its key is queued or runs; `Loads` has all of them. A `Waiter` is
one caller, which may wait for many keys. No store and no event loop may live here.
"""

from collections.abc import Callable, Hashable
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.engine.load_states import (
    ALL,
    EARLY,
    ENDINGS,
    IN_TIME,
    MAX_ROUNDS,
    NOBODY,
    QUEUED,
    Again,
    End,
    Ended,
    LoadState,
)
from stillfresh.engine.model import Answer, Outcome, OwnLoad, Private, RefreshEnd
from stillfresh.engine.rules import FOR_EVER
from stillfresh.errors import BadValue, LoadFailed
from stillfresh.stores.contract import Copy, Failure, Record

if TYPE_CHECKING:
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
    began: int = 0  # the fence's number; changes up to it are in the result
    seen: str | None = None  # the generation of the copy to replace
    failure: Failure | None = None
    wanted: bool = False
    """True for a background refresh: it runs even if no caller waits."""
    forced: bool = False
    """A caller of `refresh` wants a new copy, even during a cooldown."""
    outgrown: bool = False  # the copy is too old for a caller's `max_age`
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
        read may be newer, so it waits for the next load.
        """
        if self.is_blind and knows:
            asked_at = LATE
        self.waiters[waiter] = asked_at
        self.last_asked = max(self.last_asked, asked_at)

    def end(self, how: End, *, is_changed: bool) -> "Ended[Waiter[K, V]]":
        """End: which callers get the result, which wait on, and whether another load follows."""
        told, again, is_overtaken = ENDINGS[how, is_changed]
        sent = NOT_SENT if self.load is None else self.load.sent
        limit = {NOBODY: -1, EARLY: self.began, IN_TIME: sent, ALL: LATE}[told]
        waiters = self.waiters
        if again is Again.IF_WAITED:
            self.wanted = False
        elif again is not Again.AS_WANTED:
            self.wanted = again is Again.ALWAYS or self.rounds < MAX_ROUNDS
        if self.last_asked <= limit:
            return Ended(waiters, (), self.wanted, is_overtaken)
        in_time = [waiter for waiter, asked_at in waiters.items() if asked_at <= limit]
        left = [waiter for waiter, asked_at in waiters.items() if asked_at > limit]
        return Ended(in_time, left, self.wanted or bool(left), is_overtaken)


class Waiter(Generic[K, V]):
    """One caller that waits for one or many keys."""

    def __init__(
        self, load: OwnLoad | None = None, max_age: float = FOR_EVER, *, each: bool = False
    ) -> None:
        self.load = load  # its own loader, for loads that it begins
        self.context = copy_context()  # for hooks
        self.caller = CALLER.get()
        self.max_age = max_age  # it accepts no older copy
        self.each = each
        self.unread: set[K] = set()  # keys that the store could not be asked for
        self.unstored: set[K] = set()  # keys whose value in memory the store does not have
        self.wake: Callable[[], object] = bool  # when the last key has ended; if `each`, each one
        self.private: Private[Any] | None = None  # its own loader's value, for it alone
        self.missing = 0
        self.outer = CURRENT.get()  # the load whose loader calls, or None
        self.outcomes: dict[K, Outcome[V]] = {}
        self.not_stored: dict[K, RefreshEnd] = {}
        """Keys that were loaded and whose copy the store does not have, and why."""
        self.fallbacks: dict[K, Callable[[LoadFailed], Answer[V]]] = {}  # if the load fails

    def wait_for(self, loads: "Loads[K, V]", key: K) -> None:
        """The load whose loader calls can end only after the load of this key."""
        if self.outer is not None:
            self.outer.waiting_for.setdefault(self, []).append((loads, key))

    def end(self) -> None:
        """The call has ended: a loader that made it waits for nothing any more."""
        if self.outer is not None:
            self.outer.waiting_for.pop(self, None)

    def settle(self, key: K, outcome: Outcome[V]) -> None:
        if self.fallbacks and isinstance(outcome, LoadFailed) and key in self.fallbacks:
            # The old copy does not hide a value of a wrong type, except in its cooldown.
            is_new_mistake = isinstance(outcome, BadValue) and outcome.retry_at is None
            outcome = outcome if is_new_mistake else self.fallbacks[key](outcome)
        self.outcomes[key] = outcome
        self.missing -= 1
        if self.missing == 0 or self.each:
            self.wake()
