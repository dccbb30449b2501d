"""The contract of a store: it keeps copies and leases, atomically, and decides nothing.

The central rule: publishing needs a live lease, and invalidating voids it. The lease's token is
the fence, checked in the same atomic step as the write; its expiry only permits a takeover.
`stillfresh.testing.StoreConformance` is the suite that every store passes.

`Store` is what every store does. What only some can do is in `capabilities.py`.

Times are wall-clock seconds. `now` is the store's own clock, read inside the step.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from functools import lru_cache
from os import urandom
from typing import Final, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from stillfresh.freshness import Policy, is_lease_over
from stillfresh.stores.versions import NO_VERSION

MOST_LISTED: Final = 10_000  # entries in one page of a listing
REMEMBERED: Final = 1_000  # tags whose last invalidation a store remembers, at least


class Mark(IntEnum):
    """What an invalidation left on a copy."""

    NONE = 0
    SOFT = 1  # STALE at best
    HARD = 2  # EXPIRED at best


class Unread(Enum):
    """The value was not fetched, because the reader has that generation already."""

    UNREAD = 0


UNREAD: Final = Unread.UNREAD


@lru_cache(maxsize=4096)
def policy_of(fresh_for: float, stale_for: float, error_for: float) -> Policy:
    """The stored times as a policy. Most copies of a kind share the same one."""
    return Policy(0.0 + fresh_for, 0.0 + stale_for, 0.0 + error_for)


class Copy(Struct, frozen=True, gc=False):
    """One value as it was at `fetched_at`, with its own times; `value` None: absent upstream."""

    generation: str  # the token of the lease that published it; random, so it never comes back
    fetched_at: float
    policy: Policy
    value: bytes | Unread | None
    mark: Mark = Mark.NONE
    version: bytes = NO_VERSION  # in the form of `versions.py`; an invalidation keeps it


class Failure(Struct, frozen=True, gc=False):
    """The last loads failed: how often, with which error, and when the next may begin."""

    count: int
    retry_at: float
    error: str


class Record(Struct, frozen=True, gc=False):
    """Everything that a store has for one id."""

    copy: Copy | None = None
    held_until: float | None = None  # when the lease ends, or has ended, if there is one
    failure: Failure | None = None


AWAY: Final = Record()
"""For an id whose server is unavailable, while others answer.

Compare with `is` only: a record of which nothing is stored, or can be read, is equal to it."""


class Ask(Struct, frozen=True, gc=False):
    """A request for the lease of `id` by a caller that saw the copy `seen` (None: no copy)."""

    id: str
    seen: str | None = None
    tags: tuple[str, ...] = ()
    """Recorded with the lease, so that an invalidation by tag reaches the load under way. An entry
    has the tags of its last lease, and those that came with its copy (`publish`)."""
    failures: int | None = None  # in a row, seen by the caller (0: none); None: it does not matter
    take_over: bool = False  # grant it also while another holds it, whose token becomes void

    def missed(self, failure: Failure | None) -> bool:
        """True if another load has failed since the caller looked."""
        return self.failures is not None and failure is not None and failure.count != self.failures

    def denied(self, record: Record, now: float, lease_for: float) -> "Held | Newer | None":
        """Why the lease is denied, in the order of `acquire`; None if it is granted."""
        if record.copy is not None and record.copy.generation != self.seen:
            return Newer(record)
        until = None if self.take_over else record.held_until
        if until is not None and not is_lease_over(until, now, lease_for):
            return Held(until)
        if self.missed(record.failure):
            return Newer(record)
        return None


class Lease(Struct, frozen=True, gc=False):
    """Granted: the right to refresh `id` until `expires_at`, proved by `token`."""

    id: str
    token: str
    expires_at: float
    epoch: int = 0  # the store's at the grant; each invalidation by tag raises the store's


class Held(Struct, frozen=True, gc=False):
    """Denied: another holder, in any process, has the lease until then."""

    until: float


class Newer(Struct, frozen=True, gc=False):
    """Denied: the copy or the failure has changed since the caller looked; this is the new one."""

    record: Record


Grant: TypeAlias = Lease | Held | Newer


class Superseded(set[str]):
    """Superseded ids. An answer was lost: the ids in `unsure` may have been stored before."""

    def __init__(self, ids: Iterable[str] = (), unsure: Iterable[str] = ()) -> None:
        super().__init__(ids)
        self.unsure = frozenset(unsure)


class When(Enum):
    """The condition under which a put stores its copy, by the store's own clock.

    A copy is live if it is a value (not an absence), fresh, and not invalidated.
    """

    ALWAYS = 0
    NO_LIVE_COPY = 1
    LIVE_COPY = 2
    UNCHANGED = 3  # the copy is the one that the caller saw: same generation, same mark


ACTS_ONCE: Final = (When.UNCHANGED, When.NO_LIVE_COPY)
"""Conditions that may hold again after the put was stored, and others changed the entry.

If the answer to such a put was lost, the store must not store it again.
"""


class Put(Struct, frozen=True, gc=False):
    """A copy that a caller wants to store without a lease.

    The caller draws the copy's generation (`Store.new_generation`), one for each put: the store
    knows the put by it, however often it arrives. If the copy's value is UNREAD, the stored value
    stays and gets the new times; without a stored copy, such a put is refused.
    """

    copy: Copy
    tags: tuple[str, ...] | None = ()  # of the key: they replace the old ones; None: those stay
    late: tuple[str, ...] | None = None  # of the value; None: those of the old copy stay
    when: When = When.ALWAYS
    seen: str | None = None  # for UNCHANGED: the generation that the caller saw; None: no copy
    seen_mark: Mark = Mark.NONE  # for UNCHANGED: the mark that it saw


class PutOutcome(Enum):
    """What a store did with a put."""

    STORED = "stored"
    REPLACED = "replaced"  # it was stored, and another change has replaced it since
    KEPT = "kept"  # the stored copy has a greater version, and stays
    MIXED = "mixed"  # one version is an integer and the other one a text: nothing was done
    REFUSED = "refused"  # the condition does not hold: nothing was done
    AGAIN = "again"  # nothing was done, and nothing of this put is under way: put it again


class PutResult(Struct, frozen=True, gc=False):
    """The outcome for one id, and the version of the copy that the store has now."""

    outcome: PutOutcome
    version: bytes = NO_VERSION
    stamp: int = 0  # the position of this change among the store's changes; 0: it counts none
    is_empty: bool = False
    """REFUSED because nothing is stored: no copy, lease or failure (`TellsEmptiness`)."""

    @property
    def is_stored(self) -> bool:
        """True if the copy was stored, also if another change has replaced it since."""
        return self.outcome is PutOutcome.STORED or self.outcome is PutOutcome.REPLACED


class Costs(Struct, frozen=True, gc=False):
    """Requests to services that charge for each, since the store was opened."""

    read_units: float = 0.0
    write_units: float = 0.0
    s3_gets: int = 0
    s3_puts: int = 0
    s3_deletes: int = 0
    s3_lists: int = 0


class StoredEntry(Struct, frozen=True, gc=False):
    """One id in a listing."""

    kind: str
    id: str
    record: Record  # as `read` would give it, the value UNREAD
    size: int | None = None  # bytes of the value; None if there is none, or it is not known


class StoreStats(Struct, frozen=True, gc=False):
    """`bytes` is the space that the store takes on disk or in memory, approximately."""

    copies: int
    leases: int
    bytes: int
    costs: Costs | None = None  # None if the store charges nothing
    held: int | None = None  # bytes of the copies; None if the store has no limit
    evicted: int | None = None  # bytes evicted to make room; None if it has no limit


Generations: TypeAlias = Mapping[str, str] | None  # the generations that a reader has, by id
After: TypeAlias = tuple[str, str] | None  # the (kind, id) after which a listing goes on
Failures: TypeAlias = Mapping[str, Failure] | None  # why leases ended without a copy, by id
LateTags: TypeAlias = Mapping[str, tuple[str, ...]] | None  # the tags that came with a load, by id


@runtime_checkable
class Store(Protocol):
    """The contract. Every method takes many ids of one kind, and raises StoreError if it fails.

    A store inherits from this class, and from the protocols of `capabilities.py` that say what else
    it can do.
    """

    @abstractmethod
    async def open(self) -> None:
        """Open it; opening an open store changes nothing."""

    @abstractmethod
    async def close(self) -> None:
        """Close it, with no task or connection left; it can be opened again."""

    @abstractmethod
    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        """The record of each id; none for an unknown id; AWAY if its server is unavailable.

        If `known` names the stored generation, the value may be UNREAD, but None (absent upstream)
        stays None. The answer may miss what other processes changed in the last `lag` seconds, if
        that makes the read cheaper.
        """

    @abstractmethod
    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        """Ask for leases. For each id, in this order:

        Newer if the copy is not the one seen; Held if the lease is live (unless it is to be taken
        over); Newer if the failure is not the one seen; else a Lease. A missing copy or failure is
        no reason to deny. A takeover voids the old lease in the same step. An AWAY id gets none.
        """

    @abstractmethod
    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """Store each copy whose lease is live, end that lease and forget the failure.

        One atomic step for each id. Returns the superseded ids, whose copy no reader will see.
        An id is superseded, and its lease ends, if one of its `tags` was invalidated since the
        grant, or if the store no longer knows. `tags` replace those that came with the copy before;
        an id that is not in `tags` keeps these. A copy without a version keeps the stored one.
        """

    def new_generation(self) -> str:
        """Draw the generation of a copy that is to be put; random, so that none comes back."""
        return urandom(16).hex()

    @abstractmethod
    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """Store each copy whose condition holds, void the lease, forget the failure.

        One atomic step for each id. In this order: STORED or REPLACED if this put was stored
        before; AGAIN if the store cannot rule out that the put is late; REFUSED if the condition
        does not hold; MIXED or KEPT by the versions; else STORED. A copy without a version keeps
        the stored one. After AGAIN, a store knows more, and the caller puts it once more.

        A put that arrives late or twice does nothing to what came after it. A caller that is
        cancelled has given up: the store sends nothing more, and what is still on its way acts only
        if nothing else has happened to the entry since. If an answer got lost, the store sends the
        step again; a put on the condition UNCHANGED or NO_LIVE_COPY that is neither STORED nor
        REPLACED then is a StoreError, because its first attempt may have been stored before.
        An id whose server is unavailable gets no result. StoreError: it is not known whether the
        copies were stored.
        """

    @abstractmethod
    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        """Extend live leases to `now + lease_for`; return the ids whose lease was lost."""

    @abstractmethod
    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        """End each lease whose token still holds, expired or not, and then note its failure."""

    @abstractmethod
    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """Void the leases, then mark the copies; both are done when it returns."""

    @abstractmethod
    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """The same for every id that has the tag; return them as (kind, id).

        At least the last `REMEMBERED` tags are kept with the epoch of their invalidation.
        """

    @abstractmethod
    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        """Delete everything about each id: copy, lease, failure, tags."""
